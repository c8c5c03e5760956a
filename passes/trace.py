"""The graph of one call together with its vector-Jacobian product."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from autopar.compat import FakeTensorMode, make_fx, schema_of
from autopar.errors import AutoparError

__all__ = ["TRANSPARENT", "Request", "Trace", "Traces", "ancestors", "fake_like", "shares_memory"]

aten = torch.ops.aten
TRANSPARENT = (aten.detach.default, aten.alias.default, torch.ops.autopar.vary.default)
"""Calls that give back their operand."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The graph of one call: operands and cotangents -> results and gradients of the operands."""

    inputs: tuple[fx.Node, ...]
    tangents: tuple[fx.Node, ...]
    forward: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]
    results: tuple[Any, ...]
    gradients: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """What a trace is made of.

    Args:
        args, kwargs: arguments with operands as `_Ref`.
        operands: fake operands.
        grads: which of them need a gradient.
        mask: results that have a cotangent.
        cotangents: fake cotangents.
    """

    target: Any
    args: Any
    kwargs: Any
    operands: tuple[Tensor, ...]
    grads: tuple[bool, ...]
    mask: tuple[int, ...]
    cotangents: tuple[Tensor, ...]

    def key(self) -> Any:
        """Equal for requests with the same trace."""
        looks = tuple(map(_look, self.operands)), tuple(map(_look, self.cotangents))
        return (self.target, _frozen(self.args), _frozen(self.kwargs), looks, self.grads, self.mask)

    def results(self, operands: list[Tensor]) -> list[Any]:
        """Run the call."""
        out = self.target(*_filled(self.args, operands), **_filled(self.kwargs, operands))
        return [out] if isinstance(out, Tensor) else list(out)

    def joint(
        self, operands: list[Tensor], cotangents: list[Tensor]
    ) -> tuple[list[Any], list[Any]]:
        """Results, and gradients of the operands that need one."""
        values = [
            v.detach().requires_grad_(True) if g else v
            for v, g in zip(operands, self.grads, strict=True)
        ]
        out = self.results(values)
        wanted = [v for v, g in zip(values, self.grads, strict=True) if g]
        pairs = zip((out[i] for i in self.mask), cotangents, strict=True)
        live = [(root, seed) for root, seed in pairs if root.requires_grad]  # zeros_like has none
        if not live:
            return out, [None] * len(wanted)
        roots, seeds = zip(*live, strict=True)
        return out, list(torch.autograd.grad(roots, wanted, seeds, allow_unused=True))


@dataclass(slots=True)
class Traces:
    """Traces and fake results of calls, by what decides them."""

    mode: FakeTensorMode = field(default_factory=lambda: FakeTensorMode())
    table: dict[Any, Trace] = field(default_factory=dict)
    fakes: dict[Any, list[Any]] = field(default_factory=dict)

    def request(self, node: fx.Node, operands: list[Tensor]) -> Request:
        """The call at `node` on fake operands, nothing differentiated."""
        index = {n: i for i, n in enumerate(node.all_input_nodes)}
        refer: Any = lambda n: _Ref(index[n])  # noqa: E731
        args, kwargs = fx.map_arg((node.args, node.kwargs), refer)
        none = (False,) * len(operands)
        return Request(node.target, args, kwargs, tuple(operands), none, (), ())

    def results(self, request: Request) -> list[Any]:
        """Fake results of a call."""
        key = request.key()
        if key not in self.fakes:
            with self.mode, torch.no_grad():
                self.fakes[key] = request.results(list(request.operands))
        return self.fakes[key]

    def prepare(self, requests: Iterable[Request]) -> None:
        """Trace what is not yet traced, all in one go: starting a trace costs as much as a call."""
        new = {key: r for r in requests if (key := r.key()) not in self.table}
        if not new:
            return

        def run(values: list[list[Tensor]]) -> list[Any]:
            return [
                r.joint(v[: len(r.operands)], v[len(r.operands) :])
                for r, v in zip(new.values(), values, strict=True)
            ]

        with self.mode:
            values = [[fake_like(v) for v in (*r.operands, *r.cotangents)] for r in new.values()]
            traced = make_fx(run)(values)
            graph = traced.graph
            _without_writes(graph)
            if any(map(_writes, graph.nodes)):  # into views: this knows which
                traced.recompile()
                with torch.no_grad():
                    graph = make_fx(torch.func.functionalize(traced))(values).graph
        _clean(graph)
        placeholders = iter([n for n in graph.nodes if n.op == "placeholder"])
        out = iter(graph.output_node().args[0])  # type: ignore[arg-type]
        order = {n: i for i, n in enumerate(graph.nodes)}
        for key, r in new.items():
            inputs = [next(placeholders) for _ in r.operands]
            tangents = [next(placeholders) for _ in r.cotangents]
            results = [next(out) for _ in range(self.count(r))]
            gradients = [next(out) for g in r.grads if g]
            trace = _parted(inputs, tangents, results, gradients, order)
            _check_writes(r, trace)
            self.table[key] = trace

    def count(self, request: Request) -> int:
        """Number of results of a call."""
        none = (False,) * len(request.grads)
        bare = dataclasses.replace(request, grads=none, mask=(), cotangents=())
        return len(self.results(bare))

    def kept(self, node: fx.Node) -> set[fx.Node]:
        """Operands of a call of the global graph that its gradient is computed from."""
        operands = list(node.all_input_nodes)
        with self.mode:
            fakes = [_whole(n.meta["val"]) for n in operands]
        request = self.request(node, fakes)
        results = self.results(request)
        mask = tuple(i for i, r in enumerate(results) if (r.is_floating_point() or r.is_complex()))
        grads = tuple(bool(n.meta.get("requires_grad")) for n in operands)
        if not mask or not any(grads):
            return set()
        seeds = tuple(results[i] for i in mask)
        trace = self.of(dataclasses.replace(request, grads=grads, mask=mask, cotangents=seeds))
        stack = [n for call in trace.backward for n in call.all_input_nodes]
        found: set[fx.Node] = set()
        while stack:
            value = stack.pop()
            if value in trace.inputs:
                found.add(operands[trace.inputs.index(value)])
            elif value in trace.forward and shares_memory(value):
                stack.extend(value.all_input_nodes)
        return found

    def of(self, request: Request) -> Trace:
        """The trace of a request."""
        self.prepare([request])
        return self.table[request.key()]


def _without_writes(graph: fx.Graph) -> None:
    """Turn writes into new values: composite operations fill what they have just made in place.

    Only where the written tensor is fresh and nothing views it; `_check_writes` refuses the others.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or not shares_memory(node):
            continue
        name = node.target.overloadpacket.__name__
        functional = getattr(getattr(aten, name[:-1], None), str(node.target).split(".")[-1], None)
        written = node.args[0] if node.args else None
        if not name.endswith("_") or functional is None or not isinstance(written, fx.Node):
            continue
        fresh = written.op == "call_function" and not shares_memory(written)
        others = [u for u in written.users if u is not node]
        if not fresh or any(shares_memory(u) for u in others):
            continue
        node.target = functional
        order = {n: i for i, n in enumerate(graph.nodes)}
        for user in others:
            if order[user] > order[node]:
                user.replace_input_with(written, node)


def _writes(node: fx.Node) -> bool:
    schema = schema_of(node.target)
    return schema is not None and bool(schema.is_mutable)


def shares_memory(node: fx.Node) -> bool:
    """Whether the result of a call shares memory with an operand."""
    schema = schema_of(node.target)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


def _check_writes(request: Request, trace: Trace) -> None:
    """Refuse a call that is made of operations which write in place: tracing loses gradients."""
    for node in (*trace.forward, *trace.backward):
        if _writes(node):
            raise AutoparError(
                f"The gradient of {request.target} cannot be traced: it writes in place by "
                f"{node.target}.",
                expected="an operation made of functional ones",
                hint="write it in simpler operations in the model, and report it",
            )


def _parted(
    inputs: list[fx.Node], tangents: list[fx.Node], results: list[Any], gradients: list[Any],
    order: dict[fx.Node, int],
) -> Trace:  # fmt: skip
    """Part a joint trace: forward is what the results need, backward the rest."""
    forward = ancestors(r for r in results if isinstance(r, fx.Node))
    every = forward | ancestors(g for g in gradients if isinstance(g, fx.Node))
    forward |= {n for n in every if n.target is operator.getitem and n.args[0] in forward}
    calls = sorted((n for n in every if n.op == "call_function"), key=lambda n: order[n])
    return Trace(
        tuple(inputs),
        tuple(tangents),
        tuple(n for n in calls if n in forward),
        tuple(n for n in calls if n not in forward),
        tuple(results),
        tuple(gradients),
    )


@dataclass(frozen=True, slots=True)
class _Ref:
    """Stands for an operand in frozen arguments."""

    index: int


def _filled(value: Any, values: list[Tensor]) -> Any:
    if isinstance(value, _Ref):
        return values[value.index]
    if isinstance(value, (list, tuple)):
        return type(value)(_filled(v, values) for v in value)
    if isinstance(value, dict):
        return {k: _filled(v, values) for k, v in value.items()}
    return value


def _frozen(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple((k, _frozen(v)) for k, v in value.items())
    return (type(value).__name__, value)


def _look(val: Tensor) -> Any:
    return (tuple(val.shape), val.stride(), val.dtype, val.device)


def _whole(val: Tensor) -> Tensor:
    return torch.empty(val.shape, dtype=val.dtype)


def fake_like(val: Tensor) -> Tensor:
    """A fresh tensor of the looks of `val`, fake inside a fake mode."""
    return torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device=val.device)


def _clean(graph: fx.Graph) -> None:
    """Drop what does nothing at run time; views may copy, as strides may differ from the traced."""
    for node in list(graph.nodes):
        if node.target in TRANSPARENT:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default
        elif node.target is aten.native_layer_norm_backward.default and node.args[6] is not None:
            # it asks only whether there is a bias, which need not be kept for that
            node.update_arg(6, node.args[5])
        elif node.target is aten.convolution_backward.default and not node.args[10][0]:
            shape = list(node.args[2].meta["val"].shape)  # nothing but the shape is read of it
            with graph.inserting_before(node):
                shaped = graph.call_function(aten.new_empty.default, (node.args[0], shape))
            shaped.meta["val"] = node.args[2].meta["val"]
            node.update_arg(2, shaped)
    graph.eliminate_dead_code()


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """`nodes` and everything they are computed from."""
    seen: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return seen
