"""Ranks that call the model with different shapes at a later step stop and say so."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from test_failure import free_port
from torch import nn

import autopar
from autopar.errors import AutoparError
from autopar.runtime.heartbeat import Calls

ROOT = Path(__file__).parent.parent

SCRIPT = """
import sys
import torch
import torch.nn.functional as F
from torch import nn
import autopar

mesh, batch, known, mine = sys.argv[1], sys.argv[2], eval(sys.argv[3]), eval(sys.argv[4])
torch.manual_seed(0)
model = autopar.parallelize(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), mesh,
                            batch=batch, loss=F.cross_entropy)
opt = torch.optim.SGD(model.parameters(), lr=0.1)

def step(rows, width=0):
    torch.manual_seed(rows)
    x, y = torch.randn(rows, 8), torch.randint(0, 4, (rows,))
    loss = model(x[:, None] if width else x, targets=y[:, None] if width else y)
    loss.backward()
    opt.step()
    opt.zero_grad()

for rows in known:
    step(rows)
print("running", flush=True)
for rows in mine:
    step(*rows) if isinstance(rows, tuple) else step(rows)
print("unnoticed", flush=True)
"""


def outputs(tmp_path: Path, mesh: str, batch: str, known: Any, mine: list[Any]) -> list[str]:
    """What the ranks print; rank r goes on with the batches of mine[r]."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    port, n = free_port(), len(mine)
    ranks = []
    for r in range(n):
        extra = {"RANK": str(r), "LOCAL_RANK": str(r), "WORLD_SIZE": str(n)}
        extra |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(path), mesh, batch, repr(known), repr(mine[r])]
        ranks.append(
            subprocess.Popen(
                command, env={**os.environ, **extra, "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
        )  # fmt: skip
    deadline = time.monotonic() + 90
    try:
        return [p.communicate(timeout=deadline - time.monotonic())[0] for p in ranks]
    finally:
        for p in ranks:
            p.kill()


@pytest.mark.parametrize(
    ("mesh", "known", "mine"),
    [
        ("dp=2", [4], [[4] * 9, [6] * 9]),  # one compiles while the other steps
        ("dp=2", [4, 6], [[4] * 9, [6] * 9]),  # both know both: all their collectives fit
        ("tp=2", [4, 6], [[4] * 9, [6] * 9]),  # gloo would end the process
        ("tp=2", [4], [[6] * 9, [4] * 9]),
    ],
)
def test_another_shape_at_a_later_step_stops_both_ranks(
    mesh: str, known: list[int], mine: list[Any], tmp_path: Path
) -> None:
    for text in outputs(tmp_path, mesh, "global", known, mine):
        assert "running" in text and "unnoticed" not in text, text
        last = text[text.rfind("BatchError") :]
        number = len(known) + 1
        assert f"call {number} of the model was made by Rank 0 (" in last, text
        assert f"float32[{mine[0][0]}, 8]" in last and f"float32[{mine[1][0]}, 8]" in last, text


def test_shapes_that_change_all_the_time_are_compared_too(tmp_path: Path) -> None:
    """Too often to wait for each other: found by the beats, while the ranks go on."""
    known = [4, 6] * 20
    mine = [[4, 6] * 20000, [6, 4] * 20000]
    for text in outputs(tmp_path, "dp=2", "global", known, mine):
        assert "running" in text and "unnoticed" not in text, text
        assert "BatchError: The ranks call the model differently" in text, text


def test_other_shapes_of_own_rows_are_refused_at_once(tmp_path: Path) -> None:
    mine = [[(4, 1)], [4]]
    for text in outputs(tmp_path, "dp=2", "local", [4], mine):
        last = text[text.rfind("BatchError") :]
        assert "rank 0 with input float32[rows, 1, 8]" in last, text
        assert "rank 1 with input float32[rows, 8]" in last, text


def test_rows_of_own_may_differ(tmp_path: Path) -> None:
    for text in outputs(tmp_path, "dp=2", "local", [4], [[4, 2], [3, 6]]):
        assert "unnoticed" in text and "Error" not in text, text


def _steps(rank: int, n: int, known: list[int], mine: list[Any], batch: str = "global") -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    module = autopar.parallelize(model, "dp=2, tp=2", batch=batch)
    for rows in known:
        module(torch.ones(rows, 8)).sum().backward()
    try:
        if mine[rank] == "evaluates":
            module.eval()
        with module.no_sync() if mine[rank] == "accumulates" else nullcontext():
            module(torch.ones(4, 8)).sum().backward()
        module(torch.ones(4, 8)).sum().backward()
    except AutoparError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_one_rank_in_evaluation_is_named_on_all(pool: Pool) -> None:
    for text in pool.run(4, _steps, [4, 4], ["", "", "evaluates", ""]):
        assert text.startswith("BatchError"), text
        assert "Rank 2 (" in text and "evaluation" in text and "training" in text
    assert pool.run(4, _steps, [4, 4], ["evaluates"] * 4) == [""] * 4


def test_one_rank_inside_no_sync_is_named_on_all(pool: Pool) -> None:
    for text in pool.run(4, _steps, [4, 4], ["", "accumulates", "", ""]):
        assert text.startswith("BatchError"), text
        assert "Rank 1 (" in text and text.count("inside no_sync()") == 1
    assert pool.run(4, _steps, [4, 4], ["accumulates"] * 4) == [""] * 4


@pytest.mark.parametrize("what", ["evaluates", "accumulates"])
def test_ranks_with_own_rows_must_do_the_same_with_them(what: str, pool: Pool) -> None:
    for text in pool.run(4, _steps, [4, 4], ["", "", what, what], "local"):
        assert text.startswith("BatchError"), text
        assert "evaluation" in text if what == "evaluates" else "inside no_sync()" in text
        assert "rank 2 with input float32[rows, 8]" in text


# --- the comparison ----------------------------------------------------------------------------


def called(*texts: str) -> Calls:
    calls = Calls()
    for text in texts:
        calls = calls.called(text)
    return calls


def test_calls_alike_cost_nothing_to_tell() -> None:
    calls = called("a")
    more = calls.called("a").called("a")
    assert more.count == 3 and more.changes is calls.changes


def test_the_first_difference_is_found() -> None:
    assert called("a", "a", "b").difference(called("a", "a", "a")) == (3, "b", "a")
    assert called("a", "b", "a").difference(called("a", "a", "b")) == (2, "b", "a")
    assert called("a", "a", "b").difference(called("a", "a")) is None  # not there yet
    assert called("a", "b").difference(called("a", "b", "c")) is None
    assert called().difference(called("a")) is None


def test_old_changes_are_forgotten() -> None:
    one, two = called(*"ab" * 100), called(*"ab" * 100, "a", "c")
    assert len(one.changes) == len(two.changes) == 32
    assert one.at(200) == "b" and one.at(3) is None and two.difference(one) is None
    assert two.called("a").difference(called(*"ab" * 101).called("a")) == (202, "c", "b")


def test_frequent_changes_are_told_from_rare_ones() -> None:
    assert called(*"ab" * 20).often
    assert not called(*("a" * 3 + "b") * 20).often
    assert not called(*"abcdefgh").often
