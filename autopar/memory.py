"""Peak memory of a generated program, by the liveness of its values."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autopar.collectives import members_of
from autopar.overlap import under_way
from autopar.program import Phases, outputs_of, shares_memory

__all__ = ["peak_bytes", "saved_bytes"]

aten = torch.ops.aten

_Storage = tuple[fx.Node, int]
"""The call that makes a storage, and which of its results lies there."""


def peak_bytes(phases: Phases) -> int:
    """Most bytes that the values of a step take at once on a rank, forward and backward.

    States and inputs, which the caller holds, do not count, nor what a kernel takes for itself;
    gradients do, and messages that are under way beside other calls.
    """
    forward = _live(phases.forward.graph, {})
    if not phases.gradients:
        return forward.peak
    results, saved = _parted(phases)
    names = [n for n in phases.backward.graph.nodes if n.op == "placeholder"]
    held = {s for r in results for s in forward.home[r]}  # by the caller
    given = {
        n: [s for s in forward.home[v] if s not in held] for n, v in zip(names, saved, strict=False)
    }
    backward = _live(phases.backward.graph, given, forward.sizes)
    return max(forward.peak, forward.total(results) + backward.peak)


def saved_bytes(phases: Phases) -> int:
    """Bytes that a rank holds between forward and backward beside states, inputs and results."""
    return _live(phases.forward.graph, {}).total(_parted(phases)[1])


def _parted(phases: Phases) -> tuple[list[Any], list[Any]]:
    """Results and saved values of the forward graph."""
    outputs: Any = phases.forward.graph.output_node().args[0]
    return list(outputs[: phases.n_results]), list(outputs[phases.n_results :])


@dataclass(frozen=True, slots=True)
class _Life:
    """Storages of one graph.

    Args:
        home: where each value lies.
        sizes: bytes of each storage.
        peak: most bytes at once.
    """

    home: Mapping[fx.Node, list[_Storage]]
    sizes: Mapping[_Storage, int]
    peak: int

    def total(self, values: Iterable[Any]) -> int:
        """Bytes of these values, common storages once."""
        found = {s for v in values if isinstance(v, fx.Node) for s in self.home[v]}
        return sum(self.sizes[s] for s in found)


def _live(
    graph: fx.Graph,
    given: Mapping[fx.Node, list[_Storage]],
    sizes: Mapping[_Storage, int] | None = None,
) -> _Life:
    """The storages of `graph`; a value is released after the call that uses it last.

    Args:
        given: storages of placeholders that the graph may release; the caller holds the others.
        sizes: their bytes.
    """
    home: dict[fx.Node, list[_Storage]] = {}
    size = dict(sizes or {})
    new: list[int] = []  # bytes that each call makes
    last: dict[_Storage, int] = {}
    for e, node in enumerate(graph.nodes):
        made = {} if node.op == "output" else _made(node, home, given)
        size.update(made)
        new.append(sum(made.values()))
        for value in (node, *node.all_input_nodes):
            last.update(dict.fromkeys(home.get(value, ()), e))
    freed = [0] * len(new)
    for storage, e in last.items():
        freed[e] += size[storage]
    order = {n: e for e, n in enumerate(graph.nodes)}
    for bucket, first, end in under_way(graph):
        message = _message_bytes(bucket)
        new[order[first]] += message
        freed[order[end] - 1] += message
    held = sum(size[s] for s in {s for storages in given.values() for s in storages})
    peak = held
    for more, less in zip(new, freed, strict=True):
        held += more
        peak = max(peak, held)
        held -= less
    return _Life(home, size, peak)


def _made(
    node: fx.Node,
    home: dict[fx.Node, list[_Storage]],
    given: Mapping[fx.Node, list[_Storage]],
) -> dict[_Storage, int]:
    """Note where a value lies; returns the storages that it brings."""
    source: Any = node.args[0] if node.args else None
    val = node.meta.get("val")
    if node.op == "placeholder":
        home[node] = list(given.get(node, ()))
    elif node.target is operator.getitem:
        own = [s for s in home[source] if s == (source, node.args[1])]
        home[node] = own or home[source]
    elif isinstance(val, Tensor) and shares_memory(node) and not _copies(node):
        home[node] = home[source] if isinstance(source, fx.Node) else []
    else:
        values = [val] if isinstance(val, Tensor) else list(val or ())
        made = {(node, i): _bytes(v) for i, v in enumerate(values) if isinstance(v, Tensor)}
        home[node] = list(made)
        return made
    return {}


def _message_bytes(bucket: fx.Node) -> int:
    """What the message of a gather or scatter holds: all that is whole."""
    operands = [operand.meta["val"] for _, operand, _ in members_of(bucket)]
    return max(sum(map(_bytes, values)) for values in (operands, outputs_of(bucket)))


def _copies(node: fx.Node) -> bool:
    """Whether a reshape cannot be a view of its operand."""
    if node.target is not aten.reshape.default:
        return False
    operand: Any = node.args[0]
    val = operand.meta["val"]
    try:
        torch.empty_strided(val.shape, val.stride(), device="meta").view(node.meta["val"].shape)
    except RuntimeError:
        return True
    return False


def _bytes(val: Tensor) -> int:
    return val.numel() * val.itemsize
