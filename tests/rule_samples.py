"""Sample calls for every row of the operation table: signed, full-range data, odd and prime sizes.

`SAMPLES[overload]` is a list of functions from a `Draw` (a source of random operands) to the
arguments of one call. A row without a sample fails `test_rules.py`.
"""

import torch

SAMPLES = {}


class Draw:
    """Random operands from a seeded generator."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def f(self, *shape):
        """Signed reals of different magnitudes."""
        return 2.0 * torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def prob(self, *shape):
        """Reals in (0.05, 0.95)."""
        u = torch.rand(shape, generator=self.generator, dtype=torch.float64)
        return 0.05 + 0.9 * u

    def unit(self, *shape):
        """Reals in (-0.9, 0.9)."""
        return 2 * self.prob(*shape) - 1

    def pos(self, *shape):
        """Reals in (0.2, 4)."""
        return 4 * self.prob(*shape)

    def sign(self, *shape):
        """-1.0 or 1.0."""
        return self.b(*shape).double() * 2 - 1

    def i(self, high, *shape, low=0):
        """Integers from low up to and without high."""
        return torch.randint(low, high, shape, generator=self.generator)

    def b(self, *shape):
        """Booleans."""
        return torch.rand(shape, generator=self.generator) < 0.5

    def perm(self, n, k):
        """k different integers below n."""
        return torch.randperm(n, generator=self.generator)[:k]


def call(*args, **kwargs):
    return args, kwargs


def data(tensor):
    """A real operand that the operation does not differentiate (running statistics, weights)."""
    tensor.is_data = True
    return tensor


def sample(overloads, *makers):
    """Add samples for some overloads; '.default' may be left out, and the prefix 'aten.'."""
    for name in overloads.split():
        name = name if "." in name else f"{name}.default"
        name = name if name.startswith("autopar.") else f"aten.{name}"
        SAMPLES.setdefault(name, []).extend(makers)


# --- elementwise -------------------------------------------------------------------------------

sample(
    "abs angle asinh atan bitwise_not ceil celu clamp clamp_max clamp_min cos cosh elu erf erfc "
    "exp exp2 expm1 floor frac gelu hardshrink hardsigmoid hardswish hardtanh isfinite isinf isnan "
    "isneginf isposinf leaky_relu log_sigmoid logical_not mish nan_to_num reciprocal relu relu6 "
    "round round.decimals selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink "
    "square tan tanh threshold trunc neg clone contiguous detach alias lift_fresh_copy positive "
    "deg2rad rad2deg zero"
)
ONE_ARGUMENT = {"clamp_max": [0.4], "clamp_min": [-0.3], "clamp": [-0.5, 0.7]}
ONE_ARGUMENT |= {"threshold": [0.1, -3.0]}
for _name in list(SAMPLES):
    _short = _name.split(".")[1]
    _more = ONE_ARGUMENT.get(_short, [])
    if _short == "bitwise_not":
        sample(_name[5:], lambda r: call(r.i(9, 5, 6, low=-9)), lambda r: call(r.b(5, 6)))
    elif _name.endswith("decimals"):
        sample(_name[5:], lambda r: call(r.f(5, 6), decimals=1))
    else:
        sample(
            _name[5:],
            lambda r, m=_more: call(r.f(5, 6), *m),
            lambda r, m=_more: call(r.f(2, 1, 3), *m),
        )
sample("acos asin atanh erfinv", lambda r: call(r.unit(5, 6)))
sample("acosh", lambda r: call(1.1 + r.pos(5, 6)))
sample("log log10 log2 log1p sqrt rsqrt lgamma digamma", lambda r: call(r.pos(5, 6)))
sample("logit", lambda r: call(r.prob(5, 6)), lambda r: call(r.unit(5, 6), 0.1))
sample("add.Scalar sub.Scalar rsub.Scalar", lambda r: call(r.f(5, 6), 1.5))
sample("mul.Scalar div.Scalar", lambda r: call(r.f(5, 6), -1.5))
sample("fill.Scalar", lambda r: call(r.f(5, 6), 2.0))
sample("pow.Tensor_Scalar float_power.Tensor_Scalar", lambda r: call(r.f(5, 6), 3))
sample("pow.Tensor_Scalar", lambda r: call(r.pos(5), 0.5))
sample("pow.Scalar", lambda r: call(2.0, r.f(5, 6)))
sample("pow.Tensor_Tensor xlogy.Tensor", lambda r: call(r.pos(5, 6), r.pos(6)))
sample("xlogy.Scalar_Other", lambda r: call(r.pos(5, 6), 0.7))
sample("ldexp.Tensor", lambda r: call(r.f(5, 6), r.i(4, 6, low=-3)))
BINARY = (
    lambda r: call(r.f(5, 6), r.f(5, 6)),
    lambda r: call(r.f(5, 6), r.f(6)),
    lambda r: call(r.f(5, 1), r.f(3, 1, 6)),
)
sample(
    "maximum minimum max.other min.other fmax fmin atan2 hypot copysign.Tensor heaviside "
    "logaddexp clamp_min.Tensor clamp_max.Tensor mul.Tensor div.Tensor add.Tensor sub.Tensor "
    "rsub.Tensor fmod.Tensor remainder.Tensor eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor "
    "ge.Tensor logical_and logical_or logical_xor isclose",
    *BINARY,
)
sample("floor_divide", lambda r: call(r.f(5, 6), r.f(6)))
sample("eq.Tensor ne.Tensor isclose", lambda r: call(r.i(3, 5, 6), r.i(3, 6)))
sample("mul.Tensor add.Tensor sub.Tensor div.Tensor", lambda r: call(r.f(5, 6), 2.5))
sample("mul.Tensor", lambda r: call(r.f(5, 6), r.b(6)), lambda r: call(r.f(5, 6), r.i(9, 5, 1)))
sample("add.Tensor sub.Tensor", lambda r: call(r.f(5, 6), r.f(5, 1), alpha=-2))
sample("add.Tensor", lambda r: call(r.i(9, 5), r.i(9, 5)), lambda r: call(r.f(5, 6), r.f()))
sample("div.Tensor", lambda r: call(r.i(9, 5, 6), 1 + r.i(4, 6)))
sample(
    "div.Tensor_mode",
    lambda r: call(r.f(5, 6), r.f(6), rounding_mode="floor"),
    lambda r: call(r.f(5, 6), r.f(6), rounding_mode="trunc"),
)
sample("div.Scalar_mode", lambda r: call(r.f(5, 6), 0.7, rounding_mode="floor"))
sample("fmod.Scalar remainder.Scalar", lambda r: call(r.f(5, 6), 0.7))
sample(
    "clamp.Tensor",
    lambda r: call(r.f(5, 6), r.f(6) - 2, r.f(5, 1) + 2),
    lambda r: call(r.f(5, 6), None, r.f(6)),
)
sample("where.self", lambda r: call(r.b(5, 6), r.f(5, 6), r.f(6)))
sample("where.self", lambda r: call(r.b(5, 1), r.f(6), r.f(3, 1, 1)))
sample("where.ScalarOther", lambda r: call(r.b(5, 6), r.f(6), 0.0))
sample("where.ScalarOther", lambda r: call(r.b(5, 6), r.f(6), -1.5))
sample("where.ScalarSelf", lambda r: call(r.b(5, 1), 0, r.f(5, 6)))
sample("where.ScalarSelf", lambda r: call(r.b(5, 6), 1.5, r.f(5, 6)))
sample("where.Scalar", lambda r: call(r.b(5, 6), 1.5, 0.5))
sample(
    "eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar",
    lambda r: call(r.f(5, 6), 0.1),
    lambda r: call(r.i(3, 5), 1),
)
sample(
    "bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor __and__.Tensor __or__.Tensor "
    "__xor__.Tensor",
    lambda r: call(r.i(9, 5, 6, low=-9), r.i(9, 6, low=-9)),
    lambda r: call(r.b(5, 6), r.b(5, 1)),
)
sample(
    "bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar __and__.Scalar __or__.Scalar "
    "__xor__.Scalar",
    lambda r: call(r.i(9, 5, 6, low=-9), 5),
)
sample(
    "bitwise_left_shift.Tensor bitwise_right_shift.Tensor",
    lambda r: call(r.i(99, 5, 6, low=-99), r.i(4, 6)),
)
sample(
    "bitwise_left_shift.Tensor_Scalar bitwise_right_shift.Tensor_Scalar __lshift__.Scalar "
    "__rshift__.Scalar",
    lambda r: call(r.i(99, 5, 6, low=-99), 2),
)
sample(
    "glu",
    lambda r: call(r.f(5, 6)),
    lambda r: call(r.f(10, 3), 0),
    lambda r: call(r.f(2, 4, 3), 1),
)
sample(
    "prelu",
    lambda r: call(r.f(5, 6, 3), r.f(6)),
    lambda r: call(r.f(6, 6), r.f(6)),
    lambda r: call(r.f(5, 6), r.f(1)),
    lambda r: call(r.f(5), r.f()),
)
sample("rrelu", lambda r: call(r.f(5, 6)), lambda r: call(r.f(5), 0.1, 0.3, True))
sample("isin.Tensor_Tensor", lambda r: call(r.i(9, 5, 6), r.i(9, 4)))
sample(
    "_to_copy",
    lambda r: call(r.f(5, 6), dtype=torch.float64),
    lambda r: call(r.f(5, 6), dtype=torch.int64),
    lambda r: call(r.i(9, 5), dtype=torch.float64),
    lambda r: call(r.f(5), dtype=torch.bool),
    lambda r: call(r.b(5), dtype=torch.float64),
)
sample(
    "to.dtype",
    lambda r: call(r.i(9, 5, 6), torch.float64),
    lambda r: call(r.f(5, 6), torch.int64),
)
sample(
    "type_as",
    lambda r: call(r.i(9, 5, 6), r.f(5, 6)),
    lambda r: call(r.f(5, 6), r.i(3, 4)),
    lambda r: call(r.f(5), r.f()),
)
sample(
    "lerp.Scalar", lambda r: call(r.f(5, 6), r.f(6), 0.3), lambda r: call(r.f(6), r.f(5, 6), -1.3)
)
sample(
    "lerp.Tensor",
    lambda r: call(r.f(5, 6), r.f(6), r.f(5, 1)),
    lambda r: call(r.f(5), r.f(5), r.f(5)),
)
sample("copy", lambda r: call(r.f(5, 6), r.f(6)), lambda r: call(r.f(5, 6), r.f(5, 1)))
sample("fill.Tensor", lambda r: call(r.f(5, 6), r.f()))
sample(
    "masked_fill.Scalar",
    lambda r: call(r.f(5, 6), r.b(6), -1.5),
    lambda r: call(r.f(5, 6), r.b(5, 1), 0.0),
    lambda r: call(r.f(5, 6), r.b(5, 6), float("-inf")),
)
sample("masked_fill.Tensor", lambda r: call(r.f(5, 6), r.b(6), r.f()))
sample(
    "addcmul addcdiv",
    lambda r: call(r.f(5, 6), r.f(6), r.f(5, 1)),
    lambda r: call(r.f(6), r.f(5, 6), r.f(6), value=-0.5),
)

# --- new tensors -------------------------------------------------------------------------------

sample("zeros_like ones_like empty_like", lambda r: call(r.f(5, 6)), lambda r: call(r.i(3, 5)))
sample("full_like", lambda r: call(r.f(5, 6), 2.5))
sample("zeros ones", lambda r: call([5, 6]), lambda r: call([3, 1, 6], dtype=torch.float64))
sample("full", lambda r: call([5, 6], 2.5))
sample("empty.memory_format", lambda r: call([5, 6]))
sample(
    "new_zeros new_ones new_empty", lambda r: call(r.f(5), [5, 6]), lambda r: call(r.f(5, 6), [6])
)
sample("new_full", lambda r: call(r.f(5), [5, 6], 2.5))
sample("scalar_tensor", lambda r: call(2.5))
sample("arange eye", lambda r: call(5))
sample("arange.start", lambda r: call(1, 5))
sample("arange.start_step", lambda r: call(1, 9, 2))
sample("linspace", lambda r: call(0.0, 1.0, 5))
sample("eye.m tril_indices triu_indices", lambda r: call(5, 6))
sample(
    "autopar.uniform.default",
    lambda r: call([5, 6], "[5, 6]", 0, dtype=torch.float64, device=torch.device("cpu")),
)
sample(
    "autopar.keep_mask.default",
    lambda r: call([5, 6], "[5, 6]", 0, 0.1, device=torch.device("cpu")),
)

# --- reductions --------------------------------------------------------------------------------

sample("sum mean prod nansum count_nonzero", lambda r: call(r.f(5, 6)), lambda r: call(r.f(7)))
sample("sum amax amin max min", lambda r: call(r.f()))
sample("sum", lambda r: call(r.b(5, 6)), lambda r: call(r.i(9, 5, 6)))
sample("max min median nanmedian argmax argmin nanmean", lambda r: call(r.f(5, 6)))
sample("any all", lambda r: call(r.b(5, 6)))
sample(
    "sum.dim_IntList mean.dim",
    lambda r: call(r.f(5, 6), [1]),
    lambda r: call(r.f(5, 6, 3), [0, -1], True),
    lambda r: call(r.f(5, 6), None),
    lambda r: call(r.f(5, 6), []),
    lambda r: call(r.f(5, 1), [1], dtype=torch.float64),
)
sample("nansum", lambda r: call(r.f(5, 6), [0], True))
sample("nanmean", lambda r: call(r.f(5, 6), [1], True))
sample("count_nonzero", lambda r: call(r.i(2, 5, 6)))
sample("count_nonzero.dim_IntList", lambda r: call(r.i(2, 5, 6), [0]))
sample(
    "amax amin",
    lambda r: call(r.f(5, 6), [1]),
    lambda r: call(r.f(5, 6, 3), [0, 2], True),
    lambda r: call(r.f(5, 6)),
)
sample(
    "max.dim min.dim median.dim nanmedian.dim",
    lambda r: call(r.f(5, 6), 1),
    lambda r: call(r.f(5, 6), 0, True),
)
sample("prod.dim_int any.dim all.dim argmax argmin", lambda r: call(r.f(5, 6), -1))
sample("prod.dim_int any.dim all.dim argmax argmin", lambda r: call(r.f(5, 6), 0, True))
sample("any.dims all.dims", lambda r: call(r.b(5, 6, 3), [0, 2], True))
sample(
    "aminmax",
    lambda r: call(r.f(5, 6)),
    lambda r: call(r.f(5, 6), dim=1),
    lambda r: call(r.f(5, 6), dim=0, keepdim=True),
)
sample("quantile.scalar", lambda r: call(r.f(5, 6), 0.3), lambda r: call(r.f(5, 6), 0.3, 1, True))
sample(
    "linalg_norm",
    lambda r: call(r.f(5, 6)),
    lambda r: call(r.f(5, 6, 3), None, [1], True),
    lambda r: call(r.f(5, 6, 3), None, [0, 2]),
)
sample("linalg_matrix_norm linalg_matrix_norm.str_ord", lambda r: call(r.f(3, 5, 6), "fro"))
SAMPLES["aten.linalg_matrix_norm.default"] = [lambda r: call(r.f(3, 5, 6), 1)]
sample(
    "logsumexp",
    lambda r: call(r.f(5, 6), [1]),
    lambda r: call(r.f(5, 6, 3), [0, 2], True),
    lambda r: call(torch.where(r.b(5, 6), r.f(5, 6), float("-inf")), [1]),
)
sample(
    "linalg_vector_norm",
    lambda r: call(r.f(5, 6)),
    lambda r: call(r.f(5, 6, 3), 2, [1], True),
    lambda r: call(r.f(5, 6), 1, [-1]),
    lambda r: call(r.f(5, 6), 3, [0]),
    lambda r: call(r.f(5, 6) * torch.tensor([[1.0]] * 4 + [[0.0]]).double(), 2, [1]),
)
sample("var std var_mean std_mean", lambda r: call(r.f(5, 6)), lambda r: call(r.f(5, 6), False))
sample(
    "var.dim std.dim var_mean.dim std_mean.dim",
    lambda r: call(r.f(5, 6), [1]),
    lambda r: call(r.f(5, 6, 3), [0, 2], False, True),
    lambda r: call(r.f(5, 6), None),
)
sample(
    "var.correction std.correction var_mean.correction std_mean.correction",
    lambda r: call(r.f(5, 6)),
    lambda r: call(r.f(5, 6), [1], correction=0, keepdim=True),
    lambda r: call(r.f(5, 6, 3), [1, 2], correction=2),
)

# --- products ----------------------------------------------------------------------------------

sample(
    "linear",
    lambda r: call(r.f(3, 5, 6), r.f(7, 6)),
    lambda r: call(r.f(5, 6), r.f(7, 6), r.f(7)),
    lambda r: call(r.f(6), r.f(4, 6), r.f(4)),
    lambda r: call(r.f(5, 1), r.f(7, 1)),
)
sample(
    "bilinear",
    lambda r: call(r.f(5, 3), r.f(5, 4), r.f(6, 3, 4)),
    lambda r: call(r.f(2, 5, 3), r.f(2, 5, 4), r.f(6, 3, 4), r.f(6)),
)
sample("mm", lambda r: call(r.f(5, 6), r.f(6, 7)), lambda r: call(r.f(5, 1), r.f(1, 7)))
sample("bmm", lambda r: call(r.f(3, 5, 6), r.f(3, 6, 7)))
sample("mv", lambda r: call(r.f(5, 6), r.f(6)))
sample("dot vdot", lambda r: call(r.f(7), r.f(7)))
sample("outer ger", lambda r: call(r.f(5), r.f(6)))
sample(
    "matmul",
    lambda r: call(r.f(5), r.f(5)),
    lambda r: call(r.f(5), r.f(5, 6)),
    lambda r: call(r.f(5, 6), r.f(6)),
    lambda r: call(r.f(5, 6), r.f(6, 7)),
    lambda r: call(r.f(3, 5, 6), r.f(6, 7)),
    lambda r: call(r.f(6), r.f(3, 6, 7)),
    lambda r: call(r.f(3, 5, 6), r.f(6)),
    lambda r: call(r.f(2, 1, 5, 6), r.f(3, 6, 7)),
    lambda r: call(r.f(2, 3, 5, 6), r.f(2, 1, 6, 7)),
)
sample(
    "inner",
    lambda r: call(r.f(5), r.f(5)),
    lambda r: call(r.f(3, 5), r.f(2, 4, 5)),
    lambda r: call(r.f(3), r.f()),
)
sample(
    "tensordot",
    lambda r: call(r.f(3, 5, 6), r.f(5, 4, 3), [1, 0], [0, 2]),
    lambda r: call(r.f(3, 5), r.f(4, 6), [], []),
    lambda r: call(r.f(3, 5), r.f(5, 6), [-1], [0]),
)
sample(
    "einsum",
    lambda r: call("ij,jk->ik", [r.f(5, 6), r.f(6, 7)]),
    lambda r: call("bhqd,bhkd->bhqk", [r.f(2, 3, 5, 4), r.f(2, 3, 7, 4)]),
    lambda r: call("ij,jk", [r.f(5, 6), r.f(6, 7)]),
    lambda r: call("...ij,...jk->...ik", [r.f(2, 3, 5, 6), r.f(3, 6, 7)]),
    lambda r: call("...i,i...", [r.f(3, 5, 6), r.f(6, 3, 5)]),
    lambda r: call("i...->...", [r.f(3, 5, 6)]),
    lambda r: call("ii->i", [r.f(5, 5)]),
    lambda r: call("iij,jk->ik", [r.f(5, 5, 3), r.f(3, 4)]),
    lambda r: call("ij,jk->ik", [r.f(5, 1), r.f(6, 7)]),
    lambda r: call("ij,ij,kj->k", [r.f(5, 6), r.f(5, 6), r.f(3, 6)]),
    lambda r: call("PV,VR->RP", [r.f(5, 6), r.f(6, 7)]),
    lambda r: call("i,j->ji", [r.f(5), r.f(6)]),
    lambda r: call("ij->", [r.f(5, 6)]),
    lambda r: call("...ij,...jk->...ik", [r.f(1, 5, 6), r.f(3, 6, 7)]),
)
sample("addmm", lambda r: call(r.f(7), r.f(5, 6), r.f(6, 7)))
sample("addmm", lambda r: call(r.f(5, 7), r.f(5, 6), r.f(6, 7), beta=-0.5, alpha=2))
sample("addmm", lambda r: call(r.f(7), r.f(5, 6), r.f(6, 7), beta=0))
sample("baddbmm", lambda r: call(r.f(3, 5, 7), r.f(3, 5, 6), r.f(3, 6, 7), alpha=0.5))
sample("baddbmm", lambda r: call(r.f(5, 1), r.f(3, 5, 6), r.f(3, 6, 7), beta=3))
sample("addbmm", lambda r: call(r.f(5, 7), r.f(3, 5, 6), r.f(3, 6, 7), alpha=0.5, beta=2))
sample("addmv", lambda r: call(r.f(5), r.f(5, 6), r.f(6), beta=2))
sample("addmv", lambda r: call(r.f(1), r.f(5, 6), r.f(6)))
sample("addr", lambda r: call(r.f(5, 6), r.f(5), r.f(6), beta=2, alpha=0.5))


def conv(space, transposed=False):
    """Samples of a convolution over `space` dims: bias, stride, groups, depthwise, no batch."""
    size, kernel = (6, 5, 4)[:space], (3, 2, 2)[:space]

    def weight(r, into, out, groups=1):
        shape = (into, out // groups) if transposed else (out, into // groups)
        return r.f(*shape, *kernel)

    def grouped(*before, groups):
        # transposed: (.., output_padding, groups, dilation), else (.., dilation, groups)
        return [*before, [0] * space, groups] if transposed else [*before, [1] * space, groups]

    one, two = [1] * space, [2] * space
    return (
        lambda r: call(r.f(3, 4, *size), weight(r, 4, 5)),
        lambda r: call(r.f(3, 3, *size), weight(r, 3, 5), r.f(5), two, one),
        lambda r: call(
            r.f(2, 6, *size), weight(r, 6, 9, 3), None, *grouped(one, [0] * space, groups=3)
        ),
        lambda r: call(r.f(2, 4, *size), weight(r, 4, 8, 4), r.f(8), *grouped(one, one, groups=4)),
        lambda r: call(r.f(4, *size), weight(r, 4, 5)),
        lambda r: call(r.f(2, 6, *size), weight(r, 6, 4, 2), groups=2),
    )


for _n, _t in (
    (1, "conv_transpose1d"),
    (2, "conv_transpose2d.input"),
    (3, "conv_transpose3d.input"),
):
    sample(f"conv{_n}d", *conv(_n))
    sample(_t, *conv(_n, transposed=True))
    _one = [1] * _n
    sample(
        f"conv{_n}d.padding",
        lambda r, n=_n, one=_one: call(
            r.f(3, 4, *[5] * n), r.f(6, 2, *[3] * n), r.f(6), one, "same", one, 2
        ),
        lambda r, n=_n: call(r.f(3, 4, *[5] * n), r.f(5, 4, *[3] * n), padding="valid"),
    )
sample(
    "convolution",
    lambda r: call(
        r.f(3, 4, 5, 6), r.f(6, 2, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 2
    ),
    lambda r: call(
        r.f(3, 4, 5, 6), r.f(4, 3, 3, 3), r.f(6), [2, 1], [0, 0], [1, 1], True, [0, 0], 2
    ),
    lambda r: call(r.f(3, 5, 6), r.f(7, 5, 3), None, [1], [0], [1], False, [0], 1),
)
sample(
    "scaled_dot_product_attention",
    lambda r: call(r.f(2, 3, 5, 4), r.f(2, 3, 7, 4), r.f(2, 3, 7, 4)),
    lambda r: call(r.f(2, 5, 6, 4), r.f(2, 5, 6, 4), r.f(2, 5, 6, 4), is_causal=True),
    lambda r: call(r.f(2, 3, 5, 4), r.f(2, 3, 7, 4), r.f(2, 3, 7, 6), r.b(2, 1, 5, 7) | r.b(7)),
    lambda r: call(r.f(2, 3, 5, 4), r.f(2, 3, 7, 4), r.f(2, 3, 7, 4), r.f(5, 7), scale=0.3),
    lambda r: call(r.f(2, 3, 5, 4), r.f(2, 3, 7, 4), r.f(2, 3, 7, 4), r.f(3, 5, 7)),
    lambda r: call(r.f(2, 6, 5, 4), r.f(2, 3, 7, 4), r.f(2, 3, 7, 4), enable_gqa=True),
    lambda r: call(
        r.f(2, 8, 5, 4), r.f(2, 2, 5, 4), r.f(2, 2, 5, 4), None, 0.0, True, enable_gqa=True
    ),  # fmt: skip
    lambda r: call(r.f(2, 6, 5, 4), r.f(2, 1, 7, 4), r.f(2, 1, 7, 4), enable_gqa=True),
    lambda r: call(
        r.f(2, 6, 5, 4), r.f(2, 2, 7, 4), r.f(2, 2, 7, 4), r.f(2, 6, 5, 7), enable_gqa=True
    ),
    lambda r: call(r.f(3, 5, 4), r.f(3, 7, 4), r.f(3, 7, 4)),
    lambda r: call(r.f(5, 4), r.f(7, 4), r.f(7, 4)),
)
sample(
    "cdist",
    lambda r: call(r.f(3, 5, 4), r.f(3, 6, 4)),
    lambda r: call(r.f(2, 1, 5, 4), r.f(3, 6, 4), 1.0),
)
sample(
    "cross",
    lambda r: call(r.f(6, 3), r.f(6, 3)),
    lambda r: call(r.f(3, 6), r.f(3, 6), 0),
    lambda r: call(r.f(5, 3, 4), r.f(5, 3, 4), 1),
)
sample(
    "linalg_cross", lambda r: call(r.f(6, 3), r.f(6, 3)), lambda r: call(r.f(6, 1, 3), r.f(1, 5, 3))
)


def recurrence(gates, cells, batch_first):
    """Arguments of a two-layer, two-way recurrent net over a batch of 5 sequences of length 3."""

    def make(r):
        inside, hidden, layers = 4, 2, 2
        params = []
        for layer in range(layers):
            for _ in range(2):
                width = inside if layer == 0 else 2 * hidden
                params += [r.f(gates * hidden, width), r.f(gates * hidden, hidden)]
                params += [r.f(gates * hidden), r.f(gates * hidden)]
        x = r.f(5, 3, inside) if batch_first else r.f(3, 5, inside)
        states = [r.f(2 * layers, 5, hidden) for _ in range(cells)]
        state = states if cells > 1 else states[0]
        return call(x, state, params, True, layers, 0.0, True, True, batch_first)

    return make


sample("lstm.input", recurrence(4, 2, True), recurrence(4, 2, False))
sample("gru.input", recurrence(3, 1, True), recurrence(3, 1, False))
sample("rnn_tanh.input rnn_relu.input", recurrence(1, 1, True))
sample(
    "lstm_cell",
    lambda r: call(r.f(5, 4), [r.f(5, 3), r.f(5, 3)], r.f(12, 4), r.f(12, 3), r.f(12), r.f(12)),
)
sample("gru_cell", lambda r: call(r.f(5, 4), r.f(5, 3), r.f(9, 4), r.f(9, 3), r.f(9), r.f(9)))
sample("rnn_tanh_cell rnn_relu_cell", lambda r: call(r.f(5, 4), r.f(5, 3), r.f(3, 4), r.f(3, 3)))

# --- lookup and writing ------------------------------------------------------------------------

sample(
    "embedding",
    lambda r: call(r.f(7, 3), r.i(7, 5, 2)),
    lambda r: call(r.f(7, 3), r.i(7, 5), 2),
    lambda r: call(r.f(6, 1), r.i(6)),
    lambda r: call(r.f(7, 3), r.i(3, 5), -1, True),
)
sample(
    "gather",
    lambda r: call(r.f(5, 6), 1, r.i(6, 5, 3)),
    lambda r: call(r.f(5, 6), 0, r.i(5, 3, 6)),
    lambda r: call(r.f(5, 6), 1, r.i(6, 3, 6)),
    lambda r: call(r.f(5, 6, 2), -2, r.i(6, 5, 1, 2)),
    lambda r: call(r.f(7), 0, r.i(7, 4)),
    lambda r: call(r.f(5, 6), 1, r.i(6, 1, 6)),
)
sample(
    "take_along_dim",
    lambda r: call(r.f(5, 6), r.i(6, 5, 3), 1),
    lambda r: call(r.f(1, 6), r.i(6, 5, 3), -1),
    lambda r: call(r.f(5, 6), r.i(5, 2, 1), 0),
    lambda r: call(r.f(5, 6), r.i(6, 5, 3)),
)
sample("take", lambda r: call(r.f(5, 6), r.i(30, 3, 4)))
sample(
    "index.Tensor",
    lambda r: call(r.f(5, 6), [r.i(5, 7, low=-5)]),
    lambda r: call(r.f(5, 6, 3), [None, r.i(6, 4, 2, low=-6)]),
    lambda r: call(r.f(5, 6, 3), [r.i(5, 4), r.i(6, 4)]),
    lambda r: call(r.f(5, 6, 3), [r.i(5, 4), None, r.i(3, 4)]),
    lambda r: call(r.f(5, 6, 3), [r.i(5, 4, 1), r.i(6, 7)]),
    lambda r: call(r.f(5, 6), [torch.arange(5), r.i(6, 5)]),
    lambda r: call(r.f(5, 6), [r.b(5)]),
    lambda r: call(r.f(5, 6), [r.i(5)]),
)
sample(
    "index_select",
    lambda r: call(r.f(5, 6), 0, r.i(5, 7)),
    lambda r: call(r.f(5, 6, 3), -2, r.i(6, 4)),
    lambda r: call(r.f(7), 0, r.i(7, 5)),
    lambda r: call(r.f(5, 6), 1, r.i(6)),
)
sample(
    "index_put",
    lambda r: call(r.f(5, 6), [r.perm(5, 3)], r.f(3, 6)),
    lambda r: call(r.f(5, 6), [None, r.i(6, 4)], r.f(5, 4), True),
    lambda r: call(r.f(5, 6, 3), [r.perm(5, 4), r.i(6, 4)], r.f(3)),
    lambda r: call(r.f(5, 6), [r.perm(5, 3)], r.f()),
    lambda r: call(r.f(5, 6), [r.b(5, 6)], r.f()),
    lambda r: call(r.f(5, 6, 3), [None, r.b(6)], r.f(1), True),
    lambda r: call(r.f(5, 6), [torch.arange(5) % 2 == 0], r.f(3, 6)),
    lambda r: call(r.f(5, 6, 3), [r.i(5, 4), None, r.i(3, 4)], r.f(4, 6), True),
)
sample(
    "scatter.src",
    lambda r: call(r.f(5, 6), 1, torch.stack([r.perm(6, 3) for _ in range(5)]), r.f(5, 3)),
    lambda r: call(r.f(5, 6), 0, torch.stack([r.perm(5, 5) for _ in range(6)], 1), r.f(5, 6)),
    lambda r: call(r.f(5, 6), 1, torch.stack([r.perm(6, 3) for _ in range(3)]), r.f(3, 3)),
)
sample(
    "scatter.value",
    lambda r: call(r.f(5, 6), 1, r.i(6, 5, 3), 1.5),
    lambda r: call(r.f(5, 6), 0, r.i(5, 2, 6), 0.0),
    lambda r: call(r.f(5, 6), 1, r.i(6, 3, 3), 1.5),
)
sample("scatter.value_reduce", lambda r: call(r.f(5, 6), 1, r.i(6, 5, 3), 1.5, reduce="add"))
sample(
    "scatter.reduce",
    lambda r: call(r.f(5, 6), 1, r.i(6, 5, 3), r.i(9, 5, 3).double(), reduce="add"),
)
sample(
    "scatter_add",
    lambda r: call(r.f(5, 6), 1, r.i(6, 5, 4), r.f(5, 4)),
    lambda r: call(r.f(5, 6, 2), 0, r.i(5, 7, 6, 2), r.f(7, 6, 2)),
)
sample(
    "scatter_reduce.two",
    lambda r: call(r.f(5, 6), 1, r.i(6, 5, 4), r.f(5, 4), "sum"),
    lambda r: call(r.f(5, 6), 0, r.i(5, 7, 6), r.f(7, 6), "amax", include_self=False),
    lambda r: call(r.f(5, 6), 1, r.i(6, 5, 4), r.f(5, 4), "mean"),
)
sample(
    "index_add",
    lambda r: call(r.f(5, 6), 0, r.i(5, 7), r.f(7, 6)),
    lambda r: call(r.f(5, 6), -1, r.i(6, 4), r.f(5, 4), alpha=-2),
)
sample("index_copy", lambda r: call(r.f(5, 6), 1, r.perm(6, 4), r.f(5, 4)))
sample(
    "index_fill.int_Scalar",
    lambda r: call(r.f(5, 6), 1, r.i(6, 4), 1.5),
    lambda r: call(r.f(5, 6), 0, r.i(5, 4), 0.0),
)
sample("index_fill.int_Tensor", lambda r: call(r.f(5, 6), 1, r.i(6, 4), r.f()))
sample(
    "slice_scatter",
    lambda r: call(r.f(5, 6), r.f(5, 3), 1, 1, 4),
    lambda r: call(r.f(5, 6), r.f(3, 6), 0, 0, 5, 2),
    lambda r: call(r.f(5, 6), r.f(5, 6), 1),
)
sample(
    "select_scatter",
    lambda r: call(r.f(5, 6), r.f(5), 1, 2),
    lambda r: call(r.f(5, 6, 3), r.f(6, 3), 0, -1),
)
sample("one_hot", lambda r: call(r.i(7, 5, 2), 7), lambda r: call(r.i(7, 5)))
sample(
    "searchsorted.Tensor",
    lambda r: call(r.f(7).sort()[0], r.f(5, 6)),
    lambda r: call(r.f(5, 7).sort(-1)[0], r.f(5, 6)),
    lambda r: call(r.f(5, 7), r.f(5, 6), sorter=None),
)
SAMPLES["aten.searchsorted.Tensor"][-1] = lambda r: (
    lambda row: call(row, r.f(5, 6), right=True, sorter=row.argsort(-1))
)(r.f(5, 7))
sample("bucketize.Tensor", lambda r: call(r.f(5, 6), r.f(7).sort()[0], right=True))

# --- norms, softmax, losses --------------------------------------------------------------------

sample(
    "layer_norm",
    lambda r: call(r.f(5, 6), [6], r.f(6), r.f(6)),
    lambda r: call(r.f(3, 5, 6), [5, 6]),
    lambda r: call(r.f(5, 6), [6], r.f(6), None, 0.1),
    lambda r: call(r.f(5, 6), [6], None, r.f(6)),
)
sample(
    "native_layer_norm",
    lambda r: call(r.f(5, 6), [6], r.f(6), r.f(6), 1e-5),
    lambda r: call(r.f(3, 5, 6), [5, 6], None, None, 1e-5),
)
sample(
    "rms_norm",
    lambda r: call(r.f(5, 6), [6], r.f(6), 1e-5),
    lambda r: call(r.f(3, 5, 6), [5, 6]),
)
sample(
    "group_norm",
    lambda r: call(r.f(5, 6, 3, 2), 3, r.f(6), r.f(6)),
    lambda r: call(r.f(2, 10, 3), 5),
    lambda r: call(r.f(3, 6, 4), 1, r.f(6)),
    lambda r: call(r.f(3, 4, 5), 4, r.f(4), r.f(4), 0.1),
    lambda r: call(r.f(5, 6), 2, r.f(6), r.f(6)),
)
sample(
    "native_group_norm",
    lambda r: call(r.f(5, 6, 3, 2), r.f(6), r.f(6), 5, 6, 6, 3, 1e-5),
    lambda r: call(r.f(2, 10, 3), None, None, 2, 10, 3, 5, 1e-5),
)
sample(
    "instance_norm",
    lambda r: call(r.f(5, 6, 3, 2), r.f(6), r.f(6), None, None, True, 0.1, 1e-5, False),
    lambda r: call(r.f(3, 5, 4), None, None, None, None, True, 0.1, 1e-5, False),
    lambda r: call(
        r.f(3, 5, 4), r.f(5), r.f(5), data(r.f(5)), data(r.pos(5)), False, 0.1, 1e-5, False
    ),
    lambda r: call(
        r.f(3, 5, 4), r.f(5), r.f(5), data(r.f(5)), data(r.pos(5)), True, 0.1, 1e-5, False
    ),
)
sample(
    "batch_norm",
    lambda r: call(
        r.f(5, 6, 3), r.f(6), r.f(6), data(r.f(6)), data(r.pos(6)), False, 0.1, 1e-5, False
    ),
    lambda r: call(r.f(5, 6, 3), r.f(6), r.f(6), None, None, True, 0.1, 1e-5, False),
    lambda r: call(r.f(5, 6), r.f(6), r.f(6), data(r.f(6)), data(r.pos(6)), True, 0.1, 1e-5, False),
)
sample(
    "_native_batch_norm_legit_functional",
    lambda r: call(r.f(5, 6, 3, 2), r.f(6), r.f(6), data(r.f(6)), data(r.pos(6)), True, 0.1, 1e-5),
    lambda r: call(r.f(5, 6), None, None, data(r.f(6)), data(r.pos(6)), True, 0.3, 1e-5),
    lambda r: call(r.f(5, 6, 3), r.f(6), r.f(6), data(r.f(6)), data(r.pos(6)), False, 0.1, 1e-5),
)
sample(
    "_native_batch_norm_legit.no_stats",
    lambda r: call(r.f(5, 6, 3), r.f(6), r.f(6), True, 0.1, 1e-5),
)
sample(
    "_native_batch_norm_legit_no_training",
    lambda r: call(r.f(5, 6, 3, 2), r.f(6), r.f(6), data(r.f(6)), data(r.pos(6)), 0.1, 1e-5),
    lambda r: call(r.f(5, 6), None, None, data(r.f(6)), data(r.pos(6)), 0.1, 1e-5),
)
sample(
    "_weight_norm",
    lambda r: call(r.f(5, 6), r.f(5, 1)),
    lambda r: call(r.f(5, 6, 3), r.f(1, 6, 1), 1),
    lambda r: call(r.f(5, 6), r.f(1, 1), -1),
)
sample(
    "softmax.int log_softmax.int",
    lambda r: call(r.f(5, 6), 1),
    lambda r: call(r.f(3, 5, 6), -2),
    lambda r: call(r.f(5, 6), 0, torch.float64),
    lambda r: call(torch.where(r.b(5, 6), 10 * r.f(5, 6), float("-inf")).index_fill(
        1, torch.tensor([2]), 0.5), 1),
)  # fmt: skip
sample("_softmax _log_softmax", lambda r: call(r.f(3, 5, 6), 1, False))
sample(
    "cosine_similarity",
    lambda r: call(r.f(5, 6), r.f(5, 6)),
    lambda r: call(r.f(3, 1, 6), r.f(5, 6), -1),
    lambda r: call(r.f(3, 5, 6), r.f(3, 5, 6), 0),
)
sample(
    "pairwise_distance",
    lambda r: call(r.f(5, 6), r.f(5, 6)),
    lambda r: call(r.f(3, 5, 6), r.f(6), 1.0, 1e-6, True),
)


def classes(overload, smoothing=()):
    """Samples with class targets: reductions, weights, ignored rows, extra dims, one row."""
    some = [0.0, *smoothing]
    for reduction in (0, 1, 2):
        for e in some:
            more = [e] if e else []
            sample(
                overload,
                lambda r, q=reduction, m=more: call(r.f(5, 7), r.i(7, 5, low=-1), None, q, -1, *m),
                lambda r, q=reduction, m=more: call(r.f(5, 7), r.i(7, 5), data(r.pos(7)), q, 3, *m),
            )


classes("cross_entropy_loss", smoothing=[0.2])
classes("nll_loss")
classes("nll_loss_nd")
sample(
    "cross_entropy_loss nll_loss_nd",
    lambda r: call(r.f(3, 5, 2, 4), r.i(5, 3, 2, 4, low=-1), data(r.pos(5)), 2, -1),
    lambda r: call(r.f(3, 5, 4), r.i(5, 3, 4), None, 0, 2),
    lambda r: call(r.f(6), r.i(6), None, 2),
)
sample(
    "cross_entropy_loss",
    lambda r: call(r.f(5, 6), r.prob(5, 6), None, 2),
    lambda r: call(r.f(5, 6, 3), r.f(5, 6, 3), r.pos(6), 0, -100, 0.1),
    lambda r: call(r.f(5, 6, 3), r.prob(5, 6, 3), r.pos(6), 2, -100, 0.1),
    lambda r: call(r.f(6), r.prob(6), None, 2),
)
sample(
    "nll_loss2d",
    lambda r: call(r.f(3, 5, 2, 4), r.i(5, 3, 2, 4, low=-1), data(r.pos(5)), 2, -1),
    lambda r: call(r.f(3, 5, 2, 4), r.i(5, 3, 2, 4), None, 0, 2),
    lambda r: call(r.f(3, 5, 2, 4), r.i(5, 3, 2, 4), None, 1, 2),
)
for _q in (0, 1, 2):
    sample("mse_loss l1_loss", lambda r, q=_q: call(r.f(5, 6), r.f(5, 6), q))
    sample("smooth_l1_loss huber_loss", lambda r, q=_q: call(r.f(5, 6), r.f(5, 6), q, 0.7))
    sample("kl_div", lambda r, q=_q: call(r.f(5, 6), r.prob(5, 6), q))
    sample("kl_div", lambda r, q=_q: call(r.f(5, 6), r.f(5, 6), q, log_target=True))
    sample("soft_margin_loss", lambda r, q=_q: call(r.f(5, 6), data(r.sign(5, 6)), q))
    sample(
        "binary_cross_entropy", lambda r, q=_q: call(r.prob(5, 6), r.prob(5, 6), data(r.pos(6)), q)
    )
    sample("binary_cross_entropy", lambda r, q=_q: call(r.prob(5, 6), r.prob(5, 6), None, q))
    sample(
        "binary_cross_entropy_with_logits",
        lambda r, q=_q: call(r.f(5, 6), r.prob(5, 6), data(r.pos(5, 1)), data(r.pos(6)), q),
        lambda r, q=_q: call(r.f(5, 6), r.prob(5, 6), None, None, q),
    )
    sample("poisson_nll_loss", lambda r, q=_q: call(r.f(5, 6), r.pos(5, 6), True, True, 1e-8, q))
    sample("hinge_embedding_loss", lambda r, q=_q: call(r.f(5, 6), r.sign(5, 6), 1.0, q))
    sample("margin_ranking_loss", lambda r, q=_q: call(r.f(5, 6), r.f(6), r.sign(5, 1), 0.3, q))
    sample(
        "cosine_embedding_loss",
        lambda r, q=_q: call(r.f(5, 6), r.f(5, 6), r.sign(5), 0.1, q),
        lambda r, q=_q: call(r.f(6), r.f(6), r.sign(), 0.1, q),
    )
    sample(
        "triplet_margin_loss",
        lambda r, q=_q: call(r.f(5, 6), r.f(5, 6), r.f(5, 6), 3.0, 2.0, 1e-6, False, q),
        lambda r, q=_q: call(r.f(3, 5, 6), r.f(3, 1, 6), r.f(3, 5, 6), 3.0, 1.0, 1e-6, True, q),
    )

# --- shapes ------------------------------------------------------------------------------------

sample(
    "view reshape _unsafe_view",
    lambda r: call(r.f(5, 6), [30]),
    lambda r: call(r.f(12, 5), [3, 4, 5]),
    lambda r: call(r.f(3, 4, 5), [12, -1]),
    lambda r: call(r.f(6, 4), [2, 12]),
    lambda r: call(r.f(5, 1, 6), [5, 6]),
    lambda r: call(r.f(6, 4), [4, 6]),
    lambda r: call(r.f(4, 6, 5), [8, 3, 5, 1]),
    lambda r: call(r.f(1), []),
)
sample(
    "flatten.using_ints",
    lambda r: call(r.f(3, 4, 5)),
    lambda r: call(r.f(3, 4, 5), 1),
    lambda r: call(r.f(3, 4, 5), -3, -2),
)
sample("unsqueeze", lambda r: call(r.f(5, 6), 1), lambda r: call(r.f(5, 6), -1))
sample(
    "unflatten.int",
    lambda r: call(r.f(5, 6), 1, [2, 3]),
    lambda r: call(r.f(12, 5), 0, [2, -1, 3]),
    lambda r: call(r.f(5, 6), -1, [-1]),
)
sample("squeeze", lambda r: call(r.f(5, 1, 2)), lambda r: call(r.f(1)))
sample(
    "squeeze.dim",
    lambda r: call(r.f(5, 1, 2), 1),
    lambda r: call(r.f(5, 2), 1),
    lambda r: call(r.f(1, 3), -2),
)
sample(
    "squeeze.dims",
    lambda r: call(r.f(5, 1, 2), [1, 2]),
    lambda r: call(r.f(2, 1, 1, 3), [-2, 0, 1]),
    lambda r: call(r.f(5, 2), [1]),
)
sample("transpose.int", lambda r: call(r.f(3, 5, 6), 0, -1), lambda r: call(r.f(5, 6), 1, 0))
sample("swapdims swapaxes", lambda r: call(r.f(3, 5, 6), 1, 2))
sample("t", lambda r: call(r.f(5, 6)), lambda r: call(r.f(5)))
sample("numpy_T", lambda r: call(r.f(5, 6)))
sample("mT adjoint", lambda r: call(r.f(3, 5, 6)))
sample("permute", lambda r: call(r.f(3, 5, 6), [2, 0, 1]), lambda r: call(r.f(5, 6), [-1, 0]))
sample("movedim.int moveaxis.int", lambda r: call(r.f(3, 5, 6), 0, -1))
sample("movedim.intlist moveaxis.intlist", lambda r: call(r.f(2, 3, 5, 6), [0, 2], [3, 0]))
sample(
    "expand broadcast_to",
    lambda r: call(r.f(5, 1, 6), [-1, 3, -1]),
    lambda r: call(r.f(5), [4, 5]),
    lambda r: call(r.f(1), [6]),
)
sample("expand_as", lambda r: call(r.f(5, 1), r.f(3, 5, 6)))
sample(
    "broadcast_tensors",
    lambda r: call([r.f(5, 1), r.f(6)]),
    lambda r: call([r.f(5, 6), r.f(5, 6), r.f()]),
)
sample("meshgrid", lambda r: call([r.f(5), r.f(6)]))
sample(
    "meshgrid.indexing",
    lambda r: call([r.f(5), r.f(6), r.f(3)], indexing="xy"),
    lambda r: call([r.f(5), r.f(6)], indexing="ij"),
)
sample(
    "repeat",
    lambda r: call(r.f(5, 6), [2, 3]),
    lambda r: call(r.f(5), [3, 2]),
    lambda r: call(r.f(5, 1), [1, 4]),
    lambda r: call(r.f(5, 2), [0, 4]),
)
sample("tile", lambda r: call(r.f(5, 6), [2]), lambda r: call(r.f(5), [3, 2]))
sample(
    "repeat_interleave.self_int",
    lambda r: call(r.f(5, 6), 3, 1),
    lambda r: call(r.f(5, 6), 2),
    lambda r: call(r.f(5, 6), 2, 0, output_size=10),
    lambda r: call(r.f(5, 6), 4, -1),
)
sample(
    "cat concat concatenate",
    lambda r: call([r.f(5, 6), r.f(5, 3)], 1),
    lambda r: call([r.f(2, 6), r.f(5, 6), r.f(1, 6)]),
    lambda r: call([r.f(5, 3, 2), r.f(5, 3, 2)], -2),
)
sample("cat", lambda r: call([r.f(0), r.f(5, 6)], 1), lambda r: call([r.f(5), r.f(3)]))
sample("hstack", lambda r: call([r.f(5, 6), r.f(5, 3)]), lambda r: call([r.f(5), r.f(3)]))
sample("vstack row_stack", lambda r: call([r.f(2, 6), r.f(5, 6)]), lambda r: call([r.f(6), r.f(6)]))
sample(
    "stack",
    lambda r: call([r.f(5, 6), r.f(5, 6), r.f(5, 6)], 1),
    lambda r: call([r.f(5), r.f(5)], -1),
    lambda r: call([r.f(), r.f()]),
)
sample(
    "slice.Tensor",
    lambda r: call(r.f(5, 6), 1, 1, 4),
    lambda r: call(r.f(5, 6), 0, 0, 9223372036854775807),
    lambda r: call(r.f(5, 6), 1, -6, 6),
    lambda r: call(r.f(5, 6), -1, 0, 6, 2),
    lambda r: call(r.f(5, 6), 0, -2),
)
sample("narrow", lambda r: call(r.f(5, 6), 1, 1, 4), lambda r: call(r.f(5, 6), 0, 0, 5))
sample(
    "pad",
    lambda r: call(r.f(5, 6), [1, 2]),
    lambda r: call(r.f(5, 6), [1, 2], "constant", 1.5),
    lambda r: call(r.f(5, 6), [0, 0, 1, 1]),
    lambda r: call(r.f(5, 6), [1, -1]),
    lambda r: call(r.f(5, 3, 6), [1, 2], "reflect"),
    lambda r: call(r.f(5, 3, 6), [1, 2], "replicate"),
    lambda r: call(r.f(5, 3, 6), [1, 2], "circular"),
)
sample(
    "constant_pad_nd",
    lambda r: call(r.f(5, 6), [1, 2]),
    lambda r: call(r.f(5, 6, 2), [0, 0, 1, 0], -1.5),
)
sample(
    "diff",
    lambda r: call(r.f(5, 6)),
    lambda r: call(r.f(5, 6), 2, 0),
    lambda r: call(r.f(5, 6), 1, 1, r.f(5, 1)),
    lambda r: call(r.f(5, 6), 1, 0, r.f(2, 6), r.f(3, 6)),
    lambda r: call(r.f(5, 6), 1, -1, None, r.f(5, 3)),
)
sample("split.Tensor", lambda r: call(r.f(5, 6), 2, 1), lambda r: call(r.f(5, 6), 2))
sample("split_with_sizes split.sizes", lambda r: call(r.f(5, 6), [2, 1, 3], 1))
sample(
    "chunk tensor_split.sections", lambda r: call(r.f(5, 6), 2), lambda r: call(r.f(5, 6), 4, -1)
)
sample("tensor_split.indices", lambda r: call(r.f(5, 6), [2, 3], 1))
sample("select.int", lambda r: call(r.f(5, 6), 1, 2), lambda r: call(r.f(5, 6, 3), -2, -1))
sample("unbind.int", lambda r: call(r.f(5, 6)), lambda r: call(r.f(5, 6, 3), -1))
sample("flip", lambda r: call(r.f(5, 6), [1]), lambda r: call(r.f(5, 6, 3), [0, -1]))
sample("fliplr flipud", lambda r: call(r.f(5, 6, 3)))
sample(
    "roll",
    lambda r: call(r.f(5, 6), [2], [1]),
    lambda r: call(r.f(5, 6), [2]),
    lambda r: call(r.f(5, 6, 3), [1, -1], [0, 2]),
)
sample("tril triu", lambda r: call(r.f(3, 5, 6)), lambda r: call(r.f(5, 6), -1))
sample(
    "diagonal",
    lambda r: call(r.f(5, 6)),
    lambda r: call(r.f(3, 5, 6), 1, -2, -1),
    lambda r: call(r.f(3, 5, 6), -1, 2, 0),
)
sample(
    "unfold",
    lambda r: call(r.f(5, 6), 1, 3, 1),
    lambda r: call(r.f(5, 6), 1, 3, 3),
    lambda r: call(r.f(10, 3, 2), 0, 2, 2),
    lambda r: call(r.f(7, 3), 0, 2, 2),
)
sample("pixel_shuffle", lambda r: call(r.f(3, 12, 5, 4), 2), lambda r: call(r.f(18, 5, 2), 3))
sample("pixel_unshuffle", lambda r: call(r.f(3, 3, 10, 8), 2), lambda r: call(r.f(2, 15, 6), 3))
sample("channel_shuffle", lambda r: call(r.f(3, 6, 5), 3), lambda r: call(r.f(3, 10, 2, 2), 2))

# --- scans and sorting -------------------------------------------------------------------------

sample(
    "cumsum cumprod logcumsumexp cummax cummin",
    lambda r: call(r.f(5, 6), 1),
    lambda r: call(r.f(5, 6, 3), -3),
)
sample("sort argsort", lambda r: call(r.f(5, 6)), lambda r: call(r.f(5, 6), 0, True))
sample("sort.stable argsort.stable", lambda r: call(r.f(5, 6), stable=True, dim=0))
sample("msort", lambda r: call(r.f(5, 6)))
sample("topk", lambda r: call(r.f(5, 6), 2), lambda r: call(r.f(5, 6), 5, 0, False))
sample("kthvalue", lambda r: call(r.f(5, 6), 2), lambda r: call(r.f(5, 6), 3, 0, True))
sample("mode", lambda r: call(r.f(5, 6)), lambda r: call(r.f(5, 6), 0, True))

# --- windows and resampling --------------------------------------------------------------------

for _n in (1, 2, 3):
    _size = (6, 5, 4)[:_n]
    sample(
        f"avg_pool{_n}d max_pool{_n}d",
        lambda r, s=_size, n=_n: call(r.f(3, 5, *s), [2] * n),
        lambda r, s=_size, n=_n: call(r.f(5, 2, *s), [3] * n, [1] * n, [1] * n),
        lambda r, s=_size, n=_n: call(r.f(5, *s), [2] * n),
    )
    sample(
        f"adaptive_avg_pool{_n}d adaptive_max_pool{_n}d",
        lambda r, s=_size, n=_n: call(r.f(3, 5, *s), [1] * n),
        lambda r, s=_size, n=_n: call(r.f(5, 2, *s), [3] * n),
        lambda r, s=_size: call(r.f(5, *s), list(s)),
    )
    sample(
        f"upsample_nearest{_n}d.vec",
        lambda r, s=_size, n=_n: call(r.f(3, 5, *s), None, [2.0] * n),
        lambda r, s=_size: call(r.f(5, 2, *s), [x + 2 for x in s], None),
    )
sample("_upsample_nearest_exact2d.vec", lambda r: call(r.f(5, 3, 4, 5), [7, 6], None))
for _name, _n in (
    ("upsample_linear1d.vec", 1),
    ("upsample_bilinear2d.vec", 2),
    ("upsample_bicubic2d.vec", 2),
    ("upsample_trilinear3d.vec", 3),
):
    _size = (6, 5, 4)[:_n]
    sample(
        _name,
        lambda r, s=_size, n=_n: call(r.f(3, 5, *s), None, False, [2.0] * n),
        lambda r, s=_size: call(r.f(5, 2, *s), [x + 2 for x in s], True, None),
    )
sample("max_pool2d_with_indices", lambda r: call(r.f(5, 3, 6, 4), [2, 2]))
sample("max_pool3d_with_indices", lambda r: call(r.f(5, 3, 4, 6, 4), [2, 2, 2]))


def _pooled(r):
    values, places = torch.nn.functional.max_pool2d(r.f(5, 3, 6, 4), 2, return_indices=True)
    return call(values, places, [6, 4])


sample("max_unpool2d", _pooled)
sample(
    "im2col",
    lambda r: call(r.f(5, 3, 6, 5), [2, 3], [1, 1], [1, 0], [2, 1]),
    lambda r: call(r.f(5, 6, 5), [2, 2], [1, 1], [0, 0], [1, 1]),
)
sample(
    "col2im",
    lambda r: call(r.f(5, 12, 20), [6, 5], [2, 2], [1, 1], [0, 0], [1, 1]),
    lambda r: call(r.f(12, 6), [6, 4], [2, 2], [1, 1], [0, 0], [2, 2]),
)
sample("grid_sampler", lambda r: call(r.f(5, 3, 4, 6), r.unit(5, 3, 5, 2), 0, 0, False))
sample("grid_sampler", lambda r: call(r.f(5, 3, 4, 6, 2), r.unit(5, 3, 5, 2, 3), 0, 0, True))
sample(
    "affine_grid_generator",
    lambda r: call(r.f(5, 2, 3), [5, 3, 4, 6], False),
    lambda r: call(r.f(5, 3, 4), [5, 2, 3, 4, 2], True),
)

# --- nothing can be cut ------------------------------------------------------------------------

sample("kron", lambda r: call(r.f(2, 3), r.f(3, 2)))
sample("bincount", lambda r: call(r.i(5, 9)))
sample("histc", lambda r: call(r.f(9), 5))
sample("masked_scatter", lambda r: call(r.f(5, 6), r.b(5, 6), r.f(30)))
sample("masked_select", lambda r: call(r.f(5, 6), r.b(5, 6)))
sample("nonzero", lambda r: call(r.i(2, 5, 6)))
sample(
    "embedding_bag.padding_idx",
    lambda r: call(r.f(7, 3), r.i(7, 6), torch.tensor([0, 2]), False, 0, False, None, False, None),
)
sample("trace", lambda r: call(r.f(5, 6)))
sample("diag diag_embed", lambda r: call(r.f(5)))
sample("diagonal_scatter", lambda r: call(r.f(5, 6), r.f(5)))
sample("rot90", lambda r: call(r.f(5, 6)))
sample("dist", lambda r: call(r.f(5, 6), r.f(5, 6)))
sample("linalg_multi_dot", lambda r: call([r.f(5, 6), r.f(6, 3), r.f(3, 2)]))
sample("renorm", lambda r: call(r.f(5, 6), 2, 0, 1.0))
