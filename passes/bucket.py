"""Join collectives on parameters and their gradients: few large messages replace many small."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import fx

from autopar.collectives import members_of, ops
from autopar.program import NodeInfo, Phases, copied, info, set_info

__all__ = ["Bucket"]

_BUCKETS: dict[Any, Any] = {
    ops.all_reduce.default: ops.all_reduce_bucket.default,
    ops.all_gather.default: ops.all_gather_bucket.default,
    ops.all_gather_replicated.default: ops.all_gather_replicated_bucket.default,
    ops.reduce_scatter.default: ops.reduce_scatter_bucket.default,
}
_GATHERS = (ops.all_gather.default, ops.all_gather_replicated.default)
_REDUCTIONS = (ops.all_reduce.default, ops.reduce_scatter.default)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Group the gathers of parameters and the reductions that end gradients, in their order.

    A bucket of gathers stands where its first member stood, one of reductions where its last did.

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
        """Rewrite both graphs."""
        forward, _ = copied(phases.forward.graph)
        self.gathers(forward)
        backward, _ = copied(phases.backward.graph)
        self.gathers(backward)
        self.reductions(backward)
        return phases.replace(
            forward=fx.GraphModule(phases.forward, forward),
            backward=fx.GraphModule(phases.backward, backward),
        )

    def gathers(self, graph: fx.Graph) -> None:
        """Join the gathers of values that came into the graph."""
        chains = [
            [n] for n in graph.nodes if n.target in _GATHERS and n.args[0].op == "placeholder"
        ]
        for members in self.filled(chains):
            _join(graph, members, members[0][0], before=True)

    def reductions(self, graph: fx.Graph) -> None:
        """Join the reductions that end gradients."""
        output = graph.output_node()
        grads: Any = output.args[0]
        ends = dict.fromkeys(g for g in grads if isinstance(g, fx.Node))
        chains = [chain for g in ends if (chain := _tail(g, output))]
        order = {n: i for i, n in enumerate(graph.nodes)}
        for members in self.filled(sorted(chains, key=lambda c: order[c[0]])):
            _join(graph, members, max((c[0] for c in members), key=lambda n: order[n]))

    def filled(self, chains: Iterable[list[fx.Node]]) -> list[list[list[fx.Node]]]:
        """Buckets of chains that go through the same collectives, in order of the chains."""
        done: list[list[list[fx.Node]]] = []
        open_buckets: dict[Any, list[list[fx.Node]]] = {}
        sizes: dict[Any, int] = {}
        for chain in chains:
            operand: Any = chain[0].args[0]
            val = max((operand.meta["val"], chain[0].meta["val"]), key=lambda v: v.numel())
            key = (*((n.target, n.args[1]) for n in chain), val.dtype)
            open_buckets.setdefault(key, []).append(chain)
            sizes[key] = sizes.get(key, 0) + val.numel() * val.itemsize
            if sizes[key] >= self.cap_bytes:
                done.append(open_buckets.pop(key))
                sizes[key] = 0
        return [*done, *open_buckets.values()]


def _tail(grad: fx.Node, output: fx.Node) -> list[fx.Node]:
    """The reductions at the end of a gradient that nothing else uses, in order."""
    chain: list[fx.Node] = []
    node, user = grad, output
    while node.target in _REDUCTIONS and set(node.users) == {user}:
        chain.append(node)
        node, user = node.args[0], node  # type: ignore[assignment]
    return chain[::-1]


def _join(
    graph: fx.Graph, members: list[list[fx.Node]], anchor: fx.Node, before: bool = False
) -> None:
    """Replace chains by chains of buckets at `anchor`."""
    values: list[Any] = [chain[0].args[0] for chain in members]
    for at in range(len(members[0])):
        links = [chain[at] for chain in members]
        _, axis, *_ = links[0].args
        cuts = [members_of(n)[0][2][1:] for n in links]
        args: list[Any] = [values, axis]
        if links[0].target is not ops.all_reduce.default:
            args += [[c[0] for c in cuts], [c[1] for c in cuts], [n for c in cuts for n in c[2]]]
            args += [[c[3] for c in cuts]] if len(cuts[0]) > 3 else []
        place = graph.inserting_before if before else graph.inserting_after
        with place(anchor):
            bucket = graph.call_function(_BUCKETS[links[0].target], tuple(args))
        bucket.meta["val"] = [n.meta["val"] for n in links]
        set_info(bucket, NodeInfo(again=info(links[0]).again))
        anchor, before = bucket, False
        values = []
        for i, link in enumerate(links):
            with graph.inserting_after(anchor):
                anchor = graph.call_function(operator.getitem, (bucket, i))
            anchor.meta = dict(link.meta)
            values.append(anchor)
    for chain, value in zip(members, values, strict=True):
        chain[-1].replace_all_uses_with(value)
        for node in reversed(chain):
            graph.erase_node(node)
