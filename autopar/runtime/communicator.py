"""The collectives of a generated program, bound to one rank of a mesh.

`Communicator` holds the meaning of every collective of `autopar.collectives` (which elements go
where); a `Transport` moves flat buffers.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import torch
from torch import Tensor

from autopar.collectives import split_cuts
from autopar.errors import RankError
from autopar.layout import Layout, Mesh, chunk_sizes
from autopar.runtime import rng
from autopar.runtime.buffers import Buffers
from autopar.runtime.flat import around, join, joined, resized, split
from autopar.runtime.transport import Call, Pending, Started, Transport

__all__ = ["Communicator"]

P = ParamSpec("P")


def _awaited(start: Callable[P, Started]) -> Callable[P, list[Tensor]]:
    """What gives the results of a bucket that `start` begins."""

    @functools.wraps(start)
    def run(*args: P.args, **kwargs: P.kwargs) -> list[Tensor]:
        return start(*args, **kwargs).wait()

    return run


class Communicator:
    """The collectives of one rank. Results carry no autograd history and alias no operand
    unless the axis has size 1.

    Args:
        mesh: grid of all ranks.
        rank: this rank.
        transport: what moves the bytes.
    """

    def __init__(self, mesh: Mesh, rank: int, transport: Transport) -> None:
        self.mesh, self.rank = mesh, rank
        self.coordinate = mesh.coordinate(rank)
        self.transport = transport
        self.seed = 0
        self.step = 0
        self._sizes = mesh.sizes
        self._layouts: dict[str, rng.Positions] = {}
        self._scattering: weakref.ref[Started] | None = None
        self._buffers = Buffers()

    # ---- reductions

    def all_reduce(
        self, x: Tensor, axis: str, op: str, *, wire: torch.dtype | None = None
    ) -> Tensor:
        """Reduce `x` over `axis`; `op` is 'sum', 'max' or 'min' (on bool: or, or, and).

        With the dtype `wire`, here as below, `x` is sent in it, and the sum cast back.
        """
        if self._sizes[axis] == 1:
            return x
        if wire not in (None, x.dtype):
            return self.all_reduce(x.to(wire), axis, op).to(x.dtype)
        call = Call("all_reduce", axis, x.dtype, tuple(x.shape), (op,))
        if x.dtype == torch.bool:
            buffer, op = x.to(torch.uint8).contiguous(), "max" if op == "sum" else op
        else:
            buffer = x.detach().clone(memory_format=torch.contiguous_format)
        if buffer.numel():
            self.transport.start_reduce(buffer.view(-1), op, call).wait()
        return buffer.bool() if x.dtype == torch.bool else buffer

    def all_reduce_bucket_start(
        self, xs: Sequence[Tensor], axis: str, *, wire: torch.dtype | None = None
    ) -> Started:
        """Sum each of `xs` over `axis` by one reduction per dtype; results are views of it."""
        groups: dict[torch.dtype, list[int]] = {}
        for i, x in enumerate(xs):
            groups.setdefault(x.dtype, []).append(i)
        if self._sizes[axis] == 1:
            return Started(lambda: list(xs))
        parts: list[tuple[Pending | None, Tensor, list[int]]] = []
        for indices in groups.values():
            buffer = self._cat([xs[i].detach() for i in indices], wire)
            shapes = tuple(tuple(xs[i].shape) for i in indices)
            call = Call("all_reduce_bucket", axis, buffer.dtype, (buffer.numel(),), shapes)
            pending = self.transport.start_reduce(buffer, "sum", call) if buffer.numel() else None
            parts.append((pending, buffer, indices))
        every, dtypes = [x.shape for x in xs], tuple(groups)

        def finish() -> list[Tensor]:
            out: dict[int, Tensor] = {}
            for dtype, (pending, buffer, indices) in zip(dtypes, parts, strict=True):
                if pending is not None:
                    pending.wait()
                pieces = torch.split(buffer.to(dtype), [every[i].numel() for i in indices])
                out.update((i, p.view(every[i])) for i, p in zip(indices, pieces, strict=True))
            return [out[i] for i in range(len(every))]

        return Started(finish)

    def _cat(self, xs: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """All elements of `xs` in a row."""
        n = sum(x.numel() for x in xs)
        buffer = self._buffers.empty(n, dtype or xs[0].dtype, xs[0].device)
        return torch.cat([x.reshape(-1) for x in xs], out=buffer)

    def reduce_scatter(
        self, x: Tensor, axis: str, dim: int, outer: int, sizes: Sequence[int], local: int, *,
        wire: torch.dtype | None = None,
    ) -> Tensor:  # fmt: skip
        """Sum `x` over `axis` and keep this rank's piece of `dim`."""
        if self._sizes[axis] == 1:
            return x
        if wire not in (None, x.dtype):
            return self.reduce_scatter(x.to(wire), axis, dim, outer, sizes, local).to(x.dtype)
        call = self._call("reduce_scatter", x, axis, dim, outer, sizes, sum(sizes))
        rest = around(x, dim, outer)
        if rest * sum(sizes) == 0:
            return self.cut(x, axis, dim, outer, sizes, local)
        flat = split(x.detach(), dim, outer, sizes)
        out = self.transport.start_scatter(flat, [rest * s for s in sizes], call).wait()
        return out.view(resized(x, dim, outer * local))

    def reduce_scatter_bucket_start(
        self,
        xs: Sequence[Tensor],
        axis: str,
        dims: Sequence[int],
        outers: Sequence[int],
        sizes: Sequence[int],
        locals_: Sequence[int],
        *,
        wire: torch.dtype | None = None,
    ) -> Started:
        """As `reduce_scatter` of each of `xs`, in one message; `sizes` one after the other.

        The one begun before it is finished first, so that one message is held, however late the
        results are waited for.
        """
        if self._sizes[axis] == 1:
            return Started(lambda: list(xs))
        if wire not in (None, xs[0].dtype):
            small, dtypes = [x.to(wire) for x in xs], [x.dtype for x in xs]
            begun = self.reduce_scatter_bucket_start(small, axis, dims, outers, sizes, locals_)
            return Started(lambda: [x.to(d) for x, d in zip(begun.wait(), dtypes, strict=True)])
        before = self._scattering() if self._scattering is not None else None
        if before is not None:
            before.settle()
        cuts = split_cuts(len(xs), dims, outers, sizes, locals_)
        runs: list[list[Tensor]] = [[] for _ in range(self._sizes[axis])]
        for x, (dim, outer, pieces, _) in zip(xs, cuts, strict=True):
            self._call("reduce_scatter", x, axis, dim, outer, pieces, sum(pieces))
            flat, rest = split(x.detach(), dim, outer, pieces), around(x, dim, outer)
            for run, part in zip(runs, torch.split(flat, [rest * s for s in pieces]), strict=True):
                run.append(part)
        counts = [sum(part.numel() for part in run) for run in runs]
        call = self._bucket_call("reduce_scatter_bucket", xs, axis, cuts)
        flat = self._cat([part for run in runs for part in run])
        pending = self.transport.start_scatter(flat, counts, call) if sum(counts) else None
        shapes = [resized(x, c[0], c[1] * c[3]) for x, c in zip(xs, cuts, strict=True)]

        def finish() -> list[Tensor]:
            out = flat if pending is None else pending.wait()
            parts = torch.split(out, [math.prod(shape) for shape in shapes])
            return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

        started = Started(finish)
        self._scattering = weakref.ref(started)
        return started

    # ---- gathers and slices

    def all_gather_bucket_start(
        self,
        xs: Sequence[Tensor],
        axis: str,
        dims: Sequence[int],
        outers: Sequence[int],
        sizes: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
    ) -> Started:
        """As `all_gather` of each of `xs`, in one message; `sizes` one after the other."""
        xs = [x if dtype is None else x.to(dtype) for x in xs]
        cuts = split_cuts(len(xs), dims, outers, sizes)
        if self._sizes[axis] == 1:
            return Started(lambda: list(xs))
        for x, (dim, outer, pieces) in zip(xs, cuts, strict=True):
            mine = pieces[self.coordinate[axis]]
            self._call("all_gather", x, axis, dim, outer, pieces, mine)
        rests = [around(x, dim, outer) for x, (dim, outer, _) in zip(xs, cuts, strict=True)]
        lengths = [  # by rank, then by member
            [rest * pieces[c] for rest, (_, _, pieces) in zip(rests, cuts, strict=True)]
            for c in range(self._sizes[axis])
        ]
        call = self._bucket_call("all_gather_bucket", xs, axis, cuts)
        parts = [x.detach().reshape(-1) for x in xs]
        counts = [sum(row) for row in lengths]
        pending = self.transport.start_gather(parts, counts, call) if sum(counts) else None
        empty = parts[0]
        shapes = [resized(x, dim, 0) for x, (dim, _, _) in zip(xs, cuts, strict=True)]

        def finish() -> list[Tensor]:
            whole = empty if pending is None else pending.wait()
            runs = zip(torch.split(whole, counts), lengths, strict=True)
            rows = [torch.split(run, row) for run, row in runs]
            return [
                joined([row[i] for row in rows], shape, *cut)
                for i, (shape, cut) in enumerate(zip(shapes, cuts, strict=True))
            ]

        return Started(finish)

    def all_gather(
        self,
        x: Tensor,
        axis: str,
        dim: int,
        outer: int,
        sizes: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        wire: torch.dtype | None = None,
    ) -> Tensor:
        """Join the pieces of `dim`: (outer, sizes[c]) on each rank becomes (outer, sum(sizes)).

        With a dtype, `x` is cast to it before it is sent; `wire` is for the gradient alone.
        """
        x = x if dtype is None else x.to(dtype)
        if self._sizes[axis] == 1:
            return x
        mine = sizes[self.coordinate[axis]]
        call = self._call("all_gather", x, axis, dim, outer, sizes, mine)
        rest = around(x, dim, outer)
        if rest * sum(sizes) == 0:
            return x.new_empty(resized(x, dim, outer * sum(sizes)))
        counts = [rest * s for s in sizes]
        flat = self.transport.start_gather([x.detach().reshape(-1)], counts, call).wait()
        return join(flat, resized(x, dim, 0), dim, outer, sizes)

    def cut(
        self, x: Tensor, axis: str, dim: int, outer: int, sizes: Sequence[int], local: int
    ) -> Tensor:
        """This rank's piece of `dim`, contiguous."""
        if self._sizes[axis] == 1:
            return x
        self._call("shard", x, axis, dim, outer, sizes, sum(sizes))
        start = sum(sizes[: self.coordinate[axis]])
        x = x.detach()
        if outer == 1:
            piece = x.narrow(dim, start, local)
        else:
            whole = x.reshape(*x.shape[:dim], outer, sum(sizes), *x.shape[dim + 1 :])
            piece = whole.narrow(dim + 1, start, local)
        return piece.clone(memory_format=torch.contiguous_format).view(
            resized(x, dim, outer * local)
        )

    # these differ from the others in their adjoints only
    all_gather_replicated = all_gather
    all_gather_replicated_bucket_start = all_gather_bucket_start
    shard = cut

    # begun and awaited at once
    all_reduce_bucket = _awaited(all_reduce_bucket_start)
    reduce_scatter_bucket = _awaited(reduce_scatter_bucket_start)
    all_gather_bucket = all_gather_replicated_bucket = _awaited(all_gather_bucket_start)

    def pad(self, x: Tensor, axis: str, dim: int, outer: int, sizes: Sequence[int]) -> Tensor:
        """Zeros of the whole `dim` with `x` at this rank's piece."""
        if self._sizes[axis] == 1:
            return x
        c = self.coordinate[axis]
        self._call("pad", x, axis, dim, outer, sizes, sizes[c])
        out = x.new_zeros(resized(x, dim, outer * sum(sizes)))
        if x.numel():
            before = math.prod(x.shape[:dim]) * outer
            whole = out.view(before, sum(sizes), -1)
            whole.narrow(1, sum(sizes[:c]), sizes[c]).copy_(
                x.detach().reshape(before, sizes[c], -1)
            )
        return out

    def all_to_all(
        self,
        x: Tensor,
        axis: str,
        dim: int,
        outer: int,
        sizes: Sequence[int],
        local: int,
        to_dim: int,
        to_outer: int,
        to_sizes: Sequence[int],
        to_local: int,
    ) -> Tensor:
        """Gather along (dim, outer, sizes), then keep the piece of (to_dim, to_outer, to_sizes)."""
        if self._sizes[axis] == 1:
            return x
        if dim == to_dim:  # two atoms of one dim: `to_outer` counts elements of the gathered dim
            whole = self.all_gather(x, axis, dim, outer, sizes)
            return self.cut(whole, axis, to_dim, to_outer, to_sizes, to_local)
        call = self._call(
            "all_to_all", x, axis, dim, outer, sizes, local, to_dim, to_outer, tuple(to_sizes)
        )
        shape = resized(x, to_dim, to_outer * to_local)
        shape[dim] = outer * sum(sizes)
        rest, shape[dim] = math.prod(shape) // max(1, sum(sizes)), 0
        per_to = x.numel() // max(1, sum(to_sizes))
        flat = split(x.detach(), to_dim, to_outer, to_sizes)
        give, take = [per_to * s for s in to_sizes], [rest * s for s in sizes]
        flat = self.transport.start_swap(flat, give, take, call).wait()
        return join(flat, shape, dim, outer, sizes)

    def piece(self, size: int, *axes: str) -> int:
        """Elements of this rank's piece of `size`, cut over `axes`, outermost first."""
        for axis in axes:
            size = chunk_sizes(size, self.mesh.sizes[axis])[self.coordinate[axis]]
        return size

    def pick(self, axes: Sequence[str], values: Sequence[int]) -> int:
        """This rank's of `values`, which run over the coordinates on `axes`, the last fastest."""
        index = 0
        for axis in axes:
            index = index * self.mesh.sizes[axis] + self.coordinate[axis]
        return values[index]

    def vary(self, x: Tensor, axis: str, *, wire: torch.dtype | None = None) -> Tensor:
        """`x` itself: no data moves."""
        return x

    def shift(self, index: Tensor, axis: str, sizes: Sequence[int]) -> Tensor:
        """`index` counted from the start of this rank's piece."""
        return index - sum(sizes[: self.coordinate[axis]])

    def nothing(self, xs: Sequence[Tensor], shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
        """Zeros in place of a call on empty pieces, whose operands are named all the same."""
        return xs[0].new_zeros(shape, dtype=dtype)

    # ---- random numbers

    def uniform(
        self,
        shape: Sequence[int],
        layout: str,
        site: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Numbers in [0, 1) of local `shape`, fixed by seed, step, site and global index."""
        at = self._positions(shape, layout)
        return rng.uniform_at(
            at, seed=self.seed, step=self.step, site=site, dtype=dtype, device=torch.device(device)
        )

    def keep_mask(
        self,
        shape: Sequence[int],
        layout: str,
        site: int,
        p: float,
        *,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """`uniform(...) >= p` as bool, without the floats: true with probability 1 - p."""
        at = self._positions(shape, layout)
        return rng.keep_mask_at(
            at, p, seed=self.seed, step=self.step, site=site, device=torch.device(device)
        )

    def _positions(self, shape: Sequence[int], layout: str) -> rng.Positions:
        at = self._layouts.get(layout)
        if at is None:
            at = rng.Positions(Layout.parse(layout), self.mesh, self.coordinate)
            self._layouts[layout] = at
        assert at.shape == tuple(shape), f"{layout} is {at.shape} here, asked for {tuple(shape)}"
        return at

    # ---- whole mesh

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's picklable `value`, in rank order."""
        if self.mesh.size == 1:
            return [value]
        return self.transport.exchange(value, Call("exchange", ""))

    def barrier(self) -> None:
        """Wait for all ranks of the mesh."""
        if self.mesh.size > 1:
            self.transport.exchange(None, Call("barrier", ""))

    def _call(
        self,
        name: str,
        x: Tensor,
        axis: str,
        dim: int,
        outer: int,
        sizes: Sequence[int],
        length: int,
        *rest: object,
    ) -> Call:
        """Check the operand against the sizes: every rank sees its own error before it waits."""
        shape = list(x.shape)
        if len(sizes) != self._sizes[axis] or shape[dim] != outer * length:
            raise RankError(
                f"Rank {self.rank} calls {name} on axis '{axis}' with a wrong size.",
                where=f"dim {dim} of {list(x.shape)}",
                expected=f"length {outer} * {length}; pieces {list(sizes)} for "
                f"{self._sizes[axis]} ranks",
            )
        shape[dim] = -1
        return Call(name, axis, x.dtype, tuple(shape), (dim, outer, tuple(sizes), *rest))

    def _bucket_call(
        self, name: str, xs: Sequence[Tensor], axis: str, cuts: Sequence[tuple[Any, ...]]
    ) -> Call:
        """What all ranks must say of a bucket."""
        shapes = tuple(
            (*x.shape[:dim], -1, *x.shape[dim + 1 :]) for x, (dim, *_) in zip(xs, cuts, strict=True)
        )
        said = tuple((dim, outer, tuple(sizes)) for dim, outer, sizes, *_ in cuts)
        return Call(name, axis, xs[0].dtype, (len(xs),), (shapes, said))
