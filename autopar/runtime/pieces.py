"""Cutting a whole tensor into the pieces of a layout, and putting pieces together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from autopar.layout import Layout, Mesh, chunk_sizes

__all__ = ["assemble", "cut_of", "piece"]


def _ranges(layout: Layout, mesh: Mesh, coordinate: Mapping[str, int]) -> list[tuple[int, int]]:
    """(start, length) within each atom, atoms of all dims in order."""
    ranges = []
    for dim in layout.dims:
        for atom in dim:
            start, n = 0, atom.size
            for axis in atom.axes:
                sizes = chunk_sizes(n, mesh.sizes[axis])
                start += sum(sizes[: coordinate[axis]])
                n = sizes[coordinate[axis]]
            ranges.append((start, n))
    return ranges


def _view(tensor: Tensor, layout: Layout) -> Tensor:
    return tensor.reshape([a.size for dim in layout.dims for a in dim])


def piece(tensor: Tensor, layout: Layout, mesh: Mesh, coordinate: Mapping[str, int]) -> Tensor:
    """The part of a whole tensor that `coordinate` holds, shaped as there; may be a view."""
    if not layout.sharded:
        return tensor
    view = _view(tensor, layout)
    for i, (start, n) in enumerate(_ranges(layout, mesh, coordinate)):
        view = view.narrow(i, start, n)
    return view.reshape(layout.local_shape(mesh, coordinate))


def cut_of(
    layout: Layout, axis: str, mesh: Mesh, coordinate: Mapping[str, int]
) -> tuple[int, int, int, int]:
    """(dim, outer, inner, n): `axis` cuts n elements of a dim, between outer and inner ones."""
    d, i = layout.sharded[axis]
    sizes = [a.local_sizes(mesh, coordinate) for a in layout.dims[d]]
    atom = layout.dims[d][i]
    n = atom.size
    for before in atom.axes[: atom.axes.index(axis)]:
        n = chunk_sizes(n, mesh.sizes[before])[coordinate[before]]
    return d, math.prod(sizes[:i]), math.prod(sizes[i + 1 :]), n


def assemble(pieces: Sequence[Tensor], layout: Layout, mesh: Mesh) -> Tensor:
    """The whole tensor of the pieces of all ranks, in rank order; partial values are summed."""
    whole = pieces[0].new_zeros(layout.shape)
    view = _view(whole, layout)
    summed = [axis for axis, _ in layout.partial]
    for rank, part in enumerate(pieces):
        coordinate = mesh.coordinate(rank)
        held = [a for a in mesh.names if a not in layout.sharded and a not in summed]
        if any(coordinate[a] for a in held):  # copies of what the first rank holds
            continue
        target = view
        ranges = _ranges(layout, mesh, coordinate)
        for i, (start, n) in enumerate(ranges):
            target = target.narrow(i, start, n)
        target += part.reshape([n for _, n in ranges])
    return whole
