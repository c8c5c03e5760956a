"""Find runs of repeated blocks of calls, which generated code writes as loops.

A run is a block of `period` calls that stands `count` times in a row. Calls at one offset of the
block look alike, and each of their operands is the same value of the same block, a value of the
block before, or comes from outside the run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, fx

from autopar.compat import schema_of
from autopar.program import info
from autopar.text import written

__all__ = ["Carried", "Each", "Fixed", "Operand", "Run", "Same", "leaves", "runs"]

MIN_PERIOD = 8
"""Calls in a block: shorter ones read as well in a row."""

MIN_SAVED = 16
"""Lines that a run must save."""

LIST_LINES = 2
"""Lines that a list of values must save."""

HELD_CALLS = 4
"""Calls at the end of a run during which its loop may hold a value in vain."""

_COUNTS = ("site", "index", "start", "end")
"""Integer arguments that may differ from block to block."""

_OUTSIDE = 1 << 40


@dataclass(frozen=True, slots=True)
class Same:
    """The value at an offset of the same block."""

    offset: int


@dataclass(frozen=True, slots=True)
class Carried:
    """The value at an offset of the block before."""

    offset: int


@dataclass(frozen=True, slots=True)
class Fixed:
    """A constant, or a node outside the run, that is the same for all blocks."""

    value: Any


@dataclass(frozen=True, slots=True)
class Each:
    """A constant, or a node outside the run, for every block."""

    values: tuple[Any, ...]


Operand = Same | Carried | Fixed | Each


@dataclass(frozen=True, slots=True)
class Run:
    """A repeated block.

    Args:
        start: index of its first call among the calls of the graph.
        blocks: the calls of each block.
        operands: for each offset, what the leaves of the arguments are, in order.
        first: for each carried offset, what the first block takes instead.
        kept: offsets whose values are used outside the run, not counting the last value of a
            carried one.
    """

    start: int
    blocks: tuple[tuple[fx.Node, ...], ...]
    operands: tuple[tuple[Operand, ...], ...]
    first: Mapping[int, fx.Node]
    kept: frozenset[int]

    @property
    def count(self) -> int:
        """How often the block stands there."""
        return len(self.blocks)

    @property
    def stop(self) -> int:
        """Index of the first call after it."""
        return self.start + len(self.blocks) * len(self.operands)


def runs(graph: fx.Graph, apart: Collection[fx.Node] = ()) -> tuple[Run, ...]:
    """The runs of `graph` that are worth a loop, in order, none overlapping.

    Args:
        apart: calls that are written differently, so that they look like no others.
    """
    calls = [n for n in graph.nodes if n.op == "call_function"]
    ids: dict[Any, int] = {}
    looks = np.array([ids.setdefault(_look(n, n in apart), len(ids)) for n in calls], dtype=int)
    search = _Search(calls)
    periods = _periods(looks)
    free = np.ones(len(calls), dtype=bool)
    refused: set[tuple[int, int, int]] = set()
    found: list[Run] = []
    while (stretch := _longest(looks, free, periods, refused)) is not None:
        run = search.best(*stretch)
        if run is None:
            refused.add(stretch)
        else:
            found.append(run)
            free[run.start : run.stop] = False
    return tuple(sorted(found, key=lambda r: r.start))


def leaves(value: Any) -> list[Any]:
    """What nested arguments hold, in order."""
    if isinstance(value, (list, tuple)):
        return [leaf for v in value for leaf in leaves(v)]
    if isinstance(value, dict):
        return leaves(list(value.values()))
    return [value]


# --- equal looks -------------------------------------------------------------------------------


def _look(node: fx.Node, apart: bool) -> Any:
    """What a call looks like apart from which values it takes."""
    val = node.meta.get("val")
    vals = val if isinstance(val, (list, tuple)) else [val]
    shapes = tuple((tuple(v.shape), v.dtype) if isinstance(v, Tensor) else None for v in vals)
    schema = schema_of(node.target)
    names = [a.name for a in schema.arguments] if schema is not None else []

    def own(value: Any) -> str | None:
        return "@" if isinstance(value, fx.Node) else None

    def text(value: Any, name: str) -> str:
        return "#" if name in _COUNTS and type(value) is int else written(value, own)

    args = [text(a, names[i] if i < len(names) else "") for i, a in enumerate(node.args)]
    args += [f"{k}={text(v, k)}" for k, v in node.kwargs.items()]
    record = info(node)
    layouts = tuple(map(str, record.layouts))
    return node.target, apart, tuple(args), shapes, layouts, record.shapes, record.unless


def _periods(looks: np.ndarray, limit: int = 24) -> list[int]:
    """The commonest distances between equal sequences of `MIN_PERIOD` calls."""
    if len(looks) < 2 * MIN_PERIOD:
        return []
    n = len(looks) - MIN_PERIOD + 1
    pieces = np.stack([looks[k : k + n] for k in range(MIN_PERIOD)], axis=1)
    _, label = np.unique(pieces, axis=0, return_inverse=True)
    label = label.reshape(-1)
    order = np.argsort(label, kind="stable")
    gaps = np.diff(order)[np.diff(label[order]) == 0]
    values, counts = np.unique(gaps[gaps >= MIN_PERIOD], return_counts=True)
    return [int(v) for v in values[np.argsort(-counts, kind="stable")][:limit]]


def _longest(
    looks: np.ndarray, free: np.ndarray, periods: list[int], refused: set[tuple[int, int, int]]
) -> tuple[int, int, int] | None:
    """(start, period, length) of the stretch of free calls that repeats most."""
    best, best_saved = None, MIN_SAVED - 1
    for period in periods:
        same = (looks[:-period] == looks[period:]) & free[:-period] & free[period:]
        edges = np.flatnonzero(np.diff(np.concatenate(([0], same.astype(np.int8), [0]))))
        for a, b in zip(edges[::2], edges[1::2], strict=True):
            saved = (int(b) - int(a)) // period * period
            stretch = (int(a), period, int(b) - int(a) + period)
            better = best is None or (saved, -period) > (best_saved, -best[1])
            if saved >= MIN_SAVED and better and stretch not in refused:
                best, best_saved = stretch, saved
    return best


# --- equal operands ----------------------------------------------------------------------------


class _Search:
    """Decides which blocks of a stretch of equal looks can be one loop."""

    def __init__(self, calls: list[fx.Node]) -> None:
        self.calls = calls
        self.order = {n: i for i, n in enumerate(calls)}
        self.leaves = [leaves((n.args, n.kwargs)) for n in calls]
        end = len(calls)
        self.last_use = np.array(
            [max((self.order.get(u, end) for u in n.users), default=-1) for n in calls], dtype=int
        )

    def best(self, start: int, period: int, length: int) -> Run | None:
        """The longest run in a stretch, or one block less that has far fewer carried values."""
        most = length // period
        spare = length - most * period
        costs = self.costs(start, period, most)
        tight, loose = (min(range(n), key=lambda k: (costs[k], k)) for n in (spare + 1, period))
        found = [self.run(start + tight, period, most)]
        if loose > spare and most > 2:
            found.append(self.run(start + loose, period, most - 1))
        each = [r for r in found if r is not None]
        return max(each, key=lambda r: 2 * r.count - len(r.first), default=None)

    def costs(self, start: int, period: int, count: int) -> list[int]:
        """For a cut before each offset, how many values go from one block to the next.

        A cut within a layer of the model counts as two more.
        """
        first = start + (count // 2 - 1) * period
        crossing = np.zeros(2 * period + 1, dtype=int)
        for i in range(first, first + period):
            uses = [self.order.get(u, -1) for u in self.calls[i].users]
            last = max((u for u in uses if u < first + 2 * period), default=-1)
            if last > i:
                crossing[i - first + 1] += 1
                crossing[last - first + 1] -= 1
        values = np.cumsum(crossing)[: 2 * period].reshape(2, period).sum(0)
        layers = [self.layer(i, period) for i in range(first, first + period)]
        known = [k for k in range(period) if layers[k]]  # sums of gradients have no module
        turns = {
            k for k, before in zip(known[1:], known, strict=False) if layers[k] != layers[before]
        }
        if known and layers[known[0]] == layers[known[-1]]:  # the block lies in one layer
            turns.add(known[0])
        return [int(values[k]) + 2 * (k not in turns) for k in range(period)]

    def layer(self, i: int, period: int) -> str:
        """The part of a call's module path that differs one block later."""
        here, there = (
            info(self.calls[k]).module.split(".") if 0 <= k < len(self.calls) else []
            for k in (i, i + period)
        )
        return next((a for a, b in zip(here, there, strict=False) if a != b), "")

    def run(self, start: int, period: int, count: int) -> Run | None:
        """The longest run among these blocks, or None where no loop is worth it."""
        relations = [self.relations(start + t * period, period) for t in range(count)]
        best = (0, 0)
        for a in range(count - 1):
            if count - a <= best[1] - best[0]:
                break
            b = self.alike(relations, a, start + a * period, period)
            carried = {-1 - r for r in relations[a + 1][0] if r < 0}
            b = self.used_alike(start, period, a, b, carried)
            if b - a > best[1] - best[0]:
                best = (a, b)
        a, b = best
        return self.made(start + a * period, period, b - a) if b - a >= 2 else None

    def relations(self, first: int, period: int) -> tuple[tuple[int, ...], int]:
        """For each operand of a block its offset, or -1 - offset in the block before, or
        `_OUTSIDE`; and the last call outside that it takes."""
        found, farthest = [], -1
        for operands in self.leaves[first : first + period]:
            for leaf in operands:
                at = self.order.get(leaf, -1) if isinstance(leaf, fx.Node) else -1
                if at >= first:
                    found.append(at - first)
                elif at >= first - period and at >= 0:
                    found.append(first - period - at - 1)
                else:
                    found.append(_OUTSIDE)
                    farthest = max(farthest, at)
        return tuple(found), farthest

    def alike(self, relations: list[Any], a: int, first: int, period: int) -> int:
        """The end of the longest run of blocks from `a` on whose operands correspond."""
        wanted = relations[a + 1][0]
        initial: dict[int, fx.Node] = {}
        taken = (x for operands in self.leaves[first : first + period] for x in operands)
        for have, want, leaf in zip(relations[a][0], wanted, taken, strict=True):
            if have != want and (0 <= have < _OUTSIDE or 0 <= want < _OUTSIDE):
                return a + 1
            if want < 0 and initial.setdefault(want, leaf) is not leaf:
                return a + 1
        b = a + 1
        while b < len(relations) and relations[b][0] == wanted and relations[b][1] < first:
            b += 1
        return b

    def used_alike(self, start: int, period: int, a: int, b: int, carried: set[int]) -> int:
        """The end of the longest run in blocks a..b whose values are used alike after it.

        All values of an offset are, or none. Only the last value of a carried offset may differ;
        if it is not used, then not long before the end, up to which a loop holds it.
        """
        passed = np.zeros(period, dtype=bool)
        passed[list(carried)] = True
        while b - a >= 2:
            stop = start + b * period
            used = self.last_use[start + a * period : stop].reshape(-1, period) >= stop
            odd = np.flatnonzero((used[1:-1] != used[0]).any(1))
            needed = np.maximum(self.last_use[stop - period : stop], np.arange(stop - period, stop))
            if len(odd):
                b = a + 2 + int(odd[0])
            elif ((used[-1] != used[0]) & ~passed).any() or (
                passed & (needed < stop - HELD_CALLS)
            ).any():
                b -= 1
            else:
                break
        return b

    def made(self, start: int, period: int, count: int) -> Run | None:
        """The run, unless its lists would cost about as many lines as it saves."""
        starts = range(start, start + count * period, period)
        blocks = tuple(tuple(self.calls[s : s + period]) for s in starts)
        first: dict[int, fx.Node] = {}
        operands = []
        for j in range(period):
            second = self.leaves[start + period + j]
            row: list[Operand] = []
            for k, leaf in enumerate(second):
                values = tuple(self.leaves[s + j][k] for s in starts)
                at = self.order.get(leaf, -1) if isinstance(leaf, fx.Node) else -1
                if at >= start + period:
                    row.append(Same(at - start - period))
                elif at >= start:
                    row.append(Carried(at - start))
                    first[at - start] = values[0]
                elif all(v is leaf or _equal(v, leaf) for v in values):
                    row.append(Fixed(values[0]))
                else:
                    row.append(Each(values))
            operands.append(tuple(row))
        stop = start + count * period
        kept = frozenset(np.flatnonzero(self.last_use[start : start + period] >= stop).tolist())
        lists = {o.values for row in operands for o in row if isinstance(o, Each)}
        if (count - 1) * period < LIST_LINES * (len(lists) + len(kept) + len(first)):
            return None
        return Run(start, blocks, tuple(operands), first, kept)


def _equal(a: Any, b: Any) -> bool:
    """Whether two leaves of equal looks are one constant; NaN is."""
    return not isinstance(a, fx.Node) and repr(a) == repr(b)
