"""Put biases back into the products they were taken out of, where no reduction came between."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

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
            if node.target is aten.add.Tensor and not node.kwargs and len(node.args) == 2:
                _fuse(graph, node)
        graph.eliminate_dead_code()
        return program


def _fuse(graph: fx.Graph, node: fx.Node) -> None:
    product, bias = node.args
    if not isinstance(product, fx.Node) or not isinstance(bias, fx.Node):
        return
    if len(product.users) != 1 or product.meta.get("val") is None:
        return
    if product.meta["val"].shape != node.meta["val"].shape:
        return
    val = bias.meta["val"]
    target, args, kwargs = product.target, product.args, dict(product.kwargs)
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
    with graph.inserting_before(node):
        new = graph.call_function(target, args, kwargs)
    new.meta = dict(node.meta)
    set_info(new, info(node))
    node.replace_all_uses_with(new)
    graph.erase_node(node)
