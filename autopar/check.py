"""Invariants of each level, checked after every pass."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from autopar.collectives import COLLECTIVES, collective_of
from autopar.errors import VerificationError
from autopar.layout import Layout, Mesh
from autopar.program import Program, call_text, info

__all__ = ["Coordinate", "check_annotated", "check_global", "check_spmd", "spmd_problems"]

Coordinate = Mapping[str, int]


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


def check_spmd(program: Program, pass_name: str, place: Coordinate) -> None:
    """A lowered graph must be right by its types and placements at `place`."""
    check_global(program, pass_name)
    problems = spmd_problems(program, [place])
    if problems:
        _fail(pass_name, "\n  ".join(problems))


def spmd_problems(program: Program, places: Sequence[Coordinate]) -> list[str]:
    """Problems of a lowered graph: types, and at each of `places` local shapes and arguments."""
    problems = _mapped(program) or _typed(program)
    for place in places:
        if not problems:  # else the other places would say the same
            problems = _shaped(program, place)
    return problems


def _mapped(program: Program) -> list[str]:
    """Every collective must map a placement that it takes to the one that it gives."""
    problems = []
    for node in program.graph.graph.nodes:
        row = collective_of(node)
        if row is None:
            continue
        axis = str(node.args[1])
        before, after = _layout(node.args[0]), _layout(node)
        if before is None or after is None:
            problems.append(f"a collective without placements: {call_text(node)}")
            continue
        kinds = before.kind(axis), after.kind(axis)
        others = [o for o in program.mesh.names if o != axis and before.kind(o) != after.kind(o)]
        if kinds not in _allowed(row.name, bool(node.meta.get("requires_grad"))):
            text = f"{row.name} from {kinds[0]} to {kinds[1]} on {axis}"
            problems.append(f"{text}: {call_text(node)}")
        elif others:
            problems.append(f"{row.name} on {axis} changes {others[0]}: {call_text(node)}")
    return problems


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


def _typed(program: Program) -> list[str]:
    """Operands must have the placements that the choice of each call is right for.

    A call that differs per rank must not take a replicated value that needs a gradient (the
    gradient would be this rank's part only), a call that is the same on all ranks must not take a
    varying copy (the gradient would be reduced once too often), and a partial sum may enter only
    calls through which it passes.
    """
    problems = []
    axes = [a for a, n in program.mesh.axes if n > 1]
    for node in program.graph.graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        if collective_of(node) is not None:
            continue
        choice = info(node).choice
        result = _layout(node)
        for axis in axes:
            option = choice.get(axis, "R")
            for operand in node.all_input_nodes:
                have = _layout(operand)
                if have is None:
                    continue
                kind = have.kind(axis)
                grad = bool(operand.meta.get("requires_grad", False))
                wrong = ""
                if kind == "P" and option[0] != "P" and result and result.kind(axis) != "P":
                    wrong = "is a partial sum, expected a whole value"
                elif kind == "R" and grad and option != "R":
                    wrong = "is replicated, but the call differs per rank: its gradient is partial"
                elif kind in "VS" and grad and option == "R":
                    wrong = f"is {kind}, but the call is the same on all ranks"
                if wrong:
                    problems.append(f"on {axis}, {operand.name} {wrong}: {call_text(node)}")
    results = program.graph.graph.output_node().args[0]
    whole = {i for _, i in program.mutated} | {o.index for o in program.outputs if o.is_loss}
    given = {o.index for o in program.outputs}
    for i, value in enumerate(results):  # type: ignore[arg-type]
        have = _layout(value)
        if have is not None:
            kinds = {have.kind(axis) for axis in axes}
            grad = i in given and bool(value.meta.get("requires_grad", False))
            # whoever uses a result gives each rank its whole gradient, which V would count k times
            if "P" in kinds or (i in whole and "S" in kinds) or (grad and "V" in kinds):
                problems.append(f"result {i} leaves as {have}: {call_text(value)}")
    return problems


def _shaped(program: Program, place: Coordinate) -> list[str]:
    """Local shapes and the arguments of collectives must be those of the placements at `place`."""
    mesh = program.mesh
    problems = []
    for node in program.graph.graph.nodes:
        if node.op == "output":
            continue
        have = _layout(node)
        shape = getattr(node.meta.get("val"), "shape", None)
        if have is not None and shape is not None:
            local = have.local_shape(mesh, place)
            if tuple(shape) != local:
                problems.append(f"{list(shape)}, expected {list(local)}: {call_text(node)}")
        row = collective_of(node)
        if row is None:
            continue
        axis, before, after = str(node.args[1]), _layout(node.args[0]), have
        if mesh.sizes.get(axis, 1) == 1:
            problems.append(f"no axis '{axis}' of several ranks: {call_text(node)}")
            continue
        if before is None or after is None:
            problems.append(f"a collective without placements: {call_text(node)}")
            continue
        want = _arguments(row.name, before, after, axis, mesh, place)
        if (
            want is not None
            and tuple(tuple(a) if isinstance(a, (list, tuple)) else a for a in node.args[1:])
            != want
        ):
            problems.append(f"arguments, expected {want}: {call_text(node)}")
    return problems


def _arguments(
    name: str, before: Layout, after: Layout, axis: str, mesh: Mesh, place: Coordinate
) -> tuple[Any, ...] | None:
    """What a collective's arguments after its operand must be, from the placements around it."""
    if name == "vary":
        return (axis,)
    if name == "all_reduce":
        return (axis, before.reduction(axis)) if before.kind(axis) == "P" else None
    cut = before if name in ("all_gather", "all_gather_replicated", "pad") else after
    if name == "all_to_all":
        cut = before
    if cut.kind(axis) != "S":
        return ("a cut dim",)
    here = _cut(cut, axis, mesh, place)
    args: tuple[Any, ...] = (axis, *here)
    if name in ("shard", "cut", "reduce_scatter", "all_to_all"):
        args = (*args, here[2][place[axis]])
    if name == "all_to_all":
        there = _cut(after, axis, mesh, place)
        args = (*args, *there, there[2][place[axis]])
    return args


def _cut(
    layout: Layout, axis: str, mesh: Mesh, place: Coordinate
) -> tuple[int, int, tuple[int, ...]]:
    """(dim, outer, sizes) that `axis` cuts, by the local sizes at every index of the axis."""
    d, i = layout.sharded[axis]
    atoms = layout.dims[d]
    outer = math.prod(a.local_sizes(mesh, place) for a in atoms[:i])
    sizes = tuple(
        math.prod(a.local_sizes(mesh, {**place, axis: k}) for a in atoms[i:])
        for k in range(mesh.sizes[axis])
    )
    return d, outer, sizes
