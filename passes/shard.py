"""Lower an annotated program to local shapes and typed collectives, for one place on the mesh."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from autopar.collectives import ops
from autopar.errors import PlanError
from autopar.layout import DATA_AXES, MICRO, Layout, Mesh, chunk_sizes
from autopar.passes.cast import is_cast_state
from autopar.program import (
    NodeInfo,
    Program,
    call_text,
    graph_module,
    info,
    nodes_in,
    set_info,
    tensor_inputs,
    update_info,
)
from autopar.rules import Local, Spec
from autopar.rules.factors import producer, specs

__all__ = ["Shard"]

aten = torch.ops.aten
_GATHERS = (ops.all_gather.default, ops.all_gather_replicated.default)


@dataclass(frozen=True, slots=True)
class Shard:
    """Give every call operands in the placement its choice needs, and local size arguments.

    Before:
        y: [8{dp}, 64] = aten.linear(x, w)            # dp: cut b
    After:
        v = autopar.vary(w, "dp")                     # gradient: all_reduce over dp
        y: [8{dp}, 64] = aten.linear(x, v)

    Args:
        coordinate: place on the mesh whose local sizes are written into the graph.
        whole_outputs: gather the outputs, except over `row_axes`; else they stay as they are cut.
        wire: dtype in which gradients of states that are cast go over the data axes.
    """

    coordinate: Mapping[str, int]
    whole_outputs: bool = False
    row_axes: tuple[str, ...] = ()
    wire: torch.dtype | None = None
    name: str = "shard"

    def run(self, program: Program) -> Program:
        """Lower an annotated program; the result has level 'spmd'."""
        return _Lowering(program, self).run()


@dataclass(slots=True)
class _Lowering:
    program: Program
    options: Shard
    graph: fx.Graph = field(default_factory=fx.Graph)
    values: dict[fx.Node, fx.Node] = field(default_factory=dict)
    layouts: dict[fx.Node, Layout] = field(default_factory=dict)
    steps: dict[Any, fx.Node] = field(default_factory=dict)

    @property
    def mesh(self) -> Mesh:
        return self.program.mesh

    @property
    def coordinate(self) -> Mapping[str, int]:
        return self.options.coordinate

    def run(self) -> Program:
        program, table = self.program, specs(self.program)
        for node in program.graph.graph.nodes:
            if node.op == "placeholder":
                new = self.graph.placeholder(node.name)
                self.finish(node, new, self.made(node, 0), node)
                update_info(new, zero=info(node).zero)
            elif node.target is operator.getitem:
                self.result(node)
            elif node.op == "call_function" and not is_cast_state(node):
                self.call(node, table[node])
            elif node.op == "output":
                outputs = self.outputs(node)
        layout_of = {n.name: self.layouts[n] for n in program.placeholders().values()}
        states = tuple(dataclasses.replace(s, layout=layout_of[s.node]) for s in program.states)
        inputs = tuple(dataclasses.replace(i, layout=layout_of[i.node]) for i in program.inputs)
        gm = graph_module(self.graph)
        return program.replace(
            graph=gm, level="spmd", states=states, inputs=inputs, outputs=outputs
        )

    # --- nodes ---------------------------------------------------------------------------------

    def finish(self, old: fx.Node, new: fx.Node, layout: Layout, like: fx.Node) -> None:
        """Record that `new` computes `old` in `layout`."""
        self.values[old] = new
        self.layouts[old] = layout
        self.describe(new, layout, like)

    def describe(self, new: fx.Node, layout: Layout, like: fx.Node) -> None:
        """Give `new` a local fake value, a record and its gradient flag."""
        val = like.meta["val"]
        if isinstance(val, Tensor):
            shape = layout.local_shape(self.mesh, self.coordinate)
            new.meta["val"] = torch.empty(shape, dtype=val.dtype, device="meta")
        else:
            new.meta["val"] = val
        record = info(like)
        set_info(
            new,
            NodeInfo(
                (layout,), record.choice, record.source, record.module, record.site,
                stage=record.stage,
            ),
        )  # fmt: skip
        new.meta["requires_grad"] = like.meta.get("requires_grad", False)

    def result(self, node: fx.Node) -> None:
        """getitem: take one result of a call."""
        source, index = producer(node)
        new = self.graph.call_function(operator.getitem, (self.values[source], index))
        self.finish(node, new, info(source).layouts[index], node)

    def call(self, node: fx.Node, spec: Spec) -> None:
        choice = info(node).choice
        operands = iter(
            [
                self.convert(operand, spec.operand_layout(i, choice, self.mesh), node)
                for i, operand in enumerate(tensor_inputs(node))
            ]
        )
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: next(operands))
        local = Local(
            tuple(layout.local_shape(self.mesh, self.coordinate) for layout in info(node).layouts),
            self.factor_sizes(spec, choice),
        )
        if spec.adjust is not None:
            args, kwargs = spec.adjust(args, dict(kwargs), local)
        if node.target in (ops.uniform.default, ops.keep_mask.default):
            args = (args[0], str(info(node).layouts[0]), *args[2:])
        looked_up = [
            (axis, factor)
            for axis, factor in choice.items()
            if factor in spec.lookup and self.mesh.sizes[axis] > 1
        ]
        if looked_up:
            new = self.lookup(node, spec, args, kwargs, *looked_up[0])
        else:
            new = self.graph.call_function(node.target, tuple(args), dict(kwargs))  # type: ignore
        self.finish(node, new, info(node).layouts[0], node)
        set_info(new, dataclasses.replace(info(new), layouts=info(node).layouts))

    def factor_sizes(self, spec: Spec, choice: Mapping[str, str]) -> dict[str, int]:
        """Local size of every factor; a merged cut counts as its first factor."""
        sizes = dict(spec.sizes)
        for axis in self.mesh.names:
            option = choice.get(axis, "R")
            parts = option.split("+")
            if parts[0] not in sizes:
                continue
            total = math.prod(sizes[p] for p in parts)
            k = self.mesh.sizes[axis]
            sizes[parts[0]] = chunk_sizes(total, k)[self.coordinate[axis]]
            sizes.update(dict.fromkeys(parts[1:], 1))
        return sizes

    def lookup(
        self, node: fx.Node, spec: Spec, args: Any, kwargs: Any, axis: str, factor: str
    ) -> fx.Node:
        """Look indices up in this rank's range; others give zero, so the result is partial."""
        position = spec.lookup[factor]
        old_index = tensor_inputs(node)[position]
        nodes = nodes_in((args, kwargs))
        index = nodes[position]
        inner = math.prod(  # indices count whole dims, pieces count the cut factor
            spec.sizes[f] for dim in spec.inputs[0] if factor in dim for f in dim if f != factor
        )
        pieces = [n * inner for n in chunk_sizes(spec.sizes[factor], self.mesh.sizes[axis])]
        mine = pieces[self.coordinate[axis]]
        layout = spec.operand_layout(position, info(node).choice, self.mesh)

        def step(target: Any, *a: Any, like: torch.dtype | None = None) -> fx.Node:
            new = self.graph.call_function(target, a)
            self.describe(new, layout, old_index)
            if like is not None:
                new.meta["val"] = new.meta["val"].to(like)
            return new

        shifted = step(ops.shift.default, index, axis, pieces)
        inside = step(
            aten.bitwise_and.Tensor,
            step(aten.ge.Scalar, shifted, 0, like=torch.bool),
            step(aten.lt.Scalar, shifted, mine, like=torch.bool),
            like=torch.bool,
        )
        safe = step(aten.mul.Tensor, shifted, inside)
        args, kwargs = fx.map_arg((args, kwargs), lambda n: safe if n is index else n)
        found = self.graph.call_function(node.target, tuple(args), dict(kwargs))  # type: ignore
        self.describe(found, info(node).layouts[0], node)
        mask = inside
        shape = [1] * len(spec.outputs[0])
        index_dims = spec.inputs[position]
        if index_dims != spec.outputs[0]:  # line the mask up with the dims of the result
            local = layout.local_shape(self.mesh, self.coordinate)
            at = 0
            for d, dim in enumerate(spec.outputs[0]):
                if at < len(index_dims) and dim == index_dims[at]:
                    shape[d] = local[at]
                    at += 1
            mask = step(aten.reshape.default, inside, shape, like=torch.bool)
        zero = self.graph.call_function(  # not a product: the row looked up may hold infinities
            aten.zeros_like.default, (found,)
        )
        self.describe(zero, info(node).layouts[0], node)
        return self.graph.call_function(aten.where.self, (mask, found, zero))

    def outputs(self, node: fx.Node) -> tuple[Any, ...]:
        results = node.args[0]
        assert isinstance(results, (list, tuple))
        whole = {index for _, index in self.program.mutated}
        whole |= {o.index for o in self.program.outputs if o.is_loss}
        new, layouts = [], []
        for i, value in enumerate(results):
            want = self.layouts[value.args[0] if is_cast_state(value) else value]
            for axis in reversed(self.mesh.names):
                if want.kind(axis) != "S" or i in whole or not self.leaves_cut(want, axis):
                    want = want.without(axis)
            new.append(self.convert(value, want, node, output=True))
            layouts.append(want)
        self.graph.output(tuple(new))
        self.graph.output_node().meta["val"] = None
        return tuple(
            o if o.index < 0 else dataclasses.replace(o, layout=layouts[o.index])
            for o in self.program.outputs
        )

    def leaves_cut(self, layout: Layout, axis: str) -> bool:
        """Whether an output may leave cut over `axis`: as plain chunks of a dim."""
        if self.options.whole_outputs and axis not in self.options.row_axes:
            return False
        d, i = layout.sharded[axis]
        even = layout.key(axis, self.mesh)[-1] == "even"
        return i == 0 and (even or len(layout.dims[d]) == 1)

    # --- placements ----------------------------------------------------------------------------

    def made(self, node: fx.Node, result: int) -> Layout:
        """The layout that a call or placeholder gives a result in."""
        record = info(node)
        return record.rest or record.layouts[result]

    def convert(
        self, value: fx.Node, want: Layout, user: fx.Node, output: bool = False, cast: bool = False
    ) -> fx.Node:
        """The node that holds `value` in layout `want`; `cast` tells that it is narrowed then."""
        source, result = producer(value)
        if is_cast_state(source):
            return self.cast(source, want, user, output)
        have = self.made(source, result).normal(self.mesh)
        want = want.normal(self.mesh)
        grad = bool(value.meta.get("requires_grad", False))
        node = self.values[value]
        names = self.mesh.names
        kept = {
            a
            for a in names
            if a in have.sharded
            and a in want.sharded
            and have.key(a, self.mesh) == want.key(a, self.mesh)
        }
        moving = [a for a in names if a in have.sharded and a not in kept]
        target = [a for a in names if a in want.sharded and a not in kept]
        if len(moving) == 1 and moving == target and self.apart(have, want, moving[0], kept):
            node = self.exchange(value, node, have, want, moving[0])
            moving, target = [], []
        current = have if node is self.values[value] else want
        for axis in names:  # before gathers: the gradient is then reduced last, on a shard
            if grad and current.kind(axis) == "R" and want.kind(axis) == "V":
                current = _marked(current, axis, "V")
                sent = self.sent(axis, cast)
                node = self.step(value, node, ops.vary.default, (axis,), current, sent)
        for axis in sorted(moving, key=lambda a: -self.depth(have, a)):
            varies = grad and (want.kind(axis) == "V" or axis in target)
            name = "all_gather" if varies else "all_gather_replicated"
            after = _marked(current.without(axis), axis, "V" if varies else "R")
            sent = self.sent(axis, cast and varies)
            node = self.cut_step(value, node, name, axis, current, after, sent)
            current = after
        for axis in sorted(names, key=lambda a: a != MICRO):  # microbatches first, then ranks
            goal = want.kind(axis)
            if current.kind(axis) == "P" and goal in ("R", "V"):
                reduction = current.reduction(axis)
                current = current.without(axis)
                node = self.step(value, node, ops.all_reduce.default, (axis, reduction), current)
            if current.kind(axis) == "R" and goal == "V" and grad:
                current = _marked(current, axis, "V")
                sent = self.sent(axis, cast)
                node = self.step(value, node, ops.vary.default, (axis,), current, sent)
        for axis in sorted(target, key=lambda a: self.depth(want, a)):
            kind = current.kind(axis)
            name = {"P": "reduce_scatter", "V": "cut" if grad else "shard", "R": "shard"}[kind]
            after = self.recut(current, want, axis)
            node = self.cut_step(value, node, name, axis, after, after)
            current = after
        self.check(current, want, user, grad=grad and not output)
        return node

    def cast(self, node: fx.Node, want: Layout, user: fx.Node, output: bool) -> fx.Node:
        """A state in layout `want` and a narrow dtype.

        It is cast last, so that its gradient is reduced in the wide one; a gather casts itself,
        before it sends.
        """
        wide: Any = self.convert(node.args[0], want, user, output, cast=True)  # type: ignore
        key = (wide, node.target, str(node.kwargs))
        if key not in self.steps:
            if wide.target in _GATHERS:
                kwargs = {**node.kwargs, **wide.kwargs}
                new = self.graph.call_function(wide.target, wide.args, kwargs)
            else:
                new = self.graph.call_function(node.target, (wide,), node.kwargs)  # type: ignore
            layout = info(wide).layouts[0]
            self.describe(new, layout, node)
            kinds = {a: layout.kind(a) for a in self.mesh.names}
            choice = {a: "R" if k == "R" else info(node).choice[a] for a, k in kinds.items()}
            choice = {
                a: "V" if k != "R" and choice[a] == "R" else choice[a] for a, k in kinds.items()
            }
            update_info(new, choice=choice, again=info(wide).again)
            self.steps[key] = new
        return self.steps[key]

    def check(self, current: Layout, want: Layout, user: fx.Node, grad: bool) -> None:
        """The reached placement must be the wanted one; V and R differ only for gradients."""
        for axis in self.mesh.names:
            a, b = current.kind(axis), want.kind(axis)
            same = a == b or (not grad and {a, b} == {"R", "V"})
            if same and a == "S":
                same = current.key(axis, self.mesh) == want.key(axis, self.mesh)
            if not same:
                raise PlanError(
                    f"A value that is {current} cannot become {want} on axis {axis}.",
                    where=call_text(user),
                    hint="change the plan of this node or of the one before it",
                )

    def recut(self, current: Layout, want: Layout, axis: str) -> Layout:
        """`current` with `axis` cut as in `want`, in the atoms of `want`."""
        result = want
        for other in want.sharded:
            if other != axis and other not in current.sharded:
                result = result.without(other)
        others = Layout(
            result.dims,
            tuple(p for p in current.partial if p[0] != axis),
            tuple(a for a in current.varying if a != axis),
        )
        return others

    def depth(self, layout: Layout, axis: str) -> int:
        """How far inside the nest of cuts of its dim `axis` stands."""
        d, i = layout.sharded[axis]
        return i * 16 + layout.dims[d][i].axes.index(axis)

    def apart(self, have: Layout, want: Layout, axis: str, kept: set[str]) -> bool:
        """Whether one all-to-all does it: different dims, and only this axis changes."""
        if any(have.kind(a) != want.kind(a) for a in self.mesh.names if a != axis):
            return False
        return have.sharded[axis][0] != want.sharded[axis][0]

    def geometry(self, layout: Layout, axis: str) -> tuple[int, int, list[int]]:
        """(dim, outer, sizes) of the cut that `axis` makes in `layout`, in local elements."""
        d, i = layout.sharded[axis]
        dim = layout.dims[d]
        sizes = [a.local_sizes(self.mesh, self.coordinate) for a in dim]
        outer = math.prod(sizes[:i])
        inner = math.prod(sizes[i + 1 :])
        atom = dim[i]
        n = atom.size
        for before in atom.axes[: atom.axes.index(axis)]:
            n = chunk_sizes(n, self.mesh.sizes[before])[self.coordinate[before]]
        pieces = [s * inner for s in chunk_sizes(n, self.mesh.sizes[axis])]
        return d, outer, pieces

    def cut_step(
        self, value: fx.Node, node: fx.Node, name: str, axis: str, layout: Layout, result: Layout,
        kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> fx.Node:  # fmt: skip
        d, outer, pieces = self.geometry(layout, axis)
        args: tuple[Any, ...] = (axis, d, outer, pieces)
        if name in ("shard", "cut", "reduce_scatter"):
            args = (*args, pieces[self.coordinate[axis]])
        return self.step(value, node, getattr(ops, name).default, args, result, kwargs)

    def sent(self, axis: str, cast: bool) -> dict[str, Any]:
        """How the gradient of a state that is cast goes over an axis; microbatches send nothing."""
        ranks = axis in DATA_AXES and axis != MICRO
        return {"wire": self.options.wire} if cast and ranks and self.options.wire else {}

    def exchange(
        self, value: fx.Node, node: fx.Node, have: Layout, want: Layout, axis: str
    ) -> fx.Node:
        i = self.coordinate[axis]
        d, outer, pieces = self.geometry(have, axis)
        d2, outer2, pieces2 = self.geometry(want, axis)
        args = (axis, d, outer, pieces, pieces[i], d2, outer2, pieces2, pieces2[i])
        return self.step(value, node, ops.all_to_all.default, args, want)

    def stored_over(self, value: fx.Node) -> set[str]:
        """Axes over which a state is cut at rest and whole in use."""
        record = info(value)
        return set(record.rest.sharded) - set(record.layouts[0].sharded) if record.rest else set()

    def step(
        self, value: fx.Node, node: fx.Node, target: Any, args: tuple[Any, ...], result: Layout,
        kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> fx.Node:  # fmt: skip
        """One collective on `node`, shared by all users that ask for the same."""
        key = (node, target, str(args), str(kwargs))
        if key not in self.steps:
            new = self.graph.call_function(target, (node, *args), dict(kwargs))
            self.describe(new, result, value)
            if info(value).zero == 3 and target in _GATHERS and args[0] in self.stored_over(value):
                update_info(new, again=True)
            self.steps[key] = new
        return self.steps[key]


def _marked(layout: Layout, axis: str, kind: str) -> Layout:
    """`layout`, whole on `axis`, as R or V."""
    varying = tuple(a for a in layout.varying if a != axis)
    return Layout(layout.dims, layout.partial, (*varying, axis) if kind == "V" else varying)
