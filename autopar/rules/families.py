"""Rule functions for elementwise calls, reductions and new tensors, and what all families share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from autopar.rules.registry import unknown
from autopar.rules.spec import Adjust, Call, Dims, Factors, Local, Spec

__all__ = [
    "RuleFn",
    "argument",
    "common_shape",
    "constructor",
    "dim_list",
    "glu",
    "local_size",
    "names",
    "pointwise",
    "prelu",
    "reduction",
    "refine",
    "rrelu",
    "type_as",
    "whole_dims",
]

RuleFn = Callable[[Call], Spec]
Sets = tuple[frozenset[int], ...]


def dim_list(value: Any, rank: int) -> tuple[int, ...]:
    """Dims named by an argument: None or an empty list means all, negatives count from the end."""
    if rank == 0:
        return ()
    if isinstance(value, int):
        return (value % rank,)
    return tuple(d % rank for d in value) if value else tuple(range(rank))


def names(*dims: Iterable[str]) -> frozenset[str]:
    """The factors of some dims."""
    return frozenset(n for dim in dims for n in dim)


def common_shape(*shapes: Sequence[int]) -> list[int]:
    """The shape that some shapes broadcast to."""
    rank = max(map(len, shapes), default=0)
    padded = [[1] * (rank - len(s)) + list(s) for s in shapes]
    return [next((n for n in sizes if n != 1), 1) for sizes in zip(*padded, strict=True)]


def local_size(dim: Iterable[str], local: Local) -> int:
    """Local number of elements of a dim."""
    return math.prod(local.sizes[n] for n in dim)


def argument(call: Call, name: str, value: Callable[[Local], Any]) -> Adjust:
    """An adjust function that replaces the argument `name` by `value(local)`."""
    schema: Any = getattr(call.node.target, "_schema", None)
    place = next(i for i, a in enumerate(schema.arguments) if a.name == name)
    if schema.arguments[place].kwarg_only:
        place = len(schema.arguments)

    def adjust(args: tuple[Any, ...], kwargs: dict[str, Any], local: Local) -> Any:
        if place < len(args):
            return (*args[:place], value(local), *args[place + 1 :]), kwargs
        return args, {**kwargs, name: value(local)}

    return adjust


def refine(*parts: Sequence[int]) -> list[int] | None:
    """Common refinement of factorisations (major first) of one number; None where there is none."""
    bounds = set()
    for sizes in parts:
        total = 1
        for n in reversed(sizes):
            total *= n
            bounds.add(total)
    ordered = sorted(bounds - {1})
    out: list[int] = []
    last = 1
    for b in ordered:
        if b % last:
            return None
        out.append(b // last)
        last = b
    return out[::-1]


# --- elementwise -------------------------------------------------------------------------------


def pointwise(
    *linear: tuple[int, ...],
    when: Callable[[Call], bool] | None = None,
    reads: Callable[[Call], bool] | None = None,
) -> RuleFn:
    """Elementwise with broadcasting.

    `linear`: sets of operands in which the call is linear jointly, if `when(call)`; a set with an
    operand that is a number in this call is dropped. Where `reads(call)` is false the call draws
    random numbers and stays whole.
    """

    def make(call: Call) -> Spec:
        if reads is not None and not reads(call):
            return unknown(call)
        f = Factors()
        out = f.like(call.results[0], "d")
        inputs = tuple(f.broadcast(out, s) for s in call.shapes)
        sets = _sets(linear, len(inputs)) if when is None or when(call) else ()
        return Spec(f.sizes, inputs, tuple(out for _ in call.results), linear=sets)

    return make


def _sets(linear: Iterable[tuple[int, ...]], n: int) -> Sets:
    return tuple(frozenset(s) for s in linear if max(s) < n)


def keeps_sums(call: Call) -> bool:
    """Whether a cast commutes with sums: not from float to integer, nor from or to bool."""
    source, result = call.operands[0].meta["val"].dtype, call.node.meta["val"].dtype
    rounds = source.is_floating_point and not result.is_floating_point
    return not rounds and torch.bool not in (source, result)


def not_training(call: Call) -> bool:
    """Whether the call draws no random numbers."""
    return not call["training"]


rrelu = pointwise(reads=not_training)


def prelu(call: Call) -> Spec:
    """prelu: one weight, or one for each element of dim 1."""
    f = Factors()
    x = f.like(call.shapes[0], "d")
    shape = call.shapes[1]
    channel = x[1] if len(x) > 1 and math.prod(shape) > 1 else ()
    return Spec(f.sizes, (x, (channel,) * len(shape)), (x,), nonempty=names(channel))


def glu(call: Call) -> Spec:
    """glu: dim `dim` is two halves, which are cut alike."""
    f = Factors()
    out = f.like(call.results[0], "d")
    at = call["dim"] % len(out)
    halves = f.new(2, "h")
    operand = (*out[:at], (*halves, *out[at]), *out[at + 1 :])
    return Spec(f.sizes, (operand,), (out,), whole=names(halves))


def type_as(call: Call) -> Spec:
    """type_as: the second operand gives a type only; it goes along where the shapes agree."""
    f = Factors()
    out = f.like(call.shapes[0], "d")
    other = out if call.shapes[0] == call.shapes[1] else f.like(call.shapes[1], "o")
    linear = (frozenset({0}),) if keeps_sums(call) else ()
    return Spec(f.sizes, (out, other), (out,), names(*other) - names(*out), linear=linear)


# --- reductions --------------------------------------------------------------------------------


def reduction(
    kind: str | Callable[[Call], str],
    *,
    dims: str = "dim",
    linear: bool = False,
    nonempty: bool = False,
) -> RuleFn:
    """Reduce over the dims in argument `dims`.

    `kind`: 'sum' gives a partial sum over a cut dim, 'max' and 'min' a partial extremum (values
    without gradient only, and no empty pieces), 'whole' keeps the reduced dims whole, 'expand' cuts
    them through the expansion. `nonempty`: no dim may have empty pieces.
    """

    def make(call: Call) -> Spec:
        f = Factors()
        operand = f.like(call.shapes[0], "d")
        gone = dim_list(call.arguments.get(dims), len(operand))
        keep = bool(call.arguments.get("keepdim", False))
        out: list[tuple[str, ...]] = []
        for i, dim in enumerate(operand):
            if i not in gone:
                out.append(dim)
            elif keep:
                out.append(())
        how = kind if isinstance(kind, str) else kind(call)
        reduced = names(*(operand[i] for i in gone))
        extremum = how in ("max", "min") and not call.needs_grad()
        contracts = how in ("sum", "expand") or extremum
        return Spec(
            f.sizes,
            (operand,),
            tuple(tuple(out) for _ in call.results),
            whole=frozenset() if contracts else reduced,
            expand=reduced if how == "expand" else frozenset(),
            linear=(frozenset({0}),) if linear else (),
            reductions=dict.fromkeys(reduced, how) if extremum else {},
            nonempty=frozenset(f.sizes) if nonempty else reduced if extremum else frozenset(),
        )

    return make


def whole_dims(
    dims: str | Callable[[Call], Sequence[int]] = "dim",
    *,
    linear: bool = False,
    expand: bool = False,
    nonempty: bool = False,
) -> RuleFn:
    """Same shape in and out; the dims that argument `dims` names stay whole, others may be cut."""

    def make(call: Call) -> Spec:
        f = Factors()
        operand = f.like(call.shapes[0], "d")
        named = dims(call) if callable(dims) else call.arguments.get(dims)
        kept = names(*(operand[d] for d in dim_list(named, len(operand))))
        return Spec(
            f.sizes,
            (operand,),
            tuple(operand for _ in call.results),
            whole=frozenset() if expand else kept,
            expand=kept if expand else frozenset(),
            linear=(frozenset({0}),) if linear else (),
            nonempty=frozenset(f.sizes) if nonempty else frozenset(),
        )

    return make


# --- new tensors -------------------------------------------------------------------------------


def constructor(size: str | None) -> RuleFn:
    """A new tensor of one value: any dim may be cut. `size`: the argument with its shape."""

    def make(call: Call) -> Spec:
        f = Factors()
        out = f.like(call.results[0], "d")
        inputs: tuple[Dims, ...] = tuple(f.like(s, f"i{k}_") for k, s in enumerate(call.shapes))
        adjust = None
        if size is not None:
            adjust = argument(call, size, lambda local: list(local.outputs[0]))
        whole = frozenset(f.sizes) - names(*out)
        return Spec(f.sizes, inputs, (out,), whole, adjust=adjust)

    return make
