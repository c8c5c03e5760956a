"""Put biases back into the products they were taken out of, where no reduction came between."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.collectives import ops
from autopar.program import Program, info, set_info

__all__ = ["Fuse"]

aten = torch.ops.aten
_CONVOLUTIONS = (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)


@dataclass(frozen=True, slots=True)
class Fuse:
    """One kernel for a product and its bias.

    Before:
        y = aten.linear(x, w); z = aten.add(y, b)
    After:
        z = aten.linear(x, w, b)
    """

    name: str = "fuse"

    def run(self, program: Program) -> Program:
        """Rewrite an SPMD program."""
        program = program.copy()
        graph = program.graph.graph
        for node in list(graph.nodes):
            target, args, kwargs = _call(node)
            if target is aten.add.Tensor and not kwargs and len(args) == 2:
                _fuse(graph, node)
        graph.eliminate_dead_code()
        return program


def _call(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """What a call is, or would be if this rank's piece held anything."""
    if node.target is not ops.empty.default:
        return node.target, node.args, dict(node.kwargs)
    target: Any = torch.ops
    for part in str(node.args[3]).split("."):
        target = getattr(target, part)
    return target, tuple(node.args[0]), {}  # type: ignore[arg-type]


def _fuse(graph: fx.Graph, node: fx.Node) -> None:
    product, bias = _call(node)[1]
    if not isinstance(product, fx.Node) or not isinstance(bias, fx.Node):
        return
    if len(product.users) != 1 or product.meta.get("val") is None:
        return
    if product.meta["val"].shape != node.meta["val"].shape:
        return
    val = bias.meta["val"]
    target, args, kwargs = _call(product)
    if len(args) > 2 and target is not aten.mm.default and args[2] is not None:
        return  # it has a bias already
    if val.dtype != product.meta["val"].dtype:
        return
    if target in _CONVOLUTIONS:
        source = bias.args[0] if bias.target is aten.reshape.default else None
        if not isinstance(source, fx.Node) or source.meta["val"].dim() != 1:
            return
        if source.meta["val"].numel() != product.meta["val"].shape[1]:
            return
        args = (*args[:2], source, *args[3:])
    elif val.dim() == 1 and val.shape[0] == product.meta["val"].shape[-1]:
        if target is aten.linear.default:
            args = (*args[:2], bias)
        elif target is aten.mm.default:
            args, target = (bias, *args), aten.addmm.default
        else:
            return
    else:
        return
    if product.target is ops.empty.default:
        read = [args.index(product.args[0][i]) for i in product.args[2]]  # type: ignore
        args = (list(args), product.args[1], read, str(target))
        target, kwargs = ops.empty.default, dict(product.kwargs)
    with graph.inserting_before(node):
        new = graph.call_function(target, args, kwargs)
    new.meta = dict(node.meta)
    set_info(new, info(node))
    node.replace_all_uses_with(new)
    graph.erase_node(node)
