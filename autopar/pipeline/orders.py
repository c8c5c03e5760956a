"""The orders of the literature: what each rank of a pipeline computes, and when.

| order | source |
|---|---|
| gpipe | Huang et al. 2019, "GPipe" |
| 1f1b | Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training", section 3 |
| interleaved | Narayanan et al. 2021, "Efficient Large-Scale Language Model Training", sect. 2.2 |
| bfs | Lamy-Poirier 2023, "Breadth-First Pipeline Parallelism" |
| zb-h1, zb-h2 | Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 2 |
| zb-v | Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", section 4 |
| dualpipe-v | DeepSeek 2025, DualPipe, cut in half to a V (Sea AI Lab) |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from autopar.errors import ScheduleError
from autopar.pipeline.instructions import Instruction, Schedule, chain

__all__ = ["ORDERS", "Order", "order"]


@dataclass(frozen=True, slots=True)
class Order:
    """How an order places stages and what a rank computes.

    Args:
        rank: (ranks, rank, microbatches, stages on a rank) -> (kind, n-th stage of the rank,
            microbatch), in order.
        virtual: stages on a rank; 0: any number.
        folded: the stages go down the ranks and up again, as a V; else around and around.
        per_rank: the least number of microbatches is that times the ranks.
    """

    rank: Callable[[int, int, int, int], Iterator[tuple[str, int, int]]]
    virtual: int = 1
    folded: bool = False
    per_rank: int = 0


def order(name: str, ranks: int, microbatches: int, virtual: int = 0) -> Schedule:
    """The schedule of a named order: what is computed, without sends.

    Args:
        name: a key of `ORDERS`.
        ranks: of the pipeline.
        microbatches: any number, but where the order needs more.
        virtual: stages on each rank; 0: as many as the order has, two where it takes any number.

    Raises:
        ScheduleError: there is no such order, or it does not go with these numbers.
    """
    if name not in ORDERS:
        raise ScheduleError(f"There is no schedule {name!r}.", expected=", ".join(ORDERS))
    found = ORDERS[name]
    wanted = virtual or found.virtual or 2
    if found.virtual not in (0, wanted) or min(ranks, microbatches, wanted) < 1:
        raise ScheduleError(
            f"Schedule {name!r} cannot have {wanted} stages on a rank, with {ranks} ranks and "
            f"{microbatches} microbatches.",
            expected=f"{found.virtual or 'one or more'} on a rank, and at least one of each",
        )
    if microbatches < found.per_rank * ranks:
        raise ScheduleError(
            f"Schedule {name!r} needs at least {found.per_rank * ranks} microbatches on {ranks} "
            f"ranks, not {microbatches}.",
            hint="use more microbatches, or schedule='zb-v'",
        )
    stages = ranks * wanted
    down, up = list(range(ranks)), list(range(ranks - 1, -1, -1))
    owners = tuple(down + up) if found.folded else tuple(s % ranks for s in range(stages))
    own = [[s for s in range(stages) if owners[s] == r] for r in range(ranks)]
    lists = (
        tuple(
            Instruction(kind, own[r][n], microbatch)
            for kind, n, microbatch in found.rank(ranks, r, microbatches, wanted)
        )
        for r in range(ranks)
    )
    edges = chain(stages)
    return Schedule(name, owners, microbatches, tuple(lists), edges, edges)


Steps = Iterator[tuple[str, int, int]]


def _gpipe(ranks: int, rank: int, count: int, virtual: int) -> Steps:
    yield from (("F", 0, k) for k in range(count))
    yield from (("B", 0, k) for k in range(count))


def _bfs(ranks: int, rank: int, count: int, virtual: int) -> Steps:
    yield from (("F", n, k) for n in range(virtual) for k in range(count))
    yield from (("B", n, k) for n in reversed(range(virtual)) for k in reversed(range(count)))


def _interleaved(ranks: int, rank: int, count: int, virtual: int) -> Steps:
    """Rounds of some microbatches, about one for each rank, go through its stages in turn."""
    rounds = max(1, count // ranks)
    size = -(-count // rounds)
    forward, backward = (
        [
            (kind, n, k)
            for start in range(0, count, size)
            for n in stages
            for k in range(start, min(start + size, count))
        ]
        for kind, stages in (("F", range(virtual)), ("B", range(virtual - 1, -1, -1)))
    )
    ahead = min((virtual - 1) * size + 2 * (ranks - 1 - rank), len(forward))
    yield from _alternate(forward, backward, ahead)


def _one_by_one(ranks: int, rank: int, count: int, virtual: int) -> Steps:
    forward = [("F", 0, k) for k in range(count)]
    yield from _alternate(forward, [("B", 0, k) for k in range(count)], ranks - 1 - rank)


def _alternate(
    forward: list[tuple[str, int, int]], backward: list[tuple[str, int, int]], ahead: int
) -> Steps:
    """Some forwards, then one forward and one backward each, then the other backwards."""
    yield from forward[:ahead]
    for i, step in enumerate(backward):
        yield from forward[ahead + i : ahead + i + 1]
        yield step


def _h1(ranks: int, rank: int, count: int, virtual: int) -> Steps:
    yield from _halves(count, ranks - rank, rank)


def _h2(ranks: int, rank: int, count: int, virtual: int) -> Steps:
    yield from _halves(count, 2 * (ranks - rank) - 1, 2 * rank)


def _halves(count: int, ahead: int, late: int) -> Steps:
    """Forwards that go `ahead` of the first backward; weights follow `late` microbatches after."""
    yield from (("F", 0, k) for k in range(min(ahead, count)))
    for k in range(count):
        yield "I", 0, k
        if k >= late:
            yield "W", 0, k - late
        if k + ahead < count:
            yield "F", 0, k + ahead
    yield from (("W", 0, k) for k in range(max(0, count - late), count))


def _zbv(ranks: int, rank: int, count: int, virtual: int) -> Steps:
    """The second half of the model comes back up the ranks; all hold what 1F1B's first holds."""
    least = max(count, 2 * ranks - 1)  # what is beyond the microbatches is left out
    yield from _phrases(
        count,
        ("F0", 2 * (ranks - rank) - 1),
        ("F1 F0", rank),
        ("F1 I1 W1", ranks - rank),
        ("F0 I0 W0 F1 I1 W1", least - ranks),
        ("I0 I1", rank),
        ("I0 W0", ranks - rank),
        ("W1", count),
        ("W0", count),
    )


def _dualpipe_v(ranks: int, rank: int, count: int, virtual: int) -> Steps:
    """Forwards of one half of the model beside backwards of the other."""
    last = [f"{'B' if i <= rank else 'I'}{1 - i % 2}" for i in range(2 * (rank + 1))]
    yield from _phrases(
        count,
        ("F0", 2 * (ranks - rank - 1)),
        ("F0 F1", rank + 1),
        ("I1 W F1", ranks - rank - 1),
        ("F0 B1 F1 B0", count - 2 * ranks + rank + 1),
        ("B1 F1 B0", ranks - rank - 1),
        (" ".join(last), 1),
        ("W I0", ranks - rank - 1),
        ("W", rank + 1),
    )


def _phrases(count: int, *phrases: tuple[str, int]) -> Steps:
    """Words like "F1" (the next forward of the second stage), each phrase some times.

    A W takes the oldest I that waits for one, of its stage if it names one. A word that finds no
    microbatch is left out.
    """
    done: Counter[str] = Counter()
    waiting: list[tuple[int, int]] = []
    for word in (w for phrase, times in phrases for _ in range(times) for w in phrase.split()):
        kind, stage = word[0], word[1:]
        if kind == "W":
            ready = [w for w in waiting if stage in ("", str(w[0]))]
            if ready:
                waiting.remove(ready[0])
                yield "W", *ready[0]
            continue
        key = f"{'F' if kind == 'F' else 'B'}{stage}"
        done[key] += 1
        if done[key] <= count:
            yield kind, int(stage), done[key] - 1
            if kind == "I":
                waiting.append((int(stage), done[key] - 1))


ORDERS = {
    "gpipe": Order(_gpipe),
    "1f1b": Order(_one_by_one),
    "interleaved": Order(_interleaved, virtual=0),
    "bfs": Order(_bfs, virtual=0),
    "zb-h1": Order(_h1),
    "zb-h2": Order(_h2),
    "zb-v": Order(_zbv, virtual=2, folded=True),
    "dualpipe-v": Order(_dualpipe_v, virtual=2, folded=True, per_rank=2),
}
