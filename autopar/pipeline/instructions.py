"""A pipeline schedule: for each rank a list of instructions, and its text form.

The compute instructions are named as torch's own schedules name them: F is the forward of a stage
for a microbatch, B its whole backward, I the part of it that gives the gradient of the stage's
input, W the part that gives those of its weights. (Qi et al. 2024, "Zero Bubble Pipeline
Parallelism", call I and W B and W.)
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from autopar.errors import ScheduleError

__all__ = ["COMPUTE", "Instruction", "Schedule", "chain", "grid", "parse"]

COMPUTE = ("F", "B", "I", "W")
BACKWARD = ("B", "I")  # what gives the gradient that earlier stages wait for
_MOVES = {"SEND_F": ">", "RECV_F": "<", "SEND_B": ">", "RECV_B": "<"}
_KINDS = "F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B|REDUCE"
_FORM = re.compile(rf"(\d{{1,9}})({_KINDS})(?:(\d{{1,9}})(?:[<>](\d{{1,9}}))?)?")
_BESIDE = re.compile(r"\(([^()]*)\)OVERLAP_F_B")  # torch's word for two that run at once


@dataclass(frozen=True, slots=True)
class Instruction:
    """What a rank does next.

    Args:
        kind: "F", "B", "I" or "W"; "SEND_F", "RECV_F" of values and "SEND_B", "RECV_B" of their
            gradients; "REDUCE" of the gradients of a stage's parameters.
        stage: the stage that it belongs to.
        microbatch: its number, -1 of REDUCE.
        peer: of a send the stage that receives, of a receive the one that sends; -1 of others.
    """

    kind: str
    stage: int
    microbatch: int = -1
    peer: int = -1

    def __str__(self) -> str:
        number = "" if self.microbatch < 0 else str(self.microbatch)
        peer = "" if self.peer < 0 else f"{_MOVES.get(self.kind, '?')}{self.peer}"
        return f"{self.stage}{self.kind}{number}{peer}"

    @property
    def gives(self) -> str:
        """Of a compute instruction "F", "B" or "W": values, gradients for others, or neither."""
        return "B" if self.kind in BACKWARD else self.kind

    @property
    def moves(self) -> bool:
        """Whether it sends or receives."""
        return self.kind in _MOVES

    @property
    def sends(self) -> bool:
        """Whether it sends."""
        return self.kind.startswith("SEND")

    @property
    def message(self) -> tuple[str, int, int, int]:
        """(direction, from stage, to stage, microbatch) of what it sends or receives."""
        ends = (self.stage, self.peer) if self.sends else (self.peer, self.stage)
        return (self.kind[-1], *ends, self.microbatch)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Instructions of all ranks of a pipeline.

    Args:
        name: of the order, for reports.
        owners: the rank of each stage.
        microbatches: their number.
        ranks: the instructions of each rank, in order.
        edges: (from, to) stages where a value goes from one to a later one; skip connections and
            what every stage uses are edges as well.
        returning: the edges along which gradients come back; a mask has none.
        training: whether there is a backward pass.

    Raises:
        ScheduleError: an edge does not lead from a stage to a later one, stands twice, or is
            returned along without being one.
    """

    name: str
    owners: tuple[int, ...]
    microbatches: int
    ranks: tuple[tuple[Instruction, ...], ...]
    edges: tuple[tuple[int, int], ...]
    returning: tuple[tuple[int, int], ...]
    training: bool = True

    def __post_init__(self) -> None:
        for what, edges in (("edges", self.edges), ("returning", self.returning)):
            for i, (a, b) in enumerate(edges):
                if not 0 <= a < b < len(self.owners) or (a, b) in edges[:i]:
                    raise ScheduleError(
                        f"No values can go from stage {a} to stage {b}, or they do already.",
                        where=f"{what} of schedule {self.name!r}",
                        expected=f"each pair once, of stages 0 to {len(self.owners) - 1}, the "
                        "first less than the second",
                    )
        for a, b in self.returning:
            if (a, b) not in self.edges:
                raise ScheduleError(
                    f"Gradients cannot return from stage {b} to stage {a}: no values go there.",
                    where=f"returning of schedule {self.name!r}",
                    expected="some of the edges",
                )

    def __str__(self) -> str:
        """One line for each rank; `parse` reads it back, given the edges."""
        return "\n".join(", ".join(map(str, rank)) or "," for rank in self.ranks)

    @property
    def computed(self) -> Schedule:
        """The schedule without sends, receives and reductions."""
        kept = (tuple(i for i in rank if i.kind in COMPUTE) for rank in self.ranks)
        return dataclasses.replace(self, ranks=tuple(kept))

    @property
    def inference(self) -> Schedule:
        """Its forwards alone, without sends."""
        ranks = tuple(tuple(i for i in rank if i.kind == "F") for rank in self.ranks)
        return dataclasses.replace(self, ranks=ranks, training=False)

    def takers(self, instruction: Instruction) -> list[int]:
        """Stages that take what an instruction computes: later ones values, earlier gradients."""
        if instruction.gives == "F":
            return [b for a, b in self.edges if a == instruction.stage]
        back = self.returning if instruction.gives == "B" else ()
        return [a for a, b in back if b == instruction.stage]

    def needs(self, instruction: Instruction) -> Iterator[tuple[str, int]]:
        """("F" or "B", stage) of what an instruction waits for, of its own microbatch.

        "B" stands for the gradients that a stage gives to earlier ones, by B or I.
        """
        stage = instruction.stage
        if instruction.kind == "F":
            yield from (("F", a) for a, b in self.edges if b == stage)
        elif instruction.gives == "B":
            yield "F", stage
            yield from (("B", b) for a, b in self.returning if a == stage)
        elif instruction.kind == "W":
            yield "B", stage


def chain(stages: int) -> tuple[tuple[int, int], ...]:
    """Edges of stages that each pass values to the next alone."""
    return tuple((s, s + 1) for s in range(stages - 1))


def parse(
    source: str | Path,
    *,
    edges: Iterable[tuple[int, int]] | None = None,
    returning: Iterable[tuple[int, int]] | None = None,
    name: str = "",
) -> Schedule:
    """A schedule from text or a CSV file: a line for each rank, a cell for each instruction.

    Empty cells are idle time and mean nothing; `#` begins a comment. Tables of what the schedules
    of `torch.distributed.pipelining` with several stages a rank compute ("0F0,0F1,,0B0") are of
    this form. What is computed is enough: `communicate` writes sends, receives and reductions.

    Args:
        source: the text, or the path of a file with it.
        edges: see `Schedule`; by default each stage passes values to the next alone.
        returning: see `Schedule`; by default all edges.
        name: for reports; by default the name of the file, or "own".

    Raises:
        ScheduleError: a cell is no instruction, a stage stands on two ranks, a stage or microbatch
            is missing, or an edge is none.
        OSError: the file cannot be read.
    """
    text = source.read_text(encoding="utf-8-sig") if isinstance(source, Path) else source
    name = name or (source.stem if isinstance(source, Path) else "own")
    lines = [line.split("#")[0] for line in text.splitlines()]
    ranks = [_read(line, r) for r, line in enumerate(line for line in lines if line.strip())]
    owners: dict[int, int] = {}
    for r, rank in enumerate(ranks):
        for i in rank:
            if owners.setdefault(i.stage, r) != r:
                raise ScheduleError(
                    f"Stage {i.stage} stands on rank {owners[i.stage]} and on rank {r}.",
                    where=f"{i} of rank {r}",
                    expected="all instructions of a stage on one rank",
                )
    numbers = {i.microbatch for rank in ranks for i in rank if i.kind in COMPUTE}
    for what, found in (("stage", sorted(owners)), ("microbatch", sorted(numbers))):
        absent = next((i for i, n in enumerate(found) if i != n), None)
        if absent is not None or not found:
            raise ScheduleError(
                f"There is no {what} {absent or 0}.",
                where=f"schedule {name!r}",
                expected=f"instructions of each {what}, from 0 on without gaps",
            )
    kinds = {i.kind for rank in ranks for i in rank}
    along = tuple((a, b) for a, b in edges) if edges is not None else chain(len(owners))
    return Schedule(
        name,
        tuple(owners[s] for s in range(len(owners))),
        len(numbers),
        tuple(map(tuple, ranks)),
        along,
        tuple((a, b) for a, b in returning) if returning is not None else along,
        not kinds.isdisjoint(("B", "I", "W")),
    )


def _read(line: str, rank: int) -> list[Instruction]:
    found = []
    line = _BESIDE.sub(lambda m: m[1].replace(";", ","), line).replace("REDUCE_GRAD", "REDUCE")
    for column, cell in enumerate(c.strip() for c in line.split(",")):
        match = _FORM.fullmatch(cell)
        if not cell:
            continue
        stage, kind, microbatch, peer = match.groups() if match else ("", "", None, None)
        move = kind in _MOVES
        if not match or (microbatch is None) != (kind == "REDUCE") or (peer is None) == move:
            raise ScheduleError(
                f"{cell!r} is no instruction.",
                where=f"rank {rank}, cell {column + 1}",
                expected="stage, kind and microbatch, as 0F3, 0B3, 0I3 or 0W3; 0SEND_F3>1, "
                "1RECV_F3<0, 1SEND_B3>0, 0RECV_B3<1; or 0REDUCE",
            )
        numbers = (-1 if n is None else int(n) for n in (microbatch, peer))
        found.append(Instruction(kind, int(stage), *numbers))
    return found


def grid(ranks: Sequence[Sequence[Instruction]], marked: Iterable[tuple[int, int]] = ()) -> str:
    """The instructions of all ranks, a line each; those at (rank, position) stand in > <.

    Of a long list the neighbourhood of its first mark is shown.
    """
    marks = sorted(set(marked), key=lambda m: m[1])
    lines = []
    for r, rank in enumerate(ranks):
        own = [p for q, p in marks if q == r] or [p for _, p in marks] or [0]
        first = min(max(0, own[0] - 4), max(0, len(rank) - 4))
        last = first + 12
        shown = range(first, min(last, len(rank) + ((r, len(rank)) in marks)))
        text = " ".join(_cell(rank, p, (r, p) in marks) for p in shown)
        more = " ..." if len(rank) > last else ""
        lines.append(f"rank {r}: {'... ' if first else ''}{text}{more}".rstrip())
    return "\n".join(lines)


def _cell(rank: Sequence[Instruction], position: int, marked: bool) -> str:
    text = str(rank[position]) if position < len(rank) else "end"
    return f">{text}<" if marked else f" {text} "
