"""One program for all ranks from those of its places, and back."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autopar.collectives import collective_of, ops
from autopar.errors import AutoparError
from autopar.program import (
    Phases,
    Program,
    call_text,
    graph_module,
    info,
    outputs_of,
    tensor_inputs,
    update_info,
)
from autopar.sizes import Size, Sizes, at_place

__all__ = ["merge", "place", "place_phases"]


# --- from all places ---------------------------------------------------------------------------


def merge(programs: Sequence[Program], sizes: Sizes) -> Program:
    """The lowered program of all places: integers that differ become sizes.

    Before:
        at tp=0: v = aten.reshape(x, [8, 258])     at tp=1: v = aten.reshape(x, [8, 257])
    After:
        v = aten.reshape(x, [8, n0])               # n0 = comm.piece(515, "tp")
    """
    merged = programs[0].copy()
    others = zip(*(p.graph.graph.nodes for p in programs[1:]), strict=True)
    for node, row in zip(merged.graph.graph.nodes, others, strict=True):
        if node.op == "output":
            continue
        if any(n.target is not node.target for n in row) and node.op == "call_function":
            raise AutoparError("Ranks do not run one program.", where=call_text(node))
        node.args = _merged(sizes, [node.args, *(n.args for n in row)], node)
        node.kwargs = _merged(sizes, [node.kwargs, *(n.kwargs for n in row)], node)
        values = zip(outputs_of(node), *map(outputs_of, row), strict=True)
        shapes = tuple(sizes.each([v.shape for v in same]) for same in values)
        if any(isinstance(n, Size) for shape in shapes for n in shape):
            update_info(node, shapes=shapes, unless=_unless(node, shapes, sizes))
    return merged


def _merged(sizes: Sizes, values: Sequence[Any], node: fx.Node) -> Any:
    """Arguments at all places as one, with the nodes of the first."""
    first = values[0]
    if isinstance(first, (list, tuple)):
        if len({len(v) for v in values}) == 1:
            return type(first)(_merged(sizes, same, node) for same in zip(*values, strict=True))
    elif isinstance(first, dict):
        return {k: _merged(sizes, [v[k] for v in values], node) for k in first}
    elif isinstance(first, fx.Node):
        if all(v.name == first.name for v in values):
            return first
    elif type(first) is int:
        return sizes.of(values)
    elif all(v == first or v is first for v in values):
        return first
    raise AutoparError(f"Ranks differ in an argument: {values}.", where=call_text(node))


def _unless(node: fx.Node, shapes: Any, sizes: Sizes) -> Size | None:
    """The size that is zero where a call is not made, if there is such a place."""
    computes = node.op == "call_function" and node.target is not operator.getitem
    if not computes or collective_of(node) is not None or not tensor_inputs(node):
        return None
    if not isinstance(node.meta["val"], Tensor):
        return None
    empty = [n for n in shapes[0] if isinstance(n, Size) and 0 in n.values]
    if not empty:
        return None
    counts = [1] * len(sizes.places)
    for n in dict.fromkeys(empty):
        counts = [c * v for c, v in zip(counts, n.values, strict=True)]
    found = sizes.of(counts)
    assert isinstance(found, Size), "zero at one place and not at the first"
    return found


# --- to one place ------------------------------------------------------------------------------


def place(program: Program, k: int) -> Program:
    """The lowered program with the sizes of the k-th place."""
    return program.replace(graph=graph_module(_placed(program.graph.graph, k), program.graph))


def place_phases(phases: Phases, k: int) -> Phases:
    """The differentiated program with the sizes of the k-th place; empty calls give zeros."""
    return phases.replace(
        program=place(phases.program, k),
        forward=graph_module(_placed(phases.forward.graph, k), phases.forward),
        backward=graph_module(_placed(phases.backward.graph, k), phases.backward),
    )


def _placed(graph: fx.Graph, k: int) -> fx.Graph:
    new = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        record = info(node)
        val = _val(node, k)
        unless = record.unless if node.op == "call_function" else None
        if unless is not None and not unless.values[k]:
            if not isinstance(val, Tensor):
                continue  # its results are zeros each
            made = _nothing(new, node, mapping, val)
        else:
            made = new.node_copy(node, lambda n: mapping[n])
            made.args = at_place(made.args, k)
            made.kwargs = at_place(made.kwargs, k)
        made.meta = dict(node.meta)
        made.meta["val"] = val
        update_info(made, shapes=(), unless=None)
        mapping[node] = made
    return new


def _val(node: fx.Node, k: int) -> Any:
    """The fake value of `node` at the k-th place."""
    val: Any = node.meta.get("val")
    shapes = info(node).shapes
    if not shapes:
        return val
    values = [
        None if v is None else torch.empty(at_place(shape, k), dtype=v.dtype, device="meta")
        for v, shape in zip([val] if isinstance(val, Tensor) else val, shapes, strict=True)
    ]
    return values[0] if isinstance(val, Tensor) else values


def _nothing(
    graph: fx.Graph, node: fx.Node, mapping: dict[fx.Node, fx.Node], val: Tensor
) -> fx.Node:
    """Zeros in place of a call."""
    source: Any = node.args[0] if node.target is operator.getitem else node
    operands = [mapping[n] for n in tensor_inputs(source)]
    args: Any = (operands, list(val.shape))
    kwargs: Any = {"dtype": val.dtype}
    return graph.create_node("call_function", ops.nothing.default, args, kwargs, node.name)
