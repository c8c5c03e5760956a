"""Put a traced function in place of a node: the common step of all rewriting passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.compat import detect_fake_mode, make_fx
from autopar.program import NodeInfo, info, set_info

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


@dataclass(slots=True)
class Splicer:
    """Traces functions on the shapes of a node's operands and copies the result into its graph.

    A function is traced once per distinct operands; repeated layers reuse the trace.
    """

    cache: dict[Any, fx.GraphModule] = field(default_factory=dict)

    def trace(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> fx.GraphModule:
        """The graph of `fn` at the shapes of the nodes in `args` and `kwargs`."""
        key = (fn, _signature(args), _signature(kwargs))
        if key not in self.cache:
            nodes: list[fx.Node] = []
            fx.map_arg((args, kwargs), lambda n: nodes.append(n) or n)
            nodes = list(dict.fromkeys(nodes))
            mode = detect_fake_mode([n.meta["val"] for n in nodes])

            def run(*values: Any) -> Any:
                table = dict(zip(nodes, values, strict=True))
                a, k = fx.map_arg((args, kwargs), lambda n: table[n])
                return fn(*a, **k)

            with mode, torch.no_grad():
                self.cache[key] = make_fx(run, pre_dispatch=True)(
                    *[n.meta["val"] for n in nodes]
                )
        return self.cache[key]

    def replace(self, node: fx.Node, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replace `node` by `fn(*args, **kwargs)`, traced; returns the new value (or tuple)."""
        values = self.insert(node, fn, *args, **kwargs)
        if isinstance(values, tuple):
            for user in list(node.users):
                assert len(user.args) == 2, "a tuple result is only taken apart"
                user.replace_all_uses_with(values[user.args[1]])  # type: ignore[index]
                node.graph.erase_node(user)
        else:
            node.replace_all_uses_with(values)
        node.graph.erase_node(node)
        return values

    def insert(self, node: fx.Node, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Insert `fn(*args, **kwargs)`, traced, before `node`; returns the value (or tuple)."""
        traced = self.trace(fn, args, kwargs)
        nodes: list[fx.Node] = []
        fx.map_arg((args, kwargs), lambda n: nodes.append(n) or n)
        nodes = list(dict.fromkeys(nodes))
        record = info(node)
        mapping: dict[fx.Node, fx.Node] = {}
        inner_inputs = [n for n in traced.graph.nodes if n.op == "placeholder"]
        mapping.update(zip(inner_inputs, nodes, strict=True))
        with node.graph.inserting_before(node):
            for inner in traced.graph.nodes:
                if inner.op in ("placeholder", "output"):
                    continue
                if inner.op == "get_attr":  # a small constant made inside the function
                    value = getattr(traced, str(inner.target))
                    new = node.graph.call_function(
                        torch.ops.aten.scalar_tensor.default,
                        (value.item(),),
                        {"dtype": value.dtype, "device": value.device},
                    )
                else:
                    new = node.graph.node_copy(inner, lambda n: mapping[n])
                new.meta = {"val": inner.meta["val"]}
                set_info(new, NodeInfo(source=record.source, module=record.module))
                mapping[inner] = new
        out = traced.graph.output_node().args[0]
        if isinstance(out, (list, tuple)):
            return tuple(mapping[o] if isinstance(o, fx.Node) else o for o in out)
        return mapping[out]  # type: ignore[index]
