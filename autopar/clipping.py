"""The norm of all gradients of a parallel module, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from autopar.compat import foreach, local_like
from autopar.errors import InputError
from autopar.runtime import Communicator

__all__ = ["clip_by_norm"]


def clip_by_norm(
    parameters: Iterable[Tensor], comm: Communicator, max_norm: float, norm_type: float,
    error_if_nonfinite: bool,
) -> Tensor:  # fmt: skip
    """Scale all gradients so that their norm is at most `max_norm`.

    Norms of the pieces are combined by one reduction of a number over each mesh axis. An element
    counts once: of ranks with the same piece only the first adds it.

    Args:
        norm_type: p of the p-norm, positive or inf.

    Returns:
        The norm before, a tensor without dims, equal on all ranks.

    Raises:
        InputError: `norm_type` is not positive.
        RuntimeError: the norm is not finite and `error_if_nonfinite`.
    """
    p = float(norm_type)
    if not p > 0:
        raise InputError(f"norm_type={norm_type}", expected="a positive number or inf")
    pieces, mine = [], []
    for parameter in parameters:
        grad: Any = parameter.grad
        if grad is None:
            continue
        local, counts = grad, comm.rank == 0
        if hasattr(grad, "full_tensor"):
            local = local_like(grad, parameter)
            counts = p == math.inf or _is_first(parameter, comm)
            if local is not local_like(grad, grad):
                raise InputError("A gradient is placed otherwise than its parameter.")
        pieces.append(local)
        if counts and local.numel():
            mine.append(local)
    if not pieces:
        return torch.tensor(0.0)
    total = _reduced(mine, pieces[0], comm, p)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients is non-finite, so it cannot be "
            "clipped."
        )
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for dtype in {g.dtype for g in pieces}:
        foreach.mul_([g for g in pieces if g.dtype == dtype], factor)
    return total


def _is_first(parameter: Any, comm: Communicator) -> bool:
    """Whether no rank of a lower coordinate holds the same piece of `parameter`."""
    axes = zip(comm.mesh.names, parameter.placements, strict=True)
    return all(comm.coordinate[axis] == 0 for axis, x in axes if x.is_replicate())


def _reduced(mine: list[Tensor], like: Tensor, comm: Communicator, p: float) -> Tensor:
    """The p-norm of all elements of all ranks, summed in float64 or wider than its terms."""
    value = torch.zeros((), dtype=torch.float64, device=like.device)
    if mine:
        norms = [n.to(torch.float64) for n in foreach.norm(mine, p)]
        value = torch.linalg.vector_norm(torch.stack(norms), p)
    if p == math.inf:
        for axis in comm.mesh.names:
            value = comm.all_reduce(value, axis, "max")
    else:
        value = value**p
        for axis in comm.mesh.names:
            value = comm.all_reduce(value, axis, "sum")
        value = value ** (1 / p)
    return value.to(like.dtype.to_real())
