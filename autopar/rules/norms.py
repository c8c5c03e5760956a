"""Rule functions for normalisation and similarity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.rules.families import argument, common_shape, local_size, names
from autopar.rules.registry import unknown
from autopar.rules.spec import Adjust, Call, Dims, Factors, Local, Spec

__all__ = [
    "batch_norm",
    "cosine_similarity",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "native_group_norm",
    "pairwise_distance",
    "weight_norm",
]


def layer_norm(call: Call) -> Spec:
    """Normalise the last dims, which weight and bias share; they are cut through the expansion."""
    f = Factors()
    operand = f.like(call.shapes[0], "d")
    lead = len(operand) - len(call["normalized_shape"])
    tail = operand[lead:]
    statistics = (*operand[:lead], *((),) * len(tail))
    outputs = (operand, *(statistics for _ in call.results[1:]))
    inputs = (operand, *(tail for _ in call.shapes[1:]))
    return Spec(f.sizes, inputs, outputs, expand=names(*tail))


def batch_norm(call: Call) -> Spec:
    """Normalise over all dims but dim 1 by batch statistics, cut through the expansion.

    Without training the running statistics are used and every dim may be cut.
    """
    f = Factors()
    x = f.like(call.shapes[0], "d")
    channel = x[1]
    inputs = tuple(x if k == 0 else (channel,) for k in range(len(call.shapes)))
    outputs: list[Dims] = [x]
    unused: set[str] = set()
    for shape in call.results[1:]:
        if 0 in shape:  # a result without elements stands for a missing one
            outputs.append(f.like(shape, "z"))
            unused |= names(*outputs[-1])
        else:
            outputs.append((channel,))
    updates = len(outputs) == 5  # running statistics are results
    statistics = call.arguments.get("running_mean") is not None
    if not call.arguments.get("training", False) and not updates:
        return Spec(f.sizes, inputs, tuple(outputs), frozenset(unused), nonempty=names(*x))
    if statistics and not updates:  # updated in place, unseen by the graph
        return unknown(call)
    reduced = names(*x) - names(channel)
    return Spec(
        f.sizes,
        inputs,
        tuple(outputs),
        frozenset(unused),
        expand=reduced,
        nonempty=names(channel),
    )


def group_norm(call: Call) -> Spec:
    """Channels are (groups, c); batch and groups may be cut, the rest through the expansion."""
    f = Factors()
    shape = call.shapes[0]
    groups = call["num_groups"]
    n, g, c = f.new(shape[0], "b"), f.new(groups, "g"), f.new(shape[1] // groups, "c")
    space = f.like(shape[2:], "s")
    x = (n, (*g, *c), *space)
    inputs = (x, *(((*g, *c),) for _ in call.shapes[1:]))
    return Spec(
        f.sizes,
        inputs,
        (x,),
        expand=names(c, *space),
        adjust=argument(call, "num_groups", lambda local: local_size(g, local)),
        nonempty=names(g),
    )


def native_group_norm(call: Call) -> Spec:
    """group_norm with sizes as arguments and statistics (batch, groups) as further results."""
    f = Factors()
    shape = call.shapes[0]
    groups = call["group"]
    n, g, c = f.new(shape[0], "b"), f.new(groups, "g"), f.new(shape[1] // groups, "c")
    space = f.like(shape[2:], "s")
    x = (n, (*g, *c), *space)
    values = {
        "N": lambda local: local_size(n, local),
        "C": lambda local: local_size((*g, *c), local),
        "group": lambda local: local_size(g, local),
    }
    steps = [argument(call, name, value) for name, value in values.items()]
    return Spec(
        f.sizes,
        (x, *(((*g, *c),) for _ in call.shapes[1:])),
        (x, (n, g), (n, g)),
        names(c, *space),
        adjust=_chained(steps),
        nonempty=names(n, g),
    )


def _chained(steps: Sequence[Adjust]) -> Adjust:
    def adjust(args: tuple[Any, ...], kwargs: dict[str, Any], local: Local) -> Any:
        for step in steps:
            args, kwargs = step(args, kwargs, local)
        return args, kwargs

    return adjust


def instance_norm(call: Call) -> Spec:
    """Normalise each channel of each row over space; batch and channels may be cut."""
    if call["running_mean"] is not None and call["use_input_stats"]:
        return unknown(call)  # the running statistics are updated in place
    f = Factors()
    x = f.like(call.shapes[0], "d")
    inputs = (x, *((x[1],) for _ in call.shapes[1:]))
    expand = names(*x[2:]) if call["use_input_stats"] else frozenset()
    return Spec(f.sizes, inputs, (x,), expand=expand, nonempty=names(*x[:2]))


def weight_norm(call: Call) -> Spec:
    """weight_norm: the dim of the norms may be cut, the summed dims stay whole."""
    f = Factors()
    v = f.like(call.shapes[0], "d")
    if call["dim"] < 0:
        return unknown(call)
    at = call["dim"]
    g = tuple(d if i == at else () for i, d in enumerate(v))
    return Spec(
        f.sizes,
        (v, g),
        (v,),
        names(*v) - names(v[at]),
        linear=(frozenset({1}),),
        nonempty=names(v[at]),
    )


def cosine_similarity(call: Call) -> Spec:
    """cosine_similarity: the compared dim stays whole."""
    f = Factors()
    full = f.like(common_shape(*call.shapes), "d")
    at = call["dim"] % len(full)
    inputs = tuple(f.broadcast(full, s) for s in call.shapes)
    return Spec(f.sizes, inputs, ((*full[:at], *full[at + 1 :]),), whole=names(full[at]))


def pairwise_distance(call: Call) -> Spec:
    """pairwise_distance: the last dim stays whole."""
    f = Factors()
    full = f.like(common_shape(*call.shapes), "d")
    inputs = tuple(f.broadcast(full, s) for s in call.shapes)
    out = (*full[:-1], ()) if call["keepdim"] else full[:-1]
    return Spec(f.sizes, inputs, (out,), whole=names(full[-1]))
