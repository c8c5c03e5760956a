"""Make forward and backward graphs of an SPMD program, call by call.

Each distinct call (operation, shapes, what needs a gradient) is traced once together with its
vector-Jacobian product; the graphs of all calls are then strung together, forward in order and
backward in reverse. Repeated layers therefore cost only the stringing. Where ranks hold pieces
of different sizes, a call is traced twice, and what differs between the traces is written in names
of sizes (see `autopar.sizes`).
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from autopar.errors import AutoparError
from autopar.passes.trace import (
    TRANSPARENT,
    Request,
    Trace,
    Traces,
    fake_like,
)
from autopar.program import (
    Joint,
    NodeInfo,
    Phases,
    Program,
    ancestors,
    call_text,
    graph_module,
    info,
    set_info,
    shares_memory,
    update_info,
)
from autopar.sizes import Size, at_probe

__all__ = ["Differentiate"]

aten = torch.ops.aten
_NUMBER = re.compile(r"_\d+$")

Repeat = Callable[[Joint], set[fx.Node]]


@dataclass(frozen=True, slots=True)
class Differentiate:
    """Make the forward graph (results, saved values) and the backward graph (gradients).

    Every typed collective has its adjoint as autograd formula, so backward communication comes out
    as ordinary nodes.

    Before:
        y = autopar.all_reduce(aten.linear(x, w), "tp", "sum")
    After:
        forward:  m = aten.mm(x, t(w)); y = autopar.all_reduce(m, "tp", "sum"); return y, x, w
        backward: dx = aten.mm(dy, w); dw = aten.mm(t(dy), x)

    Args:
        device: device of the tensors at run time.
        gradients: false for a forward-only program.
        traces: traces of calls, shared between the places of one compilation.
        roots: results whose gradients come in; by default the loss, or all without one.
        repeat: chooses forward calls to compute once more in the backward graph.
    """

    device: str = "cpu"
    gradients: bool = True
    traces: Traces = field(default_factory=Traces)
    roots: tuple[int, ...] | None = None
    repeat: Repeat = lambda joint: set()
    name: str = "differentiate"

    def run(self, program: Program) -> Phases:
        """Differentiate an SPMD program with respect to all states that require a gradient."""
        wanted = [s for s in program.states if s.requires_grad and self.gradients]
        roots = list(self.roots) if self.roots is not None else _roots(program)
        roots = roots if wanted else []
        stringing = _Stringing(program, self.device, self.traces, roots, self.repeat)
        return stringing.run([s.node for s in wanted])


def _roots(program: Program) -> list[int]:
    """Graph outputs that a gradient can come from: the loss, or every float output without one."""
    losses = [o.index for o in program.outputs if o.is_loss]
    out: Any = program.graph.graph.output_node().args[0]
    if not losses:
        losses = sorted({o.index for o in program.outputs if o.index >= 0})
    return [i for i in losses if out[i].meta.get("requires_grad")]


@dataclass(frozen=True, slots=True)
class _Pending:
    """A differentiated call between its forward and its backward part."""

    node: fx.Node
    request: Request
    trace: Trace
    mapping: dict[fx.Node, fx.Node]


class _Stringing:
    """Strings the traces of all calls together into one joint graph and parts it."""

    def __init__(
        self, program: Program, device: str, traces: Traces, roots: list[int], repeat: Repeat
    ) -> None:
        self.program, self.device, self.traces, self.roots = program, device, traces, roots
        self.repeat = repeat
        self.graph = fx.Graph()
        self.fakes: dict[fx.Node, Any] = {}  # SPMD node -> fake value, or list of them
        self.probes: dict[fx.Node, Any] = {}  # the same with primes in place of uneven pieces
        self.value: dict[fx.Node, Any] = {}  # SPMD node -> joint node, or tuple of them
        self.cotangents: dict[tuple[fx.Node, int], list[fx.Node]] = {}
        self.pending: list[_Pending] = []

    def run(self, wanted: list[str]) -> Phases:
        """Joint graph, then parted; `wanted` are the placeholders to differentiate."""
        gm = self.program.graph
        out: Any = gm.graph.output_node().args[0]
        requests = self.requests(self.reach([out[i] for i in self.roots]))
        self.traces.prepare(requests.values())
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                self.value[node] = self.graph.placeholder(node.name)
                vals = {"val": self.fakes[node], "probe": self.probes[node]}
                self.value[node].meta = {**node.meta, **vals}
            elif node in requests:
                self.forward(node, requests[node])
            elif node.op == "call_function":
                self.plain(node)
        results = [self.value[r] for r in out]
        tangents = self.tangents([out[i] for i in self.roots], results)
        for pending in reversed(self.pending):
            self.backward(pending)
        by_name = self.program.placeholders()
        gradients = [self.total((by_name[name], 0)) for name in wanted]
        return self.part(results, tangents, gradients, wanted)

    def requests(self, reach: set[tuple[fx.Node, int]]) -> dict[fx.Node, Request]:
        """Fake values of all nodes, and what must be traced for each differentiated call."""
        found = {}
        for node in self.program.graph.graph.nodes:
            if node.op == "placeholder":
                self.fakes[node], self.probes[node] = self.given(node)
            elif node.target is operator.getitem:
                for table in (self.fakes, self.probes):
                    table[node] = table[node.args[0]][node.args[1]]
            elif node.op == "call_function":
                operands = list(node.all_input_nodes)
                request = self.traces.request(
                    node, [self.fakes[n] for n in operands], [self.probes[n] for n in operands]
                )
                results = self.results(node, request)
                later = self.results(node, request.probe) if request.probe else results
                many = not isinstance(node.meta["val"], Tensor)
                self.fakes[node] = results if many else results[0]
                self.probes[node] = later if many else later[0]
                mask = tuple(i for i in range(len(results)) if (node, i) in reach)
                grads = tuple(bool(n.meta.get("requires_grad")) for n in operands)
                if mask and any(grads):
                    with self.traces.mode:
                        seeds = [(_blank(results[i]), _blank(later[i])) for i in mask]
                    found[node] = request.backed(grads, mask, seeds)
        return found

    def given(self, node: fx.Node) -> tuple[Tensor, Tensor]:
        """Fake values of a placeholder: with the sizes of the first place, and with primes."""
        val, shapes = node.meta["val"], info(node).shapes
        with self.traces.mode:
            first = torch.empty(val.shape, dtype=val.dtype, device=self.device)
            if not shapes:
                return first, first
            later = [at_probe(n) for n in shapes[0]]
            return first, torch.empty(later, dtype=val.dtype, device=self.device)

    def results(self, node: fx.Node, request: Request) -> list[Any]:
        """Fake results of a call; an error names the call."""
        try:
            return self.traces.results(request)
        except Exception as error:
            raise AutoparError(
                f"The local program could not be traced: {type(error).__name__}: "
                f"{str(error).splitlines()[0] if str(error) else ''}",
                where=call_text(node),
                hint="the rule of this operation may be wrong for these shapes; please report it",
            ) from error

    def reach(self, roots: list[fx.Node]) -> set[tuple[fx.Node, int]]:
        """(call, result) pairs whose gradient the roots ask for."""
        found: set[tuple[fx.Node, int]] = set()
        stack = list(roots)
        while stack:
            node = stack.pop()
            key = _source(node)
            if key not in found and node.meta.get("requires_grad", False):
                found.add(key)
                stack.extend(key[0].all_input_nodes)
        return found

    def plain(self, node: fx.Node) -> None:
        """Append a call without gradient as it is."""
        source: Any = node.args[0] if node.args else None
        if node.target is operator.getitem and isinstance(self.value[source], tuple):
            self.value[node] = self.value[source][node.args[1]]
        elif node.target in TRANSPARENT:
            self.value[node] = self.value[source]
        else:
            new = self.graph.node_copy(node, lambda n: self.value[n])
            new.meta = {"val": self.fakes[node], "probe": self.probes[node]}
            set_info(new, dataclasses.replace(info(node), origin=_source(node)[0].name))
            self.value[node] = new

    def forward(self, node: fx.Node, request: Request) -> None:
        """Append the forward part of a differentiated call."""
        trace = self.traces.of(request)
        joint = [self.value[n] for n in node.all_input_nodes]
        mapping = dict(zip(trace.inputs, joint, strict=True))
        record = dataclasses.replace(info(node), origin=node.name)
        self.copy(trace.forward, mapping, dataclasses.replace(record, layouts=()))
        values = tuple(mapping[r] if isinstance(r, fx.Node) else r for r in trace.results)
        for value in values:
            if isinstance(value, fx.Node) and value not in joint:  # else an operand as it came
                set_info(value, record)
        self.value[node] = values if isinstance(self.fakes[node], list) else values[0]
        self.pending.append(_Pending(node, request, trace, mapping))

    def copy(
        self, nodes: Iterable[fx.Node], mapping: dict[fx.Node, fx.Node], record: NodeInfo
    ) -> None:
        """Append the nodes of a trace, numbered anew: theirs tell what was traced with them."""
        for inner in nodes:
            args, kwargs = fx.map_arg((inner.args, inner.kwargs), lambda n: mapping[n])
            name = _NUMBER.sub("", inner.name)
            new = self.graph.create_node(inner.op, inner.target, args, kwargs, name)
            val = inner.meta.get("val")
            new.meta = {"val": val, "probe": inner.meta.get("probe", val)}
            set_info(new, record)
            mapping[inner] = new

    def tangents(self, roots: list[fx.Node], results: list[Any]) -> list[fx.Node]:
        """A placeholder for the gradient of each root."""
        first = next(iter(self.graph.nodes))
        made = []
        last = [n for n in self.graph.nodes if n.op == "placeholder"][-1] if roots else first
        for i, root in enumerate(roots):
            with self.graph.inserting_after(last):
                last = self.graph.placeholder(f"tangent_{i}")
            value = results[self.roots[i]]
            last.meta.update(val=value.meta["val"], probe=value.meta["probe"])
            self.cotangents.setdefault(_source(root), []).append(last)
            made.append(last)
        return made

    def backward(self, pending: _Pending) -> None:
        """Append the backward part of a call."""
        node, request, trace, mapping = (
            pending.node, pending.request, pending.trace, pending.mapping,
        )  # fmt: skip
        given = [self.total((node, i)) for i in request.mask]
        if not any(given):
            return
        cotangents = [  # a result whose users pass no gradient on has a zero one
            c if c is not None else self.zeros(trace.results[i])
            for i, c in zip(request.mask, given, strict=True)
        ]
        seeds = [(c.meta["val"], c.meta["probe"]) for c in cotangents]
        found = self.traces.of(request.backed(request.grads, request.mask, seeds))
        if found is not trace:  # the same forward part, other strides in the backward part
            same = zip(
                (*found.inputs, *found.forward), (*trace.inputs, *trace.forward), strict=True
            )
            mapping.update([(new, mapping[old]) for new, old in same])
        mapping.update(zip(found.tangents, cotangents, strict=True))
        record = dataclasses.replace(info(node), origin=node.name, layouts=())
        self.copy(found.backward, mapping, record)
        operands = node.all_input_nodes
        wanted = [n for n, g in zip(operands, request.grads, strict=True) if g]
        for operand, gradient in zip(wanted, found.gradients, strict=True):
            if isinstance(gradient, fx.Node):
                self.cotangents.setdefault(_source(operand), []).append(mapping[gradient])

    def zeros(self, like: fx.Node) -> fx.Node:
        val = like.meta["val"]
        new = self.graph.call_function(
            aten.zeros.default, (self.shape(like),), {"dtype": val.dtype, "device": val.device}
        )
        new.meta.update(val=val, probe=like.meta["probe"])
        return new

    def shape(self, node: fx.Node) -> list[Any]:
        """Local shape of a value, with sizes where places differ."""
        first, later = node.meta["val"].shape, node.meta["probe"].shape
        sizes = self.traces.sizes
        if sizes is None:
            return list(first)
        return [sizes.between(a, b) for a, b in zip(first, later, strict=True)]

    def total(self, key: tuple[fx.Node, int]) -> fx.Node | None:
        """The sum of all cotangents of a value."""
        parts = self.cotangents.get(key, [])
        if not parts:
            return None
        total = parts[0]
        for part in parts[1:]:
            one, two = total, part
            total = self.graph.call_function(aten.add.Tensor, (one, two))
            with self.traces.mode:
                for kind in ("val", "probe"):
                    total.meta[kind] = fake_like(one.meta[kind]) + fake_like(two.meta[kind])
            set_info(total, NodeInfo(origin=key[0].name, stage=info(key[0]).stage))
        self.cotangents[key] = [total]
        return total

    def part(
        self, results: list[Any], tangents: list[fx.Node], gradients: list[Any], wanted: list[str]
    ) -> Phases:
        """Forward graph with saved values, backward graph on them."""
        nodes = list(self.graph.nodes)
        calls = [n for n in nodes if n.op == "call_function"]
        needed = ancestors([*results, *(g for g in gradients if g is not None)])
        if self.traces.sizes is not None:
            self.note_shapes(nodes)
        forward = ancestors(results)
        forward |= {n for n in nodes if n.target is operator.getitem and n.args[0] in forward}
        inputs = [n for n in nodes if n.op == "placeholder" and n not in tangents]
        forward |= set(inputs)
        rest = [n for n in calls if n not in forward and n in needed]
        ends = [g for g in gradients if g is not None]
        again = _again(calls, forward, self.repeat(Joint(self.graph, forward, rest, ends)))
        saved: dict[fx.Node, None] = {}
        stack = [n for node in reversed(rest) for n in reversed(node.all_input_nodes)]
        stack = ends[::-1] + stack
        seen: set[fx.Node] = set()
        while stack:
            node = stack.pop()
            if node in forward and node not in seen:
                seen.add(node)
                if node in again:
                    stack.extend(reversed(node.all_input_nodes))
                else:
                    saved[node] = None
        fw = _extract([n for n in calls if n in forward], inputs, [*results, *saved])
        bw = _extract(rest, [*saved, *tangents], gradients)
        names = {s.node: s.name for s in self.program.states}
        return Phases(
            self.program,
            fw,
            bw,
            n_results=len(results),
            roots=tuple(self.roots),
            gradients=tuple(names[w] for w in wanted),
        )

    def note_shapes(self, nodes: list[fx.Node]) -> None:
        """Record the local shapes that differ between places."""
        sizes = self.traces.sizes
        assert sizes is not None, "only where places differ"
        for node in nodes:
            vals, probes = (node.meta.get(kind) for kind in ("val", "probe"))
            if isinstance(vals, Tensor):
                vals, probes = [vals], [probes]
            rows = zip(vals or (), probes or (), strict=True)
            pairs = [((), ()) if v is None else (v.shape, p.shape) for v, p in rows]
            shapes = (
                tuple(sizes.between(m, n) for m, n in zip(a, b, strict=True)) for a, b in pairs
            )
            differ = any(a != b for a, b in pairs)
            update_info(node, shapes=tuple(shapes) if differ else ())
            if info(node).unless is not None and not _meets_nothing(node):
                update_info(node, unless=None)


def _meets_nothing(node: fx.Node) -> bool:
    """Whether the result or an operand of a call holds nothing at some place."""
    if node.target is operator.getitem:
        return info(node.args[0]).unless is not None  # type: ignore[arg-type]
    touched = [info(n).shapes for n in (node, *node.all_input_nodes)]
    return any(isinstance(n, Size) and 0 in n.values for s in touched for dims in s for n in dims)


def _blank(val: Tensor) -> Tensor:
    """A contiguous cotangent."""
    return torch.empty(val.shape, dtype=val.dtype, device=val.device)


def _source(node: fx.Node) -> tuple[fx.Node, int]:
    """The call that makes a value, and which of its results it is."""
    if node.target is operator.getitem:
        return node.args[0], node.args[1]  # type: ignore[return-value]
    return node, 0


def _again(calls: list[fx.Node], forward: set[fx.Node], chosen: set[fx.Node]) -> set[fx.Node]:
    """Forward calls to compute once more in the backward graph.

    Those chosen, those marked, and views of them.
    """
    found: set[fx.Node] = set()
    for node in calls:
        operands = node.all_input_nodes
        view = operands and found.issuperset(operands) and shares_memory(node)
        if node in forward and (node in chosen or info(node).again or view):
            found.add(node)
    return found


def _extract(nodes: list[fx.Node], inputs: list[fx.Node], outputs: list[Any]) -> fx.GraphModule:
    """The graph of `nodes`; operands that are neither there nor inputs are computed again."""
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        new = graph.placeholder(node.name)
        new.meta = dict(node.meta)
        mapping[node] = new

    def copy(node: fx.Node) -> None:
        for operand in node.all_input_nodes:
            if operand not in mapping:
                copy(operand)
                update_info(mapping[operand], again=True)
        mapping[node] = graph.node_copy(node, lambda n: mapping[n])
        mapping[node].meta = dict(node.meta)
        update_info(mapping[node], again=False)

    for node in nodes:
        copy(node)
    graph.output(tuple(mapping[o] if isinstance(o, fx.Node) else None for o in outputs))
    graph.eliminate_dead_code()
    return graph_module(graph)
