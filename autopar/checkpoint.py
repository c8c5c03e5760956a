"""Checkpoints that survive a crash at any moment and load on any mesh.

The files are those of `torch.distributed.checkpoint`. What is added: a checkpoint is written under
a passing name and renamed once all of it is on the disk, so a folder holds complete ones only; and
what fixes the random numbers goes along.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import shutil
import uuid
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from autopar.errors import AutoparError, CheckpointError, RankError
from autopar.module import ParallelModule
from autopar.snapshot import (
    Writer,
    check_files,
    check_model,
    copied,
    disk_full,
    optimizer_target,
    packed,
    reason,
    restore,
)

__all__ = ["Checkpoints", "Resumed"]

T = TypeVar("T")

_COMPLETE = re.compile(r"step-(\d{8,})(\.old)?")
_PASSING = ".partial"


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where a run goes on.

    Args:
        step: number that the checkpoint was saved under.
        extra: what was saved with it.
    """

    step: int
    extra: Any


class Checkpoints:
    """The checkpoints of one run, of which the newest complete one survives any crash.

    All ranks call the methods, in the same order. The model may be a parallel module on any mesh
    or a plain one. Loading unpickles, so load only what you trust.

    Args:
        folder: seen by all ranks; made where it is missing.
        keep: how many complete checkpoints stay; older ones are deleted once a new one is complete.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 2) -> None:
        if keep < 1:
            raise CheckpointError(f"keep={keep} would delete every checkpoint.", expected="keep>=1")
        self.folder, self.keep = Path(folder), keep
        self._group: Any = None
        self._writing: Future[None] | None = None
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, rising."""
        return sorted({step for step, _ in self._complete()})

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        extra: Any = None,
        *,
        wait: bool = True,
    ) -> None:
        """Save a checkpoint; when it is complete, older ones beyond `keep` are deleted.

        Args:
            step: its number, not below one in the folder; the same number replaces it.
            optimizer: over parameters of `model`.
            extra: anything that pickles, the same on all ranks, such as the place in the data.
            wait: return when it is complete. Else it is copied to the CPU and written while
                training goes on; `wait` and the next `save` or `load` raise what went wrong.

        Raises:
            CheckpointError: it could not be written; those of before are as they were.
            RankError: another rank was lost.
        """
        self.wait()
        if isinstance(model, ParallelModule):
            model.agree(f"Checkpoints.save({step})", new=True)
        state: dict[str, Any] = {"model": model.state_dict()}
        about: dict[str, Any] = {"step": step, "extra": extra}
        if optimizer is not None:
            state["optimizer"] = packed(model, optimizer)
            about["optimizer"] = type(optimizer).__name__
        if isinstance(model, ParallelModule):
            about["rng"] = model.get_rng_state()
        state["autopar"] = _pickled(about)  # one entry, whatever it holds
        path = self._together(f"save step {step}", lambda: self._begin(step))
        if wait:
            self._write(step, path, state)
        else:
            self._writing = self._threads.submit(self._write, step, path, copied(state))

    def wait(self) -> None:
        """Return once the checkpoint that is being written is complete.

        Raises:
            CheckpointError: it could not be written.
            RankError: another rank was lost.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def load(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        step: int | None = None,
    ) -> Resumed | None:
        """Load a checkpoint into a model and its optimizer, before or after their first call.

        Args:
            step: which one; the newest complete one where it is left out.

        Returns:
            where to go on, or None where there is none to load and no step was asked for.

        Raises:
            CheckpointError: it is damaged, or of another model or optimizer.
            RankError: another rank was lost.
        """
        self.wait()
        if isinstance(model, ParallelModule):
            model.agree("Checkpoints.load", new=True)
        path = self._together("load", lambda: self._choose(step))
        if path is None:
            return None
        metadata = self._together(f"load {path.name}", lambda: _metadata(path))
        state = model.state_dict()
        check_model(path, state, metadata)
        about: dict[str, Any] = {}
        if "autopar" in metadata.planner_data:
            about = pickle.loads(self._read(path, {"autopar": None})["autopar"])
        target: dict[str, Any] = {"model": state}
        if optimizer is not None:
            target["optimizer"] = optimizer_target(model, optimizer, metadata, about)
        self._read(path, target)
        model.load_state_dict(state)
        if optimizer is not None:
            restore(model, optimizer, target["optimizer"])
        if isinstance(model, ParallelModule) and "rng" in about:
            model.set_rng_state(about["rng"])
        number = _COMPLETE.fullmatch(path.name)
        assert number is not None, "only complete checkpoints are chosen"
        return Resumed(int(number[1]), about.get("extra"))

    # --- on rank 0 -----------------------------------------------------------------------------

    def _complete(self) -> list[tuple[int, Path]]:
        """Step and folder of each complete checkpoint; one about to be replaced stands first."""
        found = []
        for path in sorted(self.folder.glob("step-*"), key=lambda p: not p.name.endswith(".old")):
            match = _COMPLETE.fullmatch(path.name)
            if match:
                found.append((int(match[1]), path))
        return sorted(found, key=lambda pair: pair[0])

    def _begin(self, step: int) -> Path:
        """Clean up what a crash left, and make the folder to write into."""
        newest = max(self.steps(), default=step)
        if newest > step:
            raise CheckpointError(
                f"The folder holds a checkpoint of step {newest}, later than step {step}.",
                where=str(self.folder),
                expected="steps that rise: the next load takes the highest",
                hint="save to another folder, or delete the later checkpoints",
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self.folder.glob(f"*{_PASSING}"):
            shutil.rmtree(left, ignore_errors=True)
        path = self.folder / f"step-{step:08d}.{uuid.uuid4().hex[:8]}{_PASSING}"
        path.mkdir()
        return path

    def _commit(self, step: int, path: Path) -> None:
        """Make the complete checkpoint visible in one step, then delete older ones."""
        final = self.folder / f"step-{step:08d}"
        _sync(path)
        if final.exists():  # it counts as complete until the new one does
            self._discard(old := final.with_name(final.name + ".old"))
            final.rename(old)
        path.rename(final)
        _sync(self.folder)
        kept = self.steps()[-self.keep :]
        for number, other in self._complete():
            if number not in kept or other.name.endswith(".old"):
                self._discard(other)

    @staticmethod
    def _discard(path: Path) -> None:
        """Delete a checkpoint that is not needed; it must never look complete when half is gone."""
        with contextlib.suppress(OSError):
            passing = path.with_name(path.name + _PASSING)
            path.rename(passing)
            shutil.rmtree(passing, ignore_errors=True)

    def _choose(self, step: int | None) -> Path | None:
        found = dict(self._complete())
        if step is None:
            return found[max(found)] if found else None
        if step not in found:
            raise CheckpointError(
                f"There is no complete checkpoint of step {step}.",
                where=str(self.folder),
                expected=f"one of {', '.join(map(str, found)) or 'none'}",
            )
        return found[step]

    # --- on all ranks --------------------------------------------------------------------------

    def _processes(self) -> Any:
        """A group of its own, as training goes on in the others while this one writes."""
        if not (dist.is_available() and dist.is_initialized()):
            return None
        if self._group is None:
            # named by its ranks: a number would shift those of groups made later, such as a device
            # mesh's, by which DTensor's caches know them
            everyone = list(range(dist.get_world_size()))
            self._group = dist.new_group(everyone, backend="gloo", use_local_synchronization=True)
        return self._group

    def _together(self, what: str, work: Callable[[], T]) -> T:
        """Do `work` on rank 0 and have its result, or its error, on all ranks."""
        group = self._processes()
        outcome: list[Any] = [None]
        if group is None or dist.get_rank() == 0:
            try:
                outcome = [(True, work())]
            except Exception as error:
                outcome = [(False, error)]
        with self._explained(what, self.folder):
            if group is not None:
                dist.broadcast_object_list(outcome, 0, group=group)
            fine, value = outcome[0]
            if not fine:
                raise value
        result: T = value
        return result

    def _read(self, path: Path, target: dict[str, Any]) -> dict[str, Any]:
        """Read into the tensors of `target`."""
        group = self._processes()
        with self._explained(f"load {path.name}", path), _quiet():
            reader = FileSystemReader(path)
            load(target, storage_reader=reader, process_group=group, no_dist=group is None)
        return target

    def _write(self, step: int, path: Path, state: dict[str, Any]) -> None:
        group = self._processes()
        try:
            with self._explained(f"save step {step}", path), _quiet():
                save(state, storage_writer=Writer(path), process_group=group, no_dist=group is None)
            self._together(f"save step {step}", lambda: self._commit(step, path))
        except CheckpointError:
            if group is None or dist.get_rank() == 0:
                shutil.rmtree(path, ignore_errors=True)  # its room is needed
            raise

    @contextlib.contextmanager
    def _explained(self, what: str, path: Path) -> Any:
        """Errors of torch, of the disk and of the connection as ours."""
        try:
            yield
        except AutoparError:
            raise
        except CheckpointException as error:
            ranks = {rank: cause for rank, (cause, _) in sorted(error.failures.items())}
            raise self._failed(what, path, ranks) from error
        except OSError as error:
            raise self._failed(what, path, {0: error}) from error
        except RuntimeError as error:
            raise RankError(
                f"Another rank was lost during '{what}'.",
                where=reason(error),
                hint="look at the output of the other ranks; the complete checkpoints are as they "
                "were, and the next run resumes from the newest",
            ) from error

    def _failed(self, what: str, path: Path, ranks: dict[int, BaseException]) -> CheckpointError:
        full = [rank for rank, error in ranks.items() if disk_full(error)]
        rank, error = (full[0], ranks[full[0]]) if full else next(iter(ranks.items()))
        steps = self.steps()
        left = f"the checkpoint of step {steps[-1]} is intact" if steps else "there is none yet"
        if full:
            return CheckpointError(
                f"The disk is full: could not {what}.",
                where=f"{path}, on rank {', '.join(map(str, full))} ({reason(error)})",
                expected="room for one checkpoint more than are kept",
                hint=f"free room or lower keep={self.keep}; {left}",
            )
        return CheckpointError(
            f"Could not {what}: {reason(error)}.", where=f"{path}, on rank {rank}", hint=left
        )


def _pickled(about: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps(about)
    except Exception as error:
        raise CheckpointError(
            f"extra cannot be pickled: {reason(error)}.",
            where=f"extra of type {type(about['extra']).__name__}",
            expected="numbers, texts, tensors and containers of them",
        ) from error


def _metadata(path: Path) -> Any:
    """The metadata of a checkpoint, all of whose files are there."""
    try:
        metadata = FileSystemReader(path).read_metadata()
    except Exception as error:
        raise CheckpointError(
            f"The checkpoint is damaged: its metadata cannot be read ({reason(error)}).",
            where=str(path / ".metadata"),
            expected="a folder written by Checkpoints.save or torch.distributed.checkpoint.save",
            hint="move this folder away: the one before it is loaded then",
        ) from error
    check_files(path, metadata)
    return metadata


def _sync(folder: Path) -> None:
    """Names in a folder reach the disk only when the folder itself is synced."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _quiet() -> Any:
    """Without torch's notice that a single process saves or loads alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
