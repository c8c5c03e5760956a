"""What moves around the update of a parameter: its gradient's reduction, and its gathers.

They are taken from the compiled program, where they end the backward pass and begin the next
forward pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from autopar.collectives import collective_of, ops
from autopar.compiled import Compiled
from autopar.layout import DATA_AXES, MICRO
from autopar.passes.defer import constants, defer
from autopar.program import NodeInfo, Phases, Program, State, ancestors, info, set_info

__all__ = ["STEPPED", "Moves", "moves_of"]

REDUCED = "ran in loss.backward(), joined with others"
STEPPED = "runs in optimizer.step()"
GATHERED = "runs in the next forward pass, joined with others"
AGAIN = f"{GATHERED}, and again in its backward pass"
_GATHERS = (ops.all_gather.default, ops.all_gather_replicated.default)


@dataclass(frozen=True, slots=True)
class Moves:
    """The calls around the update of one parameter.

    Args:
        name: of the parameter, with its placement at rest.
        takes: with their names, the parts of the gradient that are reduced (the gradient itself
            where none is), and what else reducing them takes.
        reduces: calls from there to the gradient, in order.
        grad: the last value of them; None where the parameter has no gradient.
        gathers: chains of gathers that make the parameter whole, one for each way of doing so.
    """

    name: str
    takes: tuple[tuple[str, fx.Node], ...]
    reduces: tuple[fx.Node, ...]
    grad: fx.Node | None
    gathers: tuple[tuple[fx.Node, ...], ...]

    def key(self) -> tuple[Any, ...]:
        """Equal where the same operators run over the same axes, whatever the sizes."""
        rows = (self.reduces, *self.gathers)
        calls = tuple(
            tuple((n.target, _axis(n), tuple(n.kwargs.items())) for n in row) for row in rows
        )
        return (*(name for name, _ in self.takes), *calls)

    def placed(self, graph: fx.Graph, prefix: str, used: Collection[str]) -> list[fx.Node]:
        """Placeholders for `takes`.

        Args:
            prefix: of their names.
            used: names that they must not have.
        """
        made: list[fx.Node] = []
        for title, node in self.takes:
            names = (f"{title}_{k}" if k else title for k in itertools.count())
            taken = {*used, *(str(n.target).removeprefix(prefix) for n in made)}
            made.append(graph.placeholder(prefix + next(n for n in names if n not in taken)))
            made[-1].meta["val"] = node.meta["val"]
        return made

    def reduced(self, graph: fx.Graph, name: str, parts: Sequence[fx.Node]) -> fx.Node:
        """Write the reductions into a graph, and return the gradient.

        Args:
            name: of the gradient.
            parts: what is `placed`.
        """
        assert self.grad is not None, "only where there is a gradient"
        values = {node: part for (_, node), part in zip(self.takes, parts, strict=True)}
        for node in self.reduces:
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            title = name if node is self.grad else node.name
            values[node] = _call(graph, node, args, kwargs, title, REDUCED)
        return values[self.grad]

    def gathered(self, graph: fx.Graph, name: str, piece: fx.Node) -> list[fx.Node]:
        """Write the gathers of `piece` into a graph, and return whole parameters named `name`."""
        wholes = []
        for chain in self.gathers:
            value = piece
            for node in chain:
                kwargs = {k: v for k, v in node.kwargs.items() if k != "wire"}  # of the gradient
                title = name if node is chain[-1] else node.name
                where = AGAIN if info(node).again else GATHERED
                value = _call(graph, node, (value, *node.args[1:]), kwargs, title, where)
            wholes.append(value)
        return wholes


def _axis(node: fx.Node) -> Any:
    return node.args[1] if collective_of(node) is not None else None


def _call(
    graph: fx.Graph, like: fx.Node, args: Any, kwargs: Any, name: str, where: str
) -> fx.Node:  # fmt: skip
    """A call like another one, under a name of its own."""
    new = graph.create_node("call_function", like.target, args, kwargs, name)
    new.meta["val"] = like.meta["val"]
    set_info(new, NodeInfo(source=where))
    return new


def moves_of(compiled: Compiled, coordinate: Mapping[str, int]) -> dict[str, Moves]:
    """What moves around the update of each parameter with a gradient, by its name.

    A sum over microbatches is no collective and left out: a part of the gradient is that of all of
    them.

    Args:
        coordinate: place of a rank on the mesh.
    """
    here = {**dict.fromkeys(compiled.annotated.mesh.names, 0), **coordinate}
    phases = compiled.phases[compiled.signature(here)]
    states = {s.name: s for s in phases.program.states}
    return {
        name: Moves(f"{name} {states[name].layout}", *row, _gathers(phases.program, states[name]))
        for name, row in _reductions(phases).items()
    }


_Row = tuple[tuple[tuple[str, fx.Node], ...], tuple[fx.Node, ...], fx.Node | None]


def _reductions(phases: Phases) -> dict[str, _Row]:
    """`takes`, `reduces` and `grad` of each parameter."""
    halves = defer(phases.backward, constants(phases), joined=False)
    graph = halves.finish.graph
    for node in list(graph.nodes):
        if collective_of(node) is not None and _axis(node) == MICRO:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    taken = [n for n in graph.nodes if n.op == "placeholder"]
    parts = [n for n, owner in zip(taken, halves.owners, strict=True) if owner >= 0]
    ends: Any = graph.output_node().args[0]
    found: dict[str, _Row] = {}
    for name, end in zip(phases.gradients, ends, strict=True):
        needed = ancestors([] if end is None else [end])
        calls = tuple(n for n in graph.nodes if n in needed and n.op != "placeholder")
        given = [n for n in taken if n in needed]
        word = "partial_grad" if calls else "grad"
        takes = tuple((word if n in parts else "constant", n) for n in given)
        found[name] = (takes, calls, end)
    return found


def _gathers(program: Program, state: State) -> tuple[tuple[fx.Node, ...], ...]:
    """The chains of gathers over data axes after which a state is cut over none."""
    found: dict[Any, tuple[fx.Node, ...]] = {}

    def follow(node: fx.Node, chain: Sequence[fx.Node]) -> None:
        layout = info(node).layouts[0]
        if chain and not set(layout.sharded).intersection(DATA_AXES):
            how = tuple((n.args[1:], n.kwargs.get("dtype")) for n in chain)
            found.setdefault(repr(how), tuple(chain))
            return
        for user in node.users:
            if user.target is ops.vary.default:
                follow(user, chain)
            elif user.target in _GATHERS and user.args[1] in DATA_AXES:
                follow(user, [*chain, user])

    if state.layout is not None and state.layout != state.used:
        follow(program.placeholders()[state.node], ())
    return tuple(found.values())
