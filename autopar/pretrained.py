"""The whole model of a parallel one as safetensors files, tensor after tensor.

All ranks gather one tensor at a time; rank 0 keeps those of one file and writes it. The files are
those of Hugging Face: `model.safetensors`, or numbered ones with an index.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import CheckpointError, InputError

__all__ = ["save_whole"]

_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_FILES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json|\.partial)?")


@dataclass(frozen=True, slots=True)
class _File:
    """Names of tensors that share a file, with their bytes together."""

    name: str
    tensors: tuple[str, ...]
    size_bytes: int


def save_whole(
    model: nn.Module,
    state: Mapping[str, Any],
    folder: str | os.PathLike[str],
    max_shard_bytes: int,
    *,
    writes: bool,
    share: Callable[[Any], list[Any]],
) -> None:
    """Write the whole model.

    Args:
        model: the user's own; where it is of Hugging Face, its config is written, too.
        state: its state dict, with DTensors where a parameter is cut.
        max_shard_bytes: most bytes of a file, unless one tensor alone has more.
        writes: whether this rank writes; the others take part in gathering.
        share: gives the values of all ranks.

    Raises:
        CheckpointError: it could not be written; raised on all ranks.
        InputError: safetensors is not installed.
    """
    save_file = _save_file()
    names, tied = _names(model, state)
    files = _files({n: state[n] for n in names}, max_shard_bytes)
    path, error = Path(folder), ""
    if writes:
        error = _tried(lambda: path.mkdir(parents=True, exist_ok=True))
    for file in files:
        kept = writes and not error
        gathered = _gathered({n: state[n] for n in file.tensors}, keep=kept)
        if kept:
            shared = {other: n for other, n in tied.items() if n in file.tensors}
            write = partial(
                save_file, gathered, path / f"{file.name}.partial", {"format": "pt", **shared}
            )
            error = _tried(write)
            del write
        del gathered  # before the next file is
    if writes:
        error = error or _tried(lambda: _finish(model, path, files, state))
        if error:
            for file in files:
                with contextlib.suppress(OSError):
                    (path / f"{file.name}.partial").unlink()
    failed = next((e for e in share(error) if e), "")
    if failed:
        raise CheckpointError(
            f"The model could not be saved: {failed}.",
            where=str(path),
            expected=f"a folder to write {sum(f.size_bytes for f in files):,} bytes into",
            hint="files of an earlier save in this folder are as they were",
        )


def _save_file() -> Any:
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise InputError(
            "save_pretrained needs safetensors, which is not installed.",
            hint="pip install safetensors (autopar[safetensors])",
        ) from error
    return save_file


def _tried(work: Callable[[], Any]) -> str:
    """The error in one line, or nothing; the other ranks wait for this one in the gathers."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return ""


def _gathered(tensors: Mapping[str, Any], *, keep: bool) -> dict[str, Tensor]:
    """Whole tensors on the CPU, gathered one after the other."""
    found = {}
    for name, tensor in tensors.items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        if keep:
            found[name] = whole.detach().cpu().contiguous()
    return found


def _names(model: nn.Module, state: Mapping[str, Any]) -> tuple[list[str], dict[str, str]]:
    """Names to write, each tensor once, and for the others the name under which they are."""
    left_out = [re.compile(p) for p in getattr(model, "_keys_to_ignore_on_save", None) or ()]
    declared = _declared_ties(model)
    owners: dict[int, list[str]] = {}
    live = {**dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False))}  # fmt: skip
    for name, value in state.items():
        if isinstance(value, Tensor) and not any(p.fullmatch(name) for p in left_out):
            owners.setdefault(id(live.get(name, value)), []).append(name)
    kept: list[str] = []
    tied: dict[str, str] = {}
    for group in owners.values():
        free = [n for n in group if not any(re.search(p, n) for p in declared)]
        name = (free or group)[0]
        kept.append(name)
        tied.update((other, name) for other in group if other != name)
    return kept, tied


def _declared_ties(model: nn.Module) -> list[str]:
    """Patterns of the names that Hugging Face makes again from others."""
    found: list[str] = []
    for prefix, module in model.named_modules():
        patterns = getattr(module, "_tied_weights_keys", None) or ()
        start = re.escape(f"{prefix}.") if prefix else ""
        found += [f"^{start}{pattern.removeprefix('^')}" for pattern in patterns]
    return found


def _files(tensors: Mapping[str, Tensor], max_shard_bytes: int) -> list[_File]:
    """Tensors in their order, a new file where one would grow too large."""
    runs: list[tuple[list[str], int]] = []
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if not runs or runs[-1][1] + size > max_shard_bytes:
            runs.append(([], 0))
        names, total = runs[-1]
        runs[-1] = ([*names, name], total + size)
    if len(runs) <= 1:
        return [_File(_ONE, tuple(names), total) for names, total in runs]
    return [
        _File(f"model-{i:05d}-of-{len(runs):05d}.safetensors", tuple(names), total)
        for i, (names, total) in enumerate(runs, 1)
    ]


def _finish(model: nn.Module, path: Path, files: list[_File], state: Mapping[str, Any]) -> None:
    """Put the new files in the place of old ones, with index and config."""
    old = {p.name for p in path.iterdir() if _FILES.fullmatch(p.name)}
    for file in files:
        os.replace(path / f"{file.name}.partial", path / file.name)
        old -= {file.name, f"{file.name}.partial"}
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(f.size_bytes for f in files)},
            "weight_map": {n: f.name for f in files for n in f.tensors},
        }
        (path / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
        old.discard(_INDEX)
    for name in sorted(old):  # last, so that a crash loses nothing
        (path / name).unlink()
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained") and hasattr(model, "from_pretrained"):
        config = copy.deepcopy(config)
        config.architectures = [type(model).__name__]
        floats = [
            t.dtype for t in state.values() if isinstance(t, Tensor) and t.is_floating_point()
        ]
        config.dtype = str(floats[0] if floats else torch.float32).removeprefix("torch.")
        config.save_pretrained(path)
        if getattr(model, "generation_config", None) is not None and model.can_generate():  # type: ignore[operator]
            model.generation_config.save_pretrained(path)  # type: ignore[union-attr, operator]
