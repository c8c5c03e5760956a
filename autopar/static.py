"""The static check: every rank's program, read without running it.

The lowered graph is right by its types (`check.spmd_problems`). The forward graph must be that
graph, call by call, and the backward graph must hold exactly the adjoints of its collectives in
reverse order, on the right values, so that every parameter's gradient is reduced over the axes it
should be. Last, the members of every group must enter the same collectives in the same order.
"""

from __future__ import annotations

import math
import operator
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from autopar.collectives import collective_of, members_of
from autopar.layout import Mesh
from autopar.overlap import entered
from autopar.program import Phases, call_text, info

__all__ = ["Coordinate", "check_phases", "check_ranks", "count_collectives", "reaching"]

Coordinate = Mapping[str, int]


def check_phases(phases: Phases) -> list[str]:
    """Problems of one program beside those of its lowered graph, see `check.spmd_problems`."""
    problems = _forward(phases)
    if phases.gradients:
        problems += _repeated(phases)
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
                total += len(members_of(node))
    return total


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
        for name, operand, args in members_of(node):
            made = _entry(name, _plain(args), operand, node)
            found.append((made, row.name != name))
    return found


def _entry(name: str, args: tuple[Any, ...], operand: Any, node: fx.Node) -> _Entry:
    val = operand.meta.get("val")
    shape = () if val is None else tuple(int(n) for n in val.shape)
    if len(args) > 4 and args[2] == 0:  # nothing is cut: any length will do
        args = (*args[:4], 0, *args[5:])
    dtype = "?" if val is None else _dtype(val)
    if name in ("all_reduce", "reduce_scatter") and node.kwargs.get("wire") is not None:
        wire = str(node.kwargs["wire"]).removeprefix("torch.")
        return _Entry(name, args, shape, f"{dtype} as {wire}", call_text(node))
    return _Entry(name, args, shape, dtype, call_text(node))


def _dtype(val: Any) -> str:
    return str(val.dtype).removeprefix("torch.")


def _results(graph: fx.Graph) -> list[Any]:
    return list(graph.output_node().args[0])  # type: ignore[arg-type]


def _moves(node: fx.Node) -> bool:
    row = collective_of(node)
    return row is not None and row.name != "vary"


def _is_bucket(node: Any) -> bool:
    row = collective_of(node)
    return row is not None and row.name.endswith("_bucket")


def _member(node: fx.Node) -> tuple[str, fx.Node, tuple[Any, ...]] | None:
    """The collective that a result of a bucket comes from, as `members_of` gives it."""
    if node.target is operator.getitem and _is_bucket(node.args[0]):
        return members_of(node.args[0])[node.args[1]]  # type: ignore
    return None


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
    """The forward graph must enter the collectives of the lowered graph, in order, on its own."""
    spmd, forward = phases.program.graph.graph, phases.forward.graph
    want = [n for n in _live(spmd) if _moves(n)]
    have = [n for n in forward.nodes if _moves(n)]
    problems = _sequence("forward", [e for e, _ in _entries(want)], _entries(have))
    if problems:
        return problems
    lowered = _Lowered(spmd, {_origin(n) for n in forward.nodes})
    problems += _copied("forward", forward.nodes, lowered)
    results = _results(spmd)
    have_results = _results(forward)
    for i, value in enumerate(results):
        got = have_results[i]
        if not isinstance(got, fx.Node) or _origin(got) not in lowered.made_by(value):
            problems.append(f"forward: result {i} is {got}, expected {call_text(value)}")
    return problems


def _copied(phase: str, nodes: Iterable[fx.Node], lowered: _Lowered) -> list[str]:
    """Calls of the lowered graph must take the operands that they take there."""
    problems = []
    for node in nodes:
        if node.op != "call_function" or _is_bucket(node):
            continue
        source = lowered.by_name.get(_origin(node))
        if source is None:
            problems.append(f"{phase}: not in the lowered graph: {call_text(node)}")
            continue
        allowed = lowered.operands(source)
        if not _moves(source):  # a collective is one call, others may become several
            allowed.add(source.name)
        member = _member(node)
        operands = node.all_input_nodes if member is None else [member[1]]
        if member is not None and not _same(member, source):
            problems.append(f"{phase}: {call_text(node)} is not {call_text(source)}")
        wrong = [n.name for n in operands if _origin(n) not in allowed]
        if wrong:
            problems.append(f"{phase}: {wrong[0]} is not an operand of {call_text(source)}")
    return problems


def _repeated(phases: Phases) -> list[str]:
    """What the backward graph computes again must be calls of the forward graph, as they are."""
    spmd, forward = phases.program.graph.graph, phases.forward.graph
    again = [n for n in phases.backward.graph.nodes if info(n).again]
    known = {e.key for e, _ in _entries(forward.nodes)}
    problems = [
        f"backward: no collective of the forward graph: {call_text(n)}"
        for n in again
        if _moves(n)
        for e, _ in _entries([n])
        if e.key not in known
    ]
    lowered = _Lowered(spmd, {_origin(n) for n in forward.nodes})
    return problems + _copied("backward", again, lowered)


def _same(member: tuple[str, fx.Node, tuple[Any, ...]], source: fx.Node) -> bool:
    """Whether a member of a bucket is the collective of the lowered graph that it stands for."""
    row = collective_of(source)
    return row is not None and (row.name, _plain(source.args[1:])) == (member[0], _plain(member[2]))


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
    val: Any = node.meta.get("val")
    return math.prod(val.shape) if hasattr(val, "shape") else -1


def _sequence(phase: str, want: list[_Entry], pairs: list[tuple[_Entry, bool]]) -> list[str]:
    """The wanted collectives must be entered; those outside buckets in their order."""
    have = [e for e, _ in pairs]
    expected, entered = Counter(e.key for e in want), Counter(e.key for e in have)
    text = {e.key: e for e in (*want, *have)}
    problems = [
        f"{phase}: {entered[k]} x {text[k]}, expected {expected[k]}: {text[k].node}"
        for k in text
        if expected[k] != entered[k]
    ]
    if problems:
        return problems
    rest = iter(want)
    for e in (e for e, inside in pairs if not inside):
        if not any(w.key == e.key for w in rest):
            return [f"{phase}: out of its order: {e.node}"]
    return []


def _plain(args: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(tuple(a) if isinstance(a, (list, tuple)) else a for a in args)


# --- backward ----------------------------------------------------------------------------------


def reaching(graph: fx.Graph, roots: tuple[int, ...]) -> set[fx.Node]:
    """Nodes whose value flows, with gradient, into the results in `roots`."""
    results = _results(graph)
    stack = [results[i] for i in roots]
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
            made = _entry(name, args, node, node)
            operand = node.args[0].meta.get("val")
            if operand is not None:  # a gather that narrows is reduced in the wide dtype
                wire = made.dtype.partition(" as ")
                made = replace(made, dtype="".join((_dtype(operand), *wire[1:])))
            want.append(made)
    pairs = _entries(n for n in phases.backward.graph.nodes if not info(n).again)
    return _sequence("backward", want, pairs) or _flow(phases)


def _flow(phases: Phases) -> list[str]:
    """Each call of the backward graph must use the gradients and values of the call it is for."""
    spmd, backward = phases.program.graph.graph, phases.backward.graph
    n_saved = len(_results(phases.forward.graph)) - phases.n_results
    inputs = [n for n in backward.nodes if n.op == "placeholder"]
    tangents = set(inputs[n_saved:])
    made = {_origin(n) for n in phases.forward.graph.nodes}
    forward = _Lowered(spmd, made)
    calls = [n for n in backward.nodes if n.op == "call_function" and not info(n).again]
    lowered = _Lowered(spmd, set(map(_origin, calls)))
    roots = {_results(spmd)[i].name for i in phases.roots}
    problems = []

    def fits(operand: fx.Node, source: fx.Node) -> bool:
        if operand in tangents:
            return source.name in roots or lowered.passes(source, roots)
        origin = _origin(operand)
        if operand.op == "placeholder" or info(operand).again:
            return origin == source.name or origin in forward.operands(source)
        if origin == source.name:
            return True
        row = collective_of(lowered.by_name[origin]) if origin in lowered.by_name else None
        if row is not None and row.adjoint and not _ends_collective(operand):
            return False
        return lowered.passes(source, {origin})

    for node in backward.nodes:
        if node.op != "call_function" or _is_bucket(node) or info(node).again:
            continue
        source = lowered.by_name.get(_origin(node))
        if source is None:
            problems.append(f"backward: not in the lowered graph: {call_text(node)}")
            continue
        operands = node.all_input_nodes
        member = _member(node)
        if member is not None:
            operands = [member[1]]
        wrong = [n.name for n in operands if not fits(n, source)]
        if wrong:
            problems.append(f"backward: {wrong[0]} is no gradient or value of {call_text(source)}")
    states = {s.name: s.node for s in phases.program.states}
    grads = _results(backward)
    for name, grad in zip(phases.gradients, grads, strict=True):
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
    grads = _results(phases.backward.graph)
    for name, grad in zip(phases.gradients, grads, strict=True):
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
        member = _member(at)
        if member is None and _is(at, "all_reduce"):
            member = members_of(at)[0]
        if member is None or member[0] != "all_reduce":
            return axes
        axes.append(str(member[2][0]))
        at = member[1]


# --- between ranks -----------------------------------------------------------------------------


def check_ranks(
    phases: Mapping[Any, Phases], mesh: Mesh, signature: Callable[[Coordinate], Any]
) -> list[str]:
    """Problems between ranks: members of a group enter the same collectives in the same order.

    Args:
        phases: the program with the sizes of each place, by its signature.
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
    """(phase, collective, axis, what all members must agree on) in the order of entering."""
    rows = []
    for phase, gm in (("forward", phases.forward), ("backward", phases.backward)):
        for node in entered(gm.graph):
            row = collective_of(node)
            if row is None or row.factor == 0:
                continue
            agreed = ", ".join(_agreed(e) for e, _ in _entries([node]))
            rows.append((phase, row.name, str(node.args[1]), agreed))
    return rows


def _agreed(entry: _Entry) -> str:
    """What all members of a group must say of a collective."""
    shape: list[Any] = list(entry.shape)
    args = list(entry.args[1:])
    if len(args) > 1:
        shape[args[0]] = "cut"
    for at in (7, 3):  # local lengths differ
        if len(args) > at:
            del args[at]
    return f"{entry.dtype}{shape} {args}"
