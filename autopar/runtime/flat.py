"""The pieces of a cut dim in one flat run, rank after rank, as messages hold them.

A cut is (dim, outer, sizes): the dim seen as `outer` times the sum of `sizes`, of which each rank
holds its size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["around", "join", "joined", "resized", "split"]


def resized(x: Tensor, dim: int, length: int) -> list[int]:
    """The shape of `x` with another length of `dim`."""
    shape = list(x.shape)
    shape[dim] = length
    return shape


def around(x: Tensor, dim: int, outer: int) -> int:
    """Elements of `x` for each index of the cut atom."""
    return math.prod(x.shape[:dim]) * outer * math.prod(x.shape[dim + 1 :])


def split(x: Tensor, dim: int, outer: int, sizes: Sequence[int]) -> Tensor:
    """Flatten `x` piece after piece of the cut (dim, outer, sizes)."""
    before = math.prod(x.shape[:dim]) * outer
    if before == 1 or x.numel() == 0:
        return x.reshape(-1)
    whole = x.reshape(before, sum(sizes), -1)
    return torch.cat([piece.reshape(-1) for piece in torch.split(whole, list(sizes), 1)])


def join(flat: Tensor, shape: list[int], dim: int, outer: int, sizes: Sequence[int]) -> Tensor:
    """Inverse of `split`; `shape` is that of the result but for `dim`."""
    before, after = math.prod(shape[:dim]) * outer, math.prod(shape[dim + 1 :])
    if before == 1 or flat.numel() == 0:
        return flat.view([*shape[:dim], outer * sum(sizes), *shape[dim + 1 :]])
    runs = torch.split(flat, [before * s * after for s in sizes])
    return joined(runs, shape, dim, outer, sizes)


def joined(
    runs: Sequence[Tensor], shape: list[int], dim: int, outer: int, sizes: Sequence[int]
) -> Tensor:
    """The whole of the flat pieces of all ranks; `shape` is that of the result but for `dim`."""
    before, after = math.prod(shape[:dim]) * outer, math.prod(shape[dim + 1 :])
    pieces = [run.view(before, s, after) for run, s in zip(runs, sizes, strict=True)]
    return torch.cat(pieces, 1).view([*shape[:dim], outer * sum(sizes), *shape[dim + 1 :]])
