"""Every row of the operation table is proved by execution, against the operation itself.

For each sample call and each way its rule allows to cut it, the operands are cut as `torch.chunk`
does, each rank computes the operation on its piece, and the results are put together again; value
and gradient must equal those of the whole call. Nothing here knows what an operation means.
"""

import dataclasses
import functools
import math

import pytest
import torch
from rule_samples import SAMPLES, Draw
from torch import fx

from autopar import collectives  # the operators of autopar
from autopar.compat import FakeTensorMode, make_fx
from autopar.layout import chunk_sizes
from autopar.rules import Local, find, rule_of
from autopar.rules import registry as rules

SEEDS = (0, 1)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
NO_VALUE = {"aten.empty.memory_format", "aten.empty_like.default", "aten.new_empty.default"}
RANDOM = {"autopar.uniform.default", "autopar.keep_mask.default"}
ops = collectives.ops  # without it the operators would not be registered


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Many small calls: threads only cost time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --- calls -------------------------------------------------------------------------------------


def operator(name):
    space, op, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, space), op), overload)


def replace_tensors(value, fn):
    """`value` with `fn` applied to each tensor, in argument order."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, (list, tuple)):
        return type(value)(replace_tensors(v, fn) for v in value)
    if isinstance(value, dict):
        return {k: replace_tensors(v, fn) for k, v in value.items()}
    return value


@dataclasses.dataclass
class Case:
    """One call: the operator, its tensors, and the other arguments around them."""

    name: str
    tensors: list
    args: tuple
    kwargs: dict

    @staticmethod
    def of(name, maker, seed):
        args, kwargs = maker(Draw(seed))
        tensors = []
        replace_tensors((args, kwargs), tensors.append)
        return Case(name, tensors, args, kwargs)

    def arguments(self, tensors):
        rest = iter(tensors)
        return replace_tensors((self.args, self.kwargs), lambda _: next(rest))

    def run(self, tensors, adjust=None, local=None):
        """The results of the call on other tensors, with arguments adjusted to local sizes."""
        args, kwargs = self.arguments(tensors)
        if adjust is not None:
            args, kwargs = adjust(args, dict(kwargs), local)
        return run(operator(self.name), args, kwargs)

    def spec(self, needs_grad=True):
        graph = fx.Graph()

        def place(tensor):
            node = graph.placeholder(f"x{len(graph.nodes)}")
            node.meta["val"] = tensor
            node.meta["requires_grad"] = needs_grad and differentiable(tensor)
            return node

        args, kwargs = replace_tensors((self.args, self.kwargs), place)
        node = graph.call_function(operator(self.name), args, kwargs)
        copies = [t.clone() for t in self.tensors]  # some operators write into running statistics
        args, kwargs = self.arguments(copies)
        with FakeTensorMode() if self.name in RANDOM else torch.no_grad():
            node.meta["val"] = operator(self.name)(*args, **kwargs)
        return rule_of(node)


def run(fn, args, kwargs):
    if getattr(fn, "namespace", "") == "autopar":
        with FakeTensorMode():
            fake = fn(*args, **kwargs)
        result = torch.zeros(fake.shape, dtype=fake.dtype)  # only shapes count
    else:
        result = fn(*args, **kwargs)
    return [result] if isinstance(result, torch.Tensor) else list(result)


# --- cutting and joining -----------------------------------------------------------------------


def flat_sizes(dims, sizes):
    return [sizes[f] for dim in dims for f in dim]


def shape_of(dims, sizes):
    return [math.prod(sizes[f] for f in dim) for dim in dims]


def carries(dims, factor):
    return any(factor in dim for dim in dims)


def place_of(dims, factor):
    return [f for dim in dims for f in dim].index(factor)


def cut(tensor, dims, spec, factor, pieces, rank):
    """The piece of `tensor` that `rank` holds when `factor` is cut."""
    if not carries(dims, factor):
        return tensor
    local = {**spec.sizes, factor: pieces[rank]}
    whole = tensor.reshape(flat_sizes(dims, spec.sizes))
    piece = whole.narrow(place_of(dims, factor), sum(pieces[:rank]), pieces[rank])
    return piece.reshape(shape_of(dims, local)).contiguous()


def join(parts, dims, spec, factor, pieces):
    """The whole result from the pieces of all ranks: joined, summed, or their extremum."""
    if carries(dims, factor):
        flat = [
            part.reshape(flat_sizes(dims, {**spec.sizes, factor: n}))
            for part, n in zip(parts, pieces, strict=True)
        ]
        return torch.cat(flat, place_of(dims, factor)).reshape(shape_of(dims, spec.sizes))
    assert parts[0].dtype != torch.bool, "booleans have no partial sum"
    how = spec.reductions.get(factor, "sum")
    if how == "sum":
        return sum(parts[1:], parts[0])
    return getattr(torch.stack(parts), {"max": "amax", "min": "amin"}[how])(0)


def computed_in_pieces(case, spec, factor, k, tensors):
    """The results of the call when `factor` is cut over k ranks."""
    pieces = chunk_sizes(spec.sizes[factor], k)
    ranks = []
    for rank in range(k):
        local = {**spec.sizes, factor: pieces[rank]}
        here = [
            cut(t, d, spec, factor, pieces, rank) for t, d in zip(tensors, spec.inputs, strict=True)
        ]
        mask = None
        if factor in spec.lookup:
            here, mask = looked_up(spec, factor, here, pieces, rank)
        expected = tuple(tuple(shape_of(d, local)) for d in spec.outputs)
        results = case.run(here, spec.adjust, Local(expected, local))
        assert tuple(tuple(r.shape) for r in results) == expected, (
            "local shapes are not as declared"
        )
        if mask is not None:
            results = [torch.where(mask, r, torch.zeros_like(r)) for r in results]
        ranks.append(results)
    return [
        join(list(parts), dims, spec, factor, pieces)
        for parts, dims in zip(zip(*ranks, strict=True), spec.outputs, strict=True)
    ]


def looked_up(spec, factor, tensors, pieces, rank):
    """Operands with indices into this rank's range, and where the result is one of them."""
    number = spec.lookup[factor]
    dims = spec.inputs[number]
    index = tensors[number] - sum(pieces[:rank])
    inside = (index >= 0) & (index < pieces[rank])
    tensors = [*tensors[:number], torch.where(inside, index, 0), *tensors[number + 1 :]]
    out = spec.outputs[0]
    named = [d for d in dims if d]
    assert [d for d in out if d in named] == named, "index dims must come in the result's order"
    shape = [shape_of([d], spec.sizes)[0] if d in named else 1 for d in out]
    return tensors, inside.reshape(shape)


# --- comparing ---------------------------------------------------------------------------------


def same(got, want, what):
    assert got.dtype == want.dtype, f"{what}: {got.dtype} is not {want.dtype}"
    assert got.shape == want.shape, f"{what}: {list(got.shape)} is not {list(want.shape)}"
    if not want.is_floating_point():
        assert torch.equal(got, want), f"{what} differs"
        return
    finite = want.isfinite()
    assert torch.equal(finite, got.isfinite()), f"{what}: other values are finite"
    assert torch.equal(want[~finite].nan_to_num(7.0), got[~finite].nan_to_num(7.0)), what
    if finite.any():
        scale = max(1.0, float(want[finite].abs().max()))
        error = float((got[finite] - want[finite]).abs().max())
        assert error <= TOLERANCE[want.dtype] * scale, (
            f"{what} differs by {error:.1e} (scale {scale:.1e})"
        )


def differentiable(tensor):
    return tensor.is_floating_point() and not getattr(tensor, "is_data", False)


def leaves(tensors):
    return [t.clone().requires_grad_(differentiable(t)) for t in tensors]


def gradients(results, operands, seed):
    """Gradients of a random-weighted sum of all float results."""
    draw = Draw(seed + 100)
    total = None
    for result in results:
        weight = draw.f(*result.shape).to(result.dtype)
        if result.requires_grad:
            term = (weight * torch.where(result.isfinite(), result, 0)).sum()
            total = term if total is None else total + term
    wanted = [t for t in operands if t.requires_grad]
    if total is None or not wanted:
        return [torch.zeros_like(t) for t in wanted]
    found = torch.autograd.grad(total, wanted, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(found, wanted, strict=True)]


def check_equal(compute, reference, tensors, seed, grad=True):
    """Values and gradients of `compute` equal those of `reference`."""
    mine, theirs = leaves(tensors), leaves(tensors)
    got, want = compute(mine), reference(theirs)
    assert len(got) == len(want), "another number of results"
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        same(g.detach(), w.detach(), f"result {i}")
    if not grad:
        return
    try:
        expected = gradients(want, theirs, seed)
    except RuntimeError as error:
        if "is not implemented" in str(error):  # nothing to compare with
            return
        raise
    for i, (g, w) in enumerate(zip(gradients(got, mine, seed), expected, strict=True)):
        same(g, w, f"gradient {i}")


# --- the proofs --------------------------------------------------------------------------------


def prove_factor(case, spec, factor, seed, grad=True):
    """Cutting `factor` over 2, 3 and 4 ranks, and either half of it where it is a product."""
    ways = [(spec, factor, k) for k in (2, 3, 4)]
    n = spec.sizes[factor]
    prime = next((p for p in range(2, n) if n % p == 0), None)
    if prime is not None and factor not in spec.lookup:
        halves = spec.split(factor, [prime, n // prime])
        ways += [(halves, f"{factor}.{i}", 2) for i in (0, 1)]
    tested = False
    for cut_spec, name, k in ways:
        fragile = cut_spec.nonempty | set(cut_spec.lookup) | set(cut_spec.reductions)
        if name in fragile and 0 in chunk_sizes(cut_spec.sizes[name], k):
            continue
        tested = True
        if case.name in NO_VALUE | RANDOM:
            results = computed_in_pieces(case, cut_spec, name, k, case.tensors)
            assert [r.shape for r in results] == [r.shape for r in case.run(case.tensors)]
            continue
        try:
            check_equal(
                lambda tensors, s=cut_spec, f=name, k=k: computed_in_pieces(case, s, f, k, tensors),
                case.run,
                case.tensors,
                seed,
                grad,
            )
        except AssertionError as error:
            raise AssertionError(f"{case.name}, factor {name} over {k} ranks: {error}") from None
    assert tested, f"{case.name}: no sample of factor {factor} is large enough to be cut"


def prove_linear(case, spec, members, seed):
    """Operands that are sums over ranks, in all of a set at once, give results that are sums."""
    for k in (2, 3):
        draw = Draw(seed + 200)
        noise = {}
        for i in members:
            like = case.tensors[i]
            parts = [draw.f(*like.shape).to(like.dtype) for _ in range(k - 1)]
            noise[i] = [*parts, -sum(parts[1:], parts[0])]

        def partial(tensors, k=k, noise=noise):
            ranks = []
            for rank in range(k):
                here = list(tensors)
                for i in members:
                    x = here[i]
                    share = x / k if x.is_floating_point() else x * (rank == 0)
                    here[i] = share + noise[i][rank]
                ranks.append(case.run(here))
                assert all(r.dtype != torch.bool for r in ranks[-1]), "booleans have no sum"
            return [sum(parts[1:], parts[0]) for parts in zip(*ranks, strict=True)]

        try:
            check_equal(partial, case.run, case.tensors, seed)
        except AssertionError as error:
            raise AssertionError(f"{case.name}, linear in {sorted(members)}: {error}") from None


def prove_dims(case, spec):
    """Factors, sizes and shapes fit together."""
    for kind, tensors, every in (
        ("operand", case.tensors, spec.inputs),
        ("result", case.run([t.clone() for t in case.tensors]), spec.outputs),
    ):
        assert len(tensors) == len(every), f"{len(every)} {kind}s instead of {len(tensors)}"
        for i, (tensor, dims) in enumerate(zip(tensors, every, strict=True)):
            assert shape_of(dims, spec.sizes) == list(tensor.shape), f"{kind} {i} is {dims}"
            flat = [f for dim in dims for f in dim]
            assert len(flat) == len(set(flat)), f"{kind} {i} has a factor twice: {dims}"
    everywhere = {f for dims in (*spec.inputs, *spec.outputs) for dim in dims for f in dim}
    assert everywhere == set(spec.sizes), "sizes and dims name different factors"
    named = spec.whole | spec.expand | spec.nonempty | set(spec.lookup) | set(spec.reductions)
    assert named <= everywhere, f"unknown factors {named - everywhere}"
    assert not spec.whole & spec.expand, "a factor is whole and expanded"
    assert 1 not in spec.sizes.values(), "a factor of size 1 cannot be cut"
    # 'R', 'V' and 'P<i>' are the other choices, '+' joins factors
    assert all(f[0].islower() and "+" not in f for f in everywhere), everywhere
    assert all(max(members) < len(spec.inputs) for members in spec.linear)


# --- samples -----------------------------------------------------------------------------------

CASES = [
    pytest.param(name, maker, id=f"{name}-{i}")
    for name, makers in SAMPLES.items()
    for i, maker in enumerate(makers)
]


@functools.cache
def first(name, maker, needs_grad=True):
    case = Case.of(name, maker, SEEDS[0])
    return case, case.spec(needs_grad)


def known_spec(name, maker):
    """The spec of a sample, None where its rule fails (then `test_dims_fit_the_shapes` says so)."""
    try:
        return first(name, maker)[1]
    except Exception:
        return None


def cuttable(spec):
    return sorted(set(spec.sizes) - spec.whole - spec.expand)


def options():
    """(overload, sample, what) for everything that some rule claims of some sample."""
    for name, makers in SAMPLES.items():
        for i, maker in enumerate(makers):
            spec = known_spec(name, maker)
            if spec is None:
                continue
            case = first(name, maker)[0]
            claims = [(f, True) for f in cuttable(spec)]
            plain = first(name, maker, False)[1]
            claims += [(f, False) for f in cuttable(plain) if f not in cuttable(spec)]
            claims += [
                (members, True)
                for members in spec.linear
                if all(case.tensors[m].dtype != torch.bool for m in members)
            ]
            for what, grad in claims:
                label = what if isinstance(what, str) else f"P{sorted(what)}".replace(" ", "")
                label += "" if grad else "-without-gradient"
                yield pytest.param(name, maker, what, grad, id=f"{name}-{i}-{label}")


# --- tests -------------------------------------------------------------------------------------


def test_every_row_has_a_sample():
    assert set(rules.table) - set(SAMPLES) == set()
    assert set(SAMPLES) - set(rules.table) == set()


@pytest.mark.parametrize("name, maker", CASES)
def test_dims_fit_the_shapes(name, maker):
    case, spec = first(name, maker)
    prove_dims(case, spec)
    prove_dims(*first(name, maker, False))


@pytest.mark.parametrize("name, maker, what, grad", list(options()))
def test_cut_call_equals_the_whole(name, maker, what, grad):
    for seed in SEEDS:
        case = Case.of(name, maker, seed)
        spec = case.spec(grad)
        if isinstance(what, str):
            prove_factor(case, spec, what, seed, grad)
        else:
            prove_linear(case, spec, what, seed)


@pytest.mark.parametrize(
    "name, maker", [c for c in CASES if getattr(known_spec(*c.values), "expand", None)]
)
def test_expansion_equals_the_operation(name, maker):
    expansion = find(operator(name)).expansion
    for seed in SEEDS:
        case = Case.of(name, maker, seed)

        def expanded(tensors, case=case):
            return run(expansion, *case.arguments(tensors))

        check_equal(expanded, case.run, case.tensors, seed)
    args, kwargs = case.arguments(case.tensors)
    traced = make_fx(lambda *t: run(expansion, *case.arguments(t)), pre_dispatch=True)(
        *case.tensors
    )
    for node in traced.graph.nodes:
        if node.op == "call_function":
            assert find(node.target) is not None, f"{node.target} has no row"


@pytest.mark.parametrize(
    "name, maker", [c for c in CASES if getattr(known_spec(*c.values), "expand", None)]
)
def test_expansion_keeps_the_type_of_half_precision(name, maker):
    case = Case.of(name, maker, 0)
    half = [t.bfloat16() if t.is_floating_point() else t for t in case.tensors]
    given = any(isinstance(a, torch.dtype) for a in case.args)
    expected = case.run(half)
    args, kwargs = case.arguments(half)
    found = run(find(operator(name)).expansion, args, kwargs)
    for i, (got, want) in enumerate(zip(found, expected, strict=True)):
        statistics = i in (1, 2)  # mean and deviation, whose type differs by device
        assert given or statistics or got.dtype == want.dtype
        finite = want.isfinite() & got.isfinite()
        scale = max(1.0, float(want[finite].abs().max())) if finite.any() else 1.0
        assert float((got - want)[finite].abs().max() if finite.any() else 0) <= 0.04 * scale


def wrong(name, maker, what, **fields):
    return pytest.param(f"aten.{name}", maker, what, fields, id=f"{name}-{what}")


def square(r):
    return (r.f(6, 6), r.f(6, 6)), {}


@pytest.mark.parametrize(
    "name, maker, what, fields",
    [
        wrong("softmax.int", lambda r: ((r.f(5, 6), 1), {}), "d1", expand=frozenset()),
        wrong("cumsum.default", lambda r: ((r.f(5, 6), 1), {}), "d1", whole=frozenset()),
        wrong("sort.default", lambda r: ((r.f(5, 6), 1), {}), "d1", whole=frozenset()),
        wrong("mean.dim", lambda r: ((r.f(5, 6), [1]), {}), "d1", whole=frozenset()),
        wrong("sum.default", lambda r: ((r.f(5),), {}), "d0", reductions={"d0": "max"}),
        wrong("amax.default", lambda r: ((r.f(5),), {}), "d0", whole=frozenset(), reductions={}),
        wrong("mm.default", square, "k", inputs=((("m",), ("k",)), (("n",), ("k",)))),
        wrong("mm.default", square, "m", outputs=((("n",), ("m",)),)),
        wrong("mm.default", square, {0, 1}),
        wrong("relu.default", lambda r: ((r.f(5),), {}), {0}),
        wrong("add.Scalar", lambda r: ((r.f(5), 1.5), {}), {0}),
        wrong("add.Tensor", square, {0}),
        wrong("where.self", lambda r: ((r.b(5), r.f(5), r.f(5)), {}), {1}),
        wrong("linear.default", lambda r: ((r.f(5, 6), r.f(4, 6), r.f(4)), {}), "b1",
              expand=frozenset()),
        wrong("linear.default", lambda r: ((r.f(5, 6), r.f(4, 6), r.f(4)), {}), {0}),
        wrong("embedding.default", lambda r: ((r.f(7, 3), r.i(7, 5)), {}), "v0", lookup={}),
        wrong("embedding.default", lambda r: ((r.f(7, 3), r.i(7, 9), 5), {}), "v0",
              expand=frozenset(), lookup={"v0": 1}),
        wrong("group_norm.default", lambda r: ((r.f(2, 6, 3), 3), {}), "g", adjust=None),
        wrong("group_norm.default", lambda r: ((r.f(2, 6, 3), 3), {}), "c", expand=frozenset()),
        wrong("view.default", lambda r: ((r.f(9), [3, 3]), {}), "v0_0",
              outputs=((("v0_1",), ("v0_0",)),)),
        wrong("repeat.default", lambda r: ((r.f(3), [3]), {}), "d0", outputs=((("d0", "r0_"),),)),
        wrong("scaled_dot_product_attention.default",
              lambda r: (tuple(r.f(2, 3, 5, 4) for _ in range(3)), {"is_causal": True}), "q",
              whole=frozenset()),
        wrong("scaled_dot_product_attention.default",
              lambda r: ((r.f(2, 4, 5, 3), r.f(2, 2, 5, 3), r.f(2, 2, 5, 3)), {"enable_gqa": True}),
              "h", inputs=((("b0",), ("r", "h"), ("q",), ("d",)),
                           (("b0",), ("h",), ("k",), ("d",)), (("b0",), ("h",), ("k",), ("e",)))),
        wrong("conv2d.default", lambda r: ((r.f(2, 3, 5, 6), r.f(4, 3, 3, 3)), {}), "x0",
              whole=frozenset()),
        wrong("squeeze.default", lambda r: ((r.f(5, 2),), {}), "d1", whole=frozenset()),
        wrong("masked_fill.Scalar", lambda r: ((r.f(5), r.b(5), -1.0), {}), {0}),
        wrong("prelu.default", lambda r: ((r.f(6, 6), r.f(6)), {}), "d0",
              inputs=((("d0",), ("d1",)), (("d0",),))),
    ],
)  # fmt: skip
def test_proof_rejects_a_wrong_row(name, maker, what, fields):
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        for seed in SEEDS:
            case = Case.of(name, maker, seed)
            spec = dataclasses.replace(case.spec(), **fields)
            if isinstance(what, str):
                if what not in spec.sizes:
                    pytest.fail(f"{what} is no factor of {spec}")
                prove_factor(case, spec, what, seed)
            else:
                prove_linear(case, spec, what, seed)
