"""Put traced functions in place of nodes: the common step of all rewriting passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.compat import detect_fake_mode, make_fx
from autopar.program import NodeInfo, info, nodes_in, set_info

__all__ = ["Splicer"]


def _signature(value: Any) -> Any:
    if isinstance(value, fx.Node):
        val = value.meta["val"]
        return ("tensor", tuple(val.shape), tuple(val.stride()), val.dtype, val.device.type)
    if isinstance(value, (list, tuple)):
        return tuple(map(_signature, value))
    if isinstance(value, dict):
        return tuple((k, _signature(v)) for k, v in value.items())
    return (type(value).__name__, value)


def _fresh(val: Any) -> Any:
    if not isinstance(val, torch.Tensor):
        return val
    return torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device=val.device)


@dataclass(frozen=True, slots=True)
class _Planned:
    """A replacement to come: `fn(*args, **kwargs)` in place of `node`."""

    node: fx.Node
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def key(self) -> Any:
        """Equal for replacements with the same trace; same-shaped operands may be one or two."""
        index = {n: i for i, n in enumerate(self.operands())}
        which = fx.map_arg((self.args, self.kwargs), lambda n: index[n])
        parts = (self.fn, _signature(self.args), _signature(self.kwargs), _signature(which))
        return parts

    def operands(self) -> list[fx.Node]:
        """Distinct operands in argument order."""
        return list(dict.fromkeys(nodes_in((self.args, self.kwargs))))

    def run(self, values: list[Any]) -> Any:
        """Call the function on values of the operands."""
        table = dict(zip(self.operands(), values, strict=True))
        args, kwargs = fx.map_arg((self.args, self.kwargs), lambda n: table[n])
        return self.fn(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class _Body:
    """A traced function: its inputs, calls and results."""

    inputs: list[fx.Node]
    calls: list[fx.Node]
    results: Any


@dataclass(slots=True)
class Splicer:
    """Collects replacements, traces the distinct ones in one go and copies them into the graph.

    Starting a trace costs far more than a call in it, and repeated layers ask for the same.
    """

    graph: fx.Graph
    planned: list[_Planned] = field(default_factory=list)
    replaced: dict[fx.Node, Any] = field(default_factory=dict)

    def drop(self, node: fx.Node) -> None:
        """Remove a call that returns its first operand."""
        source = self.current(node.args[0])
        if node.users:
            node.replace_all_uses_with(source)
        self.replaced[node] = source
        self.graph.erase_node(node)

    def replace(self, node: fx.Node, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Plan to put `fn(*args, **kwargs)` in place of `node`."""
        self.planned.append(_Planned(node, fn, args, kwargs))

    def current(self, node: Any) -> Any:
        """What now stands for `node`."""
        while node in self.replaced:
            node = self.replaced[node]
        return node

    def flush(self) -> None:
        """Carry all planned replacements out."""
        distinct: dict[Any, _Planned] = {}
        for p in self.planned:
            distinct.setdefault(p.key(), p)
        bodies = dict(zip(distinct, self.trace(list(distinct.values())), strict=True))
        for p in self.planned:
            key = p.key()  # before its operands change
            self.put(p, bodies[key])
        self.planned.clear()

    def trace(self, plans: list[_Planned]) -> list[_Body]:
        """The bodies of all plans, in one trace."""
        if not plans:
            return []
        mode = detect_fake_mode([[n.meta["val"] for n in p.operands()] for p in plans])
        assert mode is not None, "captured values are fake"
        with mode:  # fresh ones: tracing tells values apart by identity
            values = [[_fresh(n.meta["val"]) for n in p.operands()] for p in plans]

        def run(values: list[list[Any]]) -> list[Any]:
            return [p.run(v) for p, v in zip(plans, values, strict=True)]

        with mode, torch.no_grad():
            gm = make_fx(run, pre_dispatch=True)(values)
        for node in list(gm.graph.nodes):
            if node.op == "get_attr":
                _inline_constant(gm, node)
        order = {n: i for i, n in enumerate(gm.graph.nodes)}
        placeholders = iter([n for n in gm.graph.nodes if n.op == "placeholder"])
        out = iter(gm.graph.output_node().args[0])  # type: ignore[arg-type]
        bodies = []
        for p, v in zip(plans, values, strict=True):
            inputs = [next(placeholders) for _ in v]
            with mode, torch.no_grad():
                many = p.run(v)
            results = (
                tuple(next(out) for _ in many) if isinstance(many, (list, tuple)) else next(out)
            )
            bodies.append(_Body(inputs, _calls(results, order), results))
        return bodies

    def put(self, plan: _Planned, body: _Body) -> None:
        """Copy a body in place of its node."""
        node = plan.node
        record = info(node)
        operands = [self.current(n) for n in plan.operands()]
        mapping: dict[fx.Node, Any] = dict(zip(body.inputs, operands, strict=True))
        with self.graph.inserting_before(node):
            for inner in body.calls:
                new = self.graph.node_copy(inner, lambda n: mapping[n])
                new.meta = {"val": inner.meta["val"]}
                set_info(new, NodeInfo(source=record.source, module=record.module))
                mapping[inner] = new
        if isinstance(body.results, tuple):
            for user in list(node.users):
                assert len(user.args) == 2, "a tuple result is only taken apart"
                value = mapping[body.results[user.args[1]]]  # type: ignore[index]
                user.replace_all_uses_with(value)
                self.replaced[user] = value
                self.graph.erase_node(user)
        else:
            value = mapping[body.results]
            node.replace_all_uses_with(value)
            self.replaced[node] = value
        self.graph.erase_node(node)


def _calls(results: Any, order: dict[fx.Node, int]) -> list[fx.Node]:
    """The calls that `results` need, in order."""
    seen: set[fx.Node] = set()
    stack = [r for r in (results if isinstance(results, tuple) else (results,)) if r is not None]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return sorted((n for n in seen if n.op == "call_function"), key=lambda n: order[n])


def _inline_constant(gm: fx.GraphModule, node: fx.Node) -> None:
    """A number made inside a function becomes a call that makes it."""
    value = getattr(gm, str(node.target))
    with gm.graph.inserting_before(node):
        new = gm.graph.call_function(
            torch.ops.aten.scalar_tensor.default,
            (value.item(),),
            {"dtype": value.dtype, "device": value.device},
        )
    new.meta["val"] = node.meta.get("val", value)
    node.replace_all_uses_with(new)
    gm.graph.erase_node(node)
