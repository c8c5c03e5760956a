"""The typed collectives: one row each with meaning, placements, adjoint and bytes moved.

Each is an operator `torch.ops.autopar.<name>` with a fake kernel, so it can stand in any FX graph,
and an autograd formula, its adjoint, so differentiation places the backward communication. A value
is R (replicated), V (varying copy, gradient P), S (shard) or P (partial) on an axis. For k ranks
and a whole value of B bytes the ring algorithms move, per rank, (k-1)/k * B for a gather, scatter
or all-to-all of the whole and twice that for a reduction (Thakur et al. 2005, "Optimization of
Collective Communication Operations in MPICH", sections 4.1 and 4.5).

A cut dim is described by `dim`, `outer` (elements before the cut atom within the dim, local) and
`sizes` (of the pieces on the ranks of the axis, in elements after `outer`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

__all__ = ["COLLECTIVES", "Collective", "collective_of", "members_of", "ops", "split_cuts"]

ops = torch.ops.autopar


@dataclass(frozen=True, slots=True)
class Collective:
    """One row of the table.

    Args:
        schema: operator schema without the name.
        takes: placement of the operand.
        gives: placement of the result.
        adjoint: operator that maps the gradient of the result to that of the operand, '' where the
            gradient passes unchanged, None where there is none.
        factor: bytes moved per rank over (k-1)/k times the whole value's bytes.
    """

    name: str
    schema: str
    takes: str
    gives: str
    adjoint: str | None
    factor: int


_CUT = "str axis, int dim, int outer, int[] sizes"
_CUTS = "(Tensor[] xs, str axis, int[] dims, int[] outers, int[] sizes"
"""One dim and outer a member; their sizes one after the other."""
_AS = ", *, ScalarType? dtype=None)"
"""A gather casts before it sends; its adjoint casts back before it reduces."""
_WIRE = ", *, ScalarType? wire=None)"
"""A reduction sends its operand in the dtype `wire`, and casts the sum back."""
_BACK = ", *, ScalarType? dtype=None, ScalarType? wire=None)"
"""What `wire` says here is said of the adjoint, which is a reduction."""
COLLECTIVES: dict[str, Collective] = {
    row.name: row
    for row in (
        Collective("vary", f"(Tensor x, str axis{_WIRE}", "R", "V", "all_reduce", 0),
        Collective("all_reduce", f"(Tensor x, str axis, str op{_WIRE}", "P", "R", "", 2),
        Collective("all_gather", f"(Tensor x, {_CUT}{_BACK}", "S", "V", "reduce_scatter", 1),
        Collective("all_gather_replicated", f"(Tensor x, {_CUT}{_AS}", "S", "R", "shard", 1),
        Collective("shard", f"(Tensor x, {_CUT}, int local)", "R", "S", "all_gather_replicated", 0),
        Collective("cut", f"(Tensor x, {_CUT}, int local)", "V", "S", "pad", 0),
        Collective("pad", f"(Tensor x, {_CUT})", "S", "P", "shard", 0),
        Collective(
            "reduce_scatter",
            f"(Tensor x, {_CUT}, int local{_WIRE}",
            "P",
            "S",
            "all_gather_replicated",
            1,
        ),  # fmt: skip
        Collective(
            "all_to_all",
            "(Tensor x, str axis, int dim, int outer, int[] sizes, int local, "
            "int to_dim, int to_outer, int[] to_sizes, int to_local)",
            "S",
            "S",
            "all_to_all",
            1,
        ),
        Collective(
            "all_reduce_bucket", f"(Tensor[] xs, str axis{_WIRE} -> Tensor[]", "P", "R", None, 2
        ),
        Collective("all_gather_bucket", f"{_CUTS}{_AS} -> Tensor[]", "S", "V", None, 1),
        Collective("all_gather_replicated_bucket", f"{_CUTS}{_AS} -> Tensor[]", "S", "R", None, 1),
        Collective(
            "reduce_scatter_bucket", f"{_CUTS}, int[] locals{_WIRE} -> Tensor[]", "P", "S", None, 1
        ),
    )
}

_library: Any = torch.library.Library("autopar", "DEF")  # type: ignore[no-untyped-call]
for _row in COLLECTIVES.values():
    _arrow = "" if "->" in _row.schema else " -> Tensor"
    _library.define(f"{_row.name}{_row.schema}{_arrow}")
_library.define("shift(Tensor index, str axis, int[] sizes) -> Tensor")
_library.define("nothing(Tensor[] xs, int[] shape, *, ScalarType dtype) -> Tensor")
_library.define(
    "uniform(int[] shape, str layout, int site, *, ScalarType dtype, Device device) -> Tensor"
)
_library.define("keep_mask(int[] shape, str layout, int site, float p, *, Device device) -> Tensor")


def split_cuts(members: int, *cuts: Any) -> list[tuple[Any, ...]]:
    """What a bucket's arguments after the axis say of each member: (dim, outer, sizes[, local])."""
    k = len(cuts[2]) // members if cuts else 0
    return [
        tuple(list(cut[i * k : i * k + k]) if at == 2 else cut[i] for at, cut in enumerate(cuts))
        for i in range(members)
    ]


def members_of(node: fx.Node) -> list[tuple[str, fx.Node, tuple[Any, ...]]]:
    """(collective, operand, other arguments) of a collective, or of each member of a bucket."""
    row = collective_of(node)
    assert row is not None, "only for collectives"
    xs, axis, *cuts = node.args
    name = row.name.removesuffix("_bucket")
    if name == row.name:
        return [(name, xs, (axis, *cuts))]  # type: ignore[list-item]
    if name == "all_reduce":
        return [(name, x, (axis, "sum")) for x in xs]  # type: ignore[union-attr, misc]
    own = split_cuts(len(xs), *cuts)  # type: ignore[arg-type]
    return [(name, x, (axis, *cut)) for x, cut in zip(xs, own, strict=True)]  # type: ignore


def _resized(x: Tensor, dim: int, length: int, dtype: torch.dtype | None = None) -> Tensor:
    shape = list(x.shape)
    shape[dim] = length
    return x.new_empty(shape, dtype=dtype or x.dtype)


def _gathered(
    x: Tensor, axis: str, dim: int, outer: int, sizes: Sequence[int], *, dtype: Any = None, **_: Any
) -> Tensor:
    return _resized(x, dim, outer * sum(sizes), dtype)


def _cut(x: Tensor, axis: str, dim: int, outer: int, sizes: Any, local: int, **_: Any) -> Tensor:
    return _resized(x, dim, outer * local)


def _exchanged(
    x: Tensor,
    axis: str,
    dim: int,
    outer: int,
    sizes: Sequence[int],
    local: int,
    to_dim: int,
    to_outer: int,
    to_sizes: Sequence[int],
    to_local: int,
) -> Tensor:
    shape = list(x.shape)
    shape[dim] = outer * sum(sizes)
    # the cut atom may lie in the same dim
    shape[to_dim] = shape[to_dim] // sum(to_sizes) * to_local if sum(to_sizes) else 0
    return x.new_empty(shape)


def _fresh(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_FAKES: dict[str, Any] = {
    "vary": _fresh,
    "all_reduce": _fresh,
    "all_gather": _gathered,
    "all_gather_replicated": _gathered,
    "pad": _gathered,
    "shard": _cut,
    "cut": _cut,
    "reduce_scatter": _cut,
    "all_to_all": _exchanged,
    "all_reduce_bucket": lambda xs, axis, wire=None: [_fresh(x) for x in xs],
    "all_gather_bucket": lambda xs, axis, *cuts, dtype=None: [
        _gathered(x, axis, *cut, dtype=dtype)
        for x, cut in zip(xs, split_cuts(len(xs), *cuts), strict=True)
    ],
    "all_gather_replicated_bucket": lambda xs, axis, *cuts, dtype=None: _FAKES["all_gather_bucket"](
        xs, axis, *cuts, dtype=dtype
    ),
    "reduce_scatter_bucket": lambda xs, axis, *cuts, wire=None: [
        _cut(x, axis, *cut) for x, cut in zip(xs, split_cuts(len(xs), *cuts), strict=True)
    ],
    "shift": lambda index, axis, sizes: torch.empty_like(index),
    "nothing": lambda xs, shape, *, dtype: xs[0].new_zeros(shape, dtype=dtype),
    "uniform": lambda shape, layout, site, *, dtype, device: torch.empty(
        shape, dtype=dtype, device=device
    ),
    "keep_mask": lambda shape, layout, site, p, *, device: torch.empty(
        shape, dtype=torch.bool, device=device
    ),
}
for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"autopar::{_name}", _fake, lib=_library)


def _setup(
    ctx: Any, inputs: tuple[Any, ...], output: Tensor, keyword_only_inputs: Any = None
) -> None:
    ctx.rest, ctx.dtype = inputs[1:], inputs[0].dtype
    ctx.length = inputs[0].shape[inputs[2]] if len(inputs) > 3 else 0
    wire = (keyword_only_inputs or {}).get("wire")
    ctx.wire = {} if wire is None else {"wire": wire}


def _adjoint(name: str) -> Any:
    """The autograd formula of collective `name`, which knows every size from the forward call."""

    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rest = ctx.rest
        nones = (None,) * len(rest)
        grad = grad if grad.dtype == ctx.dtype else grad.to(ctx.dtype)
        if name == "vary":
            return (ops.all_reduce(grad, rest[0], "sum", **ctx.wire), *nones)
        if name == "all_reduce":
            if rest[1] != "sum":
                raise RuntimeError(f"all_reduce({rest[1]}) has no gradient")
            return (grad, *nones)
        if name == "all_to_all":
            axis, *halves = rest
            return (ops.all_to_all(grad, axis, *halves[4:], *halves[:4]), *nones)
        cut = rest[:4]
        row = COLLECTIVES[name]
        adjoint = getattr(ops, str(row.adjoint))
        if row.adjoint in ("shard", "reduce_scatter"):  # the operand was a shard of this length
            local = ctx.length // rest[2] if rest[2] else 0
            wire = ctx.wire if row.adjoint == "reduce_scatter" else {}
            return (adjoint(grad, *cut, local, **wire), *nones)
        return (adjoint(grad, *cut), *nones)

    return backward


for _name, _row in COLLECTIVES.items():
    if _row.adjoint is not None:
        torch.library.register_autograd(
            f"autopar::{_name}", _adjoint(_name), setup_context=_setup, lib=_library
        )


def collective_of(node: fx.Node) -> Collective | None:
    """The table row of `node`, or None where it is no collective."""
    name = getattr(node.target, "name", lambda: "")() if node.op == "call_function" else ""
    return COLLECTIVES.get(name.removeprefix("autopar::").split(".")[0]) if name else None


def moved_bytes(node: fx.Node, axis_size: int) -> float:
    """Bytes that one rank sends for `node` by a ring algorithm."""
    row = collective_of(node)
    if row is None or axis_size == 1:
        return 0.0
    results = node.meta["val"] if row.name.endswith("_bucket") else [node.meta["val"]]
    operands = [x.meta["val"] for _, x, _ in members_of(node)]
    values = results if row.takes == "S" else operands
    sent: Any = node.kwargs.get("wire") if row.takes == "P" else None
    total = sum(math.prod(v.shape) * (sent or v.dtype).itemsize for v in values)
    return float(row.factor * (axis_size - 1) / axis_size * total)
