"""Find repeated blocks, so that what holds for one layer is worked out once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from torch import Tensor, fx

from autopar.program import Program, info, tensor_inputs
from autopar.rules.factors import producer
from autopar.rules.spec import Spec

__all__ = ["classes"]


def classes(program: Program, table: dict[fx.Node, Spec]) -> dict[fx.Node, int]:
    """A class number for every node with a spec; nodes at one place of repeated blocks share it.

    Blocks are tandem repeats in the sequence of calls: a run where call i looks like call i + p.
    A placeholder's class is given by the places that use it.
    """
    calls = [n for n in program.graph.graph.nodes if n in table and n.op == "call_function"]
    ids: dict[Any, int] = {}
    sequence = np.array([ids.setdefault(_look(n, table[n]), len(ids)) for n in calls])
    place: dict[fx.Node, Any] = {n: ("alone", i) for i, n in enumerate(calls)}
    free = np.ones(len(calls), dtype=bool)
    for region in range(16):
        found = _best_run(sequence, free)
        if found is None:
            break
        start, stop, period = found
        free[start:stop] = False
        for i in range(start, stop):
            place[calls[i]] = ("block", region, (i - start) % period)
    uses: dict[fx.Node, set[Any]] = {}
    for n in calls:
        for k, operand in enumerate(tensor_inputs(n)):
            uses.setdefault(producer(operand)[0], set()).add((place[n], k))
    numbers: dict[Any, int] = {}
    result: dict[fx.Node, int] = {}
    for n in table:
        if n.op == "placeholder":
            key: Any = ("state", tuple(sorted(map(str, uses.get(n, ())))), _look(n, table[n]))
            if not uses.get(n):
                key = ("unused", n.name)
        else:
            key = (place[n], _look(n, table[n]))
        result[n] = numbers.setdefault(key, len(numbers))
    return result


def _look(node: fx.Node, spec: Spec) -> Any:
    """What a call looks like apart from which values it takes."""
    val = node.meta["val"]
    shapes = [tuple(v.shape) if isinstance(v, Tensor) else None for v in _list(val)]

    def text(a: Any) -> Any:
        if isinstance(a, fx.Node):
            return "@"
        if isinstance(a, (list, tuple)):
            return tuple(map(text, a))
        return str(a)

    args = tuple(map(text, node.args))
    if info(node).site >= 0:
        args = args[:2]
    choice = tuple(sorted(info(node).choice.items()))
    kwargs = tuple((k, text(v)) for k, v in node.kwargs.items())
    operands = tuple(tuple(n.meta["val"].shape) for n in tensor_inputs(node))
    grads = node.meta.get("requires_grad", False)
    factors = tuple(spec.sizes.values())
    target = "placeholder" if node.op == "placeholder" else str(node.target)
    return (target, args if node.op != "placeholder" else (), kwargs, str(shapes), operands, choice,
            grads, factors)  # fmt: skip


def _list(val: Any) -> list[Any]:
    return list(val) if isinstance(val, (list, tuple)) else [val]


def _best_run(sequence: np.ndarray, free: np.ndarray) -> tuple[int, int, int] | None:
    """(start, stop, period) of the run of free calls that saves most, whole periods only."""
    n = len(sequence)
    gaps: Counter[int] = Counter()
    last: dict[int, list[int]] = {}
    for i in range(n):
        if not free[i]:
            continue
        seen = last.setdefault(int(sequence[i]), [])
        for j in seen[-8:]:
            gaps[i - j] += 1
        seen.append(i)
    best: tuple[int, int, int, int] | None = None
    for period, _ in gaps.most_common(40):
        if period < 4:
            continue
        same = (sequence[:-period] == sequence[period:]) & free[:-period] & free[period:]
        edges = np.flatnonzero(np.diff(np.concatenate(([0], same.astype(np.int8), [0]))))
        for a, b in zip(edges[::2], edges[1::2], strict=True):
            repeats = (b - a) // period + 1
            saved = int((repeats - 1) * period)
            if repeats >= 2 and (best is None or (saved, -period) > (best[0], -best[3])):
                best = (saved, int(a), int(a + repeats * period), period)
    return None if best is None else (best[1], best[2], best[3])
