"""What a checkpoint holds: the state of model and optimizer by name, and putting it back.

The keys are those of torch's `get_model_state_dict` and `get_optimizer_state_dict`. Those functions
themselves are not used: they make an optimizer's missing state by a step with zero gradients, which
counts, and gives a momentum that a first step would not have found.
"""

from __future__ import annotations

import copy
import errno
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from autopar.compat import local_of, wrap_like
from autopar.errors import CheckpointError
from autopar.optimizers import repoint

__all__ = [
    "Writer",
    "check_files",
    "check_model",
    "copied",
    "disk_full",
    "optimizer_target",
    "packed",
    "reason",
    "restore",
]

_FULL = (errno.ENOSPC, errno.EDQUOT)
_NAMED = 3  # names in a message


class Writer(FileSystemWriter):
    """torch's writer; a full disk stays an `OSError`, which torch.save turns into others."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write this rank's file.

        Raises:
            OSError: it could not be written.
        """
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            if cause is None:
                raise
            raise OSError(cause.errno, cause.strerror, str(self.path)) from error


def disk_full(error: BaseException) -> bool:
    """Whether an error says that there is no room."""
    return isinstance(error, OSError) and error.errno in _FULL


def reason(error: BaseException) -> str:
    """An error in one line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def copied(value: Any) -> Any:
    """The same state in memory of its own on the CPU, so that training may go on."""
    if isinstance(value, Tensor):
        if hasattr(value, "full_tensor"):
            return wrap_like(local_of(value).detach().to("cpu", copy=True), value)
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {k: copied(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(copied(v) for v in value)
    return copy.deepcopy(value)


# --- optimizer ---------------------------------------------------------------------------------


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[Tensor, str]:
    """The name of each parameter that the optimizer holds."""
    repoint(optimizer)
    known: dict[Tensor, str] = {p: n for n, p in model.named_parameters()}
    found = {}
    for i, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if p not in known:
                raise CheckpointError(
                    f"The optimizer holds a parameter of shape {list(p.shape)} that the model does "
                    "not have.",
                    where=f"param_groups[{i}] of {type(optimizer).__name__}",
                    expected="an optimizer of model.parameters()",
                    hint="save other models and their optimizers in checkpoints of their own",
                )
            found[p] = known[p]
    return found


def packed(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state and settings by names of parameters."""
    names = _names(model, optimizer)
    state = {names[p]: dict(optimizer.state[p]) for p in names if optimizer.state.get(p)}
    groups = [
        {**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups
    ]
    return {"state": state, "param_groups": groups}


def _empty(saved: Any, parameter: Tensor) -> Tensor:
    """Where a tensor of the optimizer's state is read into: cut like its parameter."""
    if saved.size == parameter.shape and parameter.dim():
        return torch.zeros_like(parameter, dtype=saved.properties.dtype, requires_grad=False)
    return torch.zeros(saved.size, dtype=saved.properties.dtype)


def optimizer_target(
    model: nn.Module, optimizer: torch.optim.Optimizer, metadata: Any, about: Mapping[str, Any]
) -> dict[str, Any]:
    """What the optimizer's part of a checkpoint is read into.

    Built from what was saved, so an optimizer that has not stepped needs no state.

    Args:
        about: holds the name of the optimizer's class as `optimizer`, where it is known.

    Raises:
        CheckpointError: another optimizer, or other parameters, were saved.
    """
    kind = about.get("optimizer")
    if kind not in (None, type(optimizer).__name__):
        raise CheckpointError(
            f"The checkpoint is of the optimizer {kind}.",
            where=f"the optimizer to load into is {type(optimizer).__name__}",
            expected="the same optimizer, as the state of another means something else",
            hint="load the model alone, and let the new optimizer begin",
        )
    parameters = {name: p for p, name in _names(model, optimizer).items()}
    state: dict[str, dict[str, Any]] = {}
    groups: dict[int, dict[str, Any]] = {}
    for key, path in metadata.planner_data.items():
        if path[:2] == ("optimizer", "state"):
            _, _, name, entry, *deeper = path
            if name not in parameters or deeper:
                raise CheckpointError(
                    f"The optimizer does not hold {name}, whose state was saved.",
                    where=f"{key} in the checkpoint",
                    expected="the optimizer of the saved run, over the same parameters",
                )
            saved = metadata.state_dict_metadata[key]
            is_tensor = hasattr(saved, "properties")
            with torch.no_grad():
                value = _empty(saved, parameters[name]) if is_tensor else None
            state.setdefault(name, {})[entry] = value
        elif path[:2] == ("optimizer", "param_groups"):
            saved = metadata.state_dict_metadata[key]
            value = torch.zeros(saved.size, dtype=saved.properties.dtype) if hasattr(
                saved, "properties") else None  # fmt: skip
            groups.setdefault(path[2], {})[path[3]] = value
    if not groups:
        raise CheckpointError(
            "The checkpoint holds no optimizer.",
            expected="one saved with an optimizer",
            hint="load the model alone, or save(step, model, optimizer)",
        )
    return {"state": state, "param_groups": [groups[i] for i in sorted(groups)]}


def restore(model: nn.Module, optimizer: torch.optim.Optimizer, loaded: Mapping[str, Any]) -> None:
    """Give the optimizer a state that was read into `optimizer_target`.

    Raises:
        CheckpointError: the groups hold other parameters.
    """
    names = _names(model, optimizer)
    numbers = {name: i for i, name in enumerate(names.values())}
    groups = loaded["param_groups"]
    mine = [{names[p] for p in group["params"]} for group in optimizer.param_groups]
    theirs = [set(group["params"]) for group in groups]
    if mine != theirs:
        raise CheckpointError(
            "The optimizer groups its parameters differently from the saved one.",
            where=_grouping(mine, theirs),
            expected=f"groups of {[len(g) for g in theirs]} parameters, as saved",
        )
    new = [
        {**group, "params": [numbers[names[p]] for p in old["params"]]}
        for old, group in zip(optimizer.param_groups, groups, strict=True)
    ]
    state = {numbers[name]: value for name, value in loaded["state"].items()}
    optimizer.load_state_dict({"state": state, "param_groups": new})


def _grouping(mine: list[set[str]], theirs: list[set[str]]) -> str:
    if len(mine) != len(theirs):
        return f"{len(mine)} groups here, {len(theirs)} in the checkpoint"
    at = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
    return f"param_groups[{at}]: {_list(mine[at] ^ theirs[at])} stand on one side only"


# --- checks before anything is read ------------------------------------------------------------


def _list(names: Iterable[str]) -> str:
    found = sorted(names)
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return ", ".join(found[:_NAMED]) + more


def check_files(path: Path, metadata: Any) -> None:
    """Every file is there, as long as the metadata says.

    Raises:
        CheckpointError: one is missing or too short.
    """
    ends: dict[str, int] = {}
    for info in metadata.storage_data.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    sizes = {n: (path / n).stat().st_size if (path / n).is_file() else None for n in ends}
    for words, bad in (
        ("is missing", [n for n, size in sizes.items() if size is None]),
        ("is cut short", [n for n, size in sizes.items() if size is not None and size < ends[n]]),
    ):
        if bad:
            raise CheckpointError(
                f"The checkpoint is damaged: {_list(bad)} {words}.",
                where=str(path),
                expected=f"{len(ends)} files: {_list(ends)}",
                hint="copy the file back, or move this folder away: the one before it is loaded "
                "then",
            )


def check_model(path: Path, state: Mapping[str, Any], metadata: Any) -> None:
    """The checkpoint is of this model.

    Raises:
        CheckpointError: names or shapes differ.
    """
    saved = {
        ".".join(map(str, where[1:])): metadata.state_dict_metadata[key]
        for key, where in metadata.planner_data.items()
        if where[0] == "model"
    }
    here = {k: v for k, v in state.items() if isinstance(v, Tensor)}
    missing = here.keys() - saved.keys()
    strange = {k for k in saved.keys() - state.keys() if hasattr(saved[k], "size")}
    if missing or strange:
        parts = [f"not in the checkpoint: {_list(missing)}"] * bool(missing)
        parts += [f"not in the model: {_list(strange)}"] * bool(strange)
        raise CheckpointError(
            "The checkpoint is of another model.",
            where="; ".join(parts),
            expected=f"the {len(here)} parameters and buffers of the model",
            hint=f"load it into the model that was saved in {path}",
        )
    for name, value in here.items():
        if saved[name].size != value.shape:
            raise CheckpointError(
                "The checkpoint is of a model with other sizes.",
                where=f"{name}: {list(saved[name].size)} in the checkpoint",
                expected=f"{list(value.shape)}, as the model has it",
                hint=f"make the model with the settings of the one saved in {path}",
            )
