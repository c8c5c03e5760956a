"""Rule functions for calls that multiply and add up: matrix products, convolutions, attention."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.rules.families import RuleFn, argument, dim_list, local_size, names
from autopar.rules.registry import unknown
from autopar.rules.spec import Call, Dims, Factors, Spec

__all__ = [
    "added_product",
    "attention",
    "bilinear",
    "convolution",
    "distances",
    "einsum",
    "inner",
    "linear",
    "matmul",
    "recurrent",
    "recurrent_cell",
    "tensordot",
]

Sets = tuple[frozenset[int], ...]
EITHER: Sets = (frozenset({0}), frozenset({1}))


def linear(call: Call) -> Spec:
    """linear: x (.., k), weight (o, k), bias (o).

    With a bias the product is partial but the bias is not, so k is cut through the expansion; a
    partial sum passes if the bias is one too.
    """
    f = Factors()
    x = f.like(call.shapes[0], "b")
    weight = (*(f.new(n, "o") for n in call.shapes[1][:-1]), x[-1])
    out = (*x[:-1], *weight[:-1])
    if len(call.shapes) == 2:
        return Spec(f.sizes, (x, weight), (out,), linear=EITHER, heavy=True)
    sets = (frozenset({0, 2}), frozenset({1, 2}))
    inputs = (x, weight, weight[:-1])
    return Spec(f.sizes, inputs, (out,), expand=names(x[-1]), linear=sets, heavy=True)


def bilinear(call: Call) -> Spec:
    """bilinear: x (.., i), y (.., j), weight (o, i, j), bias (o)."""
    f = Factors()
    lead = f.like(call.shapes[0][:-1], "b")
    o, i, j = f.like(call.shapes[2], "w")
    inputs: tuple[Dims, ...] = ((*lead, i), (*lead, j), (o, i, j), (o,))
    n = len(call.shapes)
    sets: Sets = (*EITHER, frozenset({2})) if n == 3 else tuple(frozenset({k, 3}) for k in range(3))
    expand = names(i, j) if n == 4 else frozenset()
    return Spec(
        f.sizes,
        inputs[:n],
        ((*lead, o),),
        expand=expand,
        linear=sets,
        heavy=True,
        nonempty=names(i, j),
    )


def added_product(left: str, right: str, result: str) -> RuleFn:
    """self * beta + alpha * (product of two operands), whose dims are letters.

    The contraction is cut through the expansion; a partial sum passes if self is one too.
    """

    def make(call: Call) -> Spec:
        f = Factors()
        factor: dict[str, tuple[str, ...]] = {}
        for letters, shape in zip((left, right), call.shapes[1:], strict=True):
            for c, n in zip(letters, shape, strict=True):
                factor[c] = factor.get(c) or f.new(n, c)
        a, b, out = (tuple(factor[c] for c in letters) for letters in (left, right, result))
        added = f.broadcast(out, call.shapes[0])
        gone = names(*a, *b) - names(*out)
        sets = (frozenset({0, 1}), frozenset({0, 2}))
        return Spec(
            f.sizes,
            (added, a, b),
            (out,),
            expand=gone,
            linear=sets,
            heavy=True,
            # addmv keeps a size 1 that meets a size 0
            nonempty=names(*out) - names(*added) if len(out) == 1 else frozenset(),
        )

    return make


def matmul(call: Call) -> Spec:
    """torch.matmul with its 1-d and broadcast cases."""
    f = Factors()
    a, b = call.shapes
    k = f.new(a[-1], "k")
    m: Dims = (f.new(a[-2], "m"),) if len(a) > 1 else ()
    n: Dims = (f.new(b[-1], "n"),) if len(b) > 1 else ()
    result = call.results[0]
    batch = f.like(result[: len(result) - len(m) - len(n)], "b")
    left = (*f.broadcast(batch, a[:-2]), *m, k)
    right = (*f.broadcast(batch, b[:-2]), k, *n)
    return Spec(f.sizes, (left, right), ((*batch, *m, *n),), linear=EITHER, heavy=True)


def inner(call: Call) -> Spec:
    """inner: sums over the last dims of both; a scalar operand multiplies."""
    if not call.shapes[0] or not call.shapes[1]:
        return unknown(call)
    f = Factors()
    a, b = f.like(call.shapes[0], "a"), f.like(call.shapes[1][:-1], "b")
    out = (*a[:-1], *b)
    return Spec(f.sizes, (a, (*b, a[-1])), (out,), linear=EITHER, heavy=True)


def tensordot(call: Call) -> Spec:
    """tensordot: sums over the paired dims, whose sizes may be 1 on one side."""
    f = Factors()
    a, b = call.shapes
    pairs = list(
        zip(
            dim_list(call["dims_self"], len(a)) if call["dims_self"] else (),
            dim_list(call["dims_other"], len(b)) if call["dims_other"] else (),
            strict=True,
        )
    )
    if any(a[i] != b[j] for i, j in pairs):
        return unknown(call)
    left, right = f.like(a, "a"), list(f.like([1 if j in dict(pairs).values() else n
                                               for j, n in enumerate(b)], "b"))  # fmt: skip
    for i, j in pairs:
        right[j] = left[i]
    summed_a, summed_b = {i for i, _ in pairs}, {j for _, j in pairs}
    out = (
        *(d for i, d in enumerate(left) if i not in summed_a),
        *(d for j, d in enumerate(right) if j not in summed_b),
    )
    return Spec(f.sizes, (left, tuple(right)), (out,), linear=EITHER, heavy=True)


def einsum(call: Call) -> Spec:
    """einsum: letters are factors; a letter twice in one term (a diagonal) keeps its dims whole."""
    shapes = call.shapes
    left, arrow, right = str(call["equation"]).replace(" ", "").partition("->")
    if not arrow:
        letters = sorted(set(left) - set(",."))
        right = ("..." if "..." in left else "") + "".join(c for c in letters if left.count(c) == 1)
    terms = left.split(",")
    ranks = [len(s) - len(t.replace("...", "")) for t, s in zip(terms, shapes, strict=True)]
    depth = max((r for t, r in zip(terms, ranks, strict=True) if "..." in t), default=0)

    def words(term: str, rank: int) -> list[str]:
        head, dots, tail = term.partition("...")
        dims = [f"dot{i}" for i in range(depth - rank, depth)] if dots else []
        return [*(f"e{c}" for c in head), *dims, *(f"e{c}" for c in tail)]

    operands = [words(t, r) for t, r in zip(terms, ranks, strict=True)]
    sizes: dict[str, int] = {}
    whole: set[str] = set()

    def dims(term: Sequence[str], shape: Sequence[int]) -> Dims:
        out: list[tuple[str, ...]] = []
        for i, (word, n) in enumerate(zip(term, shape, strict=True)):
            name = word
            if word in term[:i] and n != 1:
                name = f"{word}_{len(sizes)}"
                whole.update((word, name))
            if n != 1:
                sizes[name] = n
            out.append((name,) if n != 1 else ())
        return tuple(out)

    inputs = tuple(dims(t, s) for t, s in zip(operands, shapes, strict=True))
    outs = dims(words(right, depth), call.results[0])
    sets = tuple(frozenset({i}) for i in range(len(terms)))
    return Spec(sizes, inputs, (outs,), frozenset(whole), linear=sets, heavy=len(terms) > 1)


def convolution(call: Call) -> Spec:
    """Convolutions, transposed or not: batch, groups and channels may be cut, space may not.

    Weights are (groups * o, i, ..), transposed (groups * i, o, ..). With a bias the sum over i is
    cut through the expansion.
    """
    f = Factors()
    x, w = call.shapes[:2]
    y = call.results[0]
    groups = int(call["groups"])
    transposed = "output_padding" in call.arguments and call.arguments.get("transposed", True)
    g = f.new(groups, "g")
    first, second = w[0] // groups, w[1]
    o, i = f.new(second if transposed else first, "o"), f.new(first if transposed else second, "i")
    kernel = f.like(w[2:], "k")
    lead: Dims = (f.new(x[0], "b"),) if len(x) == len(w) else ()
    space_x, space_y = f.like(x[len(lead) + 1 :], "x"), f.like(y[len(lead) + 1 :], "y")
    weight = ((*g, *i), o, *kernel) if transposed else ((*g, *o), i, *kernel)
    inputs: list[Dims] = [(*lead, (*g, *i), *space_x), weight]
    bias = len(call.shapes) > 2
    if bias:
        inputs.append(((*g, *o),))
    sets = (frozenset({0, 2}), frozenset({1, 2})) if bias else EITHER
    return Spec(
        f.sizes,
        tuple(inputs),
        ((*lead, (*g, *o), *space_y),),
        names(*kernel, *space_x, *space_y),
        expand=names(i) if bias else frozenset(),
        linear=sets,
        adjust=argument(call, "groups", lambda local: local_size(g, local)),
        heavy=True,
        nonempty=names(g, o, i),
    )


def attention(call: Call) -> Spec:
    """scaled_dot_product_attention: batch and heads may be cut, queries too where not causal.

    With `enable_gqa` each of h key heads serves a run of r query heads, so query heads are (h, r).
    """
    f = Factors()
    q, k, v = call.shapes[:3]
    lead = f.like(call.results[0][:-2], "b")
    lq, lk = f.new(q[-2], "q"), f.new(k[-2], "k")
    d, e = f.new(q[-1], "d"), f.new(v[-1], "e")
    whole = names(lk, d, lq) if call["is_causal"] else names(lk, d)
    first, keys, values = (f.broadcast(lead, s[:-2]) for s in (q, k, v))
    if call["enable_gqa"] and len(k) > 2 and k[-3] != q[-3]:
        h, r = f.new(k[-3], "h"), f.new(q[-3] // k[-3], "r")
        for n in lead[-1]:
            del f.sizes[n]
        lead, first = (*lead[:-1], (*h, *r)), (*first[:-1], (*h, *r))
        keys, values = (*keys[:-1], h), (*values[:-1], h)
    inputs: list[Dims] = [(*first, lq, d), (*keys, lk, d), (*values, lk, e)]
    if len(call.shapes) > 3:
        inputs.append(f.broadcast((*lead, lq, lk), call.shapes[3]))
    out = (*lead, lq, e)
    return Spec(
        f.sizes,
        tuple(inputs),
        (out,),
        whole,
        linear=(frozenset({2}),),
        heavy=True,
    )


def distances(call: Call) -> Spec:
    """cdist: batch dims may be cut."""
    f = Factors()
    a, b = call.shapes
    result = call.results[0]
    batch = f.like(result[:-2], "b")
    m, n, k = f.new(a[-2], "m"), f.new(b[-2], "n"), f.new(a[-1], "k")
    left, right = (*f.broadcast(batch, a[:-2]), m, k), (*f.broadcast(batch, b[:-2]), n, k)
    return Spec(f.sizes, (left, right), ((*batch, m, n),), names(m, n, k))


def recurrent(call: Call) -> Spec:
    """lstm, gru, rnn over a sequence: the batch may be cut; dropout between layers may not."""
    if call["dropout"] and call["train"] and call["num_layers"] > 1:
        return unknown(call)
    f = Factors()
    shape = call.shapes[0]
    at = 0 if call["batch_first"] else 1
    batch = f.new(shape[at], "b")
    states = len(call["hx"]) if isinstance(call["hx"], (list, tuple)) else 1

    def along(shape: Sequence[int], at: int, name: str) -> Dims:
        dims = f.like([1 if d == at else n for d, n in enumerate(shape)], name)
        return (*dims[:at], batch, *dims[at + 1 :])

    inputs = [along(shape, at, "x")]
    inputs += [along(s, 1, "h") for s in call.shapes[1 : 1 + states]]
    inputs += [f.like(s, "w") for s in call.shapes[1 + states :]]
    outputs = [along(call.results[0], at, "y")]
    outputs += [along(s, 1, "s") for s in call.results[1:]]
    whole = frozenset(f.sizes) - names(batch)
    return Spec(f.sizes, tuple(inputs), tuple(outputs), whole, heavy=True, nonempty=names(batch))


def recurrent_cell(call: Call) -> Spec:
    """lstm_cell, gru_cell, rnn cells: the batch, dim 0, may be cut."""
    f = Factors()
    batch = f.new(call.shapes[0][0], "b")
    states = len(call["hx"]) if isinstance(call["hx"], (list, tuple)) else 1
    inputs: list[Dims] = []
    for k, shape in enumerate(call.shapes):
        own = f.like(shape[1:] if k <= states else shape, f"i{k}_")
        inputs.append((batch, *own) if k <= states else own)
    outputs = tuple((batch, *f.like(s[1:], f"o{k}_")) for k, s in enumerate(call.results))
    whole = frozenset(f.sizes) - names(batch)
    return Spec(f.sizes, tuple(inputs), outputs, whole, heavy=True)
