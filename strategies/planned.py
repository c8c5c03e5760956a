"""A plan given by the user: the decisions of an earlier compilation, perhaps edited."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import fx

from autopar.errors import PlanError
from autopar.layout import Atom, Layout, Mesh
from autopar.program import Choice, Input, Program, State, call_text, info, update_info
from autopar.rules.factors import producer, specs
from autopar.rules.spec import Spec
from autopar.strategies.follow import Follow, cuttable, place

__all__ = ["Inserted", "Planned", "read_plan"]

_PARTS = ("mesh", "states", "inputs", "calls")
_INSERTED, _ZERO = "inserted", "zero"
_OPTIONAL = (_INSERTED, _ZERO)  # may be left out


def read_plan(given: Any) -> dict[str, Any]:
    """The plan in a dict, in JSON text or in a file.

    Raises:
        PlanError: there is no such file, or what it holds is no plan.
    """
    plan, where = given, "plan="
    if isinstance(given, os.PathLike) or (isinstance(given, str) and given.lstrip()[:1] != "{"):
        where = f"file {os.fspath(given)}"
        try:
            plan = Path(given).read_text(encoding="utf-8")
        except OSError as error:
            raise PlanError(
                f"The plan cannot be read: {error.strerror}.",
                where=where,
                expected="a dict as Compiled.plan gives it, its JSON text, or the path of a file",
            ) from error
    if isinstance(plan, str):
        try:
            plan = json.loads(plan)
        except json.JSONDecodeError as error:
            raise PlanError(f"The plan is not JSON: {error}.", where=where) from error
    if isinstance(plan, Mapping):
        plan = {**dict.fromkeys(_OPTIONAL, {}), **plan}
    if not isinstance(plan, Mapping) or any(
        not isinstance(plan.get(k), Mapping) for k in (*_PARTS, *_OPTIONAL)
    ):
        raise PlanError(
            "This is not a plan.",
            where=where,
            expected=f"a dict with {', '.join(_PARTS)}, each a dict, as Compiled.plan gives it",
        )
    unknown = next((part for part in plan if part not in (*_PARTS, *_OPTIONAL)), None)
    if unknown is not None:
        raise PlanError(
            f"A plan has no part {unknown!r}.",
            where=where,
            expected=", ".join((*_PARTS, *_OPTIONAL)),
        )
    for name, stage in plan[_ZERO].items():
        if stage not in (1, 2, 3) or name not in plan["states"]:
            raise PlanError(
                f"The plan has stage {stage!r} of ZeRO for {name!r}.",
                where=f"{where}, {_ZERO}[{name!r}]",
                expected="1, 2 or 3, for a name in states",
            )
    return {part: dict(plan[part]) for part in (*_PARTS, *_OPTIONAL)}


@dataclass(frozen=True, slots=True)
class Planned:
    """Place states and inputs and choose for calls as a plan says.

    Placements are by axis name, so a plan holds for other sizes of its axes where they can be cut
    so. A call that the plan leaves out follows its operands.

    Args:
        plan: as `Compiled.plan` gives it.
    """

    plan: Mapping[str, Any]

    def annotate(self, program: Program) -> None:
        """Annotate every node on all axes; nothing is written where the plan does not fit.

        Raises:
            PlanError: an entry names what is not there, or asks for what cannot be.
        """
        mesh, table = program.mesh, specs(program)
        self.check_mesh(mesh)
        chosen = self.decided(program, table)
        for node in table:
            _choose(program, node, chosen.get(node, {}), table)
        self.keep_cut(program)

    def fits(self, program: Program) -> bool:
        """Whether every entry has its place in `program`."""
        try:
            self.decided(program, specs(program))
        except PlanError:
            return False
        return True

    def place_states(self, program: Program) -> None:
        """Place the states of `program` that the plan knows; the rest is left to others.

        Raises:
            PlanError: a state cannot be held so.
        """
        table, nodes = specs(program), program.placeholders()
        for state in program.states:
            if state.name in self.plan["states"]:
                node, entry = nodes[state.node], f"states[{state.name!r}]"
                layout = _layout(entry, self.plan["states"][state.name], state, program.mesh)
                update_info(node, choice=_held(entry, layout, state, table[node], program.mesh))
        self.keep_cut(program)

    def keep_cut(self, program: Program) -> None:
        """Parameters that are cut over data axes are so at rest, and gathered where they are used.

        Raises:
            PlanError: a state cannot be held so.
        """
        nodes = program.placeholders()
        for state in program.states:
            if state.name in self.plan["states"]:
                entry = f"states[{state.name!r}]"
                layout = _layout(entry, self.plan["states"][state.name], state, program.mesh)
                if layout != replace(state, layout=layout).used:
                    stage = self.plan[_ZERO].get(state.name, 3)
                    update_info(nodes[state.node], rest=layout, zero=stage)

    def check_mesh(self, mesh: Mesh) -> None:
        """The plan must be for axes of these names, outermost first.

        Raises:
            PlanError: it is for others.
        """
        axes = list(self.plan["mesh"])
        if axes == list(mesh.names):
            return
        lacking = [a for a in axes if a not in mesh.names]
        raise PlanError(
            f"The plan is for the axes {', '.join(axes)}, the mesh is '{mesh}'.",
            where=f"axis {', '.join(lacking)}" if lacking else "",
            expected="a mesh with the same axis names in the same order, of any sizes",
            hint="give an axis that should do nothing the size 1",
        )

    def decided(self, program: Program, table: Mapping[fx.Node, Spec]) -> dict[fx.Node, Choice]:
        """The choices that the plan holds for the nodes of `program`."""
        calls = {n.name: n for n in table if n.op == "call_function"}
        states, inputs = self.plan["states"], self.plan["inputs"]
        for part, known in (
            ("states", [s.name for s in program.states]),
            ("inputs", [i.name for i in program.inputs]),
            ("calls", list(calls)),
        ):
            self.check_names(part, known)
        nodes = program.placeholders()
        chosen: dict[fx.Node, Choice] = {}
        held: State | Input
        for part, entries, members in (
            ("states", states, program.states),
            ("inputs", inputs, program.inputs),
        ):
            for held in members:
                node = nodes[held.node]
                entry = f"{part}[{held.name!r}]"
                layout = _layout(entry, entries[held.name], held, program.mesh)
                chosen[node] = _held(entry, layout, held, table[node], program.mesh)
        for name, choice in self.plan["calls"].items():
            node = calls[name]
            chosen[node] = _checked(f"calls[{name!r}]", node, table[node], choice, program.mesh)
        return chosen

    def check_names(self, part: str, known: list[str]) -> None:
        """Every entry must be something's, and every state and input must have one."""
        entries = self.plan[part]
        for name in entries:
            if name not in known:
                close = difflib.get_close_matches(name, known, 3, 0.5)
                raise PlanError(
                    f"The plan has an entry for {name!r}, which is none of the {part} of this "
                    "program.",
                    where=f"{part}[{name!r}]",
                    expected=f"one of {_some(close or known)}",
                    hint="call the model with the arguments that the plan was made for, or remove "
                    "the entry",
                )
        lacking = [] if part == "calls" else [n for n in known if n not in entries]
        if lacking:
            raise PlanError(
                f"The plan has no entry for {lacking[0]!r}.",
                where=f"{part}",
                expected=f"an entry for each of the {part}: {_some(known)}",
                hint=f"add {lacking[0]!r} with a layout such as those of the others",
            )


@dataclass(frozen=True, slots=True)
class Inserted:
    """Choose for the calls that passes have inserted as a plan says.

    Where other calls are inserted than when the plan was made, because an edit changed what is
    written out, they follow their operands.

    Args:
        plan: as `Compiled.plan` gives it.
    """

    plan: Mapping[str, Any]

    def annotate(self, program: Program) -> None:
        """Annotate the nodes that have no choice.

        Raises:
            PlanError: an entry asks for what cannot be, or a result leaves as a varying copy.
        """
        table = specs(program)
        entries = self.plan[_INSERTED]
        new = [n for n in table if not info(n).choice]
        known = set(entries) == {n.name for n in new}
        for node in new:
            choice: Choice = {}
            if known:
                entry = f"{_INSERTED}[{node.name!r}]"
                choice = _checked(entry, node, table[node], entries[node.name], program.mesh)
            _choose(program, node, choice, table)
        _check_results(program)


def _choose(program: Program, node: fx.Node, given: Choice, table: Mapping[fx.Node, Spec]) -> None:
    """Write a choice into the record of `node`; on the axes that it lacks, the node follows."""
    choice = dict(given)
    for axis in program.mesh.names:
        if axis not in choice:
            update_info(node, choice=choice)
            choice[axis] = Follow(axis).option(program, node, table)
    update_info(node, choice={axis: choice[axis] for axis in program.mesh.names})
    place(node, table[node], program.mesh)


def _check_results(program: Program) -> None:
    """No result that carries a gradient may leave as a varying copy: who sums its gradient?"""
    for value in program.graph.graph.output_node().all_input_nodes:
        source, result = producer(value)
        layouts = info(source).layouts
        if layouts and layouts[result].varying and value.meta.get("requires_grad", False):
            raise PlanError(
                f"A result of the model cannot leave as the varying copy {layouts[result]}.",
                where=f"calls[{source.name!r}]: {call_text(source)}",
                expected="'R', a factor or a partial sum on " + ", ".join(layouts[result].varying),
            )


def _layout(entry: str, text: Any, held: State | Input, mesh: Mesh) -> Layout:
    """The layout that an entry gives; an input of one atom a dim may have another batch size."""
    try:
        layout = Layout.parse(str(text))
    except ValueError as error:
        raise PlanError(
            f"{text!r} is not a layout.",
            where=entry,
            expected="one size a dim, with the axes that cut it, such as '[64, 16{tp}]'",
        ) from error
    cut = [axis for axis in layout.sharded if axis not in mesh.names]
    if cut:
        raise PlanError(
            f"The plan cuts {held.name} over the axis '{cut[0]}', which the mesh '{mesh}' does "
            "not have.",
            where=f"{entry}: {text}",
            expected=f"axes from {', '.join(mesh.names)}",
        )
    if isinstance(held, Input) and len(layout.dims) == len(held.shape):
        dims = zip(layout.dims, held.shape, strict=True)
        layout = replace(layout, dims=tuple(_resized(dim, n) for dim, n in dims))
    if layout.shape != held.shape or layout.partial or layout.varying:
        raise PlanError(
            f"{held.name} cannot be held as {text}.",
            where=entry,
            expected=f"a tensor of shape {list(held.shape)}, whole or cut on each axis",
        )
    return layout.normal(mesh)


def _resized(dim: tuple[Atom, ...], n: int) -> tuple[Atom, ...]:
    return (Atom(n, dim[0].axes),) if len(dim) == 1 and dim[0].size != n else dim


def _held(entry: str, layout: Layout, held: State | Input, spec: Spec, mesh: Mesh) -> Choice:
    """The choice of a placeholder that gives `layout`."""
    choice: dict[str, str] = dict.fromkeys(mesh.names, "R")
    rest = layout
    if isinstance(held, State):
        layout = (replace(held, layout=layout).used or layout).normal(mesh)
    for axis in mesh.names:
        if axis not in layout.sharded:
            continue
        d, i = layout.sharded[axis]
        for option in _runs(spec.outputs[0][d]):
            have = spec.result_layout(0, {**choice, axis: option}, mesh).normal(mesh)
            if not cuttable(spec, option, axis, choice, mesh) or axis not in have.sharded:
                continue
            if have.key(axis, mesh) == layout.key(axis, mesh):
                choice[axis] = option
                break
    made = spec.result_layout(0, choice, mesh).normal(mesh)
    why = "" if made == layout else "that cut runs through no factor of its uses"
    if isinstance(held, State) and not why:
        why = _unstorable(held, rest, mesh)
    if why:
        raise PlanError(
            f"{held.name} cannot be held as {rest} on '{mesh}': {why}.",
            where=entry,
            expected="a layout such as " + _some(_examples(held, spec, mesh)),
            hint="hold it whole, or cut another dim",
        )
    return choice


def _unstorable(held: State, layout: Layout, mesh: Mesh) -> str:
    """Why a state cannot be at rest in `layout`, '' where it can."""
    if layout.sharded and not held.is_parameter:
        return "buffers and constants are held whole"
    for dim in layout.dims:
        cut = [atom for atom in dim if atom.axes]
        if len(cut) > 1:
            return "two axes cut different factors of one dim"
        for axis in cut[0].axes if cut else ():
            if len(dim) > 1 and layout.key(axis, mesh)[-1] != "even":
                return "its pieces are uneven and not in one run"
    return ""


def _examples(held: State | Input, spec: Spec, mesh: Mesh) -> list[str]:
    """Layouts that a placeholder may have, whole or cut over the last axis."""
    axis = mesh.names[-1]
    options = ["R", *(f for f in spec.sizes if cuttable(spec, f, axis, {}, mesh))]
    layouts = [spec.result_layout(0, {axis: option}, mesh).normal(mesh) for option in options]
    fine = [x for x in layouts if isinstance(held, Input) or not _unstorable(held, x, mesh)]
    return list(dict.fromkeys(map(str, fine)))


def _checked(entry: str, node: fx.Node, spec: Spec, choice: Any, mesh: Mesh) -> Choice:
    """The choice of a call, where it is one."""
    if not isinstance(choice, Mapping):
        raise PlanError(
            f"{choice!r} is no choice.", where=entry, expected="a dict from axes to options"
        )
    known = ["R", "V", *(f"P{k}" for k in range(len(spec.linear)))]
    for axis, option in choice.items():
        if axis not in mesh.names:
            raise PlanError(
                f"The call {node.name} has an option for the axis '{axis}', which the mesh "
                f"'{mesh}' does not have.",
                where=f"{entry}: {call_text(node)}",
                expected=f"axes from {', '.join(mesh.names)}",
            )
        if option not in known and any(p not in spec.sizes for p in str(option).split("+")):
            close = difflib.get_close_matches(str(option), spec.sizes, 1)
            raise PlanError(
                f"{option!r} is no factor of the call {node.name}.",
                where=f"{entry}[{axis!r}]: {call_text(node)}",
                expected="one of "
                + ", ".join([*known, *(f"{f} (size {n})" for f, n in spec.sizes.items())]),
                hint=f"did you mean {close[0]!r}?" if close else "",
            )
    for axis, option in choice.items():
        if option not in known and not cuttable(spec, option, axis, choice, mesh):
            fine = [f for f in spec.sizes if cuttable(spec, f, axis, choice, mesh)]
            raise PlanError(
                f"The call {node.name} cannot be cut in {option!r} over {axis}={mesh.sizes[axis]}.",
                where=f"{entry}[{axis!r}]: {call_text(node)}",
                expected=f"one of {', '.join([*known, *fine])}",
                hint="choose another: this one must be computed whole, is too short for that many "
                "ranks, or is cut by another axis already",
            )
    return {axis: choice[axis] for axis in mesh.names if axis in choice}


def _runs(dim: tuple[str, ...]) -> Iterable[str]:
    """Options that cut a dim: its factors, then runs of neighbouring ones."""
    runs = ["+".join(dim[i:j]) for i in range(len(dim)) for j in range(i + 1, len(dim) + 1)]
    return sorted(runs, key=lambda o: o.count("+"))


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
