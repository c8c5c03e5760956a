"""Gradients of calls inside `no_sync`, which wait for the reduction that they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.compat import versions_of
from autopar.errors import AutoparError
from autopar.runtime.communicator import Communicator
from autopar.schedule import Split

__all__ = ["Ledger"]


@dataclass(slots=True)
class _Sum:
    """What calls that are reduced alike gave, added up.

    Args:
        values: in the dtype of the parameter where that is wider.
        dtypes: in which they are reduced.
    """

    split: Split
    values: list[Tensor]
    dtypes: list[torch.dtype]

    def add(self, values: Sequence[Tensor]) -> None:
        """Add those of another call."""
        for total, value, owner in zip(self.values, values, self.split.owners, strict=True):
            if owner:
                total.add_(value)

    def drop(self, name: str) -> None:
        """Forget what belongs to a parameter."""
        for total, owner in zip(self.values, self.split.owners, strict=True):
            if owner == name:
                total.zero_()

    def reduced(self, comm: Communicator, device: torch.device) -> list[Tensor | None]:
        """The gradients, by the collectives of one call."""
        values = [v.to(dtype) for v, dtype in zip(self.values, self.dtypes, strict=True)]
        found: list[Tensor | None] = self.split.finish(comm, device, values)
        return found


@dataclass(slots=True)
class _Mark:
    """The `.grad` of a parameter whose partial gradient waits.

    It is there for `zero_grad` to take away, which no optimizer tells otherwise.
    """

    grad: Tensor
    version: int
    blank: bool


class Ledger:
    """The partial gradients of one module on this rank.

    Args:
        find: the parameter of a name.
        wrap: makes the gradient of a parameter from its local piece.
        local: the local piece of a gradient.
    """

    def __init__(
        self,
        find: Callable[[str], Tensor],
        wrap: Callable[[Tensor, Tensor], Tensor],
        local: Callable[[Tensor], Tensor],
    ) -> None:
        self.holding = False  # whether backward passes leave out their reductions
        self._find, self._wrap, self._local = find, wrap, local
        self._sums: dict[Any, _Sum] = {}
        self._marks: dict[str, _Mark] = {}

    @property
    def busy(self) -> bool:
        """Whether a backward pass must take part in it."""
        return self.holding or bool(self._sums)

    def clear(self) -> None:
        """Forget all partial gradients."""
        for name, mark in self._marks.items():
            parameter = self._find(name)
            if mark.blank and parameter.grad is mark.grad:
                parameter.grad = None
        self._sums, self._marks = {}, {}

    @property
    def waiting(self) -> bool:
        """Whether partial gradients wait; those of parameters whose `.grad` is gone do not."""
        for name in [n for n, m in self._marks.items() if self._find(n).grad is None]:
            self._drop(name)
        if not self._marks:
            self._sums = {}
        return bool(self._sums)

    def _drop(self, name: str) -> None:
        """Forget what a parameter waits for."""
        del self._marks[name]
        for total in self._sums.values():
            total.drop(name)

    def require_none(self, what: str, parameters: Sequence[Tensor] | None = None) -> None:
        """Refuse what needs whole gradients while some are not reduced.

        Args:
            what: that, for the message.
            parameters: those it is about; without, all.

        Raises:
            AutoparError: a partial gradient waits.
        """
        if not self.waiting:
            return
        ids = None if parameters is None else {id(p) for p in parameters}
        names = [n for n in self._marks if ids is None or id(self._find(n)) in ids]
        if names:
            raise AutoparError(
                f"{what} while gradients of calls inside no_sync() are not reduced yet.",
                where=names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else ""),
                expected="a backward pass outside no_sync() after those inside: it reduces the sum",
                hint="leave the last call of a step outside no_sync(), or zero_grad() to discard "
                "what was not reduced",
            )

    def gradients(
        self,
        split: Callable[[], Split],
        run: Callable[[Callable[..., Any]], Sequence[Tensor]],
        comm: Communicator,
        device: torch.device,
    ) -> list[Tensor | None] | None:
        """The local gradients of a call and of those before it, or None where they wait.

        Args:
            split: makes the backward function in two.
            run: runs the first of them.
        """
        halves = split()
        self._check_unchanged()
        own = self._added(halves, run(halves.partial))
        if self.holding:
            for name in halves.names:
                if name in halves.owners:
                    self._mark(name)
            return None
        others = [s for s in self._sums.values() if s is not own]
        alive = set(self._marks)
        self.clear()
        for other in others:
            self._deliver(other, other.reduced(comm, device), alive)
        return own.reduced(comm, device)

    def _added(self, split: Split, values: Sequence[Tensor]) -> _Sum:
        """The sum with the values of a call in it."""
        key = (split.key, split.names, tuple((v.shape, v.dtype) for v in values))
        found = self._sums.get(key)
        if found is not None:
            found.add(values)
            return found
        totals = []
        for owner, v in zip(split.owners, values, strict=True):
            wide = torch.promote_types(v.dtype, self._find(owner).dtype) if owner else v.dtype
            totals.append(v.to(wide, copy=True))  # it may share memory that the caller goes on with
        self._sums[key] = _Sum(split, totals, [v.dtype for v in values])
        return self._sums[key]

    def _mark(self, name: str) -> None:
        """Give a parameter a `.grad` of zeros where it has none, and remember what it is."""
        if name in self._marks:
            return
        parameter = self._find(name)
        blank = parameter.grad is None
        if blank:
            parameter.grad = torch.zeros_like(parameter.detach())
        grad = parameter.grad
        assert grad is not None, "set above"
        self._marks[name] = _Mark(grad, versions_of([self._local(grad)])[0], blank)

    def _check_unchanged(self) -> None:
        """What changes gradients in place would have changed the partial ones, too.

        Raises:
            AutoparError: it was done.
        """
        if not self.waiting:
            return
        for name, mark in self._marks.items():
            grad = self._find(name).grad
            version = versions_of([self._local(mark.grad)])[0]
            if grad is not mark.grad or version != mark.version:
                raise AutoparError(
                    f"The gradient of {name} was changed while gradients of calls inside no_sync() "
                    "are not reduced yet.",
                    where=name,
                    expected="gradients as they are until a backward pass outside no_sync(), or "
                    "None",
                    hint="clip and scale after that backward pass; "
                    "zero_grad(set_to_none=True) discards them",
                )

    def _deliver(self, total: _Sum, gradients: Sequence[Tensor | None], alive: set[str]) -> None:
        """Add gradients to `.grad`: another call than the present one gave them."""
        with torch.no_grad():
            for name, gradient in zip(total.split.names, gradients, strict=True):
                if gradient is None or name not in alive:
                    continue
                parameter = self._find(name)
                wrapped = self._wrap(parameter, gradient)
                parameter.grad = wrapped if parameter.grad is None else parameter.grad + wrapped
