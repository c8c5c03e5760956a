"""Random numbers fixed by seed, step, site and global element index, whatever the mesh.

Every row of a tensor gets a 64-bit key: SplitMix64 of its global row number, started from a mix of
(seed, step, site) (Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number Generators",
OOPSLA, section 4; constants of Stafford's variant 13). Every element is the 32-bit finaliser
`lowbias32` (Wellons 2018, "Prospecting for Hash Functions": fold 16, times 0x21f0aaad, fold 15,
times 0x735a2d97, fold 15) of its global column number, with one half of the row key xored in before
the first product and the other half before the second fold. Within a row this is a bijection of 32
bits, so no value repeats for structural reasons; between rows 64 bits differ.

Only xor, shift, product and compare of int32 touch each element, so CPU and CUDA agree bit for bit
and a mask costs less than torch's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from autopar.layout import Atom, Layout, Mesh, chunk_sizes

__all__ = ["Positions", "keep_mask", "keep_mask_at", "uniform", "uniform_at"]

_ROW_ELEMENTS = 512  # trailing dims are merged to at least this, so that keys are few
_CHUNK_ELEMENTS = 1 << 15  # two int32 buffers of this stay in a core's second-level cache
_M64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX1, _MIX2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MUL1, _MUL2 = 0x21F0AAAD, 0x735A2D97


class Positions:
    """Where the elements of a local piece lie in the whole tensor, as row and column numbers.

    Args:
        layout: of the whole tensor.
        mesh: grid of ranks.
        coordinate: of the rank that holds the piece.
    """

    def __init__(self, layout: Layout, mesh: Mesh, coordinate: Mapping[str, int]) -> None:
        self.shape = layout.local_shape(mesh, coordinate)
        whole = layout.shape
        cut = len(whole)
        while cut and math.prod(whole[cut:]) < _ROW_ELEMENTS:
            cut -= 1
        index = [_dim_index(dim, mesh, coordinate) for dim in layout.dims]
        self._rows = _linear_index(index[:cut], whole[:cut])
        columns = _linear_index(index[cut:], whole[cut:])
        self._blocks = max(1, -(-math.prod(whole[cut:]) >> 32))
        self._runs = list(_column_runs(columns, self._blocks))
        self._on: dict[torch.device, tuple[Tensor, list[tuple[int, int, int, Tensor]]]] = {}

    @property
    def rows(self) -> int:
        """Local number of rows."""
        return len(self._rows)

    @property
    def columns(self) -> int:
        """Local number of elements in a row."""
        return self._runs[-1][2] if self._runs else 0

    def on(self, device: torch.device) -> tuple[Tensor, list[tuple[int, int, int, Tensor]]]:
        """Row numbers times the number of blocks, and the (block, start, end, folded columns)."""
        found = self._on.get(device)
        if found is None:
            runs = [(block, a, b, c.to(device)) for block, a, b, c in self._runs]
            found = self._on[device] = ((self._rows * self._blocks).to(device), runs)
        return found


def uniform(
    shape: Sequence[int],
    layout: Layout,
    mesh: Mesh,
    coordinate: Mapping[str, int],
    *,
    seed: int,
    step: int,
    site: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Numbers in [0, 1) of local `shape`: multiples of 2**-24 (2**-11 half, 2**-8 bfloat16)."""
    at = Positions(layout, mesh, coordinate)
    assert at.shape == tuple(shape), f"{layout} is {at.shape} here, asked for {tuple(shape)}"
    return uniform_at(at, seed=seed, step=step, site=site, dtype=dtype, device=device)


def keep_mask(
    shape: Sequence[int],
    layout: Layout,
    mesh: Mesh,
    coordinate: Mapping[str, int],
    p: float,
    *,
    seed: int,
    step: int,
    site: int,
    device: torch.device,
) -> Tensor:
    """`uniform(..., dtype=float64) >= p` as bool: true with probability 1 - p."""
    at = Positions(layout, mesh, coordinate)
    assert at.shape == tuple(shape), f"{layout} is {at.shape} here, asked for {tuple(shape)}"
    return keep_mask_at(at, p, seed=seed, step=step, site=site, device=device)


def uniform_at(
    at: Positions, *, seed: int, step: int, site: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """`uniform` for prepared positions."""
    bits = {torch.float16: 11, torch.bfloat16: 8}.get(dtype, 24)
    out = torch.empty((at.rows, at.columns), dtype=dtype, device=device)
    for rows, columns, x in _words(at, seed, step, site, device):
        x.bitwise_right_shift_(32 - bits)  # arithmetic: 2**(bits-1) too low, exact in `dtype`
        out[rows, columns].copy_(x).mul_(2.0**-bits).add_(0.5)
    return out.view(at.shape)


def keep_mask_at(
    at: Positions, p: float, *, seed: int, step: int, site: int, device: torch.device
) -> Tensor:
    """`keep_mask` for prepared positions."""
    out = torch.empty((at.rows, at.columns), dtype=torch.bool, device=device)
    least = (math.ceil(p * 2.0**24) << 8) - 2**31  # the words are signed
    if least >= 2**31:
        return out.zero_().view(at.shape)
    for rows, columns, x in _words(at, seed, step, site, device):
        torch.ge(x, least, out=out[rows, columns])
    return out.view(at.shape)


def _words(
    at: Positions, seed: int, step: int, site: int, device: torch.device
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Random int32 words block by block; the buffer is reused."""
    if not (at.rows and at.columns):
        return
    row_numbers, runs = at.on(device)
    size = at.rows * at.columns
    if device.type == "cpu":
        size = min(size, _CHUNK_ELEMENTS * torch.get_num_threads())
    buffers = torch.empty((2, size), dtype=torch.int32, device=device)
    for block, begin, end, folded in runs:
        first, second = _row_keys(row_numbers, block, seed, step, site)
        width = min(end - begin, size)
        height = size // width
        for r in range(0, at.rows, height):
            rows = slice(r, min(r + height, at.rows))
            for c in range(begin, end, width):
                columns = slice(c, min(c + width, end))
                here = (rows.stop - r, columns.stop - c)
                x, spare = (b[: here[0] * here[1]].view(here) for b in buffers)
                torch.bitwise_xor(
                    folded[columns.start - begin : columns.stop - begin], first[rows], out=x
                )
                x.mul_(_MUL1).bitwise_xor_(second[rows])
                _fold(x, spare, 15)
                x.mul_(_MUL2)
                yield rows, columns, _fold(x, spare, 15)


def _fold(x: Tensor, spare: Tensor, bits: int) -> Tensor:
    """x ^= x >>> bits, in place; torch shifts int32 arithmetically, hence the mask."""
    torch.bitwise_right_shift(x, bits, out=spare)
    return x.bitwise_xor_(spare.bitwise_and_((1 << (32 - bits)) - 1))


def _row_keys(
    row_numbers: Tensor, block: int, seed: int, step: int, site: int
) -> tuple[Tensor, Tensor]:
    """Two int32 keys a row, each (rows, 1)."""
    base = 0
    for word in (seed, step, site):
        base = _split_mix((base + (word & _M64) + _GOLDEN) & _M64)
    z = row_numbers * _signed(_GOLDEN)
    z.add_(_signed((base + (block + 1) * _GOLDEN) & _M64))
    for shift, factor in ((30, _MIX1), (27, _MIX2), (31, 1)):
        z.bitwise_xor_((z >> shift).bitwise_and_((1 << (64 - shift)) - 1))
        if factor != 1:
            z.mul_(_signed(factor))
    return (z << 32 >> 32).int().unsqueeze(1), (z >> 32).int().unsqueeze(1)


def _split_mix(z: int) -> int:
    z = (z ^ (z >> 30)) * _MIX1 & _M64
    z = (z ^ (z >> 27)) * _MIX2 & _M64
    return z ^ (z >> 31)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _column_runs(columns: Tensor, blocks: int) -> Iterator[tuple[int, int, int, Tensor]]:
    """(block, start, end, folded low words) of the columns, 2**32 to a block."""
    if blocks == 1:
        edges = [(0, 0, len(columns))] if len(columns) else []
    else:
        values, counts = torch.unique_consecutive(columns >> 32, return_counts=True)
        ends = counts.cumsum(0)
        edges = list(zip(values.tolist(), (ends - counts).tolist(), ends.tolist(), strict=True))
    for block, start, end in edges:
        low = columns[start:end] & 0xFFFFFFFF
        low = low ^ (low >> 16)  # the first fold, for a whole column at once
        yield block, start, end, (low << 32 >> 32).int()


def _dim_index(dim: tuple[Atom, ...], mesh: Mesh, coordinate: Mapping[str, int]) -> Tensor:
    """Global index along one dim of each local index."""
    index = torch.zeros(1, dtype=torch.int64)
    for atom in dim:
        start, size = 0, atom.size
        for axis in atom.axes:
            sizes = chunk_sizes(size, mesh.sizes[axis])
            start += sum(sizes[: coordinate[axis]])
            size = sizes[coordinate[axis]]
        index = (index[:, None] * atom.size + torch.arange(start, start + size)).view(-1)
    return index


def _linear_index(indices: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Row-major linear index over several dims."""
    linear = torch.zeros(1, dtype=torch.int64)
    for index, size in zip(indices, shape, strict=True):
        linear = (linear[:, None] * size + index).view(-1)
    return linear
