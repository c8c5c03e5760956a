"""Invariants of each level, checked after every pass."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from autopar.collectives import COLLECTIVES, collective_of
from autopar.errors import VerificationError
from autopar.layout import Layout
from autopar.program import Program, call_text, info

__all__ = ["check_annotated", "check_global", "check_spmd"]


def _fail(pass_name: str, what: str, node: fx.Node | None = None) -> None:
    raise VerificationError(
        f"After the pass '{pass_name}': {what}", where=call_text(node) if node is not None else ""
    )


def check_global(program: Program, pass_name: str) -> None:
    """Tables and placeholders agree; every call has a value; the graph is well formed."""
    program.graph.graph.lint()
    names = {n.name for n in program.graph.graph.nodes if n.op == "placeholder"}
    listed = [s.node for s in program.states] + [i.node for i in program.inputs]
    if names != set(listed) or len(listed) != len(set(listed)):
        _fail(pass_name, "the placeholders are not the states and inputs")
    for node in program.graph.graph.nodes:
        if node.op == "call_function" and "val" not in node.meta:
            _fail(pass_name, "a node has no value", node)
    out = program.graph.graph.output_node().args[0]
    top = max([o.index for o in program.outputs] + [i for _, i in program.mutated], default=-1)
    if top >= len(out):  # type: ignore[arg-type]
        _fail(pass_name, "an output of the table is missing from the graph")


def check_annotated(program: Program, pass_name: str) -> None:
    """Every call has a choice on every axis and a layout of its own shape for every result."""
    check_global(program, pass_name)
    for node in program.graph.graph.nodes:
        if node.op in ("output", "get_attr") or node.target is operator.getitem:
            continue
        record = info(node)
        missing = [a for a in program.mesh.names if a not in record.choice]
        if missing:
            _fail(pass_name, f"no choice on axis {missing[0]}", node)
        val = node.meta["val"]
        values = list(val) if isinstance(val, (list, tuple)) else [val]
        for v, layout in zip(values, record.layouts, strict=True):
            if hasattr(v, "shape") and tuple(v.shape) != layout.shape:
                _fail(pass_name, f"layout {layout} on a value of shape {list(v.shape)}", node)


def check_spmd(program: Program, pass_name: str) -> None:
    """Every collective maps a placement that it takes to the one that it gives."""
    check_global(program, pass_name)
    for node in program.graph.graph.nodes:
        row = collective_of(node)
        if row is None:
            continue
        axis = str(node.args[1])
        before, after = _layout(node.args[0]), _layout(node)
        if before is None or after is None:
            _fail(pass_name, "a collective without placements", node)
            continue
        kinds = before.kind(axis), after.kind(axis)
        if kinds not in _allowed(row.name, bool(node.meta.get("requires_grad"))):
            _fail(pass_name, f"{row.name} from {kinds[0]} to {kinds[1]} on {axis}", node)
        for other in program.mesh.names:
            if other != axis and before.kind(other) != after.kind(other):
                _fail(pass_name, f"{row.name} on {axis} changes {other}", node)


def _layout(node: Any) -> Layout | None:
    if isinstance(node, fx.Node) and node.target is operator.getitem:
        source = info(node.args[0]).layouts  # type: ignore[arg-type]
        return source[node.args[1]] if len(source) > 1 else info(node).layouts[0]  # type: ignore
    layouts = info(node).layouts
    return layouts[0] if layouts else None


def _allowed(name: str, grad: bool) -> set[tuple[str, str]]:
    row = COLLECTIVES[name]
    pairs = {(row.takes, row.gives)}
    if not grad:  # R and V are the same without gradients
        swap = {"R": "RV", "V": "RV"}
        pairs = {(a, b) for x, y in pairs for a in swap.get(x, x) for b in swap.get(y, y)}
    return pairs
