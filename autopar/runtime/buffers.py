"""Memory for large messages on the CPU, used again once no tensor lies in it any more.

Fresh memory costs a page fault for every 4 KB, which is as much as filling it. Accelerators have
caching allocators of their own.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from torch import Tensor

__all__ = ["Buffers"]

_LARGE_BYTES = 1 << 20
_KEPT = 2  # of one size: gradients that the user accumulates hold one while the next is filled


class Buffers:
    """Flat tensors whose memory outlives them."""

    def __init__(self) -> None:
        self._arrays: dict[int, list[np.ndarray]] = {}
        probe = [np.empty(0)]
        self._alone = sys.getrefcount(probe[0])  # references to an array that no tensor uses

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A 1-D tensor of `numel` elements with any values."""
        n_bytes = numel * dtype.itemsize
        if device.type != "cpu" or n_bytes < _LARGE_BYTES:
            return torch.empty(numel, dtype=dtype, device=device)
        arrays = self._arrays.setdefault(n_bytes, [])
        for i in range(len(arrays)):
            if sys.getrefcount(arrays[i]) == self._alone:
                return torch.from_numpy(arrays[i]).view(dtype)
        array = np.empty(n_bytes, np.uint8)
        if len(arrays) < _KEPT:
            arrays.append(array)
        return torch.from_numpy(array).view(dtype)
