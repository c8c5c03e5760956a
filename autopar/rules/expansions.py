"""Operations written in simpler ones, for factors that can be cut only that way.

Each function takes the arguments of the operation it replaces and computes the same value and
gradient. It is traced at global shapes and its nodes are placed by the ordinary rules, so the
reductions over a cut dim come out as typed collectives. Half-precision operands are accumulated in
float32, as the operations themselves do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "added",
    "batch_norm",
    "batch_norm_functional",
    "batch_norm_no_stats",
    "biased",
    "bilinear",
    "cross_entropy",
    "embedding",
    "group_norm",
    "index",
    "instance_norm",
    "layer_norm",
    "linear",
    "log_softmax",
    "logsumexp",
    "native_layer_norm",
    "native_log_softmax",
    "native_softmax",
    "nll_loss",
    "rms_norm",
    "softmax",
    "variance",
    "vector_norm",
]


def _wide(x: Tensor) -> Tensor:
    """`x` in the type it is accumulated in."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _like(y: Tensor, dtype: torch.dtype) -> Tensor:
    return y if y.dtype == dtype else y.to(dtype)


def _root(x: Tensor) -> Tensor:
    """Square root whose gradient at zero is zero, as that of norms and deviations."""
    zero = x == 0
    return torch.where(zero, x, torch.where(zero, 1.0, x).sqrt())


def _dims(x: Tensor, dim: int | Sequence[int] | None) -> list[int]:
    """Dims that a reduction names: none means all."""
    if dim is None or (not isinstance(dim, int) and not dim):
        return list(range(x.dim()))
    return [dim] if isinstance(dim, int) else list(dim)


# --- products ----------------------------------------------------------------------------------


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The product, then the bias."""
    return F.linear(x, weight) + bias


def bilinear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The product, then the bias."""
    return torch.bilinear(x, y, weight, None) + bias


def biased(convolution: Any) -> Callable[..., Tensor]:
    """A convolution, then the bias."""

    def expansion(x: Tensor, weight: Tensor, bias: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y: Tensor = convolution(x, weight, None, *args, **kwargs)
        return y + bias.view([-1] + [1] * (weight.dim() - 2))

    return expansion


def added(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """self * beta + product * alpha."""

    def expansion(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        y = product(a, b)
        y = y if alpha == 1 else y * alpha
        return y if beta == 0 else y + (x if beta == 1 else x * beta)

    return expansion


# --- lookup ------------------------------------------------------------------------------------


def embedding(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Rows without gradient where the index is the padding."""
    rows = torch.embedding(weight, indices)
    return torch.where((indices == padding_idx).unsqueeze(-1), rows.detach(), rows)


def index(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """Indexing one dim by integers, of which negative ones count from the end."""
    at, rows = next((d, i) for d, i in enumerate(indices) if i is not None)
    rows = torch.where(rows < 0, rows + x.shape[at], rows)
    y = x.index_select(at, rows.reshape(-1))
    return y.reshape([*x.shape[:at], *rows.shape, *x.shape[at + 1 :]])


# --- reductions --------------------------------------------------------------------------------


def variance(root: bool = False, mean: bool = False) -> Callable[..., Any]:
    """Variance or deviation (and mean), in the order of arguments of any overload."""

    def expansion(
        x: Tensor,
        dim: Sequence[int] | bool | None = None,
        unbiased: bool = True,
        keepdim: bool = False,
        *,
        correction: float | None = None,
    ) -> Any:
        if isinstance(dim, bool):  # the overload without dims
            return expansion(x, None, dim)
        wide, dims = _wide(x), _dims(x, dim)
        n = math.prod(x.shape[d] for d in dims)
        freedom = n - (int(unbiased) if correction is None else correction)
        mu = wide.sum(dims, keepdim=True) / n
        centred = wide - mu
        spread = (centred * centred).sum(dims, keepdim=keepdim) / max(freedom, 0)
        result = _like(_root(spread) if root else spread, x.dtype)
        return (result, _like(mu if keepdim else mu.squeeze(dims), x.dtype)) if mean else result

    return expansion


def logsumexp(x: Tensor, dim: int | Sequence[int], keepdim: bool = False) -> Tensor:
    """log(sum(exp(x))) about the maximum."""
    wide, dims = _wide(x), _dims(x, dim)
    top = wide.detach().amax(dims, keepdim=True)
    top = torch.where(top.abs() == math.inf, 0.0, top)
    y = (wide - top).exp().sum(dims, keepdim=True).log() + top
    return _like(y if keepdim else y.squeeze(dims), x.dtype)


def vector_norm(
    x: Tensor,
    ord: float = 2,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Norm of order 1 or 2."""
    wide = _wide(x) if dtype is None else x.to(dtype)
    dims = _dims(x, dim)
    if ord == 1:
        y = wide.abs().sum(dims, keepdim=keepdim)
    else:
        y = _root((wide * wide).sum(dims, keepdim=keepdim))
    return _like(y, x.dtype if dtype is None else dtype)


def log_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """log(softmax(x)) by the maximum, the sum of exponentials and their logarithm."""
    wide = _wide(x) if dtype is None else _wide(x.to(dtype))
    shifted = wide - wide.detach().amax(dim, keepdim=True)
    y = shifted - shifted.exp().sum(dim, keepdim=True).log()
    return _like(y, x.dtype if dtype is None else dtype)


def softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """softmax by the maximum and the sum of exponentials."""
    wide = _wide(x) if dtype is None else _wide(x.to(dtype))
    e = (wide - wide.detach().amax(dim, keepdim=True)).exp()
    y = e / e.sum(dim, keepdim=True)
    return _like(y, x.dtype if dtype is None else dtype)


def native_log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """`_log_softmax`, which may give float32 for half precision."""
    return log_softmax(x, dim, torch.float32 if half_to_float else None)


def native_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """`_softmax`, which may give float32 for half precision."""
    return softmax(x, dim, torch.float32 if half_to_float else None)


# --- norms -------------------------------------------------------------------------------------


def _centred(x: Tensor, dims: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Deviation from the mean, mean and variance over `dims`, which are kept with size 1."""
    n = math.prod(x.shape[d] for d in dims)
    mean = x.sum(dims, keepdim=True) / n
    centred = x - mean
    return centred, mean, (centred * centred).sum(dims, keepdim=True) / n


def _scaled(y: Tensor, weight: Tensor | None, bias: Tensor | None, view: list[int]) -> Tensor:
    if weight is not None:
        y = y * _wide(weight.view(view))
    return y if bias is None else y + _wide(bias.view(view))


def native_layer_norm(
    x: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Layer norm, with mean and 1 / deviation."""
    dims = list(range(x.dim() - len(normalized_shape), x.dim()))
    centred, mean, spread = _centred(_wide(x), dims)
    scale = (spread + eps).rsqrt()
    y = _scaled(centred * scale, weight, bias, list(normalized_shape))
    return _like(y, x.dtype), mean.detach(), scale.detach()  # as the operation has it


def layer_norm(
    x: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """Layer norm by two passes: mean, then mean of squares about it."""
    return native_layer_norm(x, normalized_shape, weight, bias, eps)[0]


def rms_norm(
    x: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Root-mean-square norm."""
    dims = list(range(x.dim() - len(normalized_shape), x.dim()))
    n = math.prod(normalized_shape)
    wide = _wide(x)
    epsilon = torch.finfo(x.dtype).eps if eps is None else eps
    y = wide * ((wide * wide).sum(dims, keepdim=True) / n + epsilon).rsqrt()
    return _like(_scaled(y, weight, None, list(normalized_shape)), x.dtype)


def batch_norm_functional(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Batch norm with new running statistics as results (unbiased running variance)."""
    view = [1, -1] + [1] * (x.dim() - 2)
    if not training:
        y = (_wide(x) - running_mean.view(view)) * (running_var.view(view) + eps).rsqrt()
        y = _like(_scaled(y, weight, bias, view), x.dtype)
        none = running_mean.new_empty([0])
        return y, none, none.clone(), running_mean.clone(), running_var.clone()
    y, mean, scale, spread = _batch_norm(x, weight, bias, eps)
    n = x.numel() // x.shape[1]
    unbiased = spread * (n / max(n - 1, 1))
    new_mean = running_mean * (1 - momentum) + _like(mean, running_mean.dtype) * momentum
    new_var = running_var * (1 - momentum) + _like(unbiased, running_var.dtype) * momentum
    return y, mean, scale, new_mean, new_var


def _batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Result, and mean, 1 / deviation and variance of each channel without gradient."""
    dims = [d for d in range(x.dim()) if d != 1]
    view = [1, -1] + [1] * (x.dim() - 2)
    centred, mean, spread = _centred(_wide(x), dims)
    scale = (spread + eps).rsqrt()
    y = _like(_scaled(centred * scale, weight, bias, view), x.dtype)
    mean, scale, spread = (s.detach().squeeze(dims) for s in (mean, scale, spread))
    return y, mean, scale, spread


def batch_norm_no_stats(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Batch norm by batch statistics."""
    return _batch_norm(x, weight, bias, eps)[:3]


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: None,
    running_var: None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """Batch norm by batch statistics, without running ones."""
    return _batch_norm(x, weight, bias, eps)[0]


def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """Normalise each group of channels of each row."""
    grouped = x.reshape([x.shape[0], num_groups, x.shape[1] // num_groups, *x.shape[2:]])
    centred, _, spread = _centred(_wide(grouped), list(range(2, grouped.dim())))
    y = (centred * (spread + eps).rsqrt()).reshape(x.shape)
    return _like(_scaled(y, weight, bias, [1, -1] + [1] * (x.dim() - 2)), x.dtype)


def instance_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: None,
    running_var: None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """Normalise each channel of each row over space."""
    centred, _, spread = _centred(_wide(x), list(range(2, x.dim())))
    y = centred * (spread + eps).rsqrt()
    return _like(_scaled(y, weight, bias, [1, -1] + [1] * (x.dim() - 2)), x.dtype)


# --- losses ------------------------------------------------------------------------------------


def nll_loss(
    log_p: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
) -> Tensor:
    """Negative log-likelihood with reduction 0 (none) or 2 (sum)."""
    at = 1 if log_p.dim() > 1 else 0
    valid = target != ignore_index
    safe = torch.where(valid, target, 0)
    rows = -log_p.gather(at, safe.unsqueeze(at)).squeeze(at)
    if weight is not None:
        rows = rows * weight.index_select(0, safe.reshape(-1)).reshape(safe.shape)
    rows = torch.where(valid, rows, 0.0)
    return rows if reduction == 0 else rows.sum()


def cross_entropy(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross-entropy with reduction 0 (none) or 2 (sum), after `aten/native/LossNLL.cpp`.

    With smoothing e over C classes: (1 - e) * nll + e / C * sum over classes of w_c * -log p_c.
    """
    at = 1 if x.dim() > 1 else 0
    classes = x.shape[at]
    log_p = log_softmax(x, at)
    view = [-1 if d == at else 1 for d in range(x.dim())]
    weighted = log_p if weight is None else log_p * weight.view(view)
    if target.is_floating_point():
        if label_smoothing > 0:
            target = target * (1 - label_smoothing) + label_smoothing / classes
        rows = -(weighted * target).sum(at)
        return rows if reduction == 0 else rows.sum()
    rows = nll_loss(log_p, target, weight, 0, ignore_index)
    if label_smoothing > 0:
        smooth = torch.where(target != ignore_index, -weighted.sum(at), 0.0)
        rows = rows * (1 - label_smoothing) + smooth * (label_smoothing / classes)
    return rows if reduction == 0 else rows.sum()
