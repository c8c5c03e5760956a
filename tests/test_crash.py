"""A rank killed at any moment, also while a checkpoint is written, costs no completed save."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import crashing
import forks
import pytest

import autopar

MESHES = ("dp=2", "tp=2", "fsdp=2", "dp=3", "fsdp=3")
KILLS = 20
GRACE_S = 0.15  # for which the others go on


@pytest.fixture(scope="module", name="forks")
def forked() -> Any:
    return forks.context()


class Run:
    """Ranks of one run, and what they have told.

    Args:
        mine: (rank, operation on files at which it dies), or None.
    """

    def __init__(
        self, forks: Any, mesh: str, folder: Path, store: Path, mine: tuple[int, int] | None
    ) -> None:
        n = autopar.mesh(mesh).size
        self.told: list[list[Any]] = [[] for _ in range(n)]
        self.pipes: dict[Any, int] = {}
        self.ranks: list[Any] = []
        for r in range(n):
            ours, theirs = forks.Pipe()
            at = mine[1] if mine and mine[0] == r else 0
            arguments = (r, n, mesh, str(folder), str(store), theirs, at)
            process = forks.Process(target=crashing.rank, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.pipes[ours] = r
            self.ranks.append(process)

    def listen(self, until: float, enough: Any = lambda: False) -> None:
        """Hear what comes until a time, or until it is enough, or somebody has died."""
        while self.pipes and not enough() and (left := until - time.monotonic()) > 0:
            for pipe in wait(list(self.pipes), left):
                try:
                    self.told[self.pipes[pipe]].append(pipe.recv())
                except (EOFError, ConnectionError):
                    del self.pipes[pipe]
                    return

    def kill(self) -> None:
        for process in self.ranks:
            process.kill()
        for process in self.ranks:
            process.join()
        while self.pipes:
            self.listen(time.monotonic() + 5)

    @property
    def heard(self) -> int:
        """How many messages have come."""
        return sum(map(len, self.told))

    def of(self, kind: str) -> list[Any]:
        return [message[1:] for told in self.told for message in told if message[0] == kind]


def test_no_completed_save_is_lost(forks: Any, tmp_path: Path) -> None:
    dice = random.Random(7)
    model, optimizer = crashing.model_of(1)
    want = dict(crashing.steps(model, optimizer, 0, crashing.LAST))
    promised, while_saving, reached = 0, 0, 0
    folder = tmp_path / "checkpoints"
    for trial in range(KILLS):
        mesh = MESHES[trial % len(MESHES)]
        victim = dice.randrange(autopar.mesh(mesh).size)
        mine = (victim, dice.randint(1, 40 if victim == 0 else 12)) if trial % 2 else None
        run = Run(forks, mesh, folder, tmp_path / f"store{trial}", mine)
        try:
            run.listen(time.monotonic() + 60, lambda run=run: len(run.of("loss")) > 0)
            assert run.of("loss"), f"{mesh} did not start: {run.told}"
            if mine:
                process = run.ranks[victim]
                run.listen(time.monotonic() + 60, lambda dead=process: not dead.is_alive())
            else:  # by what the ranks have told, as machines differ in speed
                start, heard = time.monotonic(), run.heard + dice.randint(2, 25)
                run.listen(start + 60, lambda run=run, heard=heard: run.heard >= heard)
                run.listen(time.monotonic() + dice.uniform(0, (time.monotonic() - start) / 2))
                run.ranks[victim].kill()
            run.ranks[victim].join(5)
            assert run.ranks[victim].exitcode == -9, (mesh, mine, run.told[victim][-3:])
            while_saving += any(folder.glob("*.partial"))
            run.listen(time.monotonic() + dice.uniform(0, GRACE_S))
        finally:
            run.kill()
        resumed = {step for (step,) in run.of("resumed")}
        assert len(resumed) == 1, "ranks resumed at different steps"
        assert min(resumed) >= promised, f"{mesh}: step {promised} was saved, resumed at {resumed}"
        for step, loss in run.of("loss"):
            assert loss == pytest.approx(want[step], rel=1e-10, abs=0), (mesh, step)
        promised = max([promised, *(step for (step,) in run.of("saved"))])
        reached = max([reached, *(step for step, _ in run.of("loss"))])
    print(f"{KILLS} kills, {while_saving} of them while saving, up to step {reached}")
    assert while_saving >= KILLS // 4, "the dice must meet a checkpoint that is being written"
    assert reached > KILLS // 2, "the runs make way"


def test_saving_on_one_rank_only_is_named(forks: Any, tmp_path: Path) -> None:
    folder, store = str(tmp_path / "checkpoints"), str(tmp_path / "store")
    ranks = []
    for me in range(2):
        ours, theirs = forks.Pipe()
        process = forks.Process(target=crashing.alone, args=(me, 2, folder, store, theirs))
        process.start()
        ranks.append((process, ours))
    try:
        for _, pipe in ranks:
            assert pipe.poll(60), "a rank hangs"
            text = pipe.recv()
            assert text.startswith("BatchError") and "Checkpoints.save(2)" in text
    finally:
        for process, _ in ranks:
            process.kill()


ROOT = Path(__file__).parent.parent
LARGE = ["--steps", "14", "--every", "2", "--batch", "4", "--block", "16", "--layers", "1",
         "--width", "16", "--dtype", "float64"]  # fmt: skip


def launched(folder: Path, mesh: str, restarts: int, *more: str) -> subprocess.Popen[str]:
    n = autopar.mesh(mesh).size
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
               str(n), "--max-restarts", str(restarts), "examples/train_large.py", "--mesh", mesh,
               "--folder", str(folder), *LARGE, *more]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip


def test_torchrun_restarts_and_another_mesh_goes_on(tmp_path: Path) -> None:
    job = launched(tmp_path / "a", "fsdp=2", 2)
    losses: dict[int, list[float]] = {}
    starts, pid = [], 0
    try:
        for line in job.stdout or ():
            words = line.split()
            if words[0] == "attempt":
                starts.append(int(words[words.index("step") + 1]))
                pid = int(words[-1])
            elif words[0] == "step":
                losses.setdefault(int(words[1]), []).append(float(words[3]))
                if int(words[1]) == 7 and len(starts) == 1:
                    os.kill(pid, signal.SIGKILL)
        assert job.wait(30) == 0, "the restarted job ends well"
    finally:
        job.kill()
    assert len(starts) == 2 and 4 <= starts[1] <= 8, starts
    assert sorted(losses) == list(range(14))
    again = [pair for pair in losses.values() if len(pair) > 1]
    assert all(pair[0] == pytest.approx(pair[1], rel=1e-10) for pair in again)
    other = launched(tmp_path / "a", "tp=2", 0, "--steps", "16")
    text = other.communicate(timeout=120)[0]
    assert other.returncode == 0 and "on tp=2: step 14 of 16" in text, text
    assert (tmp_path / "a" / "model" / "model.safetensors").is_file()
