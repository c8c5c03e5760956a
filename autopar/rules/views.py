"""Rule functions for calls that move, join, cut up or repeat elements without computing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autopar.rules.families import RuleFn, argument, dim_list, local_size, names, refine
from autopar.rules.registry import unknown
from autopar.rules.spec import Adjust, Call, Dims, Factors, Local, Spec

__all__ = [
    "as_rows",
    "broadcast_tensors",
    "concat",
    "cross",
    "diagonal",
    "diff",
    "dropped",
    "expand",
    "meshgrid",
    "moved",
    "narrow",
    "pad",
    "permute",
    "pieces",
    "repeat",
    "repeat_interleave",
    "reshape",
    "selected",
    "slice_dim",
    "squeeze",
    "stack",
    "swapped",
    "unflatten",
    "unfold",
]

LINEAR = (frozenset({0}),)


# --- reshaping ---------------------------------------------------------------------------------


def factorise(a: Sequence[int], b: Sequence[int]) -> list[tuple[list[int], list[int]]] | None:
    """Group the dims of two shapes of equal product into shortest runs of equal product.

    Returns (dims of a, dims of b) per run, size-1 dims left out; None where a dim has size 0.
    """
    if 0 in a or 0 in b:
        return None
    left = [i for i, n in enumerate(a) if n != 1]
    right = [i for i, n in enumerate(b) if n != 1]
    runs = []
    i = j = 0
    while i < len(left) and j < len(right):
        run_a, run_b = [left[i]], [right[j]]
        pa, pb = a[left[i]], b[right[j]]
        i, j = i + 1, j + 1
        while pa != pb:
            if pa < pb:
                pa *= a[left[i]]
                run_a.append(left[i])
                i += 1
            else:
                pb *= b[right[j]]
                run_b.append(right[j])
                j += 1
        runs.append((run_a, run_b))
    return runs


def view_dims(f: Factors, a: Sequence[int], b: Sequence[int]) -> tuple[Dims, Dims, set[str]]:
    """Dims of the operand and result of a reshape from `a` to `b`, and the factors kept whole."""
    runs = factorise(a, b)
    ins: list[tuple[str, ...]] = [()] * len(a)
    outs: list[tuple[str, ...]] = [()] * len(b)
    whole: set[str] = set()
    if runs is None:
        ins, outs = list(f.like(a, "i")), list(f.like(b, "o"))
        return tuple(ins), tuple(outs), set(f.sizes)
    for run_a, run_b in runs:
        sizes = refine([a[i] for i in run_a], [b[j] for j in run_b])
        if sizes is None:
            for i in run_a:
                ins[i] = f.new(a[i], f"i{i}_")
                whole.update(ins[i])
            for j in run_b:
                outs[j] = f.new(b[j], f"o{j}_")
                whole.update(outs[j])
            continue
        labels = [f.new(n, f"v{run_a[0]}_{k}")[0] for k, n in enumerate(sizes)]
        for dims, run, shape in ((ins, run_a, a), (outs, run_b, b)):
            at = 0
            for d in run:
                total, start = 1, at
                while total < shape[d]:
                    total *= sizes[at]
                    at += 1
                dims[d] = tuple(labels[start:at])
    return tuple(ins), tuple(outs), whole


def _view(call: Call, adjust: Adjust | None = None) -> Spec:
    f = Factors()
    ins, outs, whole = view_dims(f, call.shapes[0], call.results[0])
    return Spec(f.sizes, (ins,), (outs,), frozenset(whole), linear=LINEAR, adjust=adjust)


def reshape(size: str | None = None) -> RuleFn:
    """view, flatten, unsqueeze: dims split and merge in order. `size`: argument with the shape."""

    def make(call: Call) -> Spec:
        if size is None:
            return _view(call)
        return _view(call, argument(call, size, lambda local: list(local.outputs[0])))

    return make


def unflatten(call: Call) -> Spec:
    """unflatten: the argument holds the sizes of the new dims only."""
    at = call["dim"] % len(call.shapes[0])
    end = at + len(call["sizes"])
    return _view(call, argument(call, "sizes", lambda local: list(local.outputs[0][at:end])))


def squeeze(call: Call) -> Spec:
    """squeeze: dims that are larger than 1 stay whole where a local size 1 would be squeezed."""
    shape = call.shapes[0]
    listed = dim_list(call.arguments.get("dim"), len(shape))
    if isinstance(call.arguments.get("dim"), (list, tuple)):
        ones = [d for d in listed if shape[d] == 1]
        return _view(call, argument(call, "dim", lambda local: ones)) if ones else unknown(call)
    f = Factors()
    operand = f.like(shape, "d")
    out = tuple(dim for d, dim in enumerate(operand) if d not in listed or shape[d] != 1)
    return Spec(
        f.sizes, (operand,), (out,), whole=names(*(operand[d] for d in listed)), linear=LINEAR
    )


# --- the order of dims -------------------------------------------------------------------------


def permute(order: Callable[[Call, int], Sequence[int]]) -> RuleFn:
    """Reorder dims; `order(call, rank)` gives for each result dim the operand dim."""

    def make(call: Call) -> Spec:
        f = Factors()
        operand = f.like(call.shapes[0], "d")
        out = tuple(operand[i] for i in order(call, len(operand)))
        return Spec(f.sizes, (operand,), (out,), linear=LINEAR)

    return make


def swapped(first: str, second: str) -> Callable[[Call, int], Sequence[int]]:
    """Order of dims after a swap of the dims in two arguments."""

    def order(call: Call, rank: int) -> Sequence[int]:
        dims = list(range(rank))
        if rank:
            a, b = call[first] % rank, call[second] % rank
            dims[a], dims[b] = b, a
        return dims

    return order


def moved(call: Call, rank: int) -> Sequence[int]:
    """Order of dims after movedim: the listed dims go to their places, the others keep order."""
    source, target = dim_list(call["source"], rank), dim_list(call["destination"], rank)
    order: list[int] = [-1] * rank
    for s, t in zip(source, target, strict=True):
        order[t] = s
    rest = iter(d for d in range(rank) if d not in source)
    return [next(rest) if d < 0 else d for d in order]


# --- repeating ---------------------------------------------------------------------------------


def expand(size: str | None) -> RuleFn:
    """Expand size-1 or new leading dims. `size`: argument with the shape, if there is one."""

    def make(call: Call) -> Spec:
        f = Factors()
        out = f.like(call.results[0], "d")
        operand = f.broadcast(out, call.shapes[0])
        adjust = None
        if size is not None:
            adjust = argument(call, size, lambda local: list(local.outputs[0]))
        inputs = (operand, *(out for _ in call.shapes[1:]))
        return Spec(f.sizes, inputs, (out,), linear=LINEAR, adjust=adjust)

    return make


def broadcast_tensors(call: Call) -> Spec:
    """broadcast_tensors: every result has the common shape."""
    f = Factors()
    out = f.like(call.results[0], "d")
    inputs = tuple(f.broadcast(out, s) for s in call.shapes)
    n = len(inputs)
    return Spec(f.sizes, inputs, (out,) * n, linear=(frozenset(range(n)),))


def meshgrid(call: Call) -> Spec:
    """meshgrid: operand i lies along dim i of every result (the first two swapped for 'xy')."""
    f = Factors()
    inputs = tuple(f.like(s, f"d{k}_") for k, s in enumerate(call.shapes))
    out = [dims[0] if dims else () for dims in inputs]
    if call.arguments.get("indexing") == "xy" and len(out) > 1:
        out[0], out[1] = out[1], out[0]
    n = len(inputs)
    return Spec(f.sizes, inputs, (tuple(out),) * n, linear=(frozenset(range(n)),))


def repeat(counts: str) -> RuleFn:
    """repeat, tile: each result dim is (repeats, elements). `counts`: argument with the repeats."""

    def make(call: Call) -> Spec:
        f = Factors()
        shape, result = call.shapes[0], call.results[0]
        operand = f.like(shape, "d")
        padded = ((),) * (len(result) - len(shape)) + operand
        given = list(call[counts])
        times = [1] * (len(result) - len(given)) + given
        copies = [f.new(n, f"r{i}_") for i, n in enumerate(times)]
        out = tuple((*r, *d) for r, d in zip(copies, padded, strict=True))
        adjust = argument(call, counts, lambda local: [local_size(r, local) for r in copies])
        if 0 in result:  # a repeat of zero keeps no factor of the operand
            return unknown(call)
        return Spec(f.sizes, (operand,), (out,), linear=LINEAR, adjust=adjust)

    return make


def repeat_interleave(call: Call) -> Spec:
    """repeat_interleave by a number: the result dim is (elements, repeats)."""
    f = Factors()
    operand = f.like(call.shapes[0], "d")
    copies = f.new(call["repeats"], "r")
    if call["dim"] is None:
        out: Dims = (tuple(n for d in operand for n in d) + copies,)
    else:
        at = call["dim"] % len(operand)
        out = (*operand[:at], (*operand[at], *copies), *operand[at + 1 :])
    repeats = argument(call, "repeats", lambda local: local_size(copies, local))
    adjust = repeats
    if call.arguments.get("output_size") is not None:
        at = 0 if call["dim"] is None else call["dim"] % len(operand)
        size = argument(call, "output_size", lambda local: local.outputs[0][at])

        def adjust(args: tuple[Any, ...], kwargs: dict[str, Any], local: Local) -> Any:
            return size(*repeats(args, kwargs, local), local)

    return Spec(f.sizes, (operand,), (out,), linear=LINEAR, adjust=adjust)


# --- joining -----------------------------------------------------------------------------------


def concat(at: int | None = None) -> RuleFn:
    """cat and its kin: the joined dim stays whole. `at`: the dim where no argument gives it."""

    def make(call: Call) -> Spec:
        f = Factors()
        rank = len(call.results[0])
        dim = (call["dim"] if at is None else at) % rank
        out = f.like(call.results[0], "d")
        whole = set(out[dim])
        inputs: list[Dims] = []
        for k, shape in enumerate(call.shapes):
            if len(shape) != rank:  # cat ignores empty 1-d operands
                if 0 not in shape:
                    return unknown(call)
                inputs.append(f.like(shape, f"e{k}_"))
                whole |= names(*inputs[-1])
                continue
            own = f.new(shape[dim], f"c{k}_")
            whole.update(own)
            inputs.append((*out[:dim], own, *out[dim + 1 :]))
        linear = (frozenset(range(len(inputs))),)
        return Spec(f.sizes, tuple(inputs), (out,), frozenset(whole), linear=linear)

    return make


def as_rows(at: int) -> RuleFn:
    """hstack (`at` 1) and vstack (`at` 0): cat of operands of two dims or more, hstack of 1-d."""

    def make(call: Call) -> Spec:
        flat = {len(s) for s in call.shapes} == {1}
        if any(len(s) < 2 for s in call.shapes) and not (flat and at == 1):
            return unknown(call)
        return concat(0 if flat else at)(call)

    return make


def stack(call: Call) -> Spec:
    """stack: the new dim stays whole."""
    f = Factors()
    at = call["dim"] % len(call.results[0])
    out = f.like(call.results[0], "d")
    operand = (*out[:at], *out[at + 1 :])
    n = len(call.shapes)
    linear = (frozenset(range(n)),)
    return Spec(f.sizes, (operand,) * n, (out,), whole=names(out[at]), linear=linear)


# --- taking parts ------------------------------------------------------------------------------


def _changed(call: Call, dims: Sequence[int], linear: bool = True, nonempty: bool = False) -> Spec:
    """The given dims change their size or order and stay whole; the others are kept."""
    f = Factors()
    operand = f.like(call.shapes[0], "d")
    outs = []
    whole = set(names(*(operand[d] for d in dims)))
    for k, result in enumerate(call.results):
        out = list(operand)
        for d in dims:
            out[d] = f.new(result[d], f"o{k}_{d}_")
            whole.update(out[d])
        outs.append(tuple(out))
    return Spec(
        f.sizes,
        (operand,),
        tuple(outs),
        frozenset(whole),
        linear=LINEAR if linear else (),
        nonempty=names(*operand) if nonempty else frozenset(),
    )


def slice_dim(call: Call) -> Spec:
    """slice: the dim may be cut only where all of it is taken."""
    shape = call.shapes[0]
    at = call["dim"] % len(shape)
    if shape == call.results[0] and call["step"] == 1:
        # bounds beyond the ends are clamped, so they take all of a piece as well
        return _changed(call, ())
    return _changed(call, (at,))


def narrow(call: Call) -> Spec:
    """narrow: the dim stays whole."""
    return _changed(call, (call["dim"] % len(call.shapes[0]),))


def pieces(call: Call) -> Spec:
    """split, chunk: the cut-up dim stays whole, others may be cut."""
    return _changed(call, (call["dim"] % len(call.shapes[0]),))


def pad(call: Call) -> Spec:
    """pad: padded dims stay whole; linear unless it fills with a nonzero value."""
    widths = list(call["pad"])
    rank = len(call.shapes[0])
    dims = [rank - 1 - i for i in range(len(widths) // 2) if widths[2 * i] or widths[2 * i + 1]]
    constant = call.arguments.get("mode", "constant") == "constant"
    return _changed(call, dims, linear=not (constant and call["value"]), nonempty=not constant)


def diff(call: Call) -> Spec:
    """diff: the dim stays whole; what is prepended or appended goes along."""
    spec = _changed(call, (call["dim"] % len(call.shapes[0]),))
    at = call["dim"] % len(call.shapes[0])
    f = Factors()
    f.sizes.update(spec.sizes)
    inputs = list(spec.inputs)
    for shape in call.shapes[1:]:
        operand = spec.inputs[0]
        inputs.append((*operand[:at], f.new(shape[at], "e"), *operand[at + 1 :]))
    whole = spec.whole | (frozenset(f.sizes) - frozenset(spec.sizes))
    linear = (frozenset(range(len(inputs))),)
    return Spec(f.sizes, tuple(inputs), spec.outputs, whole, linear=linear)


def dropped(call: Call) -> Spec:
    """select, unbind: one dim of the operand disappears and stays whole."""
    f = Factors()
    operand = f.like(call.shapes[0], "d")
    at = call["dim"] % len(operand)
    out = (*operand[:at], *operand[at + 1 :])
    outs = tuple(out for _ in call.results)
    return Spec(f.sizes, (operand,), outs, whole=names(operand[at]), linear=LINEAR)


def selected(call: Call) -> Spec:
    """topk, kthvalue, mode: the searched dim stays whole."""
    f = Factors()
    operand = f.like(call.shapes[0], "d")
    at = call.arguments.get("dim", -1) % len(operand)
    outs: list[Dims] = []
    whole = set(operand[at])
    for k, result in enumerate(call.results):
        own: Dims = ()
        if len(result) == len(operand):
            own = (f.new(result[at], f"o{k}_"),)
        whole |= names(*own)
        outs.append((*operand[:at], *own, *operand[at + 1 :]))
    return Spec(f.sizes, (operand,), tuple(outs), frozenset(whole))


def diagonal(call: Call) -> Spec:
    """diagonal: its two dims stay whole, the diagonal comes last."""
    f = Factors()
    operand = f.like(call.shapes[0], "d")
    pair = dim_list([call["dim1"], call["dim2"]], len(operand))
    last = f.new(call.results[0][-1], "n")
    out = (*(d for i, d in enumerate(operand) if i not in pair), last)
    whole = names(last, *(operand[i] for i in pair))
    return Spec(f.sizes, (operand,), (out,), whole, linear=LINEAR)


def unfold(call: Call) -> Spec:
    """unfold: windows of a dim; windows side by side split it, others keep it whole."""
    f = Factors()
    shape, result = call.shapes[0], call.results[0]
    operand = list(f.like(shape, "d"))
    at = call["dimension"] % len(shape)
    count, size = f.new(result[at], "w"), f.new(call["size"], "s")
    whole, nonempty = names(size), names(count)
    if call["step"] == call["size"] and shape[at] == result[at] * call["size"]:
        for n in operand[at]:
            del f.sizes[n]
        operand[at] = (*count, *size)
    else:
        whole |= names(count, operand[at])
    out = (*operand[:at], count, *operand[at + 1 :], size)
    return Spec(f.sizes, (tuple(operand),), (out,), whole, linear=LINEAR, nonempty=nonempty)


def cross(call: Call) -> Spec:
    """cross: the dim of size 3 stays whole; without an argument it is the first such dim."""
    f = Factors()
    out = f.like(call.results[0], "d")
    dim = call["dim"]
    at = out.index(next(d for d in out if names(d) and f.sizes[d[0]] == 3)) if dim is None else dim
    inputs = tuple(f.broadcast(out, s) for s in call.shapes)
    adjust = argument(call, "dim", lambda local: at)
    linear = (frozenset({0}), frozenset({1}))
    return Spec(f.sizes, inputs, (out,), names(out[at]), linear=linear, adjust=adjust)
