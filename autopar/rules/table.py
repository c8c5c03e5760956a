"""The operation table: one row an operation."""

from __future__ import annotations

from typing import Any

import torch

from autopar.rules import expansions, families, lookups, losses, norms, products, views, windows
from autopar.rules.families import constructor, pointwise, reduction, whole_dims
from autopar.rules.registry import register, unknown
from autopar.rules.spec import Call

__all__: list[str] = []

aten = torch.ops.aten


def _each(overloads: str, rule: Any, **options: Any) -> None:
    """One row for each of several ATen overloads; '.default' may be left out."""
    for name in overloads.split():
        register(f"aten.{name}" if "." in name else f"aten.{name}.default", rule, **options)


def _last(n: int) -> Any:
    return lambda call: range(-n, 0)


def _fills_zero(call: Call) -> bool:
    return bool(call["value"] == 0)


def _zero_other(call: Call) -> bool:
    return bool(call["other"] == 0)


def _zero_self(call: Call) -> bool:
    return bool(call["self"] == 0)


def _norm_kind(call: Call) -> str:
    return "expand" if call["ord"] in (1, 2) else "whole"


# Elementwise functions without linearity: a partial sum must be whole before them.
_each(
    "abs acos acosh angle asin asinh atan atanh bitwise_not ceil celu clamp clamp_max clamp_min "
    "cos cosh digamma elu erf erfc erfinv exp exp2 expm1 floor frac gelu hardshrink hardsigmoid "
    "hardswish hardtanh isfinite isinf isnan isneginf isposinf leaky_relu lgamma log log10 log1p "
    "log2 log_sigmoid logical_not logit mish nan_to_num reciprocal relu relu6 round round.decimals "
    "rsqrt selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink sqrt square tan "
    "tanh threshold trunc add.Scalar sub.Scalar rsub.Scalar",
    pointwise(),
)
_each(
    "pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar float_power.Tensor_Scalar ldexp.Tensor "
    "maximum minimum max.other min.other fmax fmin atan2 hypot copysign.Tensor heaviside "
    "fmod.Tensor fmod.Scalar remainder.Tensor remainder.Scalar floor_divide div.Tensor_mode "
    "div.Scalar_mode clamp.Tensor clamp_min.Tensor clamp_max.Tensor logaddexp xlogy.Tensor "
    "xlogy.Scalar_Other where.Scalar",
    pointwise(),
)
_each(
    "eq.Tensor eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar le.Tensor le.Scalar gt.Tensor "
    "gt.Scalar ge.Tensor ge.Scalar logical_and logical_or logical_xor isclose "
    "bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor bitwise_and.Scalar bitwise_or.Scalar "
    "bitwise_xor.Scalar __and__.Tensor __or__.Tensor __xor__.Tensor __and__.Scalar __or__.Scalar "
    "__xor__.Scalar bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar "
    "bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar __lshift__.Scalar "
    "__rshift__.Scalar",
    pointwise(),
)
_each("glu", families.glu)
_each("prelu", families.prelu)
_each("rrelu", families.rrelu)
_each("isin.Tensor_Tensor", lookups.isin)

# Elementwise and linear in sets of operands: a partial sum passes.
_each(
    "neg clone contiguous detach alias lift_fresh_copy positive mul.Scalar div.Scalar deg2rad "
    "rad2deg zero",
    pointwise((0,)),
)
_each("_to_copy to.dtype", pointwise((0,), when=families.keeps_sums))
_each("type_as", families.type_as)
_each("mul.Tensor", pointwise((0,), (1,)))
_each("div.Tensor", pointwise((0,)))
_each("add.Tensor sub.Tensor rsub.Tensor lerp.Scalar lerp.Tensor", pointwise((0, 1)))
_each("where.self", pointwise((1, 2)))
_each("where.ScalarOther", pointwise((1,), when=_zero_other))
_each("where.ScalarSelf", pointwise((1,), when=_zero_self))
_each("copy fill.Tensor", pointwise((1,)))  # what is overwritten does not count
_each("fill.Scalar", pointwise())
_each("masked_fill.Scalar", pointwise((0,), when=_fills_zero))
_each("masked_fill.Tensor", pointwise((0, 2)))
_each("addcmul", pointwise((0, 1), (0, 2)))
_each("addcdiv", pointwise((0, 1)))

# New tensors.
_each("zeros_like", pointwise((0,)))
_each("ones_like full_like empty_like", pointwise())
_each("zeros ones full empty.memory_format", constructor("size"))
_each("new_zeros new_ones new_full new_empty", constructor("size"))
_each("scalar_tensor", constructor(None))
_each("arange arange.start arange.start_step linspace eye eye.m tril_indices triu_indices", unknown)
register("autopar.uniform.default", constructor("shape"))
register("autopar.keep_mask.default", constructor("shape"))

# Reductions.
_each("sum sum.dim_IntList", reduction("sum", linear=True))
_each("nansum count_nonzero count_nonzero.dim_IntList", reduction("sum"))
_each("mean mean.dim", reduction("whole", linear=True))
_each("amax max", reduction("max"))
_each("amin min", reduction("min"))
_each(
    "prod prod.dim_int any any.dim any.dims all all.dim all.dims argmax argmin max.dim min.dim "
    "aminmax median median.dim nanmedian nanmedian.dim nanmean linalg_norm linalg_matrix_norm "
    "linalg_matrix_norm.str_ord",
    reduction("whole"),
)
_each("quantile.scalar", reduction("whole", nonempty=True))
_each("logsumexp", reduction("expand"), expansion=expansions.logsumexp)
_each("linalg_vector_norm", reduction(_norm_kind), expansion=expansions.vector_norm)
_each("var var.dim var.correction", reduction("expand"), expansion=expansions.variance())
_each("std std.dim std.correction", reduction("expand"), expansion=expansions.variance(root=True))
_each(
    "var_mean var_mean.dim var_mean.correction",
    reduction("expand"),
    expansion=expansions.variance(mean=True),
)
_each(
    "std_mean std_mean.dim std_mean.correction",
    reduction("expand"),
    expansion=expansions.variance(root=True, mean=True),
)

# Products.
_each("linear", products.linear, expansion=expansions.linear)
_each("bilinear", products.bilinear, expansion=expansions.bilinear)
_each("mm", "m k, k n -> m n", linear=((0,), (1,)), heavy=True)
_each("bmm", "b m k, b k n -> b m n", linear=((0,), (1,)), heavy=True)
_each("mv", "m k, k -> m", linear=((0,), (1,)))
_each("dot vdot", "k, k -> ", linear=((0,), (1,)))
_each("outer ger", "m, n -> m n", linear=((0,), (1,)))
_each("matmul", products.matmul)
_each("inner", products.inner)
_each("tensordot", products.tensordot)
_each("einsum", products.einsum)
_each("addmm", products.added_product("mk", "kn", "mn"), expansion=expansions.added(torch.mm))
_each("baddbmm", products.added_product("bmk", "bkn", "bmn"), expansion=expansions.added(torch.bmm))
_each("addmv", products.added_product("mk", "k", "m"), expansion=expansions.added(torch.mv))
_each("addr", products.added_product("m", "n", "mn"))
_each(
    "addbmm",
    products.added_product("bmk", "bkn", "mn"),
    expansion=expansions.added(lambda a, b: torch.bmm(a, b).sum(0)),
)
for _name in (
    *("conv1d.default", "conv2d.default", "conv3d.default", "convolution.default"),
    *("conv1d.padding", "conv2d.padding", "conv3d.padding"),
    *("conv_transpose1d.default", "conv_transpose2d.input", "conv_transpose3d.input"),
):
    _op, _overload = _name.split(".")
    _biased = expansions.biased(getattr(getattr(aten, _op), _overload))
    _each(_name, products.convolution, expansion=_biased)
_each("scaled_dot_product_attention", products.attention)
_each("cdist", products.distances)
_each("cross linalg_cross", views.cross)
_each("lstm.input gru.input rnn_tanh.input rnn_relu.input", products.recurrent)
_each("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell", products.recurrent_cell)

# Lookup and writing.
_each("embedding", lookups.embedding, expansion=expansions.embedding)
_each("gather", lookups.gather)
_each("take_along_dim", lookups.take_along_dim)
_each("take", lookups.take)
_each("index.Tensor", lookups.index, expansion=expansions.index)
_each("index_select", lookups.index_select)
_each("index_put", lookups.index_put)
_each("scatter.src scatter.value scatter_add", lookups.scatter())
_each("scatter.reduce scatter.value_reduce scatter_reduce.two", lookups.scatter(linear=False))
_each("index_add index_copy", lookups.index_write())
_each("index_fill.int_Scalar index_fill.int_Tensor", lookups.index_write())
_each("slice_scatter select_scatter", lookups.slice_write)
_each("one_hot", lookups.one_hot)
_each("searchsorted.Tensor", lookups.searchsorted(1))
_each("bucketize.Tensor", lookups.searchsorted(0))

# Norms, softmax, losses.
_each("layer_norm", norms.layer_norm, expansion=expansions.layer_norm)
_each("native_layer_norm", norms.layer_norm, expansion=expansions.native_layer_norm)
_each("rms_norm", norms.layer_norm, expansion=expansions.rms_norm)
_each("group_norm", norms.group_norm, expansion=expansions.group_norm)
_each("native_group_norm", norms.native_group_norm)
_each("instance_norm", norms.instance_norm, expansion=expansions.instance_norm)
_each("batch_norm", norms.batch_norm, expansion=expansions.batch_norm)
_each("_native_batch_norm_legit_functional", norms.batch_norm,
      expansion=expansions.batch_norm_functional)  # fmt: skip
_each("_native_batch_norm_legit.no_stats", norms.batch_norm,
      expansion=expansions.batch_norm_no_stats)  # fmt: skip
_each("_native_batch_norm_legit_no_training", norms.batch_norm)
_each("_weight_norm", norms.weight_norm)
_each("softmax.int", whole_dims(expand=True), expansion=expansions.softmax)
_each("_softmax", whole_dims(expand=True), expansion=expansions.native_softmax)
_each("log_softmax.int", whole_dims(expand=True), expansion=expansions.log_softmax)
_each("_log_softmax", whole_dims(expand=True), expansion=expansions.native_log_softmax)
_each("cosine_similarity", norms.cosine_similarity)
_each("pairwise_distance", norms.pairwise_distance)
_each("cross_entropy_loss", losses.cross_entropy, expansion=expansions.cross_entropy)
_each("nll_loss nll_loss_nd nll_loss2d", losses.cross_entropy, expansion=expansions.nll_loss)
_each(
    "mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy "
    "binary_cross_entropy_with_logits kl_div poisson_nll_loss hinge_embedding_loss "
    "margin_ranking_loss",
    losses.loss(),
)
_each("cosine_embedding_loss triplet_margin_loss", losses.loss(vector=1))

# Shapes.
_each("view _unsafe_view", views.reshape("size"))
_each("reshape", views.reshape("shape"))
_each("flatten.using_ints unsqueeze", views.reshape())
_each("unflatten.int", views.unflatten)
_each("squeeze squeeze.dim squeeze.dims", views.squeeze)
_each("transpose.int", views.permute(views.swapped("dim0", "dim1")))
_each("swapdims", views.permute(views.swapped("dim0", "dim1")))
_each("swapaxes", views.permute(views.swapped("axis0", "axis1")))
_each("t numpy_T", views.permute(lambda call, rank: range(rank)[::-1]))
_each("mT adjoint", views.permute(lambda call, rank: [*range(rank - 2), rank - 1, rank - 2]))
_each("permute", views.permute(lambda call, rank: [d % rank for d in call["dims"]]))
_each("movedim.int movedim.intlist moveaxis.int moveaxis.intlist", views.permute(views.moved))
_each("expand broadcast_to", views.expand("size"))
_each("expand_as", views.expand(None))
_each("broadcast_tensors", views.broadcast_tensors)
_each("meshgrid meshgrid.indexing", views.meshgrid)
_each("repeat", views.repeat("repeats"))
_each("tile", views.repeat("dims"))
_each("repeat_interleave.self_int", views.repeat_interleave)
_each("cat concat concatenate", views.concat())
_each("hstack", views.as_rows(1))
_each("vstack row_stack", views.as_rows(0))
_each("stack", views.stack)
_each("slice.Tensor", views.slice_dim)
_each("narrow", views.narrow)
_each("pad constant_pad_nd", views.pad)
_each("diff", views.diff)
_each(
    "split.Tensor split.sizes split_with_sizes chunk tensor_split.sections tensor_split.indices",
    views.pieces,
)
_each("select.int unbind.int", views.dropped)
_each("flip", whole_dims("dims", linear=True))
_each("fliplr", whole_dims(lambda call: (1,), linear=True))
_each("flipud", whole_dims(lambda call: (0,), linear=True))
_each("roll", whole_dims("dims", linear=True))
_each("tril triu", whole_dims(_last(2), linear=True))
_each("diagonal", views.diagonal)
_each("unfold", views.unfold)
_each("pixel_shuffle", windows.pixel_shuffle)
_each("pixel_unshuffle", windows.pixel_unshuffle)
_each("channel_shuffle", windows.channel_shuffle)

# Scans and sorting.
_each("cumsum", whole_dims(linear=True))
_each("cumprod logcumsumexp cummax cummin sort sort.stable argsort argsort.stable", whole_dims())
_each("msort", whole_dims(lambda call: (0,)))
_each("topk kthvalue mode", views.selected)

# Windows and resampling.
for _n in (1, 2, 3):
    _each(f"avg_pool{_n}d adaptive_avg_pool{_n}d", windows.resized(_n, linear=True))
    _each(f"max_pool{_n}d adaptive_max_pool{_n}d", windows.resized(_n, linear=False))
_each("max_pool2d_with_indices", windows.resized(2, linear=False))
_each("max_pool3d_with_indices", windows.resized(3, linear=False))
_each("max_unpool2d", windows.resized(2, linear=False))
_each("upsample_nearest1d.vec upsample_linear1d.vec", windows.resized(1, linear=True))
_each(
    "upsample_nearest2d.vec _upsample_nearest_exact2d.vec upsample_bilinear2d.vec "
    "upsample_bicubic2d.vec",
    windows.resized(2, linear=True),
)
_each("upsample_nearest3d.vec upsample_trilinear3d.vec", windows.resized(3, linear=True))
_each("im2col", windows.unfold_blocks)
_each("col2im", windows.fold)
_each("grid_sampler", windows.grid_sample)
_each("affine_grid_generator", windows.affine_grid)

# Nothing of these can be cut.
_each(
    "kron bincount histc masked_scatter embedding_bag.padding_idx trace diag diag_embed "
    "diagonal_scatter rot90 masked_select nonzero dist linalg_multi_dot renorm",
    unknown,
)
