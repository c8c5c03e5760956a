"""Rule functions for calls that read or write elements at integer positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autopar.rules.families import RuleFn, common_shape, names
from autopar.rules.registry import unknown
from autopar.rules.spec import Call, Dims, Factors, Spec

__all__ = [
    "embedding",
    "gather",
    "index",
    "index_put",
    "index_select",
    "index_write",
    "isin",
    "one_hot",
    "scatter",
    "searchsorted",
    "slice_write",
    "take",
    "take_along_dim",
]

FIRST = (frozenset({0}),)
BOTH = (frozenset({0, 2}),)


def embedding(call: Call) -> Spec:
    """embedding: rows are looked up.

    A padding row has no gradient, and its number is one of the whole table: rows are then cut
    through the expansion. Gradients scaled by frequency need all the indices at once.
    """
    if call["scale_grad_by_freq"] or call["sparse"]:
        return unknown(call)
    f = Factors()
    v, k = f.like(call.shapes[0], "v")
    rows = f.like(call.shapes[1], "i")
    spec = Spec(f.sizes, ((v, k), rows), ((*rows, k),), linear=FIRST)
    if call["padding_idx"] >= 0:
        return Spec(f.sizes, spec.inputs, spec.outputs, expand=names(v), linear=FIRST)
    lookup = dict.fromkeys(v, 1)
    return Spec(f.sizes, spec.inputs, spec.outputs, lookup=lookup, linear=FIRST)


def gather(call: Call) -> Spec:
    """gather: the indexed dim of the source is looked up, the other dims go along.

    The index may be smaller than the source in the other dims; those stay whole then.
    """
    if not call.shapes[0] or not call.shapes[1]:
        return unknown(call)
    f = Factors()
    source, out, whole = _aligned(f, call.shapes[0], call.shapes[1], call["dim"])
    at = call["dim"] % len(source)
    lookup = dict.fromkeys(source[at], 1)
    return Spec(f.sizes, (source, out), (out,), whole, lookup=lookup, linear=FIRST)


def _aligned(
    f: Factors, shape: Sequence[int], index: Sequence[int], dim: int
) -> tuple[Dims, Dims, frozenset[str]]:
    """Dims of a tensor and of an index into its dim `dim`, and the factors that stay whole."""
    source: list[tuple[str, ...]] = []
    out: list[tuple[str, ...]] = []
    whole: set[str] = set()
    for i, (m, n) in enumerate(zip(shape, index, strict=True)):
        if m == n and i != dim % len(shape):
            source.append(f.new(m, f"d{i}_"))
            out.append(source[-1])
            continue
        source.append(f.new(m, f"v{i}_"))
        out.append(f.new(n, f"n{i}_"))
        if i != dim % len(shape):
            whole.update(source[-1], out[-1])
    return tuple(source), tuple(out), frozenset(whole)


def take_along_dim(call: Call) -> Spec:
    """take_along_dim: gather whose other dims broadcast; the indexed dim stays whole."""
    if call["dim"] is None:
        return unknown(call)
    f = Factors()
    out = f.like(call.results[0], "d")
    at = call["dim"] % len(out)
    source = list(f.broadcast(out, call.shapes[0]))
    source[at] = f.new(call.shapes[0][at], "v")
    inputs = (tuple(source), f.broadcast(out, call.shapes[1]))
    return Spec(f.sizes, inputs, (out,), whole=names(source[at]), linear=FIRST)


def index_select(call: Call) -> Spec:
    """index_select: the indexed dim is looked up."""
    if not call.shapes[0]:
        return unknown(call)
    f = Factors()
    operand = f.like(call.shapes[0], "d")
    at = call["dim"] % len(operand)
    n = f.new(call.results[0][at], "n")
    out = (*operand[:at], n, *operand[at + 1 :])
    rows = (n,) if call.shapes[1] else ()
    lookup = dict.fromkeys(operand[at], 1)
    return Spec(f.sizes, (operand, rows), (out,), lookup=lookup, linear=FIRST)


def take(call: Call) -> Spec:
    """take: the source is flattened and stays whole."""
    f = Factors()
    source = f.like(call.shapes[0], "d")
    out = f.like(call.shapes[1], "n")
    return Spec(f.sizes, (source, out), (out,), whole=names(*source), linear=FIRST)


def _indexed(
    f: Factors, call: Call, indices: Sequence[Any]
) -> tuple[Dims, list[Dims], Dims, list[int]] | None:
    """Dims of the tensor, of the index tensors and of the indexed part, and the indexed dims.

    None where an index is a mask. Where the indexed dims are not side by side, the dims of the
    index tensors come first.
    """
    operand = f.like(call.shapes[0], "d")
    used = [i for i, t in enumerate(indices) if t is not None]
    vals = [indices[i].meta["val"] for i in used]
    if any(v.dtype in (torch.bool, torch.uint8) for v in vals):
        return None
    shape = common_shape(*(v.shape for v in vals))
    side_by_side = used == list(range(used[0], used[-1] + 1))
    start = used[0] if side_by_side else 0
    place = f.like(shape, "n")
    rest = [operand[i] for i in range(len(operand)) if i not in used]
    part = (*rest[:start], *place, *rest[start:])
    return operand, [f.broadcast(place, v.shape) for v in vals], part, used


def index(call: Call) -> Spec:
    """Indexing by integer tensors: indexed dims stay whole, or, for one, go by the expansion."""
    f = Factors()
    found = _indexed(f, call, call["indices"])
    if found is None:
        return unknown(call)
    operand, places, out, used = found
    kept = names(*(operand[i] for i in used))
    single = len(used) == 1
    return Spec(
        f.sizes,
        (operand, *places),
        (out,),
        whole=frozenset() if single else kept,
        expand=kept if single else frozenset(),
        linear=FIRST,
    )


def index_put(call: Call) -> Spec:
    """Writing at integer positions, or one value where a mask holds."""
    f = Factors()
    indices = call["indices"]
    found = _indexed(f, call, indices)
    used = [i for i, t in enumerate(indices) if t is not None]
    n = len(call.shapes)
    if found is None:
        if len(used) != 1 or call.shapes[-1] not in ((), (1,)):
            return unknown(call)
        f = Factors()
        operand = f.like(call.shapes[0], "d")
        mask = operand[used[0] : used[0] + len(call.shapes[1])]
        value: Dims = ((),) * len(call.shapes[-1])
        inputs = (operand, mask, value)
        return Spec(f.sizes, inputs, (operand,), linear=(frozenset({0, n - 1}),))
    operand, places, part, used = found
    whole = names(*(operand[i] for i in used), *(d for dims in places for d in dims))
    values = f.broadcast(part, call.shapes[-1])
    return Spec(
        f.sizes,
        (operand, *places, values),
        (operand,),
        whole | names(*part) - names(*operand),
        linear=(frozenset({0, n - 1}),),
    )


def _writes_number(call: Call) -> bool:
    """Whether a number other than zero is written, which is no sum over ranks."""
    value = call.arguments.get("value")
    return isinstance(value, (int, float)) and value != 0


def scatter(linear: bool = True) -> RuleFn:
    """Writing along a dim, which stays whole; other dims where all sizes agree may be cut."""

    def make(call: Call) -> Spec:
        f = Factors()
        shape, place = call.shapes[:2]
        if not shape or not place:
            return unknown(call)
        at = call["dim"] % len(shape)
        source = call.shapes[2] if len(call.shapes) > 2 else place
        same = [i for i in range(len(shape)) if i != at and shape[i] == place[i] == source[i]]
        operand = f.like(shape, "d")
        inputs = [operand]
        for k, other in enumerate(call.shapes[1:]):
            own = f.like([1 if i in same else n for i, n in enumerate(other)], f"n{k}_")
            inputs.append(tuple(operand[i] if i in same else own[i] for i in range(len(shape))))
        whole = frozenset(f.sizes) - names(*(operand[i] for i in same))
        sets: tuple[frozenset[int], ...] = BOTH if len(inputs) > 2 else FIRST
        keeps = linear and not _writes_number(call)
        return Spec(f.sizes, tuple(inputs), (operand,), whole, linear=sets if keeps else ())

    return make


def index_write(linear: bool = True) -> RuleFn:
    """index_add, index_copy, index_fill: the indexed dim stays whole."""

    def make(call: Call) -> Spec:
        if not call.shapes[0]:
            return unknown(call)
        f = Factors()
        operand = f.like(call.shapes[0], "d")
        at = call["dim"] % len(operand)
        n = f.new(1 if not call.shapes[1] else call.shapes[1][0], "n")
        inputs: list[Dims] = [operand, (n,) if call.shapes[1] else ()]
        if "source" in call.arguments:
            inputs.append((*operand[:at], n, *operand[at + 1 :]))
        elif len(call.shapes) > 2:
            inputs.append(())
        keeps = linear and not _writes_number(call)
        sets: tuple[frozenset[int], ...] = BOTH if len(inputs) > 2 else FIRST
        whole = names(operand[at], n)
        return Spec(f.sizes, tuple(inputs), (operand,), whole, linear=sets if keeps else ())

    return make


def slice_write(call: Call) -> Spec:
    """slice_scatter, select_scatter: the dim written into stays whole."""
    f = Factors()
    operand = f.like(call.shapes[0], "d")
    at = call["dim"] % len(operand)
    whole = names(operand[at])
    if len(call.shapes[1]) < len(operand):
        source = (*operand[:at], *operand[at + 1 :])
    else:
        own = f.new(call.shapes[1][at], "n")
        source = (*operand[:at], own, *operand[at + 1 :])
        whole |= names(own)
    return Spec(f.sizes, (operand, source), (operand,), whole, linear=(frozenset({0, 1}),))


def one_hot(call: Call) -> Spec:
    """one_hot: the classes stay whole; their number must be given to cut the rest."""
    if call["num_classes"] < 0:
        return unknown(call)
    f = Factors()
    rows = f.like(call.shapes[0], "d")
    classes = f.new(call.results[0][-1], "c")
    return Spec(f.sizes, (rows,), ((*rows, classes),), whole=names(classes))


def searchsorted(values: int) -> RuleFn:
    """searchsorted, bucketize: the sorted row stays whole. `values`: operand that is looked up."""

    def make(call: Call) -> Spec:
        f = Factors()
        out = f.like(call.results[0], "d")
        row = call.shapes[1 - values]
        lead = out[: len(row) - 1] if len(row) > 1 else ()
        inputs: list[Dims] = []
        for k, shape in enumerate(call.shapes):
            inputs.append(out if k == values else (*lead, f.new(shape[-1], "v")))
        whole = frozenset(f.sizes) - names(*out)
        return Spec(f.sizes, tuple(inputs), (out,), whole)

    return make


def isin(call: Call) -> Spec:
    """isin: elements may be cut, what they are sought in may not."""
    f = Factors()
    out = f.like(call.results[0], "d")
    test = f.like(call.shapes[1], "t")
    return Spec(f.sizes, (out, test), (out,), whole=names(*test))
