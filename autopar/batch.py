"""How a call's tensors become the rows of this rank, in both batch modes."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autopar.arguments import Arguments
from autopar.capture import empty_like
from autopar.compat import FakeTensorMode
from autopar.errors import BatchError, InputError, PlanError
from autopar.layout import DATA_AXES, Layout, Mesh, chunk_sizes
from autopar.runtime import Communicator
from autopar.runtime.pieces import piece

__all__ = ["Batch", "Rows"]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one call.

    Args:
        mine: rows that this rank passed.
        counts: rows that each data-parallel rank passed, the last data axis varying fastest.
        total: rows of the whole batch.
        in_place: whether every rank already holds the rows that its program works on.
    """

    mine: int
    counts: tuple[int, ...]
    total: int
    in_place: bool = True


@dataclass(frozen=True, slots=True)
class Batch:
    """The batch mode of a module on this rank.

    Args:
        mode: 'global', every rank passes the whole batch; 'local', each its own rows.
        dims: input name -> batch dim, or None; inputs not named have it first.
    """

    mode: str
    mesh: Mesh
    comm: Communicator
    dims: Mapping[str, int | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.mode not in ("global", "local"):
            raise InputError(f"batch={self.mode!r}", expected="'global' or 'local'")

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes along which ranks pass rows of their own."""
        local = self.mode == "local"
        return tuple(a for a, n in self.mesh.axes if a in DATA_AXES and n > 1 and local)

    @property
    def ranks(self) -> int:
        """Ranks that pass rows of their own."""
        return math.prod(self.mesh.sizes[a] for a in self.axes)

    def place(self, rank: int) -> int:
        """Which of the ranks that pass rows of their own `rank` is, or is like."""
        at, coordinate = 0, self.mesh.coordinate(rank)
        for axis in self.axes:
            at = at * self.mesh.sizes[axis] + coordinate[axis]
        return at

    def cut(self, total: int) -> tuple[int, ...]:
        """How programs share the rows out: cut over one axis after the other."""
        counts: tuple[int, ...] = (total,)
        for axis in self.axes:
            counts = tuple(c for n in counts for c in chunk_sizes(n, self.mesh.sizes[axis]))
        return counts

    def rows(self, arguments: Arguments, manner: str) -> Rows:
        """Count the rows; in local mode the ranks tell each other theirs, at every call.

        Args:
            manner: what else the ranks must have in common in a call, such as "evaluation".
        """
        sizes = [t.shape[0] for t in arguments.tensors if t.dim()]
        mine = max(set(sizes), key=lambda n: (sizes.count(n), -sizes.index(n))) if sizes else 0
        if self.ranks == 1:
            return Rows(mine, (mine,), mine)
        everyone = self.comm.exchange((mine, f"{self._other_sizes(arguments, mine)} ({manner})"))
        counts: dict[int, int] = {}
        for rank, (n, sizes) in enumerate(everyone):
            if sizes != everyone[0][1]:
                raise BatchError(
                    "The ranks call the model differently.",
                    where=f"rank 0 with {everyone[0][1]}; rank {rank} with {sizes}",
                    expected="the same on all ranks but for the number of rows",
                    hint="pad all rows of a step to one length; train, evaluate and use no_sync "
                    "on all ranks alike",
                )
            at = self.place(rank)
            if counts.setdefault(at, n) != n:
                where = ", ".join(f"{a}={self.mesh.coordinate(rank)[a]}" for a in self.axes)
                raise BatchError(
                    f"Ranks at {where} were given {counts[at]} and {n} rows.",
                    expected="the same rows on ranks that differ only in other axes",
                )
        ordered = tuple(counts[i] for i in range(self.ranks))
        return Rows(mine, ordered, sum(ordered), ordered == self.cut(sum(ordered)))

    def _other_sizes(self, arguments: Arguments, mine: int) -> str:
        """The shapes of a call with the number of rows left open."""
        found = []
        for name, t in zip(arguments.names, arguments.tensors, strict=True):
            d = self.dim(name, t, Rows(mine, (), mine))
            sizes = ["rows" if i == d else str(n) for i, n in enumerate(t.shape)]
            found.append(f"{name} {str(t.dtype)[6:]}[{', '.join(sizes)}]")
        return ", ".join(found)

    def dim(self, name: str, tensor: Tensor, rows: Rows) -> int | None:
        """The batch dim of an input, None where every rank needs it whole."""
        if name in self.dims:
            return self.dims[name]
        return 0 if tensor.dim() and tensor.shape[0] == rows.mine else None

    def whole(self, arguments: Arguments, rows: Rows, mode: FakeTensorMode) -> Arguments:
        """The arguments as fake tensors of the whole batch."""
        pairs = zip(arguments.tensors, self.shapes(arguments, rows), strict=True)
        tensors = tuple(empty_like(t, mode, shape) for t, shape in pairs)
        return Arguments(arguments.names, tensors, arguments.leaves, arguments.spec)

    def shapes(self, arguments: Arguments, rows: Rows) -> list[tuple[int, ...]]:
        """The shapes of the arguments of the whole batch: the same on all ranks."""
        if self.ranks == 1:
            return [tuple(t.shape) for t in arguments.tensors]
        found = []
        for name, t in zip(arguments.names, arguments.tensors, strict=True):
            shape = list(t.shape)
            d = self.dim(name, t, rows)
            if d is not None:
                shape[d] = rows.total
            found.append(tuple(shape))
        return found

    def pieces(self, arguments: Arguments, rows: Rows, layouts: list[Layout]) -> list[Tensor]:
        """What the program of this rank takes: its rows of every input."""
        found = []
        for name, t, layout in zip(arguments.names, arguments.tensors, layouts, strict=True):
            d = self.dim(name, t, rows)
            if self.ranks > 1 and d is not None:
                cut = (
                    layout.sharded == dict.fromkeys(self.axes, (d, 0)) and len(layout.dims[d]) == 1
                )
                if rows.in_place and cut and layout.dims[d][0].axes == self.axes:
                    found.append(t)  # the plain rows: nothing moves
                    continue
                t = self.gather(t, d, rows.counts)
            found.append(piece(t, layout, self.mesh, self.comm.coordinate))
        return found

    def gather(self, t: Tensor, dim: int, counts: tuple[int, ...]) -> Tensor:
        """The rows of all ranks."""
        start, length = self.place(self.comm.rank), 1
        for axis in reversed(self.axes):
            k = self.mesh.sizes[axis]
            start -= start // length % k * length
            ends = range(start, start + length * k, length)
            t = self.comm.all_gather_replicated(
                t, axis, dim, 1, [sum(counts[i : i + length]) for i in ends]
            )
            length *= k
        return t

    def check(self, arguments: Arguments, plan: str) -> None:
        """Compare the values, and the plan of the program, between ranks.

        Raises:
            BatchError: ranks that need the same rows have different ones.
            PlanError: ranks would run programs of different plans.
        """
        if self.mesh.size == 1:
            return
        mine = {n: _fingerprint(t) for n, t in zip(arguments.names, arguments.tensors, strict=True)}
        answers = self.comm.exchange((mine, hashlib.sha1(plan.encode()).hexdigest()))
        for rank, (_, digest) in enumerate(answers):
            if digest != answers[0][1]:
                raise PlanError(
                    f"Ranks 0 and {rank} have compiled the call by different plans.",
                    expected="the same model, options and plan on all ranks",
                    hint="give all ranks one plan: parallelize(model, mesh, plan=...)",
                )
        everyone = [theirs for theirs, _ in answers]
        first: dict[int, int] = {}
        for rank, theirs in enumerate(everyone):  # every rank finds the same pair and raises
            at = self.place(rank)
            other = first.setdefault(at, rank)
            ours = everyone[other]
            bad = [n for n in {**ours, **theirs} if ours.get(n) != theirs.get(n)]
            if bad:
                raise BatchError(
                    f"Ranks {other} and {rank} were given different batches (batch={self.mode!r}).",
                    where="argument " + ", ".join(bad),
                    expected="the same values on both ranks",
                    hint="pass batch='local' if every data-parallel rank loads its own rows"
                    if self.mode == "global"
                    else "give ranks that differ only in other axes than dp and fsdp the same rows",
                )
        if self.ranks > 1 and all(theirs == mine for theirs in everyone):
            warnings.warn(
                "batch='local', but all ranks were given the same rows; is the sampler "
                "distributed? Pass batch='global' if that is meant.",
                stacklevel=4,
            )


def _fingerprint(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous()
    digest = hashlib.blake2b(digest_size=12)
    digest.update(str((tuple(data.shape), data.dtype)).encode())
    if data.numel():
        digest.update(data.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
