"""The private torch names this package uses, each with the reason. Nothing else imports them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._guards import detect_fake_mode  # the fake mode of a value; no public accessor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # tensors without data
from torch.distributed.tensor.placement_types import (  # strided pieces of a fused dim
    _StridedShard as StridedShard,
)
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx._lazy_graph_module import (  # writes Python for a graph once it is read or run
    _LazyGraphModule as LazyGraphModule,
)
from torch.fx._lazy_graph_module import (
    _use_lazy_graph_module as lazy_graph_modules,
)
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils import _pytree as pytree  # the registry that torch.export and libraries share
from torch.utils._python_dispatch import TorchDispatchMode  # sees each operator as it is called

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "InputKind",
    "LazyGraphModule",
    "OutputKind",
    "StridedShard",
    "TorchDispatchMode",
    "detect_fake_mode",
    "disclaim_scaling",
    "foreach",
    "get_proxy_mode",
    "lazy_graph_modules",
    "local_like",
    "local_of",
    "make_fx",
    "move_hooks",
    "pytree",
    "schema_of",
    "settings_of_tracing",
    "storage_of",
    "versions_of",
    "wrap_like",
]


def disclaim_scaling(optimizer: Any) -> None:
    """Let `GradScaler` unscale the gradients itself; fused optimizers say that they do."""
    if hasattr(optimizer, "_step_supports_amp_scaling"):
        optimizer._step_supports_amp_scaling = False


class _Foreach:
    """Operators on lists of tensors by their names in torch without the `_foreach_` in front.

    torch's optimizers are built on them, and document them as theirs alone. As Python functions
    they cost less than as `torch.ops.aten._foreach_*`, where each tensor of a list is converted.
    """

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, f"_foreach_{name}")
        setattr(self, name, found)
        return found


foreach = _Foreach()


def schema_of(target: Any) -> Any:
    """The schema of an operator overload, or None. `OpOverload._schema` has no public name."""
    return getattr(target, "_schema", None)


def settings_of_tracing() -> tuple[Any, ...]:
    """The settings of torch that decide which operations a call and its gradient are made of.

    Determinism, attention kernels and cuDNN choose among them; casts and devices may be inserted.
    """
    backends: Any = torch.backends
    cuda = backends.cuda
    return (
        torch.get_default_dtype(),
        str(torch.get_default_device()),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        backends.cudnn.enabled,
        backends.mkldnn.enabled,
    )


def storage_of(tensor: torch.Tensor) -> int:
    """A number that tensors of the same memory share; `data_ptr` is 0 for all without values."""
    number: int = tensor.untyped_storage()._cdata
    return number


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How often the memory of each was written in place; autograd's own check reads this, too.

    Tensors of `torch.inference_mode` are not counted.
    """
    try:
        return [t._version for t in tensors]
    except RuntimeError:
        return [0 if t.is_inference() else t._version for t in tensors]


def local_of(tensor: Any) -> torch.Tensor:
    """The local piece of a DTensor without autograd (`to_local` costs 20 us in the step)."""
    local: torch.Tensor = tensor._local_tensor
    return local


def local_like(tensor: Any, like: Any) -> torch.Tensor:
    """The local piece of a DTensor, placed as the DTensor `like`; what `wrap_like` made is."""
    if tensor._spec is not like._spec and tensor.placements != like.placements:
        tensor = tensor.redistribute(placements=like.placements)
    local: torch.Tensor = tensor._local_tensor
    return local


def move_hooks(old: Any, new: Any) -> None:
    """Give `new` the hooks registered on `old`; their handles go on removing them.

    The public functions register, but do not list.
    """
    if old._backward_hooks:
        new._backward_hooks = old._backward_hooks
    if getattr(old, "_post_accumulate_grad_hooks", None):
        new._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks


def wrap_like(local: torch.Tensor, like: Any) -> torch.Tensor:
    """A DTensor of a local piece with the mesh, placements and shape of `like`.

    `DTensor.from_local` checks and copies what is known here.
    """
    from torch.distributed.tensor import DTensor

    wrapped: torch.Tensor = DTensor(local, like._spec, requires_grad=False)  # type: ignore
    return wrapped
