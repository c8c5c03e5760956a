"""Tensor parallelism: the placement of every call on an axis that moves the fewest bytes.

An integer program over one choice per class of calls (repeated layers share their variables).
Conversions between placements cost what their collectives move forward and backward, once per
value and target; large parameters must be split at rest and heavy products must work on the split
parameter. Column-row pairs, head-wise attention and vocabulary-parallel losses are solutions of
this program, not rules in it.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array
from torch import Tensor, fx

from autopar.errors import PlanError
from autopar.layout import Layout, chunk_sizes
from autopar.program import Program, info, outputs_of, tensor_inputs, update_info
from autopar.rules.factors import producer, specs
from autopar.rules.repeats import classes
from autopar.rules.spec import Spec
from autopar.strategies.follow import cuttable, place

__all__ = ["Tensors"]

Mark = tuple[Any, ...]
"""Placement of a value on the axis: ('R',), ('V',), ('P',) or ('S', key)."""

_TIE = 0.05  # work done on every rank against bytes moved: memory is that much faster than links


@dataclass(frozen=True, slots=True)
class Tensors:
    """Split parameters and products over `axis`.

    Args:
        axis: mesh axis.
        sequence: let activations between products be cut (reduce-scatter and all-gather) instead
            of replicated (all-reduce): the same bytes, less memory.
        pins: parameter name -> placement on the axis, 'R' or 'S(dim)'.
        latency_bytes: what a pass around the ring costs beside its bytes; 10 us at 400 GB/s are
            4 MB.
        time_limit_s: limit for the solver; the best plan found by then is used.
    """

    axis: str = "tp"
    sequence: bool = True
    pins: Mapping[str, str] = field(default_factory=dict)
    latency_bytes: float = 2.0**22
    time_limit_s: float = 60.0

    def annotate(self, program: Program) -> None:
        """Annotate every node on the axis.

        Raises:
            PlanError: no placement satisfies the pins.
        """
        self.check_pins(program)
        if program.mesh.sizes[self.axis] == 1:
            for node in program.graph.graph.nodes:
                if info(node).layouts:
                    update_info(node, choice={**info(node).choice, self.axis: "R"})
            return
        table = specs(program)
        problem = _Problem(self, program, table)
        chosen = problem.solve()
        for node, spec in table.items():
            update_info(node, choice={**info(node).choice, self.axis: chosen[node]})
            place(node, spec, program.mesh)

    def check_pins(self, program: Program) -> None:
        """Every pin must be well formed and name a parameter.

        Raises:
            PlanError: one does not.
        """
        names = [n for s in program.states if s.is_parameter for n in (s.name, *s.aliases)]
        for pattern, pin in self.pins.items():
            if not re.fullmatch(r"R|S\(\s*-?\d+\s*\)", str(pin).strip()):
                raise PlanError(
                    f"The pin {pattern!r}: {pin!r} is no placement.",
                    expected="'R' (whole on every rank) or 'S(dim)', such as 'S(0)'",
                )
            if not any(fnmatch.fnmatchcase(n, pattern) for n in names):
                close = difflib.get_close_matches(pattern, names, 3, 0.3) or names[:3]
                raise PlanError(
                    f"The pin {pattern!r} matches no parameter.",
                    expected=f"a name or a pattern with *, such as {', '.join(close)}",
                )


@dataclass(slots=True)
class _Rows:
    """A sparse system of linear constraints being written."""

    data: list[tuple[int, int, float]] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def add(self, terms: list[tuple[int, float]], low: float, high: float) -> None:
        """low <= sum of coefficient * variable <= high."""
        row = len(self.low)
        self.data.extend((row, v, c) for v, c in terms)
        self.low.append(low)
        self.high.append(high)


class _Problem:
    """The integer program for one axis."""

    def __init__(self, strategy: Tensors, program: Program, table: dict[fx.Node, Spec]) -> None:
        self.strategy, self.program, self.table = strategy, program, table
        self.axis, self.mesh = strategy.axis, program.mesh
        self.k = self.mesh.sizes[self.axis]
        self.state_of = {s.node: s for s in program.states}
        numbers: dict[Any, int] = {}
        self.class_of = {  # a layer with a fixed parameter is not like the others
            node: numbers.setdefault((c, self.fixed(node)), len(numbers))
            for node, c in classes(program, table).items()
        }
        self.members: dict[int, list[fx.Node]] = {}
        for node, c in self.class_of.items():
            self.members.setdefault(c, []).append(node)
        self.cost: list[float] = []
        self.integer: list[int] = []
        self.rows = _Rows()
        self.option_vars: dict[int, dict[str, int]] = {}

    # --- variables -----------------------------------------------------------------------------

    def variable(self, cost: float, integer: bool = False) -> int:
        self.cost.append(cost)
        self.integer.append(int(integer))
        return len(self.cost) - 1

    def solve(self) -> dict[fx.Node, str]:
        for c, nodes in self.members.items():
            self.add_options(c, nodes)
        self.add_edges()
        n = len(self.cost)
        rows, cols, values = zip(*self.rows.data, strict=True)
        matrix = coo_array((values, (rows, cols)), shape=(len(self.rows.low), n)).tocsr()
        scale = 1.0 / max(max(self.cost), 1.0)
        result = milp(
            np.array(self.cost) * scale * 1e3,
            integrality=np.array(self.integer),
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(matrix, np.array(self.rows.low), np.array(self.rows.high)),
            options={"time_limit": self.strategy.time_limit_s, "mip_rel_gap": 1e-6},
        )
        if result.x is None:
            raise PlanError(
                f"No placement on axis {self.axis} satisfies the plan: {result.message}",
                where=", ".join(f"{k}={v}" for k, v in self.strategy.pins.items()),
                hint="remove a pin, or pin another dim",
            )
        chosen = {}
        for node, c in self.class_of.items():
            options = self.option_vars[c]
            chosen[node] = max(options, key=lambda o: result.x[options[o]])
        return chosen

    def add_options(self, c: int, nodes: list[fx.Node]) -> None:
        node = nodes[0]
        spec = self.table[node]
        options = self.options(node, spec)
        count = len(nodes)
        size = sum(self.value_bytes(v, node) for v in outputs_of(node) if isinstance(v, Tensor))
        variables = {}
        for option in options:
            work = self.share(spec, option) * size * count * _TIE
            if node.op == "placeholder":
                work = 0.0
            if not self.strategy.sequence and option in ("R", "V"):
                work *= 0.5 / self.k  # rather replicate between products
            if option in spec.expand:
                work += self.statistics(spec, option, size, node) * count
            variables[option] = self.variable(work, integer=True)
        self.option_vars[c] = variables
        self.rows.add([(v, 1.0) for v in variables.values()], 1, 1)

    def share(self, spec: Spec, option: str) -> float:
        """Part of the work that the busiest rank does."""
        if option in ("R", "V") or option[0] == "P":
            return 1.0
        n = math.prod(spec.sizes[p] for p in option.split("+"))
        bonus = 1.0 - 1e-3 * math.log2(max(n, 2)) / 32  # between equals, cut the longer factor
        return max(chunk_sizes(n, self.k)) / n * bonus

    def statistics(self, spec: Spec, factor: str, size: float, node: fx.Node) -> float:
        """Bytes to reduce the row statistics of an expansion: two forward, two backward."""
        rows = size / spec.sizes[factor]
        times = 4 if node.meta.get("requires_grad", False) else 2
        return times * 2 * ((self.k - 1) / self.k * rows + self.strategy.latency_bytes)

    def options(self, node: fx.Node, spec: Spec) -> list[str]:
        choice = info(node).choice
        cut = [
            f
            for f in (*spec.sizes, *self.merged(spec))
            if cuttable(spec, f, self.axis, choice, self.mesh) and self.fills(spec, f, choice)
        ]
        if node.op == "placeholder":
            return self.state_options(node, spec, cut)
        heavy = spec.heavy and [f for f in cut if self.splits_work(node, spec, f)]
        if heavy:
            return heavy
        grads = any(n.meta.get("requires_grad", False) for n in tensor_inputs(node))
        sums = [f"P{i}" for i in range(len(spec.linear))]
        return ["R", *(["V"] if grads else []), *sums, *cut]

    def fills(self, spec: Spec, option: str, choice: Mapping[str, str]) -> bool:
        """Whether every rank gets a piece of the factor, beside the other axes that cut it."""
        pieces = [math.prod(spec.sizes[p] for p in option.split("+"))]
        for axis, other in choice.items():
            if axis != self.axis and other == option:
                pieces = [c for n in pieces for c in chunk_sizes(n, self.mesh.sizes[axis])]
        return all(0 not in chunk_sizes(n, self.k) for n in pieces)

    def merged(self, spec: Spec) -> list[str]:
        """Runs of neighbouring factors worth cutting as one: too small or uneven alone."""
        found = []
        dims = [d for side in (*spec.inputs, *spec.outputs) for d in side if len(d) > 1]
        for dim in dict.fromkeys(dims):
            for i in range(len(dim) - 1):
                for j in range(i + 2, len(dim) + 1):
                    run = dim[i:j]
                    if spec.sizes[run[0]] % self.k:
                        found.append("+".join(run))
        return list(dict.fromkeys(found))

    def splits_work(self, node: fx.Node, spec: Spec, factor: str) -> bool:
        """Whether cutting `factor` splits the parameters of a product (or just the product)."""
        weights = [i for i, operand in enumerate(tensor_inputs(node)) if self.parameter(operand)]
        parts = set(factor.split("+"))
        return all(parts <= spec.factors_of(spec.inputs[i]) for i in weights)

    def parameter(self, node: fx.Node) -> bool:
        """Whether a value is a large parameter, seen through reshapes and casts."""
        while node.op == "call_function" and len(node.all_input_nodes) == 1:
            node = node.all_input_nodes[0]
        state = self.state_of.get(node.name)
        return state is not None and self.is_large(state)

    def is_large(self, state: Any) -> bool:
        return bool(state.is_parameter and sum(n > 1 for n in state.shape) >= 2)

    def state_options(self, node: fx.Node, spec: Spec, cut: list[str]) -> list[str]:
        state = self.state_of.get(node.name)
        if state is None or not state.is_parameter:
            return ["R"]
        plain = [f for f in cut if self.storable(node, spec, f)]
        if (layout := state.used) is not None:
            held = [f for f in ("R", *plain) if self.holds(node, spec, f, layout)]
            return held or _lost(state)
        pin = self.pinned(state)
        if pin is not None:
            return [f for f in ("R", *plain) if self.matches(spec, f, pin)] or _bad_pin(
                state, pin, f"{self.axis}={self.k}"
            )
        if self.is_large(state) and plain:
            return plain
        return ["R", *plain]

    def fixed(self, node: fx.Node) -> str:
        """What decides the placement of a parameter beforehand, '' where nothing does."""
        state = self.state_of.get(node.name)
        if state is None or not state.is_parameter:
            return ""
        return str(state.layout or self.pinned(state) or "")

    def holds(self, node: fx.Node, spec: Spec, option: str, layout: Layout) -> bool:
        """Whether `option` cuts a parameter over the axis as `layout` does."""
        choice = {**info(node).choice, self.axis: option}
        have, want = layout.normal(self.mesh), spec.result_layout(0, choice, self.mesh)
        want = want.normal(self.mesh)
        if self.axis not in have.sharded or self.axis not in want.sharded:
            return self.axis not in have.sharded and self.axis not in want.sharded
        return have.key(self.axis, self.mesh) == want.key(self.axis, self.mesh)

    def pinned(self, state: Any) -> str | None:
        for pattern, placement in self.strategy.pins.items():
            if any(fnmatch.fnmatchcase(n, pattern) for n in (state.name, *state.aliases)):
                return str(placement).replace(" ", "")
        return None

    def matches(self, spec: Spec, option: str, pin: str) -> bool:
        if option == "R" or pin == "R":
            return option == pin
        dims = spec.outputs[0]
        d = next(i for i, dim in enumerate(dims) if option.split("+")[0] in dim)
        return pin.replace(" ", "") in (f"S({d})", f"S({d - len(dims)})")

    def storable(self, node: fx.Node, spec: Spec, factor: str) -> bool:
        """Whether a DTensor can hold the cut at rest: even, or the plain chunks of a dim."""
        choice = {**info(node).choice, self.axis: factor}
        layout = spec.result_layout(0, choice, self.mesh).normal(self.mesh)
        d, i = layout.sharded[self.axis]
        even = layout.key(self.axis, self.mesh)[-1] == "even"
        return even or len(layout.dims[d]) == 1

    # --- conversions ---------------------------------------------------------------------------

    def mark(self, layout: Layout, grad: bool) -> Mark:
        layout = layout.normal(self.mesh)
        kind = layout.kind(self.axis)
        if kind == "S":
            return ("S", *layout.key(self.axis, self.mesh))
        if kind == "V" and not grad:
            return ("R",)
        return (kind,)

    def add_edges(self) -> None:
        edges: dict[tuple[int, int, int, int], tuple[fx.Node, fx.Node, fx.Node]] = {}
        for node in self.table:
            if node.op != "call_function":
                continue
            for i, operand in enumerate(tensor_inputs(node)):
                source, result = producer(operand)
                key = (self.class_of[source], result, self.class_of[node], i)
                edges.setdefault(key, (source, operand, node))
        by_value: dict[tuple[int, int], list[tuple[Any, ...]]] = {}
        for (p, r, c, i), nodes in edges.items():
            by_value.setdefault((p, r), []).append((c, i, *nodes))
        output = self.program.graph.graph.output_node()
        for value in output.all_input_nodes:
            source, result = producer(value)
            if source in self.class_of:
                by_value.setdefault((self.class_of[source], result), []).append(
                    (None, value, source, value, output)
                )
        for (p, r), users in by_value.items():
            self.add_value(p, r, users)

    def add_value(self, p: int, r: int, users: list[tuple[Any, ...]]) -> None:
        """Flow from the placements a value is made in to those it is used in."""
        source, operand = users[0][2], users[0][3]
        spec = self.table[source]
        grad = bool(operand.meta.get("requires_grad", False))
        size = self.value_bytes(operand.meta["val"], source)
        count = len(self.members[p])
        made: dict[Mark, list[int]] = {}
        for option, var in self.option_vars[p].items():
            layout = spec.result_layout(r, {**info(source).choice, self.axis: option}, self.mesh)
            made.setdefault(self.mark(layout, grad), []).append(var)
        shared: dict[tuple[Mark, Mark], int] = {}
        for c, i, _, value, user in users:
            used: dict[Mark, list[int]] = {}
            if c is None:
                used = self.output_marks(made, value)
            else:
                for option, var in self.option_vars[c].items():
                    choice = {**info(user).choice, self.axis: option}
                    layout = self.table[user].operand_layout(i, choice, self.mesh)
                    used.setdefault(self.mark(layout, grad), []).append(var)
            flows: dict[tuple[Mark, Mark], int] = {}
            for a in made:
                for b in used:
                    cost = self.conversion(a, b, size, grad, source.op == "placeholder")
                    if cost is None or (c is None and b[0] == "S" and a != b):
                        continue  # a result leaves in the cut that it was made in, or whole
                    flow = self.variable(0.0)
                    flows[(a, b)] = flow
                    if cost > 0:
                        if (a, b) not in shared:
                            shared[(a, b)] = self.variable(cost * count)
                        self.rows.add([(shared[(a, b)], 1.0), (flow, -1.0)], 0, np.inf)
            for a, variables in made.items():
                out = [(flow, 1.0) for (x, _), flow in flows.items() if x == a]
                self.rows.add([*out, *((v, -1.0) for v in variables)], 0, 0)
            for b, variables in used.items():
                into = [(flow, 1.0) for (_, y), flow in flows.items() if y == b]
                if c is not None:
                    self.rows.add([*into, *((v, -1.0) for v in variables)], 0, 0)

    def output_marks(self, made: dict[Mark, list[int]], value: fx.Node) -> dict[Mark, list[int]]:
        """Results leave whole (losses, buffers) or as they are."""
        whole = value.meta["val"].dim() == 0
        marks: dict[Mark, list[int]] = {a: [] for a in made if a[0] == "S" and not whole}
        return {**marks, ("R",): []}

    def value_bytes(self, val: Tensor, node: fx.Node) -> float:
        """Bytes of a value as the other axes have cut it."""
        total = math.prod(val.shape) * val.dtype.itemsize
        cut = 1
        for axis, option in info(node).choice.items():
            if axis != self.axis and option not in ("R", "V") and option[0] != "P":
                cut *= self.mesh.sizes[axis]
        return total / cut

    def conversion(self, a: Mark, b: Mark, size: float, grad: bool, bucketed: bool) -> float | None:
        """Bytes moved to turn placement a into b, forward and backward; None: impossible.

        `bucketed`: the reduction of the gradient shares a message with others.
        """
        ring = (self.k - 1) / self.k * size
        back = ring if grad else 0.0
        lone = 0.0 if self.strategy.sequence else 0.5 * ring
        if a == b:
            return 0.0
        back_steps = 1 if grad else 0
        costs: dict[str, tuple[float, int]] = {  # bytes, ring passes
            "RV": (2 * back, 0 if bucketed else 2 * back_steps),
            "RS": (back, back_steps),
            "VS": (0.0, 0),
            "SR": (ring + lone, 1),
            "SV": (ring + back + lone, 1 + back_steps),
            "SS": ((ring + back) / self.k + lone, 1 + back_steps),
            "PR": (2 * ring, 2),
            "PV": (2 * ring + 2 * back, 2 + 2 * back_steps),
            "PS": (ring + back + lone, 1 + back_steps),
        }
        if a[0] + b[0] not in costs:
            return None
        moved, passes = costs[a[0] + b[0]]
        return moved + passes * self.strategy.latency_bytes


def _lost(state: Any) -> list[str]:
    raise PlanError(
        f"{state.name} is held as {state.layout}, which the program of this call cannot use.",
        expected="a call whose operations cut the parameter as those of the first call do",
        hint="make the module anew with parallelize, or pin the parameter",
    )


def _bad_pin(state: Any, pin: str, axis: str) -> list[str]:
    raise PlanError(
        f"{state.name} cannot be pinned to {pin} on {axis}.",
        where=f"{state.name} of shape {list(state.shape)}",
        expected="'R', or 'S(dim)' with a dim of at least as many elements as the axis has ranks",
    )
