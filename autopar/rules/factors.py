"""Find the factors of every value: the rule of each call, refined until neighbours agree.

A linear whose 2304 outputs are later viewed as 3 x 12 x 64 gets these three factors for its rows,
so that an axis may cut the 12 heads. Refinement runs along edges until nothing changes; where two
uses cannot be reconciled (12 x 64 against 8 x 96) each keeps its own factors.
"""

from __future__ import annotations

import operator
from collections import deque

from torch import Tensor, fx

from autopar.program import Program, tensor_inputs
from autopar.rules.families import refine
from autopar.rules.registry import rule_of
from autopar.rules.spec import Factors, Spec

__all__ = ["Edge", "edges_of", "producer", "specs"]

Edge = tuple[fx.Node, int, fx.Node, int]
"""(producer, result number, consumer, operand number)."""


def producer(node: fx.Node) -> tuple[fx.Node, int]:
    """The call that makes the value of `node`, and which of its results it is."""
    if node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, fx.Node) and isinstance(index, int)
        return source, index
    return node, 0


def edges_of(program: Program) -> list[Edge]:
    """All tensor edges between calls, results taken apart."""
    edges = []
    for node in program.graph.graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        for i, operand in enumerate(tensor_inputs(node)):
            source, result = producer(operand)
            edges.append((source, result, node, i))
    return edges


def specs(program: Program) -> dict[fx.Node, Spec]:
    """The refined spec of every call and placeholder."""
    table: dict[fx.Node, Spec] = {}
    for node in program.graph.graph.nodes:
        if node.op == "placeholder":
            f = Factors()
            val = node.meta["val"]
            dims = f.like(val.shape if isinstance(val, Tensor) else (), "d")
            table[node] = Spec(f.sizes, (), (dims,))
        elif node.op == "call_function" and node.target is not operator.getitem:
            table[node] = rule_of(node)
    edges = edges_of(program)
    touching: dict[fx.Node, list[Edge]] = {}
    for edge in edges:
        touching.setdefault(edge[0], []).append(edge)
        if edge[2] is not edge[0]:
            touching.setdefault(edge[2], []).append(edge)
    queue = deque(edges)
    queued = set(edges)
    while queue:
        edge = queue.popleft()
        queued.discard(edge)
        for node in _agree(table, edge):
            for other in touching[node]:
                if other not in queued:
                    queued.add(other)
                    queue.append(other)
    return table


def _agree(table: dict[fx.Node, Spec], edge: Edge) -> list[fx.Node]:
    """Refine both ends of an edge; returns the calls that changed."""
    source, result, sink, operand = edge
    changed: list[fx.Node] = []
    for d in range(len(table[source].outputs[result])):
        a = table[source].outputs[result][d]
        b = table[sink].inputs[operand][d]
        sizes_a = [table[source].sizes[f] for f in a]
        sizes_b = [table[sink].sizes[f] for f in b]
        if sizes_a == sizes_b or not a or not b:
            continue
        common = refine(sizes_a, sizes_b)
        if common is None:
            continue
        for node, factors in ((source, a), (sink, b)):
            at = 0
            for factor in factors:
                start, total = at, 1
                while total < table[node].sizes[factor]:
                    total *= common[at]
                    at += 1
                if at - start > 1:
                    table[node] = table[node].split(factor, common[start:at])
                    changed.append(node)
    return changed
