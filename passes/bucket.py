"""Join the reductions of gradients, so that few large messages replace many small ones."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from torch import fx

from autopar.collectives import ops
from autopar.program import Phases, copied

__all__ = ["Bucket"]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Group the all-reduces that end gradients by axes and dtype, in the order they are ready.

    Before:
        g1 = autopar.all_reduce(d1, "dp", "sum"); g0 = autopar.all_reduce(d0, "dp", "sum")
    After:
        g1, g0 = autopar.all_reduce_bucket([d1, d0], "dp")

    Args:
        cap_bytes: a bucket is closed once it holds this much.
    """

    cap_bytes: int = 25 * 2**20
    name: str = "bucket"

    def run(self, phases: Phases) -> Phases:
        """Rewrite the backward graph."""
        old = phases.backward
        graph, _ = copied(old.graph)
        out: Any = graph.output_node().args[0]
        order = {n: i for i, n in enumerate(graph.nodes)}
        open_buckets: dict[Any, list[tuple[fx.Node, list[fx.Node]]]] = {}
        sizes: dict[Any, int] = {}
        ends = {g for g in out if isinstance(g, fx.Node)}
        tails = {}
        for grad in ends:
            chain = _tail(grad, graph.output_node())
            if chain:
                tails[chain[-1]] = (grad, chain)  # the first reduction to run
        for node in sorted(tails, key=lambda n: order[n]):
            grad, chain = tails[node]
            axes = tuple(str(n.args[1]) for n in reversed(chain))
            key = (axes, grad.meta["val"].dtype)
            open_buckets.setdefault(key, []).append((grad, chain))
            sizes[key] = sizes.get(key, 0) + grad.meta["val"].numel() * grad.meta["val"].itemsize
            if sizes[key] >= self.cap_bytes:
                _close(graph, key[0], open_buckets.pop(key))
                sizes[key] = 0
        for key, members in open_buckets.items():
            _close(graph, key[0], members)
        return phases.replace(backward=fx.GraphModule(old, graph))


def _tail(grad: fx.Node, output: fx.Node) -> list[fx.Node]:
    """The all-reduces at the end of a gradient that nothing else uses, last first."""
    chain: list[fx.Node] = []
    node, user = grad, output
    while node.target is ops.all_reduce.default and set(node.users) == {user}:
        chain.append(node)
        node, user = node.args[0], node  # type: ignore[assignment]
    return chain


def _close(
    graph: fx.Graph, axes: tuple[str, ...], members: list[tuple[fx.Node, list[fx.Node]]]
) -> None:
    if len(members) == 1 and len(axes) == 1:
        return
    order = {n: i for i, n in enumerate(graph.nodes)}
    last = max((chain[-1] for _, chain in members), key=lambda n: order[n])
    values = [chain[-1].args[0] for _, chain in members]
    with graph.inserting_after(last):
        anchor = last
        for at, axis in enumerate(axes):
            graph.inserting_after(anchor)
            bucket = graph.call_function(ops.all_reduce_bucket.default, (values, axis))
            bucket.meta["val"] = [g.meta["val"] for g, _ in members]
            anchor = bucket
            taken = []
            for i, (_, chain) in enumerate(members):
                graph.inserting_after(anchor)
                anchor = graph.call_function(operator.getitem, (bucket, i))
                anchor.meta = dict(chain[-1 - at].meta)
                taken.append(anchor)
            values = taken  # type: ignore[assignment]
    for (grad, chain), value in zip(members, values, strict=True):
        grad.replace_all_uses_with(value)  # type: ignore[arg-type]
        for node in chain:
            graph.erase_node(node)
