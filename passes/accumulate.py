"""Microbatches: run a program once for each of several parts of the batch, and reduce once.

The parts are an axis of the mesh like any other, `MICRO`, which lies in time: what differs along it
runs in a loop, a sum over it is added up, and the rest runs once. So counts are those of the whole
batch, and what would mix rows of different parts is seen as a collective where none may stand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar.collectives import collective_of, ops
from autopar.errors import PlanError
from autopar.layout import MICRO
from autopar.passes.bucket import Bucket
from autopar.program import (
    Phases,
    ancestors,
    call_text,
    differentiable,
    graph_module,
    info,
    shares_memory,
)
from autopar.roll import leaves
from autopar.schedule import Join, Step
from autopar.sizes import Size

__all__ = ["Accumulation", "Part", "Parts", "accumulate", "join_of"]


@dataclass(frozen=True, slots=True)
class Accumulation:
    """A step over microbatches, and the graph of each of its functions."""

    step: Step
    graphs: Mapping[str, fx.GraphModule]

    @property
    def scatters(self) -> bool:
        """Whether gradients are scattered over ranks in each microbatch, as they arise."""
        rows = map(collective_of, self.graphs["body"].graph.nodes)
        return any(row is not None and row.name.startswith("reduce_scatter") for row in rows)


def accumulate(phases: Phases) -> Accumulation:
    """Take a differentiated program apart at the joins over the axis `MICRO`.

    Raises:
        PlanError: rows of different microbatches are mixed, or there is no loss.
    """
    if len(phases.roots) != 1 or not any(o.is_loss for o in phases.program.outputs):
        raise PlanError(
            "accumulate= needs the loss inside the program, and one parameter with a gradient.",
            hint="pass loss=fn to parallelize and call model(x, targets=y)",
        )
    return Parts(phases).run()


_JOINS = (
    ops.all_reduce.default, ops.all_gather.default, ops.all_gather_replicated.default,
)  # fmt: skip


class Part(NamedTuple):
    """A function of a step: its graph, and the names of what it takes and gives."""

    graph: fx.GraphModule
    takes: tuple[str, ...]
    gives: tuple[str, ...]


class Parts:
    """A differentiated program in one graph, and what of it differs between microbatches."""

    def __init__(self, phases: Phases) -> None:
        self.phases = phases
        self.late: dict[fx.Node, fx.Node | None] = {}  # backward calls -> the forward call repeated
        self.graph, self.results, self.gradients, self.tangents = _inlined(phases, self.late)
        self.sum_whole()
        self.survey()

    def survey(self) -> None:
        """Note of every call what it differs by and is made of."""
        nodes = list(self.graph.nodes)
        self.inputs = [n for n in nodes if n.op == "placeholder"]
        self.joins = [n for n in nodes if _joins(n)]
        self.varying: set[fx.Node] = set()
        self.sources: dict[fx.Node, set[fx.Node]] = {}  # the joins that a value is computed from
        self.linear = set(self.tangents)  # what is computed from the gradient of the loss
        for node in nodes:
            self.note(node)
        again = {n.name for n in self.phases.program.graph.graph.nodes if info(n).again}
        self.inline = {n for n in nodes if info(n).again or info(n).origin in again}  # not held

    def sum_whole(self) -> None:
        """Scatter the sum over microbatches of a gradient, for states in stage 1 of ZeRO."""
        nodes, states = self.phases.program.placeholders(), self.phases.program.states
        first = {s.name for s in states if info(nodes[s.node]).zero == 1}
        for i, name in enumerate(self.phases.gradients):
            node: Any = self.gradients[i] if name in first else None
            while node is not None and collective_of(node) is not None and not _joins(node):
                node = node.args[0]
            if node is None or not _joins(node) or not _scattered(node.args[0]):
                continue
            with self.graph.inserting_before(node):
                total = self.joined(node.args[0], node)
            node.replace_all_uses_with(total)
            self.gradients[i] = total if self.gradients[i] is node else self.gradients[i]

    def joined(self, value: Any, join: fx.Node) -> fx.Node:
        """`join` of a value, made before the scatters in it: all of these are linear."""
        if _scattered(value):
            operands = {n: self.joined(n, join) for n in value.all_input_nodes}
            new = self.graph.node_copy(value, lambda n: operands[n])
        else:
            new = self.graph.create_node(join.op, join.target, (value, *join.args[1:]))
        new.meta = dict(value.meta)
        return new

    def note(self, node: fx.Node) -> None:
        """Whether a value differs between microbatches, and which joins over them it needs."""
        operands = node.all_input_nodes
        direct = [{n} if _joins(n) else self.sources[n] for n in operands]
        self.sources[node] = set().union(*direct)
        if self.linear.intersection(operands):
            self.linear.add(node)
        if _joins(node):
            return
        row = collective_of(node)
        if row is not None and row.factor and node.args[1] == MICRO:  # neither sum nor gather
            raise self.mixed(node)
        layout = next(iter(info(node).layouts), None)
        drawn = node.target in (ops.uniform.default, ops.keep_mask.default)
        cut = layout is not None and MICRO in layout.sharded and (drawn or not operands)
        moved = row is not None and node.args[1] == MICRO and row.name in ("shard", "cut", "pad")
        moved = moved or (node.target is ops.shift.default and node.args[1] == MICRO)
        sized = [*leaves((node.args, node.kwargs)), *leaves(info(node).shapes)]
        sizes = any(isinstance(s, Size) and f'"{MICRO}"' in s.text for s in sized)
        if cut or moved or sizes or any(n in self.varying for n in operands):
            self.varying.add(node)

    def mixed(self, node: fx.Node) -> PlanError:
        """Rows of different microbatches meet in a call."""
        by_name = {n.name: n for n in self.phases.program.graph.graph.nodes}
        culprit = by_name.get(info(node).origin, node)
        while collective_of(culprit) is not None and culprit.users:
            culprit = next(iter(culprit.users))
        return PlanError(
            "Rows of different microbatches meet before the loss, so the batch cannot be split.",
            where=call_text(culprit),
            expected="a loss that is a sum over rows, divided by counts",
            hint="leave out accumulate=, or take the batch-wide part (batch norm in training, a "
            "contrastive loss) out of the model",
        )

    def run(self) -> Accumulation:
        """The step, in functions that run once and functions that run for each microbatch."""
        needed = ancestors(n for n in (*self.results, *self.gradients) if n is not None)
        used = set().union(*(self.sources[n] for n in self.varying & needed))
        counted = [s for s in self.joins if s in used]
        for node in counted:
            if self.sources[node]:
                raise self.mixed(node)
        summed = [s for s in self.joins if s in needed and s not in used]
        cut = {n.name: self.dim(n) for n in self.results if n in self.varying}
        ends = [n for n in self.results if n not in self.varying]
        inner = [n for n in self.results if n in self.varying]
        body = [*(s.args[0] for s in summed), *inner]
        once = self.once(body, counted)
        known = [*self.inputs, *self.joins]
        parts = {
            "count": self.part([s.args[0] for s in counted], self.inputs),
            "start": self.part(once, [*self.inputs, *counted]),
            "body": self.part(body, [*self.inputs, *counted, *once], reductions=True),
            "end": self.part(ends, known),
            "finish": self.part(self.gradients, known, reductions=True),
        }
        step = Step(
            takes={name: part.takes for name, part in parts.items()},
            gives={name: part.gives for name, part in parts.items()},
            counted=tuple(map(join_of, counted)),
            summed=tuple(map(join_of, summed)),
            placed=tuple(n.name for n in self.inputs if n not in self.tangents),
            results=tuple(n.name for n in self.results),
            cut=cut,
            tangent=(self.tangents[0].name, self.tangents[0].meta["val"].dtype),
            loss=self.phases.roots[0],
            carrying=differentiable(self.phases.program),
            scaling=frozenset(s.name for s in self.joins if s in self.linear),
        )
        return Accumulation(step, {name: part.graph for name, part in parts.items()})

    def once(self, body: Iterable[Any], counted: Sequence[fx.Node]) -> list[fx.Node]:
        """The calls outside the loop whose values it takes; views are made within."""
        needed = self.varying & ancestors(body, [*counted, *self.inputs])
        inside = [n for n in self.graph.nodes if n in needed]  # in order, that code be the same
        found: dict[fx.Node, None] = {}
        stack = [n for node in inside for n in node.all_input_nodes]
        while stack:
            node = stack.pop()
            if node.op != "call_function" or node in self.varying or node in counted:
                continue
            if node in self.inline or shares_memory(node) or _many(node):
                stack.extend(node.all_input_nodes)
            else:
                found[node] = None
        return list(found)

    def dim(self, node: fx.Node) -> int:
        """The dim of a result that microbatches cut."""
        layout = info(node).layouts[0]
        if MICRO not in layout.sharded:
            raise self.mixed(node)
        return layout.sharded[MICRO][0]

    def part(
        self, outputs: Sequence[Any], known: Sequence[fx.Node], reductions: bool = False
    ) -> Part:
        """The function that computes values from known ones."""
        graph = fx.Graph()
        mapping: dict[fx.Node, fx.Node] = {}
        needed = ancestors((o for o in outputs if o is not None), known)
        stops = set(known)
        for node in self.graph.nodes:
            if node not in needed:
                continue
            if node in stops:
                mapping[node] = graph.placeholder(node.name)
            else:
                mapping[node] = graph.node_copy(node, lambda n: mapping[n])
            mapping[node].meta = dict(node.meta)
        inputs = [n for n, new in mapping.items() if new.op == "placeholder"]
        graph.output(tuple(mapping[o] if o is not None else None for o in outputs))
        bucket = Bucket()
        bucket.gathers(graph, {s.node for s in self.phases.program.states})
        if reductions:
            bucket.reductions(graph)
        names = tuple("" if o is None else o.name for o in outputs)
        return Part(graph_module(graph), tuple(n.name for n in inputs), names)


def join_of(node: fx.Node) -> Join:
    """What a reduction or gather over microbatches joins."""
    operand: Any = node.args[0]
    if node.target is ops.all_reduce.default:
        return Join(operand.name, node.name, str(node.args[2]))
    _, _, dim, outer, *_ = node.args
    return Join(operand.name, node.name, "gather", dim, outer)  # type: ignore[arg-type]


def _joins(node: fx.Node) -> bool:
    """Whether a call joins what microbatches give, so that the result is the same for all."""
    return node.target in _JOINS and node.args[1] == MICRO


def _scattered(node: fx.Node) -> bool:
    """Whether a value is what a rank has of a scattered sum, or a sum of such values."""
    if node.target is torch.ops.aten.add.Tensor and len(node.all_input_nodes) == 2:
        return any(map(_scattered, node.all_input_nodes))
    return node.target is ops.reduce_scatter.default


def _many(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (list, tuple))


def _inlined(
    phases: Phases, late: dict[fx.Node, fx.Node | None]
) -> tuple[fx.Graph, list[fx.Node], list[fx.Node | None], list[fx.Node]]:
    """(graph, results, gradients, tangents): forward and backward in one.

    Args:
        late: filled with the calls of the backward graph, see `Parts`.
    """
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}

    def copy(source: fx.Graph) -> list[Any]:
        for node in source.nodes:
            if node.op != "output" and node not in mapping:
                mapping[node] = graph.node_copy(node, lambda n: mapping[n])
                mapping[node].meta = dict(node.meta)
        return [mapping.get(o) for o in source.output_node().args[0]]  # type: ignore

    outputs = copy(phases.forward.graph)
    results, saved = outputs[: phases.n_results], outputs[phases.n_results :]
    taken = [n for n in phases.backward.graph.nodes if n.op == "placeholder"]
    mapping.update(zip(taken, saved, strict=False))
    by_name = {n.name: mapping[n] for n in phases.forward.graph.nodes if n in mapping}
    before = set(mapping)
    gradients = copy(phases.backward.graph)
    for node in phases.backward.graph.nodes:
        if node not in before and node.op == "call_function":
            late[mapping[node]] = by_name.get(node.name) if info(node).again else None
    tangents = [mapping[n] for n in taken[len(saved) :]]
    return graph, results, gradients, tangents
