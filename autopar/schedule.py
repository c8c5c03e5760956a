"""What runs when in a step over microbatches, and what is joined between."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.pipeline import Schedule
from autopar.sizes import Size, at_place

__all__ = ["PARTS", "Join", "Split", "Stages", "Step"]

PARTS = ("count", "start", "body", "end", "finish")
"""The functions of a step, in order.

`count` runs once for each microbatch, before all else: what the whole batch is counted by. `start`
runs once: what does not differ between microbatches. `body` runs once for each: forward, and
backward with a gradient of 1 at the loss. `end` runs once: results. `finish` runs once, in the
backward pass: gradients.
"""


@dataclass(frozen=True, slots=True)
class Join:
    """A sum over microbatches, or values of all of them side by side.

    Args:
        operand, result: names.
        how: "sum", "max", "min" or "gather".
        dim, outer: of a gather, where the pieces lie in the dim.
    """

    operand: str
    result: str
    how: str
    dim: int = 0
    outer: int | Size = 1


@dataclass(frozen=True, slots=True)
class Step:
    """A step over microbatches, by the names of its values.

    Args:
        takes, gives: names of values, by function.
        counted, summed: what is joined after `count` and after `body`.
        placed: name of each state and input, in order.
        results: name of each result, in order.
        cut: of each result that differs between microbatches, the dim that they cut.
        tangent: name of the gradient of the loss, and its dtype.
        loss: which result the loss is.
        carrying: results through which a gradient could come.
        scaling: results of joins that are linear in the gradient of the loss.
    """

    takes: Mapping[str, Sequence[str]]
    gives: Mapping[str, Sequence[str]]
    counted: Sequence[Join]
    summed: Sequence[Join]
    placed: Sequence[str]
    results: Sequence[str]
    cut: Mapping[str, int]
    tangent: tuple[str, torch.dtype]
    loss: int
    carrying: frozenset[int]
    scaling: frozenset[str]

    def at(self, place: int) -> Step:
        """The step with the sizes of the ranks at a place."""
        counted, summed = (
            tuple(dataclasses.replace(j, outer=at_place(j.outer, place)) for j in joins)
            for joins in (self.counted, self.summed)
        )
        return dataclasses.replace(self, counted=counted, summed=summed)


@dataclass(frozen=True, slots=True)
class Stages:
    """What a rank of a pipeline runs in a step: as `Step`, its body in functions of its stages.

    Args:
        step: of this rank. Its functions are "start", "end" and "finish", and for each of its
            stages "F", "B", "I" and "W" with the number of the stage.
        schedule: the instructions of all ranks.
        rank: the coordinate on the axis of the pipeline.
        messages: names of the values that go along an edge, by (direction, from, to).
        looks: shape and dtype of each value that goes between ranks.
        moves: (name, from rank, to rank) of the sums that go between ranks after the schedule.
        held: names of the states that this rank needs.
    """

    step: Step
    schedule: Schedule
    rank: int
    messages: Mapping[tuple[str, int, int], Sequence[str]]
    looks: Mapping[str, tuple[tuple[int | Size, ...], torch.dtype]]
    moves: Sequence[tuple[str, int, int]]
    held: frozenset[str]


@dataclass(frozen=True, slots=True)
class Split:
    """A function that gives gradients, in two, so that several calls can share the reductions.

    Args:
        partial: what the function takes -> values of this rank's rows, not reduced.
        finish: those, or sums of them over calls -> gradients.
        names: of the states whose gradients they are.
        owners: of each value the state whose gradient it is a part of; '' where it is a constant.
        key: what `finish` does: values are added up over splits that are alike in it.
    """

    partial: Callable[..., Any]
    finish: Callable[..., Any]
    names: tuple[str, ...]
    owners: tuple[str, ...]
    key: Any
