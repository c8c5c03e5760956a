"""Runs a step over microbatches inside autograd: forward and backward of each in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.errors import AutoparError
from autopar.layout import MICRO, Layout, Mesh, chunk_sizes
from autopar.runtime.communicator import Communicator
from autopar.runtime.ledger import Ledger
from autopar.runtime.pieces import cut_of
from autopar.schedule import Join, Split, Step

__all__ = ["Microbatches", "Values", "add", "side_by_side"]

Values = dict[str, Any]


class Microbatches:
    """A step over microbatches, bound to a rank.

    Args:
        step: what runs when, with the sizes of this rank.
        functions: the generated ones, by name; those that give nothing are not there.
        mesh: with the axis of microbatches.
        layouts: of states and inputs, in order; None for states.
        wrap: makes the gradient of the i-th differentiated state from its local piece.
        comm: the collectives of this rank.
        device: where the tensors live.
        ledger: of gradients that are reduced later, if there can be any.
        split: makes the function `finish` in two, for them.
    """

    def __init__(
        self,
        step: Step,
        functions: Mapping[str, Callable[..., Any]],
        mesh: Mesh,
        layouts: Sequence[Layout | None],
        wrap: Callable[[int, Tensor], Tensor],
        comm: Communicator,
        device: torch.device,
        ledger: Ledger | None = None,
        split: Callable[[], Split] | None = None,
    ) -> None:
        self.ledger, self.split = ledger, split
        self.step, self.functions = step, functions
        self.mesh, self.layouts, self.wrap = mesh, layouts, wrap
        self.comm, self.device = comm, device
        places = [{**comm.coordinate, MICRO: i} for i in range(mesh.sizes[MICRO])]
        self.comms = [Communicator(mesh, mesh.rank(p), comm.transport) for p in places]

    @property
    def carrying(self) -> frozenset[int]:
        """Results through which a gradient can come."""
        return self.step.carrying

    def run(self, values: list[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
        """Results of one call; gradients go from the loss to `leaves`.

        Args:
            values: local states, then local inputs with the rows of all microbatches.
            leaves: the differentiated parameters, in the order of the gradients.
        """
        apply: Any = _Step.apply
        return list(apply(self, [v.contiguous() for v in values], *leaves))

    def forward(self, given: list[Tensor]) -> tuple[list[Tensor], Values]:
        """Results, and what `finish` takes but the gradient of the loss."""
        step = self.step
        for comm in self.comms:
            comm.seed, comm.step = self.comm.seed, self.comm.step
        common: Values = dict(zip(step.placed, given, strict=True))
        tangent, dtype = step.tangent
        common[tangent] = torch.ones((), dtype=dtype, device=self.device)
        parts = [self.part(common, i) for i in range(len(self.comms))]
        self.each("count", parts, common, step.counted)
        common.update(self.call("start", self.comms[0], common))
        cut: dict[str, list[Tensor]] = {name: [] for name in step.cut}
        self.each("body", parts, common, step.summed, cut)
        joined = {name: torch.cat(rows, step.cut[name]) for name, rows in cut.items()}
        common.update(self.call("end", self.comms[0], common))
        common.update(joined)
        kept = {n: common[n] for n in step.takes["finish"] if n != tangent}
        return [common[n] for n in step.results], kept

    def part(self, common: Values, i: int) -> Values:
        """The inputs of a microbatch."""
        found: Values = {}
        for name, layout in zip(self.step.placed, self.layouts, strict=True):
            if layout is not None and MICRO in layout.sharded:
                place = self.comms[i].coordinate
                d, outer, inner, n = cut_of(layout, MICRO, self.mesh, place)
                sizes = [s * inner for s in chunk_sizes(n, self.mesh.sizes[MICRO])]
                found[name] = self.comms[i].cut(common[name], MICRO, d, outer, sizes, sizes[i])
        return found

    def each(
        self,
        name: str,
        parts: list[Values],
        common: Values,
        joins: Sequence[Join],
        cut: dict[str, list[Tensor]] | None = None,
    ) -> None:
        """Run a function for every microbatch and join what it gives."""
        if name not in self.functions:
            return
        pieces: dict[str, list[Tensor]] = {j.result: [] for j in joins if j.how == "gather"}
        totals: Values = {}
        for i, own in enumerate(parts):
            found = self.call(name, self.comms[i], {**common, **own})
            for join in joins:
                value = found[join.operand]
                if join.how == "gather":
                    pieces[join.result].append(value)
                elif i == 0:
                    totals[join.result] = value.clone()
                else:
                    totals[join.result] = add(totals[join.result], value, join.how)
            for key, rows in (cut or {}).items():
                rows.append(found[key])
        common.update(totals)
        for join in joins:
            if join.how == "gather":
                common[join.result] = side_by_side(pieces[join.result], join.dim, join.outer)

    def call(self, name: str, comm: Communicator, values: Values) -> Values:
        """What a function gives, by name."""
        function = self.functions.get(name)
        if function is None:
            return {}
        with torch.no_grad():
            found = function(comm, self.device, [values[n] for n in self.step.takes[name]])
        return dict(zip(self.step.gives[name], found, strict=True))

    def gradients(self, kept: Values) -> Sequence[Tensor | None] | None:
        """Local gradients from what `finish` takes; None where they wait in the ledger."""

        def run(function: Callable[..., Any]) -> Any:
            with torch.no_grad():
                return function(
                    self.comms[0], self.device, [kept.pop(n) for n in self.step.takes["finish"]]
                )

        if self.ledger is None or not self.ledger.busy:
            if "finish" not in self.functions:  # a stage without parameters
                return [None] * len(self.step.gives["finish"])
            found: Sequence[Tensor | None] = run(self.functions["finish"])
            return found
        assert self.split is not None, "given with the ledger"
        return self.ledger.gradients(self.split, run, self.comms[0], self.device)


def add(total: Tensor, value: Tensor, reduction: str) -> Tensor:
    """A total with one more value in it; a sum is made in place."""
    if reduction == "sum" and total.dtype != torch.bool:
        return total.add_(value)
    if total.dtype == torch.bool:
        return total & value if reduction == "min" else total | value
    return torch.maximum(total, value) if reduction == "max" else torch.minimum(total, value)


def side_by_side(pieces: Sequence[Tensor], dim: int, outer: Any) -> Tensor:
    """Pieces of a dim that stand within `outer` elements each."""
    shape = pieces[0].shape
    apart = [p.reshape(*shape[:dim], outer, -1, *shape[dim + 1 :]) for p in pieces]
    return torch.cat(apart, dim + 1).flatten(dim, dim + 1)


class _Step(torch.autograd.Function):
    """One call as one node of the autograd graph."""

    @staticmethod
    def forward(ctx: Any, micro: Microbatches, values: list[Tensor], *leaves: Tensor) -> Any:
        ctx.micro = micro
        results, ctx.kept = micro.forward(values)
        results = [r.detach() for r in results]
        carrying = micro.carrying
        ctx.mark_non_differentiable(*(r for i, r in enumerate(results) if i not in carrying))
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        micro: Microbatches = ctx.micro
        if ctx.kept is None:
            raise RuntimeError(
                "backward was called twice on the same step; its gradients are freed after the "
                "first call. Run the model again, or add the losses before calling backward."
            )
        if any(g is not None for i, g in enumerate(grads) if i != micro.step.loss):
            raise AutoparError(
                "A gradient arrives at an output beside the loss, but with accumulate= forward and "
                "backward of the microbatches have run already.",
                where="an output of the model other than its loss",
                expected="gradients through the loss alone",
                hint="compute that term inside the model or in loss=, or leave out accumulate=",
            )
        kept, ctx.kept = ctx.kept, None
        tangent = grads[micro.step.loss]
        if tangent is None:
            return (None,) * (2 + len(micro.step.gives["finish"]))
        for name in micro.step.scaling.intersection(kept):  # made with a gradient of 1 at the loss
            kept[name] = kept[name] * tangent.to(kept[name].dtype)
        kept[micro.step.tangent[0]] = tangent
        local = micro.gradients(kept)
        if local is None:
            return (None,) * (2 + len(micro.step.gives["finish"]))
        wrapped = (None if g is None else micro.wrap(i, g) for i, g in enumerate(local))
        return (None, None, *wrapped)
