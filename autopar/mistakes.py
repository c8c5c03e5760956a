"""The mistakes that can be made at a collective, as edits of a graph; each says what it does."""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem
from typing import Any

import torch
from torch import fx

from autopar.collectives import collective_of, members_of, ops
from autopar.layout import Mesh
from autopar.program import info

__all__ = ["Change", "changes", "harmless", "typed_changes"]

aten = torch.ops.aten
Change = Callable[[fx.Graph, Any], bool]
"""Edits a graph at a node; false where the mistake cannot be made there."""

_CUTS = ("shard", "cut", "reduce_scatter")
_GATHERS = ("all_gather", "all_gather_replicated")
_GATHER_BUCKETS = ("all_gather_bucket", "all_gather_replicated_bucket")


# --- mistakes in the generated phases ----------------------------------------------------------


def changes(node: Any, mesh: Mesh) -> list[tuple[str, Change]]:
    """(kind, change) of the mistakes that can be made at `node`."""
    if node.op != "call_function":
        return []
    if node.target is ops.shift.default:
        return [("shift of the indices left out", _skip)]
    if node.target is aten.where.self and _is_zeros(node.args[2]):
        return [("mask of a lookup left out", _second)]
    if node.target in (ops.uniform.default, ops.keep_mask.default):
        return [("random numbers of another site", _other_site)]
    row = collective_of(node)
    if row is None or mesh.sizes[str(node.args[1])] == 1:
        return []
    size = mesh.sizes[str(node.args[1])]
    found: list[tuple[str, Change]] = []
    if row.name == "all_reduce":
        found += [("left out", _skip), ("doubled", _double), ("mean for sum", _scaled(1 / size))]
        found += [(f"{op} for {node.args[2]}", _argument(2, op)) for op in ("sum", "max", "min")
                  if op != node.args[2]]  # fmt: skip
        found.append(("late", _late))
    if row.name == "all_reduce_bucket":
        found += [("left out", _unbucket), ("doubled", _double_bucket)]
        found += [(f"member {i} left out", _without(i)) for i in range(len(node.args[0]))]
        found.append(("two members exchanged", _exchanged))
        found.append(("mean for sum", _scaled_member(1 / size)))
    if row.name == "reduce_scatter_bucket":
        found += [("two members exchanged", _exchanged), ("mean for sum", _scaled_member(1 / size))]
    if row.name in _GATHER_BUCKETS:
        found += [("two members exchanged", _exchanged), ("pieces rotated", _turned_member)]
    if row.name in _GATHERS:
        found += [("padded without communication", _as(ops.pad.default))]
        found += [("own piece in every place", _repeated), ("pieces rotated", _turned)]
    if row.name == "reduce_scatter":
        found += [("cut without reduction", _as(ops.cut.default))]
        found += [("mean for sum", _scaled(1 / size)), ("wrong piece", _turned_operand)]
    if row.name in ("shard", "cut"):
        found.append(("wrong piece", _turned_operand))
    if row.name in _CUTS and len(set(node.args[4])) > 1:
        found.append(("rotated sizes", _rolled_sizes))
    if row.name == "pad":
        found.append(("wrong place", _turned))
    if row.name == "all_to_all":
        found += [("without communication", _local_exchange), ("pieces rotated", _turned)]
    if row.factor:
        for axis, k in mesh.axes:
            if axis != node.args[1] and k > 1:
                found.append((f"over {axis}", _argument(1, axis)))
    return found


def harmless(node: Any, kind: str) -> str:
    """Why a change does not alter any number, or ''."""
    args = node.args
    scatters = node.target is ops.reduce_scatter.default and kind != "mean for sum"
    if kind in _VALUES and not scatters and _void(node):
        return "this rank's piece is empty"
    if kind == "wrong piece" and _constant_along(args[0], args[2]):
        return "all pieces of an expanded value are equal"
    if kind == "pieces rotated" and all(u.target is aten.sum.default for u in node.users):
        return "the sum of all elements does not depend on their order"
    if node.target is ops.all_reduce.default and args[2] == "max":
        if kind == "doubled":
            return "the maximum of equal values is that value"
        if kind in ("min for max", "sum for max"):
            return "softmax does not depend on the shift of its exponents"
    return ""


_VALUES = ("mean for sum", "wrong piece", "rotated sizes", "pieces rotated")
"""Kinds that change values only."""


def _void(node: Any) -> bool:
    """Whether nothing is left of a value: it is empty, or only empty pieces of it are used."""
    val = node.meta.get("val")
    if isinstance(val, torch.Tensor) and val.numel() == 0:
        return True
    through = (ops.shard.default, ops.cut.default, aten.reshape.default)
    return bool(node.users) and all(u.target in through and _void(u) for u in node.users)


def _constant_along(value: Any, dim: Any) -> bool:
    if value.target is not aten.expand.default:
        return False
    before, after = (v.meta["val"].shape for v in (value.args[0], value))
    at = dim - (len(after) - len(before))
    return bool(at < 0 or before[at] == 1 < after[dim])


def _is_zeros(value: Any) -> bool:
    return isinstance(value, fx.Node) and value.target is aten.zeros_like.default


def _put(graph: fx.Graph, target: Any, args: tuple[Any, ...], like: Any) -> fx.Node:
    """A new call with the record of `like`, as a pass that makes the mistake would write it."""
    new = graph.call_function(target, args)
    new.meta = dict(like.meta)
    return new


def _replace(graph: fx.Graph, node: Any, new: Any) -> bool:
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    graph.erase_node(node)
    return True


def _skip(graph: fx.Graph, node: Any) -> bool:
    return _replace(graph, node, node.args[0])


def _second(graph: fx.Graph, node: Any) -> bool:
    return _replace(graph, node, node.args[1])


def _other_site(graph: fx.Graph, node: Any) -> bool:
    node.args = (*node.args[:2], node.args[2] + 1000, *node.args[3:])
    return True


def _argument(at: int, value: Any) -> Change:
    def change(graph: fx.Graph, node: Any) -> bool:
        node.args = (*node.args[:at], value, *node.args[at + 1 :])
        return True

    return change


def _as(target: Any) -> Change:
    """Another operator with the same arguments."""

    def change(graph: fx.Graph, node: Any) -> bool:
        node.target = target
        return True

    return change


def _double(graph: fx.Graph, node: Any) -> bool:
    with graph.inserting_after(node):
        again = _put(graph, node.target, (node, *node.args[1:]), node)
    node.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)
    return True


def _scaled(factor: float) -> Change:
    def change(graph: fx.Graph, node: Any) -> bool:
        if not node.meta["val"].dtype.is_floating_point:
            return False
        with graph.inserting_after(node):
            new = _put(graph, aten.mul.Scalar, (node, factor), node)
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        return True

    return change


_LINEAR = (
    aten.view, aten._unsafe_view, aten.reshape, aten.t, aten.transpose, aten.permute, aten.neg,
    aten.clone, aten.expand, aten.unsqueeze, aten.squeeze, aten.select, aten.slice, aten._to_copy,
    aten.where,  # a mask over zeros
)  # fmt: skip


def _late(graph: fx.Graph, node: Any) -> bool:
    """Reduce the result of the next call in place of its operand; linear calls would not mind."""
    for user in node.users:
        val = user.meta.get("val")
        same = isinstance(val, torch.Tensor) and val.shape == node.meta["val"].shape
        linear = getattr(user.target, "overloadpacket", None) in _LINEAR
        linear = linear or "backward" in str(user.target)  # in the gradient that is reduced
        if user.op != "call_function" or not same or linear or collective_of(user) is not None:
            continue
        if user.target in (aten.mul.Scalar, aten.div.Scalar, aten.mul.Tensor, aten.div.Tensor):
            others = [a for a in user.all_input_nodes if a is not node]
            if not others or user.args[0] is node:  # a factor, the same on all ranks or not
                continue
        user.replace_input_with(node, node.args[0])
        with graph.inserting_after(user):
            new = _put(graph, node.target, (user, *node.args[1:]), user)
        user.replace_all_uses_with(new, delete_user_cb=lambda u, new=new: u is not new)
        if not node.users:
            graph.erase_node(node)
        return True
    return False


def _turned(graph: fx.Graph, node: Any) -> bool:
    """The cut dim of the result turned by one piece (or by half, where the piece is whole)."""
    if node.target is ops.all_to_all.default and node.args[3] != 1:
        return False
    return _turn(graph, node, *node.args[2:5])


def _turn(graph: fx.Graph, node: Any, dim: int, outer: int, sizes: list[int]) -> bool:
    length = sum(sizes)
    shape = list(node.meta["val"].shape)
    wide = [*shape[:dim], outer, length, *shape[dim + 1 :]]
    with graph.inserting_after(node):
        new = _put(graph, aten.reshape.default, (node, wide), node)
    first = new
    with graph.inserting_after(first):
        turned = _put(graph, aten.roll.default, (first, [sizes[0]], [dim + 1]), node)
    with graph.inserting_after(turned):
        new = _put(graph, aten.reshape.default, (turned, shape), node)
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not first)
    return True


def _turned_operand(graph: fx.Graph, node: Any) -> bool:
    """Take the piece of the next rank (of equal pieces), else one shifted by an element."""
    operand = node.args[0]
    dim, outer, sizes = node.args[2:5]
    shape = list(operand.meta["val"].shape)
    wide = [*shape[:dim], outer, sum(sizes), *shape[dim + 1 :]]
    with graph.inserting_before(node):
        new = _put(graph, aten.reshape.default, (operand, wide), operand)
        new = _put(graph, aten.roll.default, (new, [sizes[0]], [dim + 1]), operand)
        new = _put(graph, aten.reshape.default, (new, shape), operand)
    node.args = (new, *node.args[1:])
    return True


def _rolled_sizes(graph: fx.Graph, node: Any) -> bool:
    sizes = list(node.args[4])
    node.args = (*node.args[:4], sizes[-1:] + sizes[:-1], *node.args[5:])
    return True


def _repeated(graph: fx.Graph, node: Any) -> bool:
    """Every rank puts its own piece in the place of each."""
    dim, outer, sizes = node.args[2:5]
    if outer != 1 or len(set(sizes)) > 1:
        return False
    with graph.inserting_after(node):
        new = _put(graph, aten.cat.default, ([node.args[0]] * len(sizes), dim), node)
    return _replace(graph, node, new)


def _local_exchange(graph: fx.Graph, node: Any) -> bool:
    """Pad and cut in place of an all-to-all."""
    axis, dim, outer, sizes = node.args[1:5]
    to = node.args[6:10]
    with graph.inserting_after(node):
        whole = _put(graph, ops.pad.default, (node.args[0], axis, dim, outer, sizes), node)
    with graph.inserting_after(whole):
        new = _put(graph, ops.cut.default, (whole, axis, *to), node)
    return _replace(graph, node, new)


# --- mistakes in buckets -----------------------------------------------------------------------


def _members(node: Any) -> list[Any]:
    """getitem users in order of the members they take."""
    return sorted(node.users, key=lambda user: user.args[1])


def _unbucket(graph: fx.Graph, node: Any) -> bool:
    for user in list(node.users):
        _replace(graph, user, node.args[0][user.args[1]])
    graph.erase_node(node)
    return True


def _without(i: int) -> Change:
    def change(graph: fx.Graph, node: Any) -> bool:
        operands = list(node.args[0])
        for user in _members(node):
            if user.args[1] == i:
                _replace(graph, user, operands[i])
            elif user.args[1] > i:
                user.args = (node, user.args[1] - 1)
        del operands[i]
        node.args = (operands, *node.args[1:])
        node.meta["val"] = [v for j, v in enumerate(node.meta["val"]) if j != i]
        if not operands:
            graph.erase_node(node)
        return True

    return change


def _exchanged(graph: fx.Graph, node: Any) -> bool:
    """Give two gradients of one shape each other's values."""
    users = _members(node)
    for i, a in enumerate(users):
        for b in users[i + 1 :]:
            if a.meta["val"].shape == b.meta["val"].shape and a.meta["val"].numel():
                a.args, b.args = b.args, a.args
                return True
    return False


def _scaled_member(factor: float) -> Change:
    def change(graph: fx.Graph, node: Any) -> bool:
        held = [user for user in _members(node) if user.meta["val"].numel()]
        return bool(held) and _scaled(factor)(graph, held[0])

    return change


def _turned_member(graph: fx.Graph, node: Any) -> bool:
    user = _members(node)[0]
    _, dim, outer, sizes = members_of(node)[user.args[1]][2]
    return _turn(graph, user, dim, outer, sizes)


def _double_bucket(graph: fx.Graph, node: Any) -> bool:
    """Reduce all members twice: each is multiplied by the size of the axis."""
    users = _members(node)
    with graph.inserting_after(node):
        again = _put(graph, node.target, (users, node.args[1]), node)
    anchor = again
    for user in users:
        with graph.inserting_after(anchor):
            anchor = taken = _put(graph, getitem, (again, user.args[1]), user)
        user.replace_all_uses_with(taken, delete_user_cb=lambda u: u is not again)
        again.prepend(user)
    return True


# --- mistakes in the lowered graph, which its gradient then repeats ----------------------------


def typed_changes(node: Any, mesh: Mesh, grad: bool) -> list[tuple[str, Change]]:
    """(kind, change) at a lowered node; `grad`: the loss sends a gradient to it."""
    row = collective_of(node) if node.op == "call_function" else None
    if row is None:
        return []
    found: list[tuple[str, Change]] = []
    if row.name == "vary":
        found += [("missing: gradient not reduced", _skip), ("doubled", _double)]
    if row.name == "all_reduce":
        found += [("left out", _skip), ("doubled", _double)]
    if grad and row.name == "all_gather":
        found.append(("adjoint of a replicated gather", _as(ops.all_gather_replicated.default)))
    if grad and row.name == "all_gather_replicated":
        found.append(("adjoint of a varying gather", _as(ops.all_gather.default)))
    if grad and row.name == "shard":
        found.append(("adjoint of a varying cut", _as(ops.cut.default)))
    if grad and row.name == "cut":
        found.append(("adjoint of a replicated cut", _as(ops.shard.default)))
    if row.name == "reduce_scatter":
        found.append(("cut without reduction", _as(ops.cut.default)))
    if grad and info(node).layouts and info(node).layouts[0].kind(str(node.args[1])) == "R":
        found.append(("gradient reduced once too often", _also_vary))
    return found


def _also_vary(graph: fx.Graph, node: Any) -> bool:
    with graph.inserting_after(node):
        new = _put(graph, ops.vary.default, (node, node.args[1]), node)
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    return True
