"""Sends, receives and reductions, added to what the ranks compute."""

from __future__ import annotations

import dataclasses
from collections import Counter

from autopar.pipeline.instructions import Instruction, Schedule
from autopar.pipeline.simulate import simulate

__all__ = ["communicate"]


def communicate(schedule: Schedule) -> Schedule:
    """Add a send and a receive wherever a value goes from rank to rank, and REDUCE to each stage.

    Before:
        0F0, 0B0
        1F0, 1B0
    After:
        0F0, 0SEND_F0>1, 0RECV_B0<1, 0B0, 0REDUCE
        1RECV_F0<0, 1F0, 1B0, 1SEND_B0>0, 1REDUCE

    Both ends of a message are written at once, when the simulator, with equal times for all
    instructions, has computed the value. So the lists are parts of one sequence in which each send
    stands beside its receive: run in that order nobody waits, whether sends block or not. A stage
    reduces its gradients after its last microbatch.

    Raises:
        ScheduleError: the ranks wait for each other forever.
    """
    ranks: list[list[Instruction]] = [[] for _ in schedule.ranks]
    spans = simulate(schedule.computed).spans
    left = Counter(s.instruction.stage for s in spans if s.instruction.kind != "F")
    events = [(s.end_s, 0, s) for s in spans] + [(s.start_s, 1, s) for s in spans]
    for _, begins, span in sorted(events, key=lambda e: (e[0], e[1], e[2].rank)):
        done = span.instruction
        if begins:
            ranks[span.rank].append(done)
            continue
        for peer in schedule.takers(done):
            owner = schedule.owners[peer]
            if owner != span.rank:
                ends = (done.stage, done.microbatch, peer), (peer, done.microbatch, done.stage)
                ranks[span.rank].append(Instruction(f"SEND_{done.gives}", *ends[0]))
                ranks[owner].append(Instruction(f"RECV_{done.gives}", *ends[1]))
        if done.kind != "F":
            left[done.stage] -= 1
            if not left[done.stage]:
                ranks[span.rank].append(Instruction("REDUCE", done.stage))
    return dataclasses.replace(schedule, ranks=tuple(map(tuple, ranks)))
