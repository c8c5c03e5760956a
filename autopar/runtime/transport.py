"""What moves bytes between ranks: messages that are started, and awaited later.

There are two transports: threads of one process (`runtime.virtual`) and torch process groups
(`runtime.processes`). Both reduce small values in rank order, so a virtual run and a gloo run of
the same program agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["Call", "Pending", "Started", "Transport", "reduce_in_order"]


@dataclass(frozen=True, slots=True)
class Call:
    """What one rank asks of a collective; equal on all ranks of the group.

    Args:
        name: collective.
        axis: mesh axis, '' for the whole mesh.
        dtype: of the operand.
        shape: of the operand, -1 where the ranks may differ.
        detail: the other arguments.
    """

    name: str
    axis: str
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    detail: tuple[object, ...] = ()

    def __str__(self) -> str:
        operand = ""
        if self.dtype is not None:
            dims = ", ".join("?" if n < 0 else str(n) for n in self.shape)
            operand = f"{str(self.dtype).removeprefix('torch.')}[{dims}]"
        inside = ", ".join(filter(None, (operand, *map(str, self.detail))))
        return f"{self.name}({inside})" + (f" on axis '{self.axis}'" if self.axis else "")


class Pending(Protocol):
    """A message under way."""

    def wait(self) -> Tensor:
        """Block until it has come; the flat result."""


class Transport(Protocol):
    """Moves flat buffers between the ranks of one line of the mesh.

    `counts`, `give` and `take` are numbers of elements per rank of the axis.
    """

    def start_reduce(self, buffer: Tensor, op: str, call: Call) -> Pending:
        """Replace the contiguous `buffer` by its reduction over the axis once waited for."""

    def start_gather(self, parts: Sequence[Tensor], counts: Sequence[int], call: Call) -> Pending:
        """Concatenate the 1-D `parts` of all ranks, rank after rank; they are read at once."""

    def start_scatter(self, flat: Tensor, counts: Sequence[int], call: Call) -> Pending:
        """Sum the 1-D `flat` over the axis and keep this rank's run of `counts`."""

    def start_swap(
        self, flat: Tensor, give: Sequence[int], take: Sequence[int], call: Call
    ) -> Pending:
        """Send run j of `flat` to rank j; concatenate what comes, in rank order."""

    def link(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Prepare for messages from the first rank of each pair to the second; all ranks call it.

        Messages of a pair arrive in the order in which they are sent.
        """

    def start_send(self, value: Tensor, rank: int, call: Call) -> Pending:
        """Send `value` to a rank of the mesh; it must stay as it is until waited for."""

    def start_receive(self, like: Tensor, rank: int, call: Call) -> Pending:
        """What that rank sends next to this one, of the shape and dtype of the buffer `like`."""

    def exchange(self, value: Any, call: Call) -> list[Any]:
        """Collect one picklable object from every rank of the mesh."""


def reduce_in_order(values: Sequence[Tensor], op: str) -> Tensor:
    """Reduce in rank order; half precisions are summed in float32 and rounded once."""
    first = values[0]
    if op == "sum":
        half = first.dtype in (torch.float16, torch.bfloat16)
        total = first.float() if half else first.clone()
        for value in values[1:]:
            total.add_(value)
        return total.to(first.dtype)
    combine = {"max": torch.maximum, "min": torch.minimum}[op]
    total = first.clone()
    for value in values[1:]:
        combine(total, value, out=total)
    return total


class Started:
    """A bucket whose message is under way.

    Args:
        finish: awaits the message and makes the results of it, in the order of the operands.
    """

    __slots__ = ("__weakref__", "_finish", "_out")

    def __init__(self, finish: Callable[[], list[Tensor]]) -> None:
        self._finish: Callable[[], list[Tensor]] | None = finish
        self._out: list[Tensor] = []

    def settle(self) -> None:
        """Block until the results are there, and let go of the message."""
        finish, self._finish = self._finish, None
        if finish is not None:
            self._out = finish()

    def wait(self) -> list[Tensor]:
        """Block until the results are there, and hand them over."""
        self.settle()
        out, self._out = self._out, []
        return out
