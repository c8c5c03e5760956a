"""The static check: every rank's program, read without running it.

The lowered (SPMD) graph is checked against the placements on its nodes: types, local shapes and
the arguments of every collective at every coordinate. The forward graph must then be that graph,
node by node, and the backward graph must hold exactly the adjoints of its collectives in reverse
order, so that every parameter's gradient is reduced over the axes it should be. Last, the members
of every group must enter the same collectives in the same order.
"""

from __future__ import annotations

import math
import operator
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from autopar.collectives import collective_of
from autopar.layout import Layout, Mesh
from autopar.program import Phases, call_text, info

__all__ = ["Coordinate", "check_phases", "check_ranks", "count_collectives", "reaching"]

Coordinate = Mapping[str, int]


def check_phases(phases: Phases, places: Sequence[Coordinate]) -> list[str]:
    """Problems of one program, which the ranks at `places` run."""
    problems = _typed(phases)
    for place in places:
        problems += _shaped(phases, place)
        if problems:  # the other places would say the same
            return problems
    problems += _forward(phases)
    if phases.gradients:
        problems += _backward(phases)
        problems += _tails(phases)
    return problems


def count_collectives(phases: Phases) -> int:
    """Collectives that move data in both phases; a bucket counts as the reductions it joins."""
    total = 0
    for gm in (phases.forward, phases.backward):
        for node in gm.graph.nodes:
            row = collective_of(node)
            if row is not None and row.factor:
                total += len(node.args[0]) if row.name == "all_reduce_bucket" else 1
    return total


# --- the lowered graph -------------------------------------------------------------------------


def _layout(node: fx.Node) -> Layout | None:
    if node.target is operator.getitem:
        source, index = node.args
        layouts = info(source).layouts  # type: ignore[arg-type]
        return layouts[index] if len(layouts) > 1 else _only(node)  # type: ignore[index]
    return _only(node)


def _only(node: fx.Node) -> Layout | None:
    layouts = info(node).layouts
    return layouts[0] if layouts else None


def _typed(phases: Phases) -> list[str]:
    """Operands must have the placements that the choice of each call is right for.

    A call that differs per rank must not take a replicated value that needs a gradient (the
    gradient would be this rank's part only), a call that is the same on all ranks must not take a
    varying copy (the gradient would be reduced once too often), and a partial sum may enter only
    calls through which it passes.
    """
    program = phases.program
    problems = []
    axes = [a for a, n in program.mesh.axes if n > 1]
    for node in program.graph.graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        if collective_of(node) is not None:
            continue
        choice = info(node).choice
        result = _only(node)
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
    for i, value in enumerate(results):  # type: ignore[arg-type]
        have = _layout(value)
        if have is not None:
            kinds = {have.kind(axis) for axis in axes}
            if "P" in kinds or (i in whole and "S" in kinds):
                problems.append(f"result {i} leaves as {have}: {call_text(value)}")
    return problems


def _shaped(phases: Phases, place: Coordinate) -> list[str]:
    """Local shapes and the arguments of collectives must be those of the placements at `place`."""
    program = phases.program
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
        if want is not None and _plain(node.args[1:]) != want:
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


def _plain(args: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(tuple(a) if isinstance(a, (list, tuple)) else a for a in args)


# --- forward -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Entry:
    """A collective as the ranks enter it; `node` is its text for messages."""

    name: str
    args: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: str
    node: str

    @property
    def key(self) -> tuple[Any, ...]:
        """What must agree."""
        return (self.name, self.args, self.shape, self.dtype)

    def __str__(self) -> str:
        return f"{self.name}{self.args} of {self.dtype}{list(self.shape)}"


def _entries(nodes: Iterable[fx.Node]) -> list[tuple[_Entry, bool]]:
    """The collectives of `nodes` in order, and whether each stands in a bucket."""
    found = []
    for node in nodes:
        row = collective_of(node)
        if row is None or row.name == "vary":
            continue
        if row.name == "all_reduce_bucket":
            for member in node.args[0]:  # type: ignore[union-attr]
                made = _entry("all_reduce", (str(node.args[1]), "sum"), member, node)
                found.append((made, True))
        else:
            found.append((_entry(row.name, _plain(node.args[1:]), node.args[0], node), False))
    return found


def _entry(name: str, args: tuple[Any, ...], operand: Any, node: fx.Node) -> _Entry:
    val = operand.meta.get("val")
    shape = () if val is None else tuple(int(n) for n in val.shape)
    dtype = "?" if val is None else str(val.dtype).removeprefix("torch.")
    return _Entry(name, args, shape, dtype, call_text(node))


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


def _forward(phases: Phases) -> list[str]:
    """The forward graph must enter the collectives of the lowered graph, in order, on its values."""
    spmd, forward = phases.program.graph.graph, phases.forward.graph
    want = [n for n in _live(spmd) if _moves(n)]
    have = [n for n in forward.nodes if _moves(n)]
    expected = [e for e, _ in _entries(want)]
    entered = [e for e, _ in _entries(have)]
    problems = _sequence("forward", expected, entered)
    if problems:
        return problems
    lowered = _Lowered(spmd, {_origin(n) for n in forward.nodes})
    for node in forward.nodes:
        if node.op != "call_function":
            continue
        source = lowered.by_name.get(_origin(node))
        if source is None:
            problems.append(f"forward: not in the lowered graph: {call_text(node)}")
            continue
        allowed = lowered.operands(source)
        if not _moves(source):  # a collective is one call, others may become several
            allowed.add(source.name)
        wrong = [n.name for n in node.all_input_nodes if _origin(n) not in allowed]
        if wrong:
            problems.append(f"forward: {wrong[0]} is not an operand of {call_text(source)}")
    results = spmd.output_node().args[0]
    have_results = forward.output_node().args[0]
    for i, value in enumerate(results):  # type: ignore[arg-type]
        got = have_results[i]  # type: ignore[index]
        if not isinstance(got, fx.Node) or _origin(got) not in lowered.made_by(value):
            problems.append(f"forward: result {i} is {got}, expected {call_text(value)}")
    return problems


def _origin(node: fx.Node) -> str:
    """The call of the lowered graph that `node` computes (part of), forward or backward."""
    found = info(node).origin
    return found or (node.name if node.op == "placeholder" else "")


class _Lowered:
    """Which values a call of the lowered graph may use.

    Args:
        present: origins that have calls in the graph to be checked; calls without any (a view that
            changes nothing, a placement that moves no data) are seen through.
    """

    def __init__(self, graph: fx.Graph, present: set[str]) -> None:
        self.by_name = {n.name: n for n in graph.nodes if n.op in ("placeholder", "call_function")}
        self.present = present

    def made_by(self, node: fx.Node) -> set[str]:
        """Origins of the value of `node`."""
        if node.target is operator.getitem:
            return self.made_by(node.args[0])  # type: ignore[arg-type]
        if node.name in self.present or _moves(node):
            return {node.name}
        return self.operands(node)

    def operands(self, node: fx.Node) -> set[str]:
        """Origins of the operands of `node`."""
        return {name for operand in node.all_input_nodes for name in self.made_by(operand)}

    def passes(self, node: fx.Node, ends: set[str]) -> bool:
        """Whether a call in `ends` may pass its gradient to `node`: directly, or through calls
        that hand gradients on as they come. Collectives with an adjoint never do."""
        size = _numel(node)
        queue, seen = deque([node]), {node}
        while queue:
            for user in queue.popleft().users:
                if user in seen or user.op == "output":
                    continue
                seen.add(user)
                if user.name in ends:
                    return True
                row = collective_of(user)
                if (row is None or not row.adjoint) and (
                    user.name not in self.present or _numel(user) == size
                ):
                    queue.append(user)
        return False


def _numel(node: fx.Node) -> int:
    val = node.meta.get("val")
    return math.prod(val.shape) if hasattr(val, "shape") else -1


def _sequence(phase: str, want: list[_Entry], have: list[_Entry]) -> list[str]:
    for i in range(max(len(want), len(have))):
        a = want[i] if i < len(want) else None
        b = have[i] if i < len(have) else None
        if a is None or b is None or a.key != b.key:
            at = b.node if b is not None else a.node if a is not None else ""
            return [f"{phase}: collective {i} is {b or 'missing'}, expected {a or 'none'}: {at}"]
    return []


# --- backward ----------------------------------------------------------------------------------


def reaching(graph: fx.Graph, roots: tuple[int, ...]) -> set[fx.Node]:
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


def _adjoint(node: fx.Node) -> tuple[str, tuple[Any, ...]]:
    """Name and arguments of the collective that takes the gradient of `node` back."""
    row = collective_of(node)
    assert row is not None and row.adjoint, "only for collectives with an adjoint"
    axis, *rest = _plain(node.args[1:])
    if row.name == "vary":
        return row.adjoint, (axis, "sum")
    if row.name == "all_to_all":
        return row.adjoint, (axis, *rest[4:], *rest[:4])
    dim, outer, sizes = rest[:3]
    if row.adjoint not in ("shard", "reduce_scatter"):
        return row.adjoint, (axis, dim, outer, sizes)
    length = node.args[0].meta["val"].shape[dim]  # type: ignore[union-attr]
    return row.adjoint, (axis, dim, outer, sizes, int(length) // outer if outer else 0)


def _backward(phases: Phases) -> list[str]:
    """The backward graph must enter the adjoints in reverse; buckets may gather reductions."""
    graph = phases.program.graph.graph
    reach = reaching(graph, phases.roots)
    want = []
    for node in reversed(graph.nodes):
        row = collective_of(node)
        if row is not None and row.adjoint and node in reach:
            name, args = _adjoint(node)
            want.append(_entry(name, args, node, node))
    pairs = _entries(phases.backward.graph.nodes)
    expected, entered = Counter(e.key for e in want), Counter(e.key for e, _ in pairs)
    text = {e.key: e for e in (*want, *(e for e, _ in pairs))}
    problems = [
        f"backward: {entered[k]} x {text[k]}, expected {expected[k]}: {text[k].node}"
        for k in text
        if expected[k] != entered[k]
    ]
    if problems:
        return problems
    alone = [e for e, inside in pairs if not inside]
    rest = iter(want)
    for e in alone:  # the ones outside buckets keep their order
        if not any(w.key == e.key for w in rest):
            return [f"backward: out of its order: {e.node}"]
    return _flow(phases)


def _flow(phases: Phases) -> list[str]:
    """Each call of the backward graph must use the gradients and values of the call it is for."""
    spmd, backward = phases.program.graph.graph, phases.backward.graph
    n_saved = len(phases.forward.graph.output_node().args[0]) - phases.n_results  # type: ignore
    inputs = [n for n in backward.nodes if n.op == "placeholder"]
    tangents = set(inputs[n_saved:])
    made = {_origin(n) for n in phases.forward.graph.nodes}
    forward = _Lowered(spmd, made)
    lowered = _Lowered(spmd, {_origin(n) for n in backward.nodes if n.op == "call_function"})
    roots = {spmd.output_node().args[0][i].name for i in phases.roots}  # type: ignore[index]
    problems = []

    def fits(operand: fx.Node, source: fx.Node) -> bool:
        if operand in tangents:
            return source.name in roots or lowered.passes(source, roots)
        origin = _origin(operand)
        if operand.op == "placeholder":
            return origin == source.name or origin in forward.operands(source)
        if origin == source.name:
            return True
        row = collective_of(lowered.by_name[origin]) if origin in lowered.by_name else None
        if row is not None and row.adjoint and not _ends_collective(operand):
            return False
        return lowered.passes(source, {origin})

    for node in backward.nodes:
        if node.op != "call_function" or _is(node, "all_reduce_bucket"):
            continue
        source = lowered.by_name.get(_origin(node))
        if source is None:
            problems.append(f"backward: not in the lowered graph: {call_text(node)}")
            continue
        operands = node.all_input_nodes
        if node.target is operator.getitem and _is(node.args[0], "all_reduce_bucket"):
            operands = [node.args[0].args[0][node.args[1]]]  # type: ignore
        wrong = [n.name for n in operands if not fits(n, source)]
        if wrong:
            problems.append(f"backward: {wrong[0]} is no gradient or value of {call_text(source)}")
    states = {s.name: s.node for s in phases.program.states}
    grads = backward.output_node().args[0]
    for name, grad in zip(phases.gradients, grads, strict=True):  # type: ignore[arg-type]
        if grad is not None and not fits(grad, lowered.by_name[states[name]]):
            problems.append(f"backward: {grad} is not the gradient of {name}")
    return problems


def _ends_collective(node: fx.Node) -> bool:
    """Whether a value is the result of a collective (of a bucket, too)."""
    if node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    return collective_of(node) is not None


def _tails(phases: Phases) -> list[str]:
    """Each replicated parameter used by varying work must end in a reduction over that axis."""
    problems = []
    placeholders = phases.program.placeholders()
    by_name = {s.name: s for s in phases.program.states}
    reach = reaching(phases.program.graph.graph, phases.roots)
    grads = phases.backward.graph.output_node().args[0]
    for name, grad in zip(phases.gradients, grads, strict=True):  # type: ignore[arg-type]
        state = by_name[name]
        node = placeholders[state.node]
        used = node in reach
        if used != (grad is not None):
            problems.append(
                f"{name} has {'no' if used else 'a'} gradient, but the loss "
                f"{'depends' if used else 'does not depend'} on it"
            )
            continue
        if grad is None:
            continue
        shape = tuple(grad.meta["val"].shape) if "val" in grad.meta else None
        if shape is not None and shape != tuple(node.meta["val"].shape):
            problems.append(
                f"gradient of {name} is {list(shape)}, expected {list(node.meta['val'].shape)}"
            )
        want: list[str] = []
        while len(node.users) == 1 and _is(next(iter(node.users)), "vary"):
            node = next(iter(node.users))
            want.append(str(node.args[1]))
        have = _reductions(grad)
        if have[: len(want)] != want:
            problems.append(f"gradient of {name} is reduced over {have}, expected {want}")
    return problems


def _is(node: Any, name: str) -> bool:
    row = collective_of(node)
    return row is not None and row.name == name


def _reductions(grad: fx.Node) -> list[str]:
    """Axes of the reductions that end a gradient, last first."""
    axes: list[str] = []
    at: Any = grad
    while True:
        if at.target is operator.getitem and _is(at.args[0], "all_reduce_bucket"):
            bucket, i = at.args
            axes.append(str(bucket.args[1]))
            at = bucket.args[0][i]
        elif _is(at, "all_reduce"):
            axes.append(str(at.args[1]))
            at = at.args[0]
        else:
            return axes


# --- between ranks -----------------------------------------------------------------------------


def check_ranks(
    phases: Mapping[Any, Phases], mesh: Mesh, signature: Callable[[Coordinate], Any]
) -> list[str]:
    """Problems between ranks: members of a group enter the same collectives in the same order.

    Args:
        phases: each distinct program by its signature.
        signature: of the program that the rank at a coordinate runs.
    """
    traces = {key: _trace(p) for key, p in phases.items()}
    runs = [signature(mesh.coordinate(r)) for r in range(mesh.size)]
    first = traces[runs[0]]
    for rank, key in enumerate(runs):
        other = traces[key]
        if [t[:3] for t in other] != [t[:3] for t in first]:
            at = next(
                (i for i, (x, y) in enumerate(zip(first, other, strict=False)) if x[:3] != y[:3]),
                min(len(first), len(other)),
            )
            a, b = (" ".join(t[at][:3]) if at < len(t) else "nothing" for t in (first, other))
            return [f"rank 0 enters {a}, rank {rank} {b}"]
    problems = []
    seen = set()
    for axis, size in mesh.axes:
        for rank in range(mesh.size):
            line = mesh.group(axis, rank)
            group = frozenset(runs[r] for r in line)
            if size == 1 or len(group) == 1 or (axis, group) in seen:
                continue
            seen.add((axis, group))
            for i, entry in enumerate(first):
                details = {traces[runs[r]][i][3]: r for r in line}
                if entry[2] == axis and len(details) > 1:
                    (a, r), (b, q) = list(details.items())[:2]
                    problems.append(f"{' '.join(entry[:3])}: {a} on rank {r}, {b} on rank {q}")
    return problems


def _trace(phases: Phases) -> list[tuple[str, str, str, str]]:
    """(phase, collective, axis, what all members must agree on) in order of execution."""
    rows = []
    for phase, gm in (("forward", phases.forward), ("backward", phases.backward)):
        for node in gm.graph.nodes:
            row = collective_of(node)
            if row is None or row.factor == 0:
                continue
            if row.name == "all_reduce_bucket":
                made = [e for e, _ in _entries([node])]
                agreed = ", ".join(f"{e.dtype}{list(e.shape)}" for e in made)
            else:
                entry = _entries([node])[0][0]
                shape: list[Any] = list(entry.shape)
                args = list(entry.args[1:])
                if len(args) > 1:
                    shape[args[0]] = "cut"
                for at in (7, 3):  # local lengths differ
                    if len(args) > at:
                        del args[at]
                agreed = f"{entry.dtype}{shape} {args}"
            rows.append((phase, row.name, str(node.args[1]), agreed))
    return rows
