"""Part what gives gradients from their reductions, so that several calls can share these."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.collectives import collective_of, members_of, ops
from autopar.passes.bucket import Bucket
from autopar.program import Phases, ancestors, graph_module

__all__ = ["Deferred", "constants", "defer"]

aten = torch.ops.aten

_REDUCTIONS = ("all_reduce", "reduce_scatter")
_LINEAR: dict[Any, tuple[int, ...]] = {
    aten.add.Tensor: (0, 1),
    aten.clone.default: (0,),
    aten.embedding_dense_backward.default: (0,),
    aten.expand.default: (0,),
    aten.neg.default: (0,),
    aten.permute.default: (0,),
    aten.reshape.default: (0,),
    aten.select_backward.default: (0,),
    aten.slice.Tensor: (0,),
    aten.slice_backward.default: (0,),
    aten.squeeze.dim: (0,),
    aten.sum.dim_IntList: (0,),
    aten.t.default: (0,),
    aten.transpose.int: (0,),
    aten.unsqueeze.default: (0,),
    aten.view.default: (0,),
    ops.pad.default: (0,),
    ops.shard.default: (0,),
}
"""Operands in which a call is linear, all of them jointly; the others must be constant."""


@dataclass(frozen=True, slots=True)
class Deferred:
    """A graph of gradients in two.

    Args:
        partial: what the graph takes -> values of this rank's rows, not reduced.
        finish: those -> gradients, None where there is none. It is linear in all values but the
            constant ones, so the gradients of a sum are the sum of the gradients.
        owners: of each value the place of its gradient; -1 where it is a constant.
    """

    partial: fx.GraphModule
    finish: fx.GraphModule
    owners: tuple[int, ...]


def defer(gm: fx.GraphModule, known: Collection[str] = (), joined: bool = True) -> Deferred:
    """Cut a graph of gradients before the reductions over ranks that lead to them.

    Most gradients end in one. After it may come what is linear: a view, the sum with another part
    of the gradient, the scatter of rows into an embedding.

    Before:
        program(x): d = aten.mm(x, x); g = autopar.all_reduce(d, "dp", "sum"); return g
    After:
        partial(x): d = aten.mm(x, x); return d
        finish(d):  g = autopar.all_reduce(d, "dp", "sum"); return g

    Args:
        known: placeholders with the same values in all calls.
        joined: whether reductions of several gradients go in one message.
    """
    return _Cut(gm, set(known), joined).run()


def constants(phases: Phases) -> set[str]:
    """What the backward graph takes that no input of the call decides, such as positions."""
    changed = {i.node for i in phases.program.inputs}
    mutated = {name for name, _ in phases.program.mutated}
    changed |= {s.node for s in phases.program.states if s.is_parameter or s.name in mutated}
    differs: set[fx.Node] = set()
    for node in phases.forward.graph.nodes:
        drawn = node.op == "placeholder" and node.name in changed
        if drawn or _is_random(node) or differs.intersection(node.all_input_nodes):
            differs.add(node)
    saved: Any = phases.forward.graph.output_node().args[0][phases.n_results :]  # type: ignore
    taken = [n for n in phases.backward.graph.nodes if n.op == "placeholder"]
    return {n.name for n, value in zip(taken, saved, strict=False) if value not in differs}


def _is_random(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    drawn = node.target in (ops.uniform.default, ops.keep_mask.default)
    return drawn or torch.Tag.nondeterministic_seeded in tags


class _Cut:
    def __init__(self, gm: fx.GraphModule, known: set[str], joined: bool) -> None:
        self.graph, self.known, self.joined = gm.graph, known, joined
        self.finish = fx.Graph()
        self.ends: list[fx.Node] = []
        self.owners: list[int] = []
        self.found: dict[fx.Node, bool] = {}

    def run(self) -> Deferred:
        output = self.graph.output_node()
        gradients: Any = output.args[0]
        values = [
            self.value(g, output, i) if isinstance(g, fx.Node) else None
            for i, g in enumerate(gradients)
        ]
        self.finish.output(tuple(values))
        if self.joined:
            Bucket().reductions(self.finish)
        finish = graph_module(self.finish)
        return Deferred(_ending(self.graph, self.ends), finish, tuple(self.owners))

    def value(self, node: fx.Node, user: fx.Node, owner: int) -> fx.Node:
        """A value in `finish`: computed there where a reduction leads to it, else taken."""
        if owner < 0 or not self.reduced(node, user):
            new = self.finish.placeholder(f"partial_{len(self.ends)}")
            self.ends.append(node)
            self.owners.append(owner)
        elif (link := _reduction(node)) is not None:
            name, operand, args, call = link
            value = self.value(operand, call, owner)
            kwargs = dict(call.kwargs)
            new = self.finish.call_function(getattr(ops, name).default, (value, *args), kwargs)
        else:
            carried = [node.args[i] for i in _LINEAR[node.target]]
            mapping = {
                n: self.value(n, node, owner if n in carried else -1) for n in node.all_input_nodes
            }
            target: Any = node.target
            args, kwargs = fx.map_arg((node.args, node.kwargs), mapping.__getitem__)
            new = self.finish.call_function(target, args, kwargs)
        new.meta = dict(node.meta)
        return new

    def reduced(self, node: fx.Node, user: fx.Node) -> bool:
        """Whether a reduction, and then nothing but linear calls, leads to a value of one user."""
        if set(node.users) != {user}:
            return False
        if node not in self.found:
            self.found[node] = _reduction(node) is not None or any(
                self.reduced(n, node) for n in self.operands(node)
            )
        return self.found[node]

    def operands(self, node: fx.Node) -> Iterator[fx.Node]:
        """The operands in which a call is linear; none where another one is not constant."""
        nodes: list[Any] = [node.args[i] for i in _LINEAR.get(node.target, ())]
        if all(n in nodes or self.constant(n) for n in node.all_input_nodes):
            yield from nodes

    def constant(self, node: fx.Node) -> bool:
        """Whether a value is the same in all calls."""
        if node.op == "placeholder":
            return node.name in self.known
        return not _is_random(node) and all(map(self.constant, node.all_input_nodes))


def _reduction(node: fx.Node) -> tuple[str, fx.Node, tuple[Any, ...], fx.Node] | None:
    """(collective, operand, other arguments, call) where a value is a sum over ranks.

    That of a bucket's member stands for itself.
    """
    call: Any = node
    at = 0
    if node.target is operator.getitem:
        call, at = node.args  # type: ignore[assignment]
    row = collective_of(call)
    if row is None or row.name.removesuffix("_bucket") not in _REDUCTIONS:
        return None
    name, operand, args = members_of(call)[at]
    return None if name == "all_reduce" and args[1] != "sum" else (name, operand, args, call)


def _ending(graph: fx.Graph, ends: Sequence[fx.Node]) -> fx.GraphModule:
    """The graph that gives these values; it takes all that the graph takes."""
    needed = ancestors(ends)
    new = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder" or node in needed:
            mapping[node] = new.node_copy(node, lambda n: mapping[n])
            mapping[node].meta = dict(node.meta)
    new.output(tuple(mapping[n] for n in ends))
    return graph_module(new)
