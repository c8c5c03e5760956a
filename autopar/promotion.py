"""Dtypes that meet in one call where parameters are cast and buffers are not.

Most operations promote their operands by themselves. Those that refuse to mix dtypes are few, and
get here what `torch.autocast` would give them: products in the narrowest dtype, losses in the
widest, and norms their statistics, weight and bias in one dtype, no narrower than their input's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.compat import pytree

__all__ = ["Promotion"]


class Promotion(TorchFunctionMode):
    """Inside, calls that refuse to mix dtypes get operands of one."""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func` with operands it takes."""
        meet = _MEETING.get(func)
        if meet is None or len(found := _dtypes((args, kwargs))) < 2:
            return func(*args, **(kwargs or {}))
        return meet(func, args, dict(kwargs or {}), found)


def _dtypes(values: Any) -> list[torch.dtype]:
    """Floating dtypes among `values`, the narrowest first."""
    leaves = pytree.tree_leaves(values)
    found = {x.dtype for x in leaves if isinstance(x, Tensor) and x.is_floating_point()}
    return sorted(found, key=lambda dtype: (dtype.itemsize, str(dtype)))


def _as(values: Any, dtype: torch.dtype) -> Any:
    return pytree.tree_map_only(
        Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, values
    )


def _product(func: Any, args: Any, kwargs: Any, found: list[torch.dtype]) -> Any:
    args, kwargs = _as((args, kwargs), found[0])
    return func(*args, **kwargs)


def _loss(func: Any, args: Any, kwargs: Any, found: list[torch.dtype]) -> Any:
    args, kwargs = _as((args, kwargs), found[-1])
    return func(*args, **kwargs)


def _norm(func: Any, args: Any, kwargs: Any, found: list[torch.dtype]) -> Any:
    """Buffers are written, so the others go to their dtype, which torch mixes with a half input."""
    x, wide = args[0] if args else kwargs.pop("input"), found[-1]
    mixes = x.dtype.itemsize == 2 and wide == torch.float32
    args, kwargs = _as((args[1:], kwargs), wide)
    return func(x if mixes else x.to(wide), *args, **kwargs).to(x.dtype)


_PRODUCTS = (
    F.linear, F.bilinear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d,
    F.conv_transpose3d, F.scaled_dot_product_attention, torch.einsum, torch.matmul, Tensor.matmul,
    Tensor.__matmul__, Tensor.__rmatmul__, torch.mm, Tensor.mm, torch.bmm, Tensor.bmm, torch.mv,
    Tensor.mv, torch.dot, Tensor.dot, torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm,
)  # fmt: skip
_LOSSES = (
    F.cross_entropy, F.nll_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits,
    F.kl_div, F.multi_margin_loss, F.cosine_embedding_loss,
)  # fmt: skip
_NORMS = (F.batch_norm, F.instance_norm, F.group_norm, F.layer_norm, F.rms_norm)
_MEETING: dict[Any, Callable[[Any, Any, Any, list[torch.dtype]], Any]] = {
    **dict.fromkeys(_PRODUCTS, _product),
    **dict.fromkeys(_LOSSES, _loss),
    **dict.fromkeys(_NORMS, _norm),
}
