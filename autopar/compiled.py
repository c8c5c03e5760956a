"""What a compilation yields: the annotated program, and the one that all ranks run."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from autopar.codegen import (
    Functions,
    generate,
    generate_parts,
    generate_stages,
    load,
    load_parts,
)
from autopar.collectives import collective_of, moved_bytes
from autopar.errors import InputError
from autopar.layout import MICRO, Atom
from autopar.memory import peak_bytes, saved_bytes
from autopar.passes.accumulate import Accumulation
from autopar.passes.merge import place_phases
from autopar.passes.split import Staging
from autopar.program import Choice, Phases, Program, info, tensor_inputs
from autopar.rules.factors import specs
from autopar.schedule import Stages, Step
from autopar.sizes import Sizes
from autopar.strategies.remat import Remat
from autopar.text import show

__all__ = ["Compiled", "uneven_atoms"]


def uneven_atoms(program: Program) -> tuple[Atom, ...]:
    """The cut atoms whose pieces differ in size; they decide which ranks share a program."""
    found: dict[Atom, None] = {}
    for node, spec in specs(program).items():
        record = info(node)
        layouts = [*record.layouts, *([record.rest] if record.rest else [])]
        if node.op == "call_function":
            layouts += [
                spec.operand_layout(i, record.choice, program.mesh)
                for i in range(len(tensor_inputs(node)))
            ]
        for layout in layouts:
            for dim in layout.dims:
                for atom in dim:
                    k = 1
                    for axis in atom.axes:
                        k *= program.mesh.sizes[axis]
                    if atom.size % k:  # and as it is when the inner axes are gathered
                        for i in range(len(atom.axes)):
                            found[Atom(atom.size, atom.axes[: i + 1])] = None
    return tuple(found)


@dataclass(slots=True)
class Compiled:
    """A compiled step.

    Args:
        annotated: the global graph with a choice per node and axis.
        atoms: uneven cuts; ranks with the same local sizes of them are at one place.
        phases: the differentiated program with the sizes of each place (distinct tuple of them).
        shared: the one program that all ranks run; sizes that differ are bound when it is loaded.
            Without, each place runs its own.
        sizes: those, if there are any.
        remat: what is computed again in the backward pass.
        accumulation: the same program over microbatches, which are an axis of its mesh.
        staging: the same over microbatches and pipeline stages.
        decisions: what strategies chose for each call of the captured graph.
    """

    annotated: Program
    title: str
    atoms: tuple[Atom, ...]
    phases: dict[tuple[int, ...], Phases] = field(default_factory=dict)
    decisions: Mapping[str, Choice] = field(default_factory=dict)
    shared: Phases | None = None
    sizes: Sizes | None = None
    remat: Remat = Remat()
    accumulation: Accumulation | None = None
    staging: Staging | None = None

    @property
    def over_microbatches(self) -> bool:
        """Whether microbatches run in turns, on ranks that hold the rows of all."""
        return self.accumulation is not None or self.staging is not None

    def place(self, coordinate: Mapping[str, int]) -> int:
        """The number of the place at a coordinate."""
        return list(self.places()).index(self.signature(coordinate))

    def signature(self, coordinate: Mapping[str, int]) -> tuple[int, ...]:
        """Local sizes of the uneven atoms at `coordinate`."""
        return tuple(a.local_sizes(self.annotated.mesh, coordinate) for a in self.atoms)

    def places(self) -> dict[tuple[int, ...], dict[str, int]]:
        """A coordinate of every place, the one with the largest pieces first."""
        mesh = self.annotated.mesh
        axes = [a for a in mesh.names if any(a in atom.axes for atom in self.atoms)]
        found: dict[tuple[int, ...], dict[str, int]] = {}
        for index in itertools.product(*(range(mesh.sizes[a]) for a in axes)):
            coordinate = {**dict.fromkeys(mesh.names, 0), **dict(zip(axes, index, strict=True))}
            found.setdefault(self.signature(coordinate), coordinate)
        return found

    def bind(self, phases: Phases) -> None:
        """Let all ranks run `phases`."""
        self.shared = phases
        places = list(self.places())
        many = len(places) > 1
        self.phases = {p: place_phases(phases, k) if many else phases for k, p in enumerate(places)}

    def of(self, rank: int = 0) -> Phases:
        """The phases that `rank` runs."""
        return self.phases[self.signature(self.annotated.mesh.coordinate(rank))]

    def functions(self) -> dict[tuple[int, ...], Functions]:
        """The generated functions that the ranks of each place run: the same for all."""
        if self.shared is not None:
            found = load(generate(self.shared, self.title), f"<virtual {self.title}>")
            return dict.fromkeys(self.phases, found)
        return {
            key: load(generate(phases, self.title), f"<virtual {self.title} {key}>")
            for key, phases in self.phases.items()
        }

    def step(self, coordinate: Mapping[str, int]) -> Step:
        """What runs when over microbatches, with the sizes of a rank."""
        assert self.accumulation is not None, "only with accumulate="
        here = {**dict.fromkeys(self.annotated.mesh.names, 0), **coordinate}
        return self.accumulation.step.at(self.place(here))

    def stages(self, coordinate: Mapping[str, int]) -> Stages:
        """What a rank of a pipeline runs, with its sizes."""
        assert self.staging is not None, "only with an axis pp"
        here = {**dict.fromkeys(self.annotated.mesh.names, 0), **coordinate}
        found = self.staging.ranks[here["pp"]]
        return dataclasses.replace(found, step=found.step.at(self.place(here)))

    def held(self, coordinate: Mapping[str, int]) -> Collection[str]:
        """Names of the states that the rank at a coordinate needs: all, but in a pipeline."""
        if self.staging is None:
            return [s.name for s in self.annotated.states]
        return self.staging.ranks[coordinate["pp"]].held

    def stage_rank(self, rank: int) -> int:
        """Where a rank stands in the pipeline."""
        mesh = self.annotated.mesh
        return mesh.coordinate(rank * mesh.sizes[MICRO])["pp"]

    def stage_functions(self, rank: int) -> dict[str, Callable[..., Any]]:
        """The generated functions of a rank of a pipeline, by name."""
        assert self.staging is not None, "only with an axis pp"
        name = f"<stages of {self.title} on rank {rank} of the pipeline>"
        return load_parts(self.stage_code(rank), name)

    def stage_code(self, rank: int) -> str:
        """The generated Python of a rank of a pipeline."""
        assert self.staging is not None, "only with an axis pp"
        return generate_stages(self.staging, rank, self.annotated, self.title)

    def parts(self) -> dict[str, Callable[..., Any]]:
        """The generated functions of a step over microbatches, by name."""
        return load_parts(self.code(), f"<microbatches of {self.title}>")

    def code(self, rank: int = 0) -> str:
        """The generated Python of `rank`: the same for all."""
        if self.staging is not None:
            return self.stage_code(self.stage_rank(rank))
        if self.accumulation is not None:
            return generate_parts(self.accumulation, self.annotated, self.title)
        return generate(self.of(rank) if self.shared is None else self.shared, self.title)

    def graph(self, phase: str = "forward", rank: int = 0) -> fx.GraphModule:
        """The graph of a phase: 'global', 'spmd', 'forward' or 'backward'.

        In a pipeline also that of a function of a stage on the rank, such as 'F0' (forward of stage
        0), 'B0', 'I0' or 'W0', and of 'count', 'start', 'end' and 'finish'.

        Raises:
            InputError: there is no such phase.
        """
        phases = self.of(rank)
        graphs = {
            "global": self.annotated.graph,
            "spmd": phases.program.graph,
            "forward": phases.forward,
            "backward": phases.backward,
        }
        if self.staging is not None:
            graphs.update(self.staging.graphs[self.stage_rank(rank)])
        if phase not in graphs:
            raise InputError(f"There is no phase {phase!r}.", expected=", ".join(graphs))
        return fx.GraphModule(graphs[phase], graphs[phase].graph)  # a plain one: tools know it

    def text(self, level: str = "spmd", rank: int = 0) -> str:
        """The program of `rank` as text that parses back: level 'annotated' or 'spmd'.

        Raises:
            InputError: there is no such level.
        """
        coordinate = self.annotated.mesh.coordinate(rank)
        if level == "annotated":
            return show(self.annotated, coordinate)
        if level == "spmd":
            return show(self.of(rank).program, coordinate)
        raise InputError(f"There is no level {level!r}.", expected="annotated, spmd")

    @property
    def plan(self) -> dict[str, Any]:
        """Placements at rest and the choice of every call, ready for JSON.

        `parallelize(model, mesh, plan=...)` takes it back, edited or not. `calls` are those of the
        captured graph, `inserted` those that passes write in their place, `zero` the stages of the
        states that ZeRO cuts at rest.
        """
        program = self.of_any().program
        nodes = self.annotated.graph.graph.nodes
        final = {n.name: info(n).choice for n in nodes if n.op == "call_function"}
        new = {name: c for name, c in final.items() if c and name not in self.decisions}
        held = {n.name: info(n) for n in nodes if n.op == "placeholder"}
        stages = {s.name: held[s.node].zero for s in program.states}
        return {
            "mesh": dict(program.mesh.sizes),
            "states": {s.name: str(s.layout) for s in program.states},
            "inputs": {i.name: str(i.layout) for i in program.inputs},
            "calls": {name: dict(final.get(name, c)) for name, c in self.decisions.items()},
            "zero": {name: stage for name, stage in stages.items() if stage},
            "inserted": {name: dict(c) for name, c in new.items()},
        }

    def plan_json(self) -> str:
        """The plan as JSON text."""
        return json.dumps(self.plan, indent=1)

    def of_any(self) -> Phases:
        """The phases of some place."""
        return next(iter(self.phases.values()))

    def traffic(self) -> list[tuple[str, str, str, int, float]]:
        """(phase, axis, collective, count, bytes per rank) of one step."""
        phases = self.of_any()
        rows: dict[tuple[str, str, str], list[float]] = {}
        for phase, gm in (("forward", phases.forward), ("backward", phases.backward)):
            for node in gm.graph.nodes:
                row = collective_of(node)
                if row is None or row.factor == 0:
                    continue
                axis = str(node.args[1])
                entry = rows.setdefault((phase, axis, row.name), [0, 0.0])
                entry[0] += 1
                entry[1] += moved_bytes(node, phases.program.mesh.sizes[axis])
        return [(*key, int(n), total) for key, (n, total) in sorted(rows.items())]

    @property
    def peak_bytes(self) -> int:
        """Most bytes that a step holds on a rank beside states and inputs, by liveness."""
        return max(map(peak_bytes, self.phases.values()))

    @property
    def saved_bytes(self) -> int:
        """Bytes that a rank holds from the forward to the backward pass."""
        return max(map(saved_bytes, self.phases.values()))

    def explain(self) -> str:
        """What was done, as text: placements, the traffic of a step and its memory."""
        program = self.of_any().program
        width = max((len(s.name) for s in program.states), default=4)
        lines = [f"{self.title} on {program.mesh}", ""]
        lines.append("parameters and buffers at rest")
        for s in program.states:
            tied = f"  tied: {', '.join(s.aliases)}" if s.aliases else ""
            lines.append(f"  {s.name:<{width}}  {s.layout}{tied}")
        lines += ["", "inputs"]
        lines += [f"  {i.name:<{width}}  {i.layout}" for i in program.inputs]
        lines += ["", "communication of one step, per rank"]
        for phase, axis, name, count, total in self.traffic():
            lines.append(f"  {phase:<9} {axis:<4} {name:<22} x{count:<5} {total / 2**20:10.3f} MiB")
        lines += ["", "memory of one step, per rank, beside parameters, buffers and inputs"]
        for what, size in (("kept for backward", self.saved_bytes), ("peak", self.peak_bytes)):
            lines.append(f"  {what:<38} {size / 2**20:16.3f} MiB")
        return "\n".join(lines)
