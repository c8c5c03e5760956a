"""Rematerialisation: which forward values the backward pass computes again in place of keeping.

A minimum cut between what is at hand in the backward pass anyway (states, inputs, calls that are
not worth repeating) and the backward calls, with the bytes of each value as its capacity, gives the
smallest set of values to keep (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost";
as a cut: He and Yu 2023, "Transcending Runtime-Memory Tradeoffs in Checkpointing by being Fusion
Aware", section 3). Values that go from one repeated block to the next are kept if they are needed:
else the first layers would run again for each of the last.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow
from torch import Tensor, fx

from autopar.collectives import collective_of
from autopar.errors import PlanError
from autopar.memory import peak_bytes
from autopar.program import Joint, Phases, info, shares_memory
from autopar.roll import Run, runs

__all__ = ["MODES", "Remat", "within"]

MODES = ("none", "selective", "full")

_HEAVY = (
    "mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "convolution", "_scaled_dot_product",
    "_flash_attention", "_efficient_attention", "_fft", "linalg", "lstm", "gru", "rnn",
)  # fmt: skip
_NO_LIMIT = 2**30


@dataclass(frozen=True, slots=True)
class Remat:
    """Choose the forward calls to repeat.

    Args:
        mode: "none"; "selective": all that is cheap, no products and no collectives; "full":
            everything in repeated blocks but what goes from block to block.
        blocks: only in so many of the first repeated blocks, while the others do what the mode
            before does; None: in all.
    """

    mode: str = "none"
    blocks: int | None = None

    def choose(self, joint: Joint) -> set[fx.Node]:
        """The forward calls to compute once more in the backward graph."""
        if self.mode == "none":
            return set()
        found = [r for r in runs(joint.graph) if r.blocks[0][0] in joint.forward]
        kept = self.kept(joint, found)
        return _cut(joint, kept)

    def kept(self, joint: Joint, found: list[Run]) -> set[fx.Node]:
        """The forward calls that may not be repeated."""
        inside = {n for run in found for block in run.blocks[: self.blocks] for n in block}
        kept = {block[j] for run in found for block in run.blocks for j in run.first}
        kept |= {n for run in found for n in run.first.values()}
        for node in joint.forward:
            if node.op != "call_function":
                continue
            if self.mode == "full":
                allowed = node in inside or not _heavy(node)
            else:
                allowed = not _heavy(node) and (self.blocks is None or node in inside)
            if not allowed:
                kept.add(node)
        return kept


def within(limit_bytes: int, attempt: Callable[[Remat], Phases]) -> tuple[Remat, Phases]:
    """The choice that repeats least among those with which a step holds no more than a limit.

    Selective comes before full, and fewer of the repeated blocks before more.

    Args:
        attempt: makes the program with a choice.

    Raises:
        PlanError: there is none.
    """
    least = None
    for mode in MODES:
        phases = attempt(Remat(mode))
        found = peak_bytes(phases)
        least = found if least is None else min(least, found)
        if found <= limit_bytes:
            return _fewest(limit_bytes, mode, phases, attempt)
    raise PlanError(
        f"A step holds at least {least:,} bytes on a rank, more than remat={limit_bytes:,}.",
        where="values of forward and backward, beside states and inputs",
        expected=f"at least {least:,} bytes",
        hint="use more ranks, a smaller batch, or sequence=True on an axis tp",
    )


def _fewest(
    limit_bytes: int, mode: str, phases: Phases, attempt: Callable[[Remat], Phases]
) -> tuple[Remat, Phases]:
    """The choice in the fewest blocks that keeps within the limit."""
    best: tuple[Remat, Phases] = Remat(mode), phases
    low, high = 0, 0 if mode == "none" else _blocks(phases)
    while low + 1 < high:
        middle = (low + high) // 2
        tried = attempt(Remat(mode, middle))
        if peak_bytes(tried) <= limit_bytes:
            best, high = (Remat(mode, middle), tried), middle
        else:
            low = middle
    return best


def _blocks(phases: Phases) -> int:
    """The number of repeated forward blocks."""
    return max((run.count for run in runs(phases.forward.graph)), default=0)


def _heavy(node: fx.Node) -> bool:
    """Whether a call is not worth repeating: it costs more than reading what it gives."""
    row = collective_of(node)
    if row is not None:
        return row.factor > 0 and not info(node).again
    name = str(node.target).removeprefix("aten.").split(".")[0]
    return any(name == heavy or (heavy[0] == "_" and name.startswith(heavy)) for heavy in _HEAVY)


def _cut(joint: Joint, kept: set[fx.Node]) -> set[fx.Node]:
    """The calls that a minimum cut repeats."""
    needed = {n for call in joint.backward for n in call.all_input_nodes if n in joint.forward}
    needed |= {g for g in joint.gradients if g in joint.forward}
    nodes = [n for n in joint.graph.nodes if n in joint.forward]
    index = {n: 2 + 2 * i for i, n in enumerate(nodes)}  # 0: source, 1: sink; in and out of each
    total = sum(map(_bytes, nodes))
    unit = max(1, total // _NO_LIMIT + 1)
    rows: list[tuple[int, int, int]] = []
    for node, i in index.items():
        source = node.op == "placeholder"
        if source or node in kept:
            rows.append((0, i, _NO_LIMIT))
        free = 0 if source else _NO_LIMIT if _unsaved(node) else _bytes(node) // unit + 1
        rows.append((i, i + 1, free))
        if node in needed:
            rows.append((i + 1, 1, _NO_LIMIT))
        rows += [(i + 1, index[u], _NO_LIMIT) for u in node.users if u in index]
    a, b, capacity = (np.array(column, dtype=np.int32) for column in zip(*rows, strict=True))
    size = 2 + 2 * len(nodes)
    graph = csr_array((capacity, (a, b)), shape=(size, size), dtype=np.int32)
    flow = maximum_flow(graph, 0, 1).flow
    left = csr_array(graph - flow)
    left.data[left.data < 0] = 0
    left.eliminate_zeros()
    reached = set(breadth_first_order(left, 0, return_predecessors=False).tolist())
    return {n for n, i in index.items() if n.op == "call_function" and i not in reached}


def _unsaved(node: fx.Node) -> bool:
    """Whether a value is not kept itself: a view, several results in one, or gathered again."""
    many = not isinstance(node.meta.get("val"), Tensor)
    view = shares_memory(node) and node.target is not operator.getitem
    return many or view or info(node).again


def _bytes(node: fx.Node) -> int:
    val = node.meta.get("val")
    return int(val.numel() * val.itemsize) if isinstance(val, Tensor) else 0
