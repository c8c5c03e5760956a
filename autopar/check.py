"""Invariants of each level, checked after every pass, and the static check of all ranks."""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

from torch import fx

from autopar.collectives import COLLECTIVES, collective_of
from autopar.errors import VerificationError
from autopar.layout import Layout
from autopar.program import Phases, Program, call_text, info

__all__ = ["check_annotated", "check_global", "check_phases", "check_ranks", "check_spmd"]


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
        pairs = {
            (a, b) for x, y in pairs for a in swap.get(x, x) for b in swap.get(y, y)
        }
    return pairs


# --- the static check --------------------------------------------------------------------------


def check_phases(phases: Phases) -> list[str]:
    """Problems of one program: its backward must hold exactly the adjoints of its forward."""
    problems = []
    spmd = phases.program.graph
    forward_want = _count(n for n in _live(spmd.graph) if _moves(n))
    forward_have = _count(n for n in phases.forward.graph.nodes if _moves(n))
    problems += _differences("forward", forward_want, forward_have)
    if not phases.gradients:
        return problems
    reach = _reaching(spmd.graph, phases.roots)
    want: Counter[tuple[str, str]] = Counter()
    for node in spmd.graph.nodes:
        row = collective_of(node)
        if row is not None and row.adjoint and node.meta.get("requires_grad") and node in reach:
            want[(row.adjoint, str(node.args[1]))] += 1
    have = _count(n for n in phases.backward.graph.nodes if collective_of(n))
    problems += _differences("backward", want, have)
    problems += _tails(phases)
    return problems


def _moves(node: fx.Node) -> bool:
    row = collective_of(node)
    return row is not None and row.name != "vary"


def _live(graph: fx.Graph) -> list[fx.Node]:
    seen: set[fx.Node] = set()
    stack = list(graph.output_node().all_input_nodes)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return [n for n in graph.nodes if n in seen]


def _reaching(graph: fx.Graph, roots: tuple[int, ...]) -> set[fx.Node]:
    """Nodes whose value flows, with gradient, into the results in `roots`."""
    results = graph.output_node().args[0]
    stack = [results[i] for i in roots]  # type: ignore[index]
    seen: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node not in seen and node.meta.get("requires_grad", False):
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return seen


def _count(nodes: Any) -> Counter[tuple[str, str]]:
    """Collectives by name and axis; a bucket counts as the reductions it joins."""
    found: Counter[tuple[str, str]] = Counter()
    for node in nodes:
        name = str(node.target).split(".")[1]
        if name == "all_reduce_bucket":
            found[("all_reduce", str(node.args[1]))] += len(node.args[0])
        else:
            found[(name, str(node.args[1]))] += 1
    return found


def _differences(
    phase: str, want: Counter[tuple[str, str]], have: Counter[tuple[str, str]]
) -> list[str]:
    return [
        f"{phase}: {have[key]} x {key[0]} over {key[1]}, expected {want[key]}"
        for key in sorted(want.keys() | have.keys())
        if want[key] != have[key]
    ]


def _tails(phases: Phases) -> list[str]:
    """Each replicated parameter used by varying work must end in a reduction over that axis."""
    problems = []
    placeholders = phases.program.placeholders()
    by_name = {s.name: s for s in phases.program.states}
    grads = phases.backward.graph.output_node().args[0]
    for name, grad in zip(phases.gradients, grads, strict=True):  # type: ignore[arg-type]
        want: list[str] = []
        node = placeholders[by_name[name].node]
        while len(node.users) == 1 and "vary" in str(next(iter(node.users)).target):
            node = next(iter(node.users))
            want.append(str(node.args[1]))
        if grad is None or not want:
            continue
        have: list[str] = []
        at: Any = grad
        while True:
            if at.target is operator.getitem and "all_reduce_bucket" in str(at.args[0].target):
                bucket, i = at.args
                have.append(str(bucket.args[1]))
                at = bucket.args[0][i]
            elif "autopar.all_reduce.default" in str(at.target):
                have.append(str(at.args[1]))
                at = at.args[0]
            else:
                break
        if have[: len(want)] != want:
            problems.append(f"gradient of {name} is reduced over {have}, expected {want}")
    return problems


def check_ranks(phases: dict[Any, Phases], places: dict[Any, dict[str, int]]) -> list[str]:
    """Problems between ranks: members of a group enter the same collectives in the same order."""
    problems: list[str] = []
    traces = {key: _trace(p) for key, p in phases.items()}
    keys = list(traces)
    for i, a in enumerate(keys):
        for b in keys[i + 1 :]:
            one, two = traces[a], traces[b]
            if [t[:3] for t in one] != [t[:3] for t in two]:
                at = next(
                    (k for k, (x, y) in enumerate(zip(one, two, strict=False)) if x[:3] != y[:3]),
                    min(len(one), len(two)),
                )
                left = one[at][:3] if at < len(one) else "nothing"
                right = two[at][:3] if at < len(two) else "nothing"
                problems.append(f"ranks at {places[a]} enter {left}, those at {places[b]} {right}")
                continue
            for x, y in zip(one, two, strict=True):
                together = all(
                    places[a][axis] == places[b][axis] for axis in places[a] if axis != x[2]
                )
                if together and x[3] != y[3]:
                    problems.append(
                        f"{x[1]} over {x[2]}: {x[3]} at {places[a]}, {y[3]} at {places[b]}"
                    )
    return problems


def _trace(phases: Phases) -> list[tuple[str, str, str, Any]]:
    """(phase, collective, axis, what all members must agree on) in order of execution."""
    rows = []
    for phase, gm in (("forward", phases.forward), ("backward", phases.backward)):
        for node in gm.graph.nodes:
            row = collective_of(node)
            if row is None or row.factor == 0:
                continue
            operand = node.args[0]
            if row.name == "all_reduce_bucket":
                shapes: Any = [tuple(v.meta["val"].shape) for v in operand]
            else:
                shape: list[Any] = list(operand.meta["val"].shape)
                if len(node.args) > 3:
                    shape[node.args[2]] = "cut"
                shapes = (shape, node.args[2:5], operand.meta["val"].dtype)
            rows.append((phase, row.name, str(node.args[1]), str(shapes)))
    return rows
