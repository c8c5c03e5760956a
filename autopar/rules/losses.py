"""Rule functions for losses. A mean keeps all whole: passes write it as a sum and a count."""

from __future__ import annotations

from autopar.rules.families import RuleFn, common_shape, names
from autopar.rules.registry import unknown
from autopar.rules.spec import Call, Dims, Factors, Spec

__all__ = ["cross_entropy", "loss"]

NONE, MEAN = 0, 1


def loss(vector: int = 0) -> RuleFn:
    """A loss of rows: reduction 'none' keeps them, 'sum' adds them up, 'mean' keeps all whole.

    The last `vector` dims of the first operand make up one row and stay whole; operands of fewer
    dims than the first have no such dims.
    """

    def make(call: Call) -> Spec:
        if call["reduction"] == MEAN:
            return unknown(call)
        f = Factors()
        first = len(call.shapes[0])
        long = [s for s in call.shapes if not vector or len(s) == first]
        full = f.like(common_shape(*long), "d")
        rows = full[: len(full) - vector]
        inputs = tuple(
            f.broadcast(full if not vector or len(s) == first else rows, s) for s in call.shapes
        )
        out = rows if call["reduction"] == NONE else ()
        return Spec(f.sizes, inputs, (out,), whole=names(*full) - names(*rows))

    return make


def cross_entropy(call: Call) -> Spec:
    """cross_entropy and nll_loss: classes, dim 1, are cut through the expansion."""
    if call["reduction"] == MEAN:
        return unknown(call)
    f = Factors()
    x = f.like(call.shapes[0], "d")
    at = 1 if len(x) > 1 else 0
    rows = (*x[:at], *x[at + 1 :])
    probabilities = call.operands[1].meta["val"].dtype.is_floating_point
    inputs: list[Dims] = [x, x if probabilities else rows]
    inputs += [(x[at],) for _ in call.shapes[2:]]
    out = rows if call["reduction"] == NONE else ()
    # nll_loss picks values, cross_entropy has logarithms inside
    linear = () if "label_smoothing" in call.arguments else (frozenset({0}),)
    return Spec(f.sizes, tuple(inputs), (out,), expand=names(x[at]), linear=linear)
