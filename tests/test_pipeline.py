"""Pipeline schedules against torch's, published figures, closed formulas and an interpreter."""

from __future__ import annotations

import dataclasses
import json
import xml.etree.ElementTree as ET
from collections import defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autopar.errors import ScheduleError
from autopar.pipeline import (
    ORDERS,
    Costs,
    Instruction,
    Schedule,
    check_schedule,
    communicate,
    html,
    order,
    parse,
    problems,
    simulate,
    svg,
)

# every order, with few and many microbatches, dividing and not
CASES = [
    (name, ranks, count, virtual)
    for name, found in ORDERS.items()
    for ranks in (1, 2, 3, 4, 6)
    for count in (1, 2, 3, 5, 8, 13)
    for virtual in ((1, 2, 3) if found.virtual == 0 else (found.virtual,))
    if count >= found.per_rank * ranks
]


def test_every_order_is_right_and_comes_back_from_text() -> None:
    for case in CASES:
        found = communicate(order(*case))
        check_schedule(found)
        assert parse(str(found), name=found.name) == found
        assert found.computed == order(*case)
        check_schedule(communicate(found.inference))


# --- against others ----------------------------------------------------------------------------

# Qi et al. 2024, "Zero Bubble Pipeline Parallelism": ranks, microbatches, times of F, B, W and a
# transfer in ms, and the bubble rates of three schedules
PUBLISHED = [
    (8, 24, (18.522, 18.086, 9.337, 0.601), (0.2431, 0.1585, 0.1083)),
    (8, 64, (18.546, 18.097, 9.321, 0.762), (0.1240, 0.0674, 0.0444)),
    (16, 48, (11.347, 11.248, 8.132, 0.377), (0.2552, 0.1397, 0.0672)),
]


@pytest.mark.parametrize(("ranks", "count", "times", "rates"), PUBLISHED)
@pytest.mark.parametrize("sends", [True, False])
def test_bubble_rates_are_the_published_ones(
    ranks: int, count: int, times: tuple[float, ...], rates: tuple[float, ...], sends: bool
) -> None:
    costs = Costs(*(t / 1000 for t in times))
    for name, rate in zip(("1f1b", "zb-h1", "zb-h2"), rates, strict=True):
        found = order(name, ranks, count)
        timeline = simulate(communicate(found) if sends else found, costs)
        assert timeline.bubble_rate == pytest.approx(rate, abs=0.0001)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("count", [1, 3, 8, 20])
def test_bubbles_and_memory_are_those_of_the_formulas(ranks: int, count: int) -> None:
    bubbles = (ranks - 1) / (count + ranks - 1)  # Huang et al. 2019, section 2.3
    for name in ("gpipe", "1f1b"):
        assert simulate(order(name, ranks, count)).bubble_rate == pytest.approx(bubbles)
    one, all_at_once = (simulate(order(name, ranks, count)) for name in ("1f1b", "gpipe"))
    assert one.in_flight == tuple(min(ranks - i, count) for i in range(ranks))
    assert set(all_at_once.in_flight) == {count}
    assert one.peak_bytes == one.in_flight, "each microbatch holds 1"
    half = simulate(order("zb-h1", ranks, count))
    assert max(half.in_flight) <= min(ranks, count), "as much as the first rank of 1F1B"
    assert max(simulate(order("zb-v", ranks, count)).peak_bytes) <= 2 * ranks
    assert max(simulate(order("zb-h2", ranks, count)).in_flight) <= 2 * ranks - 1


def test_virtual_stages_divide_the_bubble() -> None:
    """Narayanan et al. 2021: (ranks - 1) / (microbatches x stages of a rank) of the rest."""
    for virtual in (1, 2, 4):
        costs = Costs(1 / virtual, 1 / virtual, 1 / virtual)
        found = simulate(order("interleaved", 4, 8, virtual), costs)
        assert found.step_s == pytest.approx(3 * (8 + 3 / virtual))


class _Stage:
    """What torch's schedules ask of a stage to write their order."""

    def __init__(self, index: int, stages: int, ranks: int) -> None:
        self.stage_index, self.num_stages = index, stages
        self.group_size, self.group_rank = ranks, 0
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.has_backward, self.submod = True, None
        self.stage_index_to_group_rank: dict[int, int] = {}
        self.device = "cpu"


TORCH = {
    "gpipe": ("ScheduleGPipe", 1),
    "1f1b": ("Schedule1F1B", 1),
    "interleaved": ("ScheduleInterleaved1F1B", 2),
    "bfs": ("ScheduleLoopedBFS", 3),
    "zb-v": ("ScheduleZBVZeroBubble", 2),
    "dualpipe-v": ("ScheduleDualPipeV", 2),
}


@pytest.mark.parametrize("name", TORCH)
def test_orders_are_those_of_torch(name: str) -> None:
    from torch.distributed.pipelining import schedules

    kind, virtual = TORCH[name]
    compared = 0
    for ranks, count in [(r, c) for r in (2, 3, 4, 8) for c in (1, 2, 3, 4, 8, 12, 16, 24)]:
        stages: Any = [_Stage(i * ranks, ranks * virtual, ranks) for i in range(virtual)]
        try:
            theirs = getattr(schedules, kind)(
                stages[0] if name in ("gpipe", "1f1b") else stages, count, loss_fn=lambda *_: None
            )
        except ValueError:  # it wants more microbatches, or another number
            continue
        own = order(name, ranks, count, virtual if name in ("interleaved", "bfs") else 0)
        for rank, instructions in enumerate(own.ranks):
            flat = [
                str(action)
                for slot in theirs.pipeline_order[rank]
                if slot is not None
                for action in slot.sub_actions or [slot]
            ]
            flat = [a for a in flat if "REDUCE" not in a]
            mine = list(map(str, instructions))
            if name == "1f1b" and rank == ranks - 1:  # theirs counts its forwards from 1, to draw
                flat, mine = ([a[:2] for a in names] for names in (flat, mine))
            assert mine == flat
            compared += 1
        if virtual > 1:  # its own table, with overlaps, reductions and idle time, is read, too
            table = "\n".join(
                ",".join("" if a is None else str(a) for a in theirs.pipeline_order[rank])
                for rank in range(ranks)
            )
            assert parse(table, name=own.name).computed == own
    assert compared > 30


# --- against an interpreter --------------------------------------------------------------------


def _run(schedule: Schedule) -> dict[int, Any] | None:
    """Each stage's sum of gradients by running the lists on terms; None: they stall.

    Channels between ranks are first in, first out, and nothing tells which message comes out.
    """
    channels: dict[tuple[int, int], deque[Any]] = defaultdict(deque)
    reduced: dict[int, Any] = {}
    owners = schedule.owners

    def rank_of(rank: int) -> Iterator[bool]:
        values: dict[Any, Any] = {}
        sums: dict[int, list[Any]] = defaultdict(list)
        for i in schedule.ranks[rank]:
            stage, k = i.stage, i.microbatch
            if i.kind == "F":
                given = [values.get(("F", a, k, stage), values.get(("F", a, k))) for a, b in
                         schedule.edges if b == stage]  # fmt: skip
                values["F", stage, k] = ("F", stage, k, *given)
            elif i.kind in ("B", "I"):
                given = [values.get(("B", b, k, stage), values.get(("B", b, k))) for a, b in
                         schedule.returning if a == stage]  # fmt: skip
                values["B", stage, k] = ("B", stage, k, values.get(("F", stage, k)), *given)
            if i.kind in ("B", "W"):
                sums[stage].append(values.get(("B", stage, k)))
            elif i.kind == "REDUCE":
                reduced[stage] = sorted(map(repr, sums[stage]))
            elif i.sends:
                channels[rank, owners[i.peer]].append(values.get((i.kind[-1], stage, k)))
            elif i.moves:
                while not channels[owners[i.peer], rank]:
                    yield False
                values[i.kind[-1], i.peer, k, stage] = channels[owners[i.peer], rank].popleft()
            yield True

    running = [rank_of(r) for r in range(len(schedule.ranks))]
    while running:
        moved = False
        for process in list(running):
            for went in process:
                if not went:
                    break
                moved = True
            else:
                running.remove(process)
                moved = True
        if not moved:
            return None
    return None if any(channels.values()) else reduced


def _right(schedule: Schedule) -> dict[int, Any]:
    """The same sums, of stages one after another for each microbatch."""
    values: dict[Any, Any] = {}
    stages, count = len(schedule.owners), schedule.microbatches
    for k in range(count):
        for s in range(stages):
            given = [values["F", a, k] for a, b in schedule.edges if b == s]
            values["F", s, k] = ("F", s, k, *given)
        for s in reversed(range(stages)):
            given = [values["B", b, k] for a, b in schedule.returning if a == s]
            values["B", s, k] = ("B", s, k, values["F", s, k], *given)
    return {s: sorted(repr(values["B", s, k]) for k in range(count)) for s in range(stages)}


def skipping(name: str, ranks: int, count: int) -> Schedule:
    """A schedule with a skip over all stages, and a mask that the first gives to all others."""
    found = order(name, ranks, count)
    last = len(found.owners) - 1
    returning = tuple(dict.fromkeys([*found.edges, (0, last)]))
    edges = tuple(dict.fromkeys([*returning, *((0, s) for s in range(1, last + 1))]))
    return dataclasses.replace(found, edges=edges, returning=returning)


MUTATED = [("1f1b", 3, 4), ("zb-h1", 3, 4), ("zb-v", 2, 4), ("interleaved", 2, 3), ("gpipe", 2, 3)]


@pytest.mark.parametrize(("name", "ranks", "count"), MUTATED)
@pytest.mark.parametrize("skips", [False, True])
def test_schedules_give_every_gradient_once(name: str, ranks: int, count: int, skips: bool) -> None:
    found = communicate(skipping(name, ranks, count) if skips else order(name, ranks, count))
    check_schedule(found)
    assert _run(found) == _right(found)


def _mutants(schedule: Schedule) -> Iterator[tuple[str, Schedule]]:
    def changed(rank: int, instructions: list[Instruction]) -> Schedule:
        ranks = list(schedule.ranks)
        ranks[rank] = tuple(instructions)
        return dataclasses.replace(schedule, ranks=tuple(ranks))

    stages = len(schedule.owners)
    for r, rank in enumerate(schedule.ranks):
        for p, i in enumerate(rank):
            before, after = list(rank[:p]), list(rank[p + 1 :])
            yield "drop", changed(r, before + after)
            yield "duplicate", changed(r, [*before, i, i, *after])
            yield "duplicate at the end", changed(r, [*before, i, *after, i])
            if after:
                yield "swap", changed(r, [*before, after[0], i, *after[1:]])
            if i.moves:
                other = dataclasses.replace(i, peer=(i.peer + 1) % stages)
                yield "peer", changed(r, [*before, other, *after])
            if i.kind != "REDUCE":
                other = dataclasses.replace(
                    i, microbatch=(i.microbatch + 1) % schedule.microbatches
                )
                yield "microbatch", changed(r, [*before, other, *after])
            if i.kind == "REDUCE":
                last = max(
                    q for q in range(p) if rank[q].kind in ("B", "W") and rank[q].stage == i.stage
                )
                yield "early", changed(r, [*before[:last], i, *before[last:], *after])


@pytest.mark.parametrize(("name", "ranks", "count"), MUTATED)
@pytest.mark.parametrize("skips", [False, True])
def test_changed_lists_are_caught(name: str, ranks: int, count: int, skips: bool) -> None:
    """All that give another result or stall; a swap of what is independent gives the same."""
    found = communicate(skipping(name, ranks, count) if skips else order(name, ranks, count))
    right, kinds, harmless = _right(found), defaultdict(int), 0
    for kind, mutant in _mutants(found):
        caught = next(problems(mutant), None) is not None
        if kind == "swap" and not caught:
            assert _run(mutant) == right
            harmless += 1
            continue
        assert caught, f"{kind} is not caught:\n{mutant}"
        kinds[kind] += 1
    assert {"drop", "duplicate", "swap", "peer", "microbatch", "early"} <= set(kinds)
    assert harmless, "sends beside independent computations can be swapped"


def test_messages_in_another_order_are_named() -> None:
    found = communicate(order("gpipe", 2, 2))
    lists = str(found).replace(
        "1RECV_F0<0, 1F0, 1RECV_F1<0, 1F1", "1RECV_F1<0, 1F1, 1RECV_F0<0, 1F0"
    )
    assert lists != str(found)
    with pytest.raises(
        ScheduleError, match="rank 0 sends 0SEND_F0>1 where rank 1 receives 1RECV_F1<0"
    ):
        check_schedule(parse(lists))


def test_sends_that_wait_are_checked_too() -> None:
    """1F1B as it is often written, a send after each result, a receive before each use."""
    text = """
        0F0, 0SEND_F0>1, 0F1, 0SEND_F1>1, 0RECV_B0<1, 0B0, 0RECV_B1<1, 0B1, 0REDUCE
        1RECV_F0<0, 1F0, 1B0, 1SEND_B0>0, 1RECV_F1<0, 1F1, 1B1, 1SEND_B1>0, 1REDUCE
    """
    found = parse(text)
    simulate(found)
    assert _run(found) == _right(found)
    with pytest.raises(ScheduleError, match="sends that wait for their receives") as error:
        check_schedule(found)
    assert ">0SEND_F1>1<" in str(error.value) and ">1SEND_B0>0<" in str(error.value)
    check_schedule(communicate(found))


# --- reading, refusing, drawing ----------------------------------------------------------------


def test_tables_of_torch_are_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1,\n", encoding="utf-8")
    found = parse(path)
    assert found.name == "mine" and found.microbatches == 2 and found.owners == (0, 1)
    assert found.ranks == order("1f1b", 2, 2).ranks
    check_schedule(communicate(found))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0, 0X0", ["'0X0' is no instruction", "rank 0, cell 2", "0F3"]),
        ("0F0, 0SEND_F0", ["'0SEND_F0' is no instruction"]),
        ("0F0, 0REDUCE1", ["no instruction"]),
        ("0F0\n0B0", ["Stage 0 stands on rank 0 and on rank 1", "0B0 of rank 1"]),
        ("0F0\n2F0", ["There is no stage 1", "schedule 'own'"]),
        ("0F0\n99999999F0", ["There is no stage 1"]),
        ("0F0, 0F99999999", ["There is no microbatch 1"]),
        ("\n # nothing\n", ["There is no stage 0"]),
    ],
)
def test_text_that_is_no_schedule_is_refused(text: str, words: list[str]) -> None:
    with pytest.raises(ScheduleError) as error:
        parse(text)
    assert not [w for w in words if w not in str(error.value)], str(error.value)


@pytest.mark.parametrize(
    ("edges", "returning", "words"),
    [
        ([(1, 0)], None, "No values can go from stage 1 to stage 0"),
        ([(0, 0)], None, "from stage 0 to stage 0"),
        ([(0, 1), (1, 5)], None, "stages 0 to 2"),
        ([(0, 1), (0, 1)], None, "or they do already"),
        ([(0, 1), (1, 2)], [(0, 2)], "return from stage 2 to stage 0"),
    ],
)
def test_edges_that_are_none_are_refused(edges: Any, returning: Any, words: str) -> None:
    with pytest.raises(ScheduleError, match=words.replace("(", r"\(")):
        parse("0F0, 0B0\n1F0, 1B0\n2F0, 2B0", edges=edges, returning=returning)


@pytest.mark.parametrize(
    "costs",
    [
        {"forward_s": [1.0, 2.0]},
        {"weight_s": -1.0},
        {"transfer_s": [0.0] * 4},
        {"input_s": float("nan")},
    ],
)
def test_costs_that_are_none_are_refused(costs: Any) -> None:
    with pytest.raises(ScheduleError, match=f"{next(iter(costs))} cannot be"):
        simulate(order("1f1b", 4, 4), Costs(**costs))
    assert simulate(order("1f1b", 2, 2), Costs(0, 0, 0)).bubble_rate == 0


def test_what_is_missing_is_marked_and_named() -> None:
    with pytest.raises(ScheduleError, match="0REDUCE is missing") as error:
        check_schedule(parse("0F0, 0B0"))
    assert ">end<" in str(error.value)
    with pytest.raises(ScheduleError, match="or for what is missing") as error:
        communicate(parse("0F0, 0B0, 0B1\n1F0, 1F1, 1B0, 1B1"))
    assert "0F1 for 1F1" in str(error.value) and ">1F1<" in str(error.value)
    pairs: Any = [[0, 1]]  # as JSON has them
    idle = parse("0F0, 0B0\n,\n1F0, 1B0", edges=pairs)
    assert parse(str(idle)) == idle and idle.owners == (0, 2)
    forward = simulate(communicate(order("gpipe", 2, 8).inference))
    assert forward.peak_bytes == (
        0,
        0,
    ) and forward.in_flight == (0, 0)
    more = Instruction("B", 7, 0)
    wrong = dataclasses.replace(idle, ranks=((*idle.ranks[0], more), *idle.ranks[1:]))
    with pytest.raises(ScheduleError):
        check_schedule(wrong)


def test_a_broken_schedule_is_drawn_with_the_step_marked() -> None:
    text = "0F0, 0F1, 0B1, 0B0\n1F0, 1B0, 1F1, 1B1"
    good = communicate(parse(text))
    broken = str(good).replace("1F1, ", "", 1).replace("1B1", "1B1, 1F1")
    with pytest.raises(ScheduleError) as error:
        check_schedule(parse(broken))
    message = str(error.value)
    assert "'own' is wrong: 1B1 comes before the values of stage 1, microbatch 1, are" in message
    assert ">1B1<" in message and "\nrank 0: ... " in message
    with pytest.raises(ScheduleError, match="wait for each other forever") as error:
        communicate(parse("0F0, 0B1, 0F1, 0B0\n1F0, 1B0, 1F1, 1B1"))
    assert ">0B1<" in str(error.value) and ">1F1<" in str(error.value)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (("zb", 2, 4), ["no schedule 'zb'", "gpipe, 1f1b"]),
        (("1f1b", 2, 4, 2), ["cannot have 2 stages on a rank"]),
        (("1f1b", 2, 0), ["0 microbatches"]),
        (("dualpipe-v", 4, 7), ["at least 8 microbatches", "zb-v"]),
    ],
)
def test_orders_that_cannot_be_are_refused(case: Any, words: list[str]) -> None:
    with pytest.raises(ScheduleError) as error:
        order(*case)
    assert not [w for w in words if w not in str(error.value)], str(error.value)


def test_unequal_stages_cost_what_they_cost() -> None:
    """Two ranks, two microbatches, by hand: the second stage is slow, a transfer takes 2."""
    costs = Costs(forward_s=(1.0, 4.0), input_s=(1.0, 4.0), weight_s=(1.0, 4.0), transfer_s=2.0)
    timeline = simulate(communicate(order("gpipe", 2, 2)), costs)
    spans = {str(s.instruction): (s.start_s, s.end_s) for s in timeline.spans}
    assert spans == {
        "0F0": (0, 1), "0F1": (1, 2), "1F0": (3, 7), "1F1": (7, 11),
        "1B0": (11, 19), "1B1": (19, 27), "0B0": (21, 23), "0B1": (29, 31),
    }  # fmt: skip
    assert timeline.step_s == 31 and timeline.bubble_rate == pytest.approx(1 - (6 + 24) / 62)


def test_pictures_show_every_instruction() -> None:
    timeline = simulate(order("zb-v", 3, 4), Costs(transfer_s=0.25))
    root = ET.fromstring(svg(timeline, "a < b"))
    titles = [t.text or "" for t in root.iter("{http://www.w3.org/2000/svg}title")]
    want = [str(s.instruction) for rank in timeline.by_rank() for s in rank]
    assert [t.split(":")[0] for t in titles] == want and len(set(want)) == 3 * 2 * 4 * 3
    page = html({"simulated": timeline, "measured": timeline})
    assert page.count("<svg") == 2 and "http" not in page.replace("http://www.w3.org", "")
    events = json.loads(timeline.trace())["traceEvents"]
    drawn = [e for e in events if e["ph"] == "X"]
    assert {(e["pid"], e["name"]) for e in drawn} == {
        (s.rank, str(s.instruction)) for s in timeline.spans
    }
    assert max(e["ts"] + e["dur"] for e in drawn) == pytest.approx(timeline.end_s * 1e6)
