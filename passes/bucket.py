"""Join collectives on parameters and their gradients: few large messages replace many small."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from autopar.collectives import members_of, ops
from autopar.program import NodeInfo, Phases, copied, graph_module, info, set_info
from autopar.roll import runs

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
    It holds whole repeated blocks where one is not too large, so that code can loop over them.

    Before:
        g1 = autopar.all_reduce(d1, "dp", "sum"); g0 = autopar.all_reduce(d0, "dp", "sum")
    After:
        g1, g0 = autopar.all_reduce_bucket([d1, d0], "dp")

    Args:
        cap_bytes: most that a bucket of several reductions holds.
        cut_cap_bytes: most that a bucket of several gathers or scatters holds: what is cut at rest
            is whole only while it is in one, so large buckets would cost the memory that it saves.
    """

    cap_bytes: int = 25 * 2**20
    cut_cap_bytes: int = 8 * 2**20
    name: str = "bucket"

    def run(self, phases: Phases) -> Phases:
        """Rewrite both graphs."""
        states = {s.node for s in phases.program.states}
        forward, _ = copied(phases.forward.graph)
        self.gathers(forward, states)
        backward, _ = copied(phases.backward.graph)
        self.gathers(backward, states)
        self.reductions(backward)
        return phases.replace(
            forward=graph_module(forward, phases.forward),
            backward=graph_module(backward, phases.backward),
        )

    def gathers(self, graph: fx.Graph, states: Collection[str]) -> None:
        """Join the gathers of states, given by the names of their placeholders.

        Other values that came into the graph, such as what the forward pass has left of every
        layer, are gathered one by one: joined, all of them would be whole at once.
        """
        chains = [[n] for n in graph.nodes if n.target in _GATHERS and _name(n.args[0]) in states]
        for members in self.filled(chains, _blocks(graph)):
            _join(graph, members, members[0][0], before=True)

    def reductions(self, graph: fx.Graph) -> None:
        """Join the reductions that end gradients."""
        output = graph.output_node()
        grads: Any = output.args[0]
        ends = dict.fromkeys(g for g in grads if isinstance(g, fx.Node))
        chains = [chain for g in ends if (chain := _tail(g, output))]
        order = {n: i for i, n in enumerate(graph.nodes)}
        chains.sort(key=lambda c: order[c[0]])
        for members in self.filled(chains, _blocks(graph)):
            _join(graph, members, max((c[0] for c in members), key=lambda n: order[n]))

    def filled(
        self, chains: Iterable[list[fx.Node]], blocks: Mapping[fx.Node, int]
    ) -> list[list[list[fx.Node]]]:
        """Buckets of chains that go through the same collectives, in order of the chains."""
        kinds: dict[Any, list[list[fx.Node]]] = {}
        for chain in chains:
            operand: Any = chain[0].args[0]
            given = (n.kwargs.get(name) for n in chain for name in ("dtype", "wire"))
            dtypes = operand.meta["val"].dtype, *given
            kinds.setdefault((*((n.target, n.args[1]) for n in chain), dtypes), []).append(chain)
        return [bucket for alike in kinds.values() for bucket in self.cut(alike, blocks)]

    def cut(
        self, chains: list[list[fx.Node]], blocks: Mapping[fx.Node, int]
    ) -> Iterator[list[list[fx.Node]]]:
        """Buckets of at most the cap, or of one that is larger."""
        reduced = all(n.target is ops.all_reduce.default for n in chains[0])
        cap = self.cap_bytes if reduced else self.cut_cap_bytes
        place = [blocks.get(chain[0], -1) for chain in chains]
        of_block = Counter[int]()
        for chain, block in zip(chains, place, strict=True):
            of_block[block] += _size_bytes(chain)
        bucket: list[list[fx.Node]] = []
        held = 0
        for i, (chain, block) in enumerate(zip(chains, place, strict=True)):
            turns = i > 0 and block != place[i - 1]
            coming = of_block[block] if turns and block >= 0 else _size_bytes(chain)
            if bucket and held + coming > cap:
                yield bucket
                bucket, held = [], 0
            bucket.append(chain)
            held += _size_bytes(chain)
        if bucket:
            yield bucket


def _name(operand: fx.Node) -> str:
    """The name of an operand that came into the graph, '' for others."""
    return operand.name if operand.op == "placeholder" else ""


def _size_bytes(chain: list[fx.Node]) -> int:
    """What the message of a chain holds: the whole of what is gathered or reduced."""
    operand: Any = chain[0].args[0]
    values = (operand.meta["val"], chain[0].meta["val"])
    return int(max(v.numel() * v.itemsize for v in values))


def _blocks(graph: fx.Graph) -> dict[fx.Node, int]:
    """The number of the repeated block that each call lies in, if it does."""
    blocks = [block for run in runs(graph) for block in run.blocks]
    return {node: i for i, block in enumerate(blocks) for node in block}


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
        kwargs = dict(links[0].kwargs)
        if links[0].target in _GATHERS:
            kwargs.pop("wire", None)  # it was for the gradient, which is taken by now
        with place(anchor):
            bucket = graph.call_function(_BUCKETS[links[0].target], tuple(args), kwargs)
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
