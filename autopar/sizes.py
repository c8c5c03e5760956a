"""Integers that differ between ranks: one program for all, whose sizes are bound when it is loaded.

Ranks differ where a cut leaves pieces of different sizes. A *place* stands for all ranks with the
same pieces; the first place has the largest ones. Every local size is a number times pieces of
uneven cuts. A size that an operation makes of others (in its decomposition or its gradient) is
found by tracing it twice, once with the sizes of the first place and once with a large prime in
place of each piece: the prime factors of what comes out tell which pieces it is made of.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.errors import AutoparError
from autopar.layout import Atom, Layout, Mesh

__all__ = ["Size", "Sizes", "at_place", "at_probe", "has_sizes"]

_FIRST_PRIME = 10007


@dataclass(frozen=True, slots=True)
class Size:
    """An integer that differs between places.

    Args:
        name: its variable in generated code, where `text` binds it.
        values: at each place.
        probe: in the trace with primes; None where only a table gives the values.
    """

    name: str
    text: str
    values: tuple[int, ...]
    probe: int | None

    def __repr__(self) -> str:
        return self.name


@dataclass(slots=True)
class _Piece:
    """Pieces of an uneven cut, without their common factor."""

    atom: Atom
    factor: int
    values: tuple[int, ...]
    prime: int


@dataclass(slots=True)
class Sizes:
    """The sizes of one program.

    Args:
        places: a coordinate of each place, the one with the largest pieces first.
        atoms: the uneven cuts.
    """

    mesh: Mesh
    places: Sequence[Mapping[str, int]]
    atoms: Sequence[Atom]
    found: dict[tuple[int, ...], Size] = field(default_factory=dict)
    _pieces: list[_Piece] = field(default_factory=list)

    def __post_init__(self) -> None:
        known = set()
        for atom in self.atoms:
            values = tuple(atom.local_sizes(self.mesh, p) for p in self.places)
            factor = math.gcd(*values)
            primitive = tuple(v // factor for v in values)
            if len(set(values)) > 1 and primitive not in known:
                known.add(primitive)
                prime = _next_prime(self._pieces[-1].prime if self._pieces else _FIRST_PRIME)
                self._pieces.append(_Piece(atom, factor, primitive, prime))

    def of(self, values: Sequence[int]) -> int | Size:
        """The size with these values at the places."""
        wanted = tuple(values)
        if len(set(wanted)) == 1:
            return wanted[0]
        if wanted not in self.found:
            self.found[wanted] = self._made(wanted)
        return self.found[wanted]

    def between(self, first: int, probe: int) -> int | Size:
        """The size that is `first` at the first place and `probe` in the trace with primes.

        Raises:
            AutoparError: it is no product of pieces.
        """
        if first == probe:
            return first
        values, rest = [1] * len(self.places), probe
        for piece in self._pieces:
            while rest and rest % piece.prime == 0:
                rest //= piece.prime
                values = [v * p for v, p in zip(values, piece.values, strict=True)]
        values = [v * rest for v in values]
        if values[0] != first:
            raise AutoparError(
                f"A size is {first} on the first rank and {probe} for other pieces; it is no "
                "product of the sizes of pieces.",
                expected="an operation whose decomposition depends on the shapes in no other way",
                hint="make the uneven sizes divide the mesh, or report this",
            )
        return self.of(values)

    def shape(self, layout: Layout) -> tuple[int | Size, ...]:
        """Local shape of a tensor at all places."""
        return self.each([layout.local_shape(self.mesh, p) for p in self.places])

    def each(self, rows: Sequence[Sequence[int]]) -> tuple[int | Size, ...]:
        """Sizes from the values of all at each place."""
        return tuple(self.of(column) for column in zip(*rows, strict=True))

    def probed(self, value: Any, pieces: bool = False) -> Any:
        """Nested arguments in the trace with primes.

        Args:
            pieces: lists are the pieces on all ranks of an axis, of which only the sum counts.
        """
        is_list = isinstance(value, (list, tuple))
        if pieces and is_list and value and all(isinstance(v, (int, Size)) for v in value):
            if not has_sizes(value):
                return value
            rows = [at_place(value, k) for k in range(len(self.places))]
            total = at_probe(self.of([sum(row) for row in rows]))
            return [total, *([0] * (len(value) - 1))]
        if is_list:
            return type(value)(self.probed(v, pieces) for v in value)
        if isinstance(value, dict):
            return {k: self.probed(v, pieces) for k, v in value.items()}
        return at_probe(value)

    def _made(self, values: tuple[int, ...]) -> Size:
        name = f"n{len(self.found)}"
        for count in (1, 2, 3):
            for pieces in itertools.combinations_with_replacement(self._pieces, count):
                columns = zip(*(p.values for p in pieces), strict=True)
                factor = _ratio(values, [math.prod(column) for column in columns])
                if factor:
                    probe = factor * math.prod(p.prime for p in pieces)
                    return Size(name, _product(factor, pieces), values, probe)
        return Size(name, self._table(values), values, None)

    def _table(self, values: tuple[int, ...]) -> str:
        """Values by the coordinates on the axes that decide them."""
        axes = [a for a in self.mesh.names if any(a in atom.axes for atom in self.atoms)]
        keys = {
            tuple(a.local_sizes(self.mesh, p) for a in self.atoms): v
            for p, v in zip(self.places, values, strict=True)
        }
        rows = []
        for index in itertools.product(*(range(self.mesh.sizes[a]) for a in axes)):
            place = {**dict.fromkeys(self.mesh.names, 0), **dict(zip(axes, index, strict=True))}
            rows.append(keys[tuple(a.local_sizes(self.mesh, place) for a in self.atoms)])
        return f"comm.pick({axes!r}, {rows!r})".replace("'", '"')


def at_place(value: Any, place: int) -> Any:
    """Nested arguments with the values of one place."""
    if isinstance(value, Size):
        return value.values[place]
    if isinstance(value, (list, tuple)):
        return type(value)(at_place(v, place) for v in value)
    if isinstance(value, dict):
        return {k: at_place(v, place) for k, v in value.items()}
    return value


def at_probe(value: Any) -> Any:
    """A value in the trace with primes.

    Raises:
        AutoparError: only a table gives it.
    """
    if not isinstance(value, Size):
        return value
    if value.probe is None:
        raise AutoparError(
            f"A size is one of {sorted(set(value.values))} by rank, and no product of pieces.",
            hint="make the uneven sizes divide the mesh, or report this",
        )
    return value.probe


def has_sizes(value: Any) -> bool:
    """Whether nested arguments differ between places."""
    if isinstance(value, (list, tuple)):
        return any(map(has_sizes, value))
    if isinstance(value, dict):
        return any(map(has_sizes, value.values()))
    return isinstance(value, Size)


def _ratio(values: Sequence[int], others: Sequence[int]) -> int:
    """The integer by which `others` become `values`, or 0."""
    k, rest = divmod(values[0], others[0]) if others[0] else (0, 1)
    same = all(v == k * o for v, o in zip(values, others, strict=True))
    return k if same and not rest else 0


def _product(factor: int, pieces: Sequence[_Piece]) -> str:
    words = []
    below = 1
    for piece in pieces:
        axes = "".join(f', "{a}"' for a in piece.atom.axes)
        words.append(f"comm.piece({piece.atom.size}{axes})")
        below *= piece.factor
    common = math.gcd(factor, below)
    factor, below = factor // common, below // common
    text = " * ".join([*([str(factor)] if factor > 1 else []), *words])
    return f"{text} // {below}" if below > 1 else text


def _next_prime(after: int) -> int:
    n = after + 1
    while any(n % k == 0 for k in range(2, math.isqrt(n) + 1)):
        n += 1
    return n
