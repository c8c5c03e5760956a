"""What a schedule costs: instructions and their times to a timeline, bubbles and memory."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.errors import ScheduleError
from autopar.pipeline.instructions import COMPUTE, Instruction, Schedule, grid

__all__ = ["Costs", "Span", "Timeline", "simulate"]

_MICRO = 1e6  # microseconds, the unit of Chrome traces


@dataclass(frozen=True, slots=True)
class Costs:
    """What the instructions of each stage cost; one number stands for all stages.

    Args:
        forward_s, input_s, weight_s: time of F, I and W; B takes I and W together.
        transfer_s: from a send on one rank until the value is there on another. Sends take no time
            of the sender, and receives none of the receiver, which waits where it uses the value.
        held_bytes: what a stage keeps of one microbatch from F until its backward.
        weight_bytes: the part of it that W still needs after I.
    """

    forward_s: float | Sequence[float] = 1.0
    input_s: float | Sequence[float] = 1.0
    weight_s: float | Sequence[float] = 1.0
    transfer_s: float = 0.0
    held_bytes: float | Sequence[float] = 1.0
    weight_bytes: float | Sequence[float] = 1.0

    def seconds(self, instruction: Instruction) -> float:
        """The time that an instruction takes."""
        parts = {"F": [self.forward_s], "I": [self.input_s], "W": [self.weight_s]}
        parts["B"] = [self.input_s, self.weight_s]
        return sum(at(part, instruction.stage) for part in parts[instruction.kind])

    def kept_bytes(self, instruction: Instruction) -> float:
        """Change of what is held when the instruction has run."""
        held, left = (at(b, instruction.stage) for b in (self.held_bytes, self.weight_bytes))
        left = min(held, left)
        return {"F": held, "B": -held, "I": left - held, "W": -left}[instruction.kind]


def at(value: float | Sequence[float], stage: int) -> float:
    """What a number, or one for each stage, is for a stage."""
    return value[stage] if isinstance(value, Sequence) else value


@dataclass(frozen=True, slots=True)
class Span:
    """An instruction that ran on a rank, from `start_s` to `end_s`."""

    rank: int
    instruction: Instruction
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """When each rank computed what, simulated or measured.

    Args:
        ranks: their number.
        spans: what was computed, of each rank in order.
        peak_bytes: the most that each rank held of activations.
        in_flight: the most microbatches that each stage held at once, from F until B or W.
    """

    ranks: int
    spans: tuple[Span, ...]
    peak_bytes: tuple[float, ...] = ()
    in_flight: tuple[int, ...] = ()

    def by_rank(self) -> list[list[Span]]:
        """What each rank computed, in order."""
        found: list[list[Span]] = [[] for _ in range(self.ranks)]
        for span in self.spans:
            found[span.rank].append(span)
        return found

    @property
    def end_s(self) -> float:
        """When the last instruction has run."""
        return max((s.end_s for s in self.spans), default=0.0)

    @property
    def step_s(self) -> float:
        """The longest time of a rank from its first instruction to its last: what a step takes.

        Ranks that begin late may end late, as the next step begins on them as late again.
        """
        return max((r[-1].end_s - r[0].start_s for r in self.by_rank() if r), default=0.0)

    @property
    def bubble_rate(self) -> float:
        """The part of the time of a step in which ranks are idle, over all ranks."""
        busy = sum(s.end_s - s.start_s for s in self.spans)
        return 1 - busy / (self.step_s * self.ranks) if self.step_s else 0.0

    def trace(self) -> str:
        """JSON for `chrome://tracing` and Perfetto: a process for each rank, times in µs."""
        events = [
            {
                "name": str(s.instruction), "cat": s.instruction.kind, "ph": "X", "tid": 0,
                "pid": s.rank, "ts": s.start_s * _MICRO, "dur": (s.end_s - s.start_s) * _MICRO,
                "args": {"stage": s.instruction.stage, "microbatch": s.instruction.microbatch},
            }
            for s in self.spans
        ]  # fmt: skip
        names = [
            {"name": "process_name", "ph": "M", "pid": r, "args": {"name": f"rank {r}"}}
            for r in range(self.ranks)
        ]
        return json.dumps({"traceEvents": [*names, *events], "displayTimeUnit": "ms"})


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Run the instructions by their times: each as soon as its rank is free and its operands there.

    What `check_schedule` finds is for it to find. Without a backward pass nothing is held.

    Args:
        schedule: with its sends, or what is computed alone: then values leave when computed.
        costs: in seconds and bytes; by default F, I and W take 1 each and transfers nothing.

    Raises:
        ScheduleError: the ranks wait for each other forever, or the costs are not of its stages.
    """
    costs = costs if costs is not None else Costs()
    for field in dataclasses.fields(costs):
        value, stages = getattr(costs, field.name), len(schedule.owners)
        given = value if isinstance(value, Sequence) else [value]
        single = field.name == "transfer_s"
        wrong = given is value and (single or len(given) != stages)
        if wrong or not all(math.isfinite(x) and x >= 0 for x in given):
            raise ScheduleError(
                f"{field.name} cannot be {value}.",
                expected="a number from 0 on"
                + ("" if single else f", or one for each of the {stages} stages"),
            )
    run = _Run(schedule, costs)
    positions = [0] * len(schedule.ranks)
    moved = True
    while moved:
        moved = False
        for rank, instructions in enumerate(schedule.ranks):
            while positions[rank] < len(instructions) and run.step(
                rank, instructions[positions[rank]]
            ):
                positions[rank] += 1
                moved = True
    stuck = [(r, p) for r, p in enumerate(positions) if p < len(schedule.ranks[r])]
    if stuck:
        raise ScheduleError(
            "The ranks of the schedule wait for each other forever, or for what is missing.",
            where="\n" + grid(schedule.ranks, stuck),
            expected="before each marked one, on its rank or another: "
            + "; ".join(_needed(schedule, schedule.ranks[r][p]) for r, p in stuck),
        )
    return run.timeline()


def _needed(schedule: Schedule, instruction: Instruction) -> str:
    """What an instruction waits for, in words."""
    k = instruction.microbatch
    needs = [
        f"{stage}F{k}" if kind == "F" else f"{stage}B{k} or {stage}I{k}"
        for kind, stage in schedule.needs(instruction)
    ]
    return f"{' and '.join(needs)} for {instruction}"


class _Run:
    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule, self.costs = schedule, costs
        self.sends = any(i.sends for rank in schedule.ranks for i in rank)
        self.clock = [0.0] * len(schedule.ranks)
        self.ends: dict[tuple[str, int, int], float] = {}  # of F and of backwards
        self.sent: dict[tuple[str, int, int, int], float] = {}
        self.spans: list[Span] = []

    def step(self, rank: int, instruction: Instruction) -> bool:
        """Run an instruction if what it needs is under way."""
        if instruction.sends:
            self.sent[instruction.message] = self.clock[rank]
        if instruction.kind not in COMPUTE:
            return True
        ready = list(self.ready(rank, instruction))
        if None in ready:
            return False
        start = max(self.clock[rank], *(t for t in ready if t is not None), 0.0)
        end = start + self.costs.seconds(instruction)
        key = (instruction.gives, instruction.stage, instruction.microbatch)
        self.ends[key] = self.clock[rank] = end
        self.spans.append(Span(rank, instruction, start, end))
        return True

    def ready(self, rank: int, instruction: Instruction) -> Iterator[float | None]:
        """When each value that an instruction needs is there; None: nobody knows yet."""
        schedule, number = self.schedule, instruction.microbatch
        for kind, stage in schedule.needs(instruction):
            if schedule.owners[stage] == rank:
                yield self.ends.get((kind, stage, number))
                continue
            message = (kind, stage, instruction.stage, number)
            left = self.sent.get(message) if self.sends else self.ends.get((kind, stage, number))
            yield None if left is None else left + self.costs.transfer_s

    def timeline(self) -> Timeline:
        drawn = Timeline(len(self.schedule.ranks), tuple(self.spans))
        peaks, flights = [0.0] * drawn.ranks, [0] * len(self.schedule.owners)
        flying = [0] * len(flights)
        for rank, spans in enumerate(drawn.by_rank() if self.schedule.training else []):
            held = 0.0
            for i in (s.instruction for s in spans):
                held += self.costs.kept_bytes(i)
                peaks[rank] = max(peaks[rank], held)
                flying[i.stage] += {"F": 1, "I": 0}.get(i.kind, -1)
                flights[i.stage] = max(flights[i.stage], flying[i.stage])
        return dataclasses.replace(drawn, peak_bytes=tuple(peaks), in_flight=tuple(flights))
