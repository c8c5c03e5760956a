"""Propagate: each call goes along with the placements of its operands.

This is all of data parallelism once the batch dim of the inputs is cut, and it places the calls
that passes insert after a strategy has chosen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from autopar.layout import Layout, Mesh, chunk_sizes
from autopar.program import Program, info, tensor_inputs, update_info
from autopar.rules import Spec
from autopar.rules.factors import producer, specs

__all__ = ["Follow", "cuttable"]


def cuttable(spec: Spec, factor: str, axis: str, choice: Mapping[str, str], mesh: Mesh) -> bool:
    """Whether `axis` may cut `factor` beside what the other axes of `choice` cut."""
    parts = factor.split("+")
    if any(p in spec.whole for p in parts) or not together(spec, parts):
        return False
    others = [o.split("+") for a, o in choice.items() if a != axis]
    if any(set(parts) & set(o) and parts != o for o in others):
        return False
    taken = any(part in o for o in others for part in parts)
    if any(part in spec.lookup for part in parts) and (taken or len(parts) > 1):
        return False
    if any(part in spec.lookup or part in spec.nonempty for part in parts):
        size = math.prod(spec.sizes[part] for part in parts)
        ranks = math.prod(mesh.sizes[a] for a, o in choice.items() if a != axis and o == factor)
        return 0 not in chunk_sizes(size, ranks * mesh.sizes[axis])
    return True


def together(spec: Spec, run: list[str]) -> bool:
    """Whether the factors of `run` stand side by side, in order, wherever one of them stands."""
    if len(run) == 1:
        return True
    for dim in (d for side in (*spec.inputs, *spec.outputs) for d in side):
        if set(dim) & set(run):
            at = dim.index(run[0]) if run[0] in dim else len(dim)
            if list(dim[at : at + len(run)]) != run:
                return False
    return True


@dataclass(frozen=True, slots=True)
class Follow:
    """Place every call that has no choice on `axis` by its operands.

    A call cuts the factor in which its largest cut operand is cut; else it passes a partial sum
    through where it is linear; else it works on varying copies where it is given any; else it is
    computed replicated.
    """

    axis: str

    def annotate(self, program: Program) -> None:
        """Write choices and layouts into the records of `program`'s nodes."""
        table = specs(program)
        for node in program.graph.graph.nodes:
            if node not in table:
                continue
            record = info(node)
            if self.axis not in record.choice:
                option = "R" if node.op == "placeholder" else self.option(program, node, table)
                update_info(node, choice={**record.choice, self.axis: option})
            place(node, table[node], program.mesh)
        self.sink(program, table)

    def sink(self, program: Program, table: Mapping[fx.Node, Spec]) -> None:
        """Cut replicated calls whose every user cuts their result in the same way.

        Without this a dropout mask or an expanded class token is made whole on every rank and
        sliced after.
        """
        mesh, axis = program.mesh, self.axis
        wanted: dict[fx.Node, set[tuple[object, ...] | None]] = {}
        for node in reversed(program.graph.graph.nodes):
            if node.op == "output":
                for operand in node.all_input_nodes:
                    wanted.setdefault(producer(operand)[0], set()).add(None)
            if node not in table or node.op != "call_function":
                continue
            spec, choice = table[node], dict(info(node).choice)
            keys = wanted.get(node, set())
            if choice[axis] == "R" and len(keys) == 1 and len(spec.outputs) == 1:
                for factor in spec.sizes:
                    if factor in spec.expand or not cuttable(spec, factor, axis, choice, mesh):
                        continue
                    layout = spec.result_layout(0, {**choice, axis: factor}, mesh).normal(mesh)
                    if axis in layout.sharded and layout.key(axis, mesh) in keys:
                        choice[axis] = factor
                        update_info(node, choice=choice)
                        place(node, spec, mesh)
                        break
            for i, operand in enumerate(tensor_inputs(node)):
                layout = spec.operand_layout(i, choice, mesh).normal(mesh)
                key = layout.key(axis, mesh) if axis in layout.sharded else None
                wanted.setdefault(producer(operand)[0], set()).add(key)

    def option(self, program: Program, node: fx.Node, table: Mapping[fx.Node, Spec]) -> str:
        """The choice of `node` on the axis."""
        spec, mesh, axis = table[node], program.mesh, self.axis
        choice = dict(info(node).choice)
        votes: dict[str, int] = {}
        partial: set[int] = set()
        varying = False
        for i, operand in enumerate(tensor_inputs(node)):
            source, result = producer(operand)
            have = info(source).layouts[result]
            kind = have.kind(axis)
            if kind == "P" and have.reduction(axis) == "sum":
                partial.add(i)
            varying = varying or (kind == "V" and operand.meta.get("requires_grad", False))
            if kind == "S":
                factor = carried(spec, i, have, axis, choice, mesh)
                if factor is not None and cuttable(spec, factor, axis, choice, mesh):
                    size = operand.meta["val"].numel()
                    votes[factor] = max(votes.get(factor, 0), size)
        if votes:
            return max(votes, key=lambda f: votes[f])
        for k, members in enumerate(spec.linear):
            if partial and members <= partial and partial <= members:
                return f"P{k}"
        return "V" if varying else "R"


def carried(
    spec: Spec, operand: int, have: Layout, axis: str, choice: Mapping[str, str], mesh: Mesh
) -> str | None:
    """The factor of `spec` that must be cut to take `operand` just as it is on `axis`."""
    want = have.normal(mesh)
    if axis not in want.sharded:
        return None
    key = want.key(axis, mesh)
    dims = spec.inputs[operand]
    dim = dims[want.sharded[axis][0]]
    options = ["+".join(dim[i:j]) for i in range(len(dim)) for j in range(i + 1, len(dim) + 1)]
    for option in sorted(options, key=lambda o: o.count("+")):
        layout = spec.operand_layout(operand, {**choice, axis: option}, mesh).normal(mesh)
        if axis in layout.sharded and layout.key(axis, mesh) == key:
            return option
    return None


def place(node: fx.Node, spec: Spec, mesh: Mesh) -> None:
    """Write the layouts of the results of `node` that follow from its choice."""
    choice = info(node).choice
    layouts = tuple(
        spec.result_layout(i, choice, mesh).normal(mesh) for i in range(len(spec.outputs))
    )
    update_info(node, layouts=layouts)
