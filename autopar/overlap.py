"""What runs beside the calls: which buckets are started before their place or awaited after it.

A bucket is one call of the graph, at the place where its operands are there and its results are
needed. For how long it is under way follows from the graph, so no pass can part a start from its
wait. What the graph takes from outside is gathered ahead by one bucket: the first at the head of
the function, each other where the one before it is awaited. A reduction whose results only leave
is awaited at the end. A scatter, whose message is larger than its result, is finished where the
next one begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from torch import fx

from autopar.collectives import ops

__all__ = ["ahead", "entered", "late", "under_way"]

_GATHERS = (ops.all_gather_bucket.default, ops.all_gather_replicated_bucket.default)
_SCATTER = ops.reduce_scatter_bucket.default
_REDUCTIONS = (ops.all_reduce_bucket.default, _SCATTER)


def ahead(graph: fx.Graph) -> dict[fx.Node, fx.Node | None]:
    """The gathers that are started ahead, in order, each with the next."""
    found = [n for n in graph.nodes if n.target in _GATHERS and _given(n)]
    return dict(zip(found, [*found[1:], None], strict=False))


def late(graph: fx.Graph) -> dict[fx.Node, None]:
    """The reductions that are awaited at the end, in order."""
    only = {graph.output_node()}
    found = (n for n in graph.nodes if n.target in _REDUCTIONS)
    return {n: None for n in found if all(set(taken.users) == only for taken in n.users)}


def entered(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes in the order in which their collectives are entered."""
    following = ahead(graph)
    yield from list(following)[:1]
    for node in graph.nodes:
        if node not in following:
            yield node
        elif (then := following[node]) is not None:
            yield then


def under_way(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node, fx.Node]]:
    """(bucket, first, end) of each message that is there beside other calls: from the node `first`
    up to, not including, the node `end`."""
    first, gathers = next(iter(graph.nodes)), list(ahead(graph))
    found = list(zip(gathers, [first, *gathers], gathers, strict=False))
    scatters = [n for n in late(graph) if n.target is _SCATTER]
    found += [(one, one, two) for one, two in pairwise([*scatters, graph.output_node()])]
    return found


def _given(node: fx.Node) -> bool:
    """Whether a call takes values from outside alone, so that it can be made at any time."""
    return all(operand.op == "placeholder" for operand in node.all_input_nodes)
