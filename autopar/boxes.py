"""The boxes of a whole tensor that a rank's piece consists of, told to torch's checkpoints.

`torch.distributed.checkpoint` takes the piece of a DTensor for one box of the whole. A dim that is
cut within sections (the fused query, key and value of a head) has a run in each: torch then finds
overlapping chunks and refuses to save. Here the piece is described as all its boxes, through the
three hooks by which that library asks a tensor, so saving and loading by torch's own functions are
right, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.compat import StridedShard, local_of

__all__ = ["Box", "boxes", "describe_pieces"]


@dataclass(frozen=True, slots=True)
class Box:
    """One contiguous part of a whole tensor on this rank; a tuple has one entry a dim.

    Args:
        offsets: where it starts in the whole tensor.
        sizes: how long it is.
        local: where it starts in the rank's piece.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local: tuple[int, ...]


def boxes(tensor: Any) -> list[Box]:
    """The boxes of a DTensor on this rank, in the order of the piece; none where it is empty."""
    coordinate = tensor.device_mesh.get_coordinate()
    runs = []
    for dim, size in enumerate(tensor.shape):
        index = torch.arange(size)
        for axis, placement in enumerate(tensor.placements):
            if getattr(placement, "dim", None) == dim:
                index = _cut(index, placement, tensor.device_mesh.size(axis), coordinate[axis])
        runs.append(_runs(index))
    found = [
        Box(*(tuple(part) for part in zip(*chosen, strict=True))) if chosen else Box((), (), ())
        for chosen in itertools.product(*runs)
    ]
    covered = sum(torch.Size(box.sizes).numel() for box in found)
    assert covered == local_of(tensor).numel(), "placements describe the piece"
    return found


def _cut(index: Tensor, placement: Any, parts: int, at: int) -> Tensor:
    """What stays of `index` on rank `at` of an axis of `parts`."""
    sections = placement.split_factor if isinstance(placement, StridedShard) else 1
    kept = [section.chunk(parts)[at : at + 1] for section in index.chunk(int(sections))]
    return torch.cat([index[:0], *itertools.chain.from_iterable(kept)])


def _runs(index: Tensor) -> list[tuple[int, int, int]]:
    """(offset, length, position) of each run of consecutive numbers."""
    if index.numel() == 0:
        return []
    breaks = (index.diff() != 1).nonzero().flatten() + 1
    starts = [0, *breaks.tolist()]
    ends = [*starts[1:], index.numel()]
    return [(int(index[a]), b - a, a) for a, b in zip(starts, ends, strict=True)]


def _several(tensor: Any) -> list[Box]:
    """The boxes where there are several; torch itself describes one box, and an empty piece."""
    if not any(isinstance(p, StridedShard) for p in tensor.placements):
        return []
    found = boxes(tensor)
    return found if len(found) > 1 else []


def describe_pieces() -> None:
    """Let `torch.distributed.checkpoint` see every box of a DTensor, in this process.

    The hooks are torch's own for tensors with another storage (`_Checkpointable`); one cut into
    contiguous pieces goes on to what stood there before.
    """
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.metadata import TensorProperties as Properties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
    from torch.distributed.tensor import DTensor

    kind: Any = DTensor
    items, chunks, shard = (
        kind.__create_write_items__, kind.__create_chunk_list__, kind.__get_tensor_shard__
    )  # fmt: skip
    if getattr(items, "__module__", "") == __name__:
        return

    def chunk(box: Box) -> Any:
        return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))

    def create_write_items(self: Any, fqn: str, value: Any) -> Iterable[Any]:
        found = _several(value)
        properties = Properties.create_from_tensor(local_of(value))
        return [
            WriteItem(
                MetadataIndex(fqn, box.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk(box), properties, value.size()),
            )
            for box in found
        ] or items(self, fqn, value)

    def create_chunk_list(self: Any) -> Any:
        return [chunk(box) for box in _several(self)] or chunks(self)

    def get_tensor_shard(self: Any, index: Any) -> Tensor:
        for box in _several(self):
            if index.offset == torch.Size(box.offsets):
                part = local_of(self)
                for dim, (start, size) in enumerate(zip(box.local, box.sizes, strict=True)):
                    part = part.narrow(dim, start, size)
                return part
        whole: Tensor = shard(self, index)
        return whole

    replaced: list[tuple[str, Callable[..., Any]]] = [
        ("__create_write_items__", create_write_items),
        ("__create_chunk_list__", create_chunk_list),
        ("__get_tensor_shard__", get_tensor_shard),
    ]
    for name, function in replaced:
        setattr(kind, name, function)
