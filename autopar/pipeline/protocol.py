"""The lists of all ranks together, proved complete, in order and free of deadlock."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from autopar.errors import ScheduleError
from autopar.pipeline.instructions import COMPUTE, Instruction, Schedule, grid

__all__ = ["Problem", "check_schedule", "problems"]


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with a schedule, and the (rank, position) of each culprit."""

    text: str
    marks: tuple[tuple[int, int], ...]


def check_schedule(schedule: Schedule) -> None:
    """Check a whole schedule, with its sends, receives and reductions.

    Raises:
        ScheduleError: what `problems` finds first, with a grid that marks it.
    """
    found = next(problems(schedule), None)
    if found is not None:
        raise ScheduleError(
            f"Schedule {schedule.name!r} is wrong: {found.text}.",
            where="\n" + grid(schedule.ranks, found.marks),
            expected="F, then B or I and W, once for each stage and microbatch; each value sent "
            "once and received before its use; reductions last",
        )


def problems(schedule: Schedule) -> Iterator[Problem]:
    """Everything that would make a schedule stall, or compute something else than it should.

    Checked are: each stage computes each microbatch once, on its rank; what an instruction takes is
    computed before it on the same rank, or received; what goes to another rank is sent once, after
    it was computed, and received once; the messages from one rank to another arrive in the order
    in which they are expected; reductions come after the last microbatch; and the ranks come to an
    end, whether sends wait for their receives or not.
    """
    run = _Check(schedule)
    faults = list(run.complete())  # what comes after takes the instructions for known ones
    faults = faults or [*run.matched(), *run.ordered()]
    yield from faults or run.stalls()


class _Check:
    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.places: dict[Instruction, list[tuple[int, int]]] = defaultdict(list)
        for r, rank in enumerate(schedule.ranks):
            for p, i in enumerate(rank):
                self.places[i].append((r, p))

    def wanted(self) -> Iterator[tuple[Instruction, ...]]:
        """What must be there once: an instruction, or one or more in its place."""
        schedule = self.schedule
        for stage in range(len(schedule.owners)):
            for k in range(schedule.microbatches):
                yield (Instruction("F", stage, k),)
                if schedule.training:
                    yield tuple(Instruction(kind, stage, k) for kind in ("B", "I", "W"))
            if schedule.training:
                yield (Instruction("REDUCE", stage),)
        back = [(b, a) for a, b in schedule.returning] if schedule.training else []
        for kind, edges in (("F", schedule.edges), ("B", back)):
            for a, b in edges:
                if schedule.owners[a] != schedule.owners[b]:
                    for k in range(schedule.microbatches):
                        yield (Instruction(f"SEND_{kind}", a, k, b),)
                        yield (Instruction(f"RECV_{kind}", b, k, a),)

    def complete(self) -> Iterator[Problem]:
        """Every instruction once, on the rank of its stage, and no other."""
        known: set[Instruction] = set()
        for options in self.wanted():
            known.update(options)
            counts = [len(self.places[i]) for i in options]
            marks = tuple(m for i in options for m in self.places[i])
            if counts not in ([1], [1, 0, 0], [0, 1, 1]):
                first, owner = options[0], self.schedule.owners[options[0].stage]
                what = str(first) if len(options) == 1 else f"the backward of {_of(first)}"
                marks = marks or ((owner, len(self.schedule.ranks[owner])),)
                times = "missing" if not any(counts) else "not there once"
                yield Problem(f"{what} is {times}", marks)
        for i, places in self.places.items():
            if places and i not in known:
                yield Problem(f"{i} belongs to no stage, edge or microbatch", tuple(places))
            for rank, position in places:
                if i in known and self.schedule.owners[i.stage] != rank:
                    text = f"{i} stands on rank {rank}, its stage on another"
                    yield Problem(text, ((rank, position),))

    def matched(self) -> Iterator[Problem]:
        """Between two ranks messages are received in the order in which they are sent."""
        sent: dict[tuple[int, int], list[Instruction]] = defaultdict(list)
        received: dict[tuple[int, int], list[Instruction]] = defaultdict(list)
        owners = self.schedule.owners
        for rank in self.schedule.ranks:
            for i in rank:
                if i.moves:
                    _, source, target, _ = i.message
                    where = sent if i.sends else received
                    where[owners[source], owners[target]].append(i)
        for channel, sends in sent.items():
            for send, receive in zip(sends, received[channel], strict=False):
                if send.message != receive.message:
                    marks = (*self.places[send], *self.places[receive])
                    a, b = channel
                    text = f"rank {a} sends {send} where rank {b} receives {receive}"
                    yield Problem(text, marks)
                    break

    def ordered(self) -> Iterator[Problem]:
        """On each rank, everything after what it needs."""
        for r, rank in enumerate(self.schedule.ranks):
            done: set[tuple[object, ...]] = set()
            left = Counter(i.stage for i in rank if i.kind in COMPUTE)
            for p, i in enumerate(rank):
                for need, text in self.needs(r, i):
                    if need not in done:
                        yield Problem(f"{i} comes before {text}", ((r, p),))
                if i.kind == "REDUCE" and left[i.stage]:
                    text = f"{i} comes before the last microbatch of stage {i.stage}"
                    yield Problem(text, ((r, p),))
                if i.kind in COMPUTE:
                    left[i.stage] -= 1
                    done.add((i.gives, i.stage, i.microbatch))
                elif i.moves and not i.sends:
                    done.add(i.message)

    def needs(self, rank: int, i: Instruction) -> Iterator[tuple[tuple[object, ...], str]]:
        """(what must be done before on the same rank, in words)."""
        number = i.microbatch
        if i.sends:
            yield (i.kind[-1], i.stage, number), f"{_of(i)} is computed"
        for kind, stage in self.schedule.needs(i):
            what = "the values" if kind == "F" else "the gradients"
            if self.schedule.owners[stage] == rank:
                text = f"{what} of stage {stage}, microbatch {number}, are computed"
                yield (kind, stage, number), text
            else:
                text = f"{what} of stage {stage}, microbatch {number}, are received"
                yield (kind, stage, i.stage, number), text

    def stalls(self) -> Iterator[Problem]:
        """Whether the ranks come to an end, with sends that return at once and ones that wait."""
        for blocking in (False, True):
            stuck = self.run(blocking)
            if stuck:
                how = "wait for their receives" if blocking else "return at once"
                waiting = " and ".join(f"rank {r} at {self.schedule.ranks[r][p]}" for r, p in stuck)
                text = f"with sends that {how}, ranks wait for each other forever: {waiting}"
                yield Problem(text, tuple(stuck))
                return

    def run(self, blocking: bool) -> list[tuple[int, int]]:
        """(rank, position) of the ranks that stand still before their end."""
        ranks, owners = self.schedule.ranks, self.schedule.owners
        positions = [0] * len(ranks)
        ready = deque(range(len(ranks)))
        sent: set[tuple[str, int, int, int]] = set()

        def head(rank: int) -> Instruction | None:
            return ranks[rank][positions[rank]] if positions[rank] < len(ranks[rank]) else None

        while ready:
            rank = ready.popleft()
            while (i := head(rank)) is not None:
                if i.moves:
                    other = owners[i.peer]
                    there = head(other)
                    if i.sends and not blocking:
                        sent.add(i.message)
                        ready.append(other)
                    elif not blocking and i.message not in sent:
                        break
                    elif blocking:
                        if there is None or not there.moves or there.message != i.message:
                            break
                        positions[other] += 1
                        ready.append(other)
                positions[rank] += 1
        return [(r, p) for r, p in enumerate(positions) if p < len(ranks[r])]


def _of(i: Instruction) -> str:
    return f"stage {i.stage}, microbatch {i.microbatch}"
