"""Mesh, placements and the layout of a tensor over a mesh.

A *layout* says, for each dim of a tensor, how it is cut. A dim is a product of *atoms*, written
major to minor; an atom may be cut over mesh axes. `(3, 12{tp}, 64)` is one dim of 2304 rows seen as
3 x 12 x 64 of which the 12 are spread over `tp`: fused query-key-value weights keep whole heads on
each rank that way. An atom of n elements on an axis of k ranks is cut like `torch.chunk`: pieces
of ceil(n / k), the last ones shorter or empty. Two axes on one atom cut in the written order.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from autopar.errors import MeshError

__all__ = ["DATA_AXES", "MICRO", "Atom", "Layout", "Mesh", "chunk_sizes", "mesh", "replicated"]

MICRO = "micro"
"""The axis of microbatches, which lies in time: the last one, where a step has it."""

DATA_AXES = ("dp", "fsdp", MICRO)
"""Mesh axes that cut the batch."""


@lru_cache(maxsize=4096)
def chunk_sizes(n: int, k: int) -> tuple[int, ...]:
    """Sizes of the k pieces of n elements, as `torch.chunk` cuts, padded with empty pieces."""
    step = -(-n // k)
    return tuple(max(0, min(step, n - i * step)) for i in range(k))


@dataclass(frozen=True)
class Mesh:
    """A grid of ranks with named axes, the last axis varying fastest with the rank.

    Args:
        axes: (name, size) pairs, outermost first.
    """

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        if len(set(names)) != len(names):
            raise MeshError("A mesh axis is named twice.", where=str(self))
        for name, size in self.axes:
            if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or size < 1:
                raise MeshError(
                    f"'{name}={size}' is not a mesh axis.",
                    expected="a lowercase name and a size of at least 1, such as 'dp=2'",
                )

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Size of each axis by name."""
        return dict(self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """Axis names, outermost first."""
        return tuple(name for name, _ in self.axes)

    @property
    def cut_order(self) -> tuple[str, ...]:
        """Axis names in the order in which they cut one atom, the outermost first.

        Axes that cut the batch come before those that cut its computation further, in whatever
        order the ranks lie: a rank's rows, and of these a microbatch, are gathered over `tp` alone.
        """
        return tuple(sorted(self.names, key=lambda axis: axis not in DATA_AXES))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(size for _, size in self.axes)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Index of `rank` along each axis."""
        result: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, result[name] = divmod(rank, size)
        return {name: result[name] for name in self.names}

    def rank(self, coordinate: Mapping[str, int]) -> int:
        """Rank at `coordinate`."""
        result = 0
        for name, size in self.axes:
            result = result * size + coordinate[name]
        return result

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """Ranks that differ from `rank` in `axis` only, in axis order."""
        here = self.coordinate(rank)
        return tuple(self.rank({**here, axis: i}) for i in range(self.sizes[axis]))

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in self.axes)


def mesh(spec: str | int | Mapping[str, int] | Mesh | object) -> Mesh:
    """Make a mesh from a text such as ``"dp=2, tp=2"``, a mapping, an int or a torch DeviceMesh.

    An int n is a plain data-parallel mesh of n ranks.

    Raises:
        MeshError: the text does not parse, an axis repeats, or a DeviceMesh has no axis names.
    """
    if isinstance(spec, Mesh):
        return spec
    if isinstance(spec, int):
        return Mesh((("dp", spec),))
    if isinstance(spec, Mapping):
        return Mesh(tuple((str(k), int(v)) for k, v in spec.items()))
    if isinstance(spec, str):
        axes = []
        for part in filter(None, (p.strip() for p in spec.split(","))):
            match = re.fullmatch(r"([a-z][a-z0-9_]*)\s*=\s*(\d+)", part)
            if match is None:
                raise MeshError(
                    f"The mesh text {spec!r} does not parse at {part!r}.",
                    expected="comma-separated axis=size pairs, such as 'dp=2, tp=4'",
                )
            axes.append((match[1], int(match[2])))
        if not axes:
            raise MeshError(
                f"The mesh text {spec!r} names no axis.",
                expected="comma-separated axis=size pairs, such as 'dp=2, tp=4'",
            )
        return Mesh(tuple(axes))
    names = getattr(spec, "mesh_dim_names", None)
    shape = getattr(getattr(spec, "mesh", None), "shape", None)
    if names is None or shape is None:
        raise MeshError(
            f"A mesh cannot be made from {type(spec).__name__}.",
            expected="a text such as 'dp=2, tp=2', a dict, an int, or a DeviceMesh with named dims",
        )
    return Mesh(tuple(zip(names, map(int, shape), strict=True)))


@dataclass(frozen=True, slots=True)
class Atom:
    """A factor of a dim: its global size and the mesh axes it is cut over, outermost first."""

    size: int
    axes: tuple[str, ...] = ()

    def local_sizes(self, mesh: Mesh, coordinate: Mapping[str, int]) -> int:
        """Number of elements of this atom at `coordinate`."""
        n = self.size
        for axis in self.axes:
            n = chunk_sizes(n, mesh.sizes[axis])[coordinate[axis]]
        return n

    def __str__(self) -> str:
        return f"{self.size}{{{','.join(self.axes)}}}" if self.axes else str(self.size)


@dataclass(frozen=True)
class Layout:
    """Placement of one tensor on every axis of a mesh.

    Args:
        dims: atoms of each dim, major to minor; an empty tuple is a dim of size 1.
        partial: (axis, reduction) pairs: the true value is that reduction over the axis.
        varying: axes on which the value is a varying copy (its gradient is partial).
    """

    dims: tuple[tuple[Atom, ...], ...]
    partial: tuple[tuple[str, str], ...] = ()
    varying: tuple[str, ...] = field(default=())

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return tuple(math.prod(a.size for a in dim) for dim in self.dims)

    def local_shape(self, mesh: Mesh, coordinate: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of the piece at `coordinate`."""
        return tuple(math.prod(a.local_sizes(mesh, coordinate) for a in dim) for dim in self.dims)

    @cached_property
    def sharded(self) -> dict[str, tuple[int, int]]:
        """(dim, atom) that each sharded axis cuts."""
        return {
            axis: (d, i)
            for d, dim in enumerate(self.dims)
            for i, atom in enumerate(dim)
            for axis in atom.axes
        }

    def kind(self, axis: str) -> str:
        """'S', 'P', 'V' or 'R': the placement on `axis`."""
        if axis in self.sharded:
            return "S"
        if any(a == axis for a, _ in self.partial):
            return "P"
        return "V" if axis in self.varying else "R"

    def reduction(self, axis: str) -> str:
        """The reduction that makes a partial value whole on `axis`."""
        return dict(self.partial)[axis]

    def key(self, axis: str, mesh: Mesh) -> tuple[object, ...]:
        """Equal for two layouts of one shape only where `axis` cuts both into the same pieces."""
        d, i = self.sharded[axis]
        atom = self.dims[d][i]
        outer = math.prod(a.size for a in self.dims[d][:i])
        before = atom.axes[: atom.axes.index(axis)]
        cut = math.prod(mesh.sizes[a] for a in (*before, axis))
        even = atom.size % cut == 0
        return (d, outer, before, "even" if even else atom.size)

    def without(self, axis: str) -> Layout:
        """This layout with `axis` replicated."""
        dims = tuple(
            tuple(Atom(a.size, tuple(x for x in a.axes if x != axis)) for a in dim)
            for dim in self.dims
        )
        return Layout(
            dims,
            tuple(p for p in self.partial if p[0] != axis),
            tuple(a for a in self.varying if a != axis),
        )

    def normal(self, mesh: Mesh) -> Layout:
        """The same placement with the fewest atoms, so that equal placements compare equal."""
        dims = []
        for dim in self.dims:
            out: list[Atom] = []
            for atom in dim:
                axes = tuple(a for a in atom.axes if mesh.sizes[a] > 1)
                if atom.size == 1 and not axes:
                    continue
                if out and not axes:
                    last = out[-1]
                    if last.size % math.prod(mesh.sizes[a] for a in last.axes) == 0:
                        out[-1] = Atom(last.size * atom.size, last.axes)
                        continue
                out.append(Atom(atom.size, axes))
            dims.append(tuple(out))
        keep = {a for a, n in mesh.axes if n > 1}
        order = {a: i for i, a in enumerate(mesh.names)}
        return Layout(
            tuple(dims),
            tuple(sorted((p for p in self.partial if p[0] in keep), key=lambda p: order[p[0]])),
            tuple(sorted((a for a in self.varying if a in keep), key=lambda a: order[a])),
        )

    def __str__(self) -> str:
        def dim_text(dim: tuple[Atom, ...]) -> str:
            if not dim:
                return "1"
            text = "*".join(map(str, dim))
            return text

        text = f"[{', '.join(map(dim_text, self.dims))}]"
        text += "".join(f" +{a}" if r == "sum" else f" {r}:{a}" for a, r in self.partial)
        return text + "".join(f" ~{a}" for a in self.varying)

    @staticmethod
    def parse(text: str) -> Layout:
        """Inverse of `str`.

        Raises:
            ValueError: the text is not a layout.
        """
        match = re.fullmatch(r"\[(.*?)\]((?: (?:\+|~|\w+:)\w+)*)", text)
        if match is None:
            raise ValueError(f"not a layout: {text!r}")
        dims = tuple(_parse_dim(d) for d in re.split(r",\s(?![^{]*\})", match[1]) if d)
        partial, varying = [], []
        for word in match[2].split():
            if word[0] == "~":
                varying.append(word[1:])
            elif word[0] == "+":
                partial.append((word[1:], "sum"))
            else:
                reduction, axis = word.split(":")
                partial.append((axis, reduction))
        return Layout(dims, tuple(partial), tuple(varying))


def _parse_dim(text: str) -> tuple[Atom, ...]:
    if text == "1":
        return ()
    atoms = []
    for part in text.split("*"):
        match = re.fullmatch(r"(\d+)(?:\{([\w,]+)\})?", part)
        if match is None:
            raise ValueError(f"not a dim: {text!r}")
        atoms.append(Atom(int(match[1]), tuple(match[2].split(",")) if match[2] else ()))
    return tuple(atoms)


def replicated(shape: Sequence[int] | Iterable[int]) -> Layout:
    """The layout of a tensor of `shape` that every rank holds whole."""
    return Layout(tuple((Atom(int(n)),) if n != 1 else () for n in shape))
