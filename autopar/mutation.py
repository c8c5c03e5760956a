"""Wrong programs made from a right one, one mistake each, to prove that verification finds them.

The mistakes follow the kinds of silent errors of parallel training that TrainVerify (SOSP 2025)
seeds and those that a compiler like this one can make: a collective missing, doubled, late, of the
wrong kind, over the wrong axis or by one rank only; a wrong piece, order or scale; a gradient left
out, exchanged, not reduced or reduced over an axis too many; the wrong adjoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from autopar.collectives import ops
from autopar.compiled import Compiled
from autopar.mistakes import Change, changes, harmless, typed_changes
from autopar.passes.bucket import Bucket
from autopar.passes.differentiate import Differentiate
from autopar.passes.trace import Traces
from autopar.program import Phases, Program, graph_module
from autopar.static import reaching

__all__ = ["Mutant", "edited", "mutants"]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One mistake.

    Args:
        where: phase ('spmd', 'forward' or 'backward') and node.
        kind: the mistake, in words.
        build: makes the changed program; a compiler error counts as caught.
        equal: why the change does not alter any number, '' for a true mistake.
    """

    where: str
    kind: str
    build: Callable[[], Compiled]
    equal: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.kind}"


@dataclass(slots=True)
class _Apart(Compiled):
    """A step in which one rank runs a program of its own."""

    odd: int = -1

    def signature(self, coordinate: Mapping[str, int]) -> tuple[int, ...]:
        usual = Compiled.signature(self, coordinate)
        return (*usual, -1) if self.annotated.mesh.rank(coordinate) == self.odd else usual


def mutants(compiled: Compiled) -> Iterator[Mutant]:
    """Every program with one mistake, in the program of all ranks that share it or of one rank."""
    mesh = compiled.annotated.mesh
    for key, phases in compiled.phases.items():
        for phase in ("forward", "backward"):
            gm = getattr(phases, phase)
            for i, node in enumerate(gm.graph.nodes):
                where = f"{phase} {node.name}"
                if node.target is ops.shift.default and not _shifts(compiled, key, node):
                    continue
                for kind, change in changes(node, mesh):
                    mutant = edited(gm, i, change)
                    if mutant is None:
                        continue
                    wrong = phases.replace(**{phase: mutant})
                    changed = _with(compiled, key, wrong)
                    yield Mutant(where, kind, _fixed(changed), harmless(node, kind))
                    if kind in ("left out", "doubled") or kind.startswith("over"):
                        apart = _one_rank(compiled, key, wrong)
                        if apart is not None:
                            yield Mutant(where, f"{kind} by one rank", _fixed(apart))
    assert compiled.shared is not None, "set by every compilation"
    program = compiled.shared.program
    reach = reaching(program.graph.graph, compiled.shared.roots)
    for i, node in enumerate(program.graph.graph.nodes):
        for kind, change in typed_changes(node, mesh, node in reach):
            mutant = edited(program.graph, i, change)
            if mutant is not None:
                build = _again(compiled, program.replace(graph=mutant))
                yield Mutant(f"spmd {node.name}", kind, build, harmless(node, kind))


def _with(compiled: Compiled, key: Any, phases: Phases) -> Compiled:
    programs = {**compiled.phases, key: phases}
    return Compiled(compiled.annotated, compiled.title, compiled.atoms, programs)


def _one_rank(compiled: Compiled, key: Any, phases: Phases) -> Compiled | None:
    """The step in which only the last of the ranks that share a program makes the mistake."""
    mesh = compiled.annotated.mesh
    ranks = [r for r in range(mesh.size) if compiled.signature(mesh.coordinate(r)) == key]
    if len(ranks) < 2:
        return None
    programs = {**compiled.phases, (*key, -1): phases}
    return _Apart(compiled.annotated, compiled.title, compiled.atoms, programs, odd=ranks[-1])


def _shifts(compiled: Compiled, key: Any, node: Any) -> bool:
    """Whether any rank of a program holds a piece that does not start at 0."""
    mesh = compiled.annotated.mesh
    axis, sizes = str(node.args[1]), list(node.args[2])
    here = [mesh.coordinate(r) for r in range(mesh.size)]
    return any(sum(sizes[: c[axis]]) for c in here if compiled.signature(c) == key)


def _fixed(compiled: Compiled) -> Callable[[], Compiled]:
    return lambda: compiled


def _again(compiled: Compiled, wrong: Program) -> Callable[[], Compiled]:
    """Differentiate a lowered graph with a mistake in it."""

    def build() -> Compiled:
        gradients = bool(compiled.of_any().gradients)
        differentiate = Differentiate(gradients=gradients, traces=Traces(sizes=compiled.sizes))
        phases = Bucket().run(differentiate.run(wrong))
        made = Compiled(compiled.annotated, compiled.title, compiled.atoms, sizes=compiled.sizes)
        made.bind(phases)
        return made

    return build


def edited(gm: fx.GraphModule, index: int, change: Change) -> fx.GraphModule | None:
    """A copy of a graph with a mistake at the node of an index; None where none can be made."""
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    out = graph.graph_copy(gm.graph, mapping)
    for before, after in mapping.items():
        after.meta = dict(before.meta)
    graph.output(out)
    graph.output_node().meta = dict(gm.graph.output_node().meta)
    if not change(graph, list(graph.nodes)[index]):
        return None
    graph.lint()
    return graph_module(graph)
