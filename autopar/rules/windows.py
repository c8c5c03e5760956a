"""Rule functions for images: pooling, interpolation, sliding windows, channels and pixels."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.rules.families import RuleFn, argument, local_size, names
from autopar.rules.spec import Call, Dims, Factors, Spec

__all__ = [
    "affine_grid",
    "channel_shuffle",
    "fold",
    "grid_sample",
    "pixel_shuffle",
    "pixel_unshuffle",
    "resized",
    "unfold_blocks",
]


def resized(space: int, *, linear: bool) -> RuleFn:
    """Pooling and interpolation: the last `space` dims stay whole, the others may be cut."""

    def make(call: Call) -> Spec:
        f = Factors()
        shape = call.shapes[0]
        kept = f.like(shape[: len(shape) - space], "d")
        operand = (*kept, *f.like(shape[len(shape) - space :], "i"))
        own = f.like(call.results[0][len(shape) - space :], "o")
        # unpooling also takes the places that pooling gave
        inputs = tuple(operand for _ in call.shapes)
        outputs = tuple((*kept, *own) for _ in call.results)
        whole = frozenset(f.sizes) - names(*kept)
        frail = names(*kept[1:]) if len(kept) > 1 else names(*kept)  # the batch may be empty
        sets = (frozenset({0}),) if linear else ()
        return Spec(f.sizes, inputs, outputs, whole, linear=sets, nonempty=frail)

    return make


def unfold_blocks(call: Call) -> Spec:
    """im2col: (b, c, y, x) becomes (b, c * kernel, blocks)."""
    f = Factors()
    shape, result = call.shapes[0], call.results[0]
    lead = f.like(shape[:-2], "d")
    space, kernel = f.like(shape[-2:], "s"), f.new(result[-2] // shape[-3], "k")
    blocks = f.new(result[-1], "n")
    out = (*lead[:-1], (*lead[-1], *kernel), blocks)
    whole = names(*space, kernel, blocks)
    sets = (frozenset({0}),)
    return Spec(f.sizes, ((*lead, *space),), (out,), whole, linear=sets, nonempty=names(*lead))


def fold(call: Call) -> Spec:
    """col2im: the inverse sum of im2col."""
    f = Factors()
    shape, result = call.shapes[0], call.results[0]
    lead = f.like(result[:-2], "d")
    space, kernel = f.like(result[-2:], "s"), f.new(shape[-2] // result[-3], "k")
    blocks = f.new(shape[-1], "n")
    operand = (*lead[:-1], (*lead[-1], *kernel), blocks)
    whole = names(*space, kernel, blocks)
    sets = (frozenset({0}),)
    return Spec(f.sizes, (operand,), ((*lead, *space),), whole, linear=sets, nonempty=names(*lead))


def affine_grid(call: Call) -> Spec:
    """affine_grid: the batch may be cut."""
    f = Factors()
    batch = f.new(call.shapes[0][0], "b")
    theta = (batch, *f.like(call.shapes[0][1:], "t"))
    grid = (batch, *f.like(call.results[0][1:], "g"))
    size = list(call["size"])
    adjust = argument(call, "size", lambda local: [local.outputs[0][0], *size[1:]])
    whole = frozenset(f.sizes) - names(batch)
    return Spec(
        f.sizes,
        (theta,),
        (grid,),
        whole,
        linear=(frozenset({0}),),
        adjust=adjust,
        nonempty=names(batch),
    )


def grid_sample(call: Call) -> Spec:
    """grid_sample: batch, channels and the places of the result may be cut."""
    f = Factors()
    x, grid = call.shapes
    out = f.like(call.results[0], "d")
    space, xy = f.like(x[2:], "s"), f.new(grid[-1], "c")
    inputs = ((out[0], out[1], *space), (out[0], *out[2:], xy))
    return Spec(
        f.sizes,
        inputs,
        (out,),
        names(*space, xy),
        linear=(frozenset({0}),),
        nonempty=names(*out),
    )


# --- channels and space ------------------------------------------------------------------------


def pixel_shuffle(call: Call) -> Spec:
    """pixel_shuffle: channels (c, r, r) move into height (h, r) and width (w, r)."""
    f = Factors()
    coarse, fine = _pixels(f, call.shapes[0], call.results[0], call["upscale_factor"])
    return _shuffled(f, coarse, fine, names(coarse[-3][-2:]))


def pixel_unshuffle(call: Call) -> Spec:
    """pixel_unshuffle: the inverse of pixel_shuffle."""
    f = Factors()
    coarse, fine = _pixels(f, call.results[0], call.shapes[0], call["downscale_factor"])
    return _shuffled(f, fine, coarse, names(coarse[-3][-2:]))


def _shuffled(f: Factors, operand: Dims, out: Dims, whole: frozenset[str]) -> Spec:
    # shapes and gradients of empty pieces are wrong in torch 2.13
    every = frozenset(f.sizes)
    return Spec(f.sizes, (operand,), (out,), whole, linear=(frozenset({0}),), nonempty=every)


def _pixels(f: Factors, small: Sequence[int], large: Sequence[int], r: int) -> tuple[Dims, Dims]:
    lead = f.like(small[:-3], "d")
    c, h, w = f.new(large[-3], "c"), f.new(small[-2], "h"), f.new(small[-1], "w")
    down, right = f.new(r, "y"), f.new(r, "x")
    return (*lead, (*c, *down, *right), h, w), (*lead, c, (*h, *down), (*w, *right))


def channel_shuffle(call: Call) -> Spec:
    """channel_shuffle: channels (group, c) become (c, group)."""
    f = Factors()
    shape = call.shapes[0]
    g, c = f.new(call["groups"], "g"), f.new(shape[1] // call["groups"], "c")
    batch, space = f.new(shape[0], "b"), f.like(shape[2:], "s")
    return Spec(
        f.sizes,
        ((batch, (*g, *c), *space),),
        ((batch, (*c, *g), *space),),
        linear=(frozenset({0}),),
        adjust=argument(call, "groups", lambda local: local_size(g, local)),
        nonempty=frozenset(f.sizes),
    )
