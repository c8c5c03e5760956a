"""A rank that dies or raises stops all others within a minute, and they say which it was."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import os, signal, sys
import torch
import torch.nn.functional as F
from torch import nn
import autopar

how, victim = sys.argv[1], int(sys.argv[2])
rank = int(os.environ["RANK"])
torch.manual_seed(0)
model = autopar.parallelize(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), "dp=3")
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1000000):
    x, y = torch.randn(6, 8), torch.randint(0, 4, (6,))
    if step == 3 and rank == victim:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raise":
            raise ValueError("no more data")
        if how == "leave":
            sys.exit(0)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    opt.step()
    opt.zero_grad()
    if step == 2:
        print("running", flush=True)
"""
ROOT = Path(__file__).parent.parent


def start(path: Path, how: str, victim: int, *launcher: str, **extra: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **extra}
    return subprocess.Popen(
        [sys.executable, *launcher, str(path), how, str(victim)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def free_port() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


@pytest.mark.parametrize(
    ("how", "victim", "words"),
    [
        ("kill", 1, "Rank 1 ("),
        ("kill", 0, "Rank 0 ("),  # the store lives there
        ("raise", 2, "raised ValueError: no more data"),
        ("leave", 1, "has ended its program"),
    ],
)
def test_the_others_stop_and_name_the_rank(tmp_path, how, victim, words):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    port = free_port()
    ranks = [
        start(path, how, victim, RANK=str(r), LOCAL_RANK=str(r), WORLD_SIZE="3",
              MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        for r in range(3)
    ]  # fmt: skip
    began, outputs = time.monotonic(), {}
    try:
        ranks[victim].wait(timeout=100)  # starting and compiling count too
        died = time.monotonic()
        for r, process in enumerate(ranks):
            outputs[r] = process.communicate(timeout=60 - (time.monotonic() - died))[0]
    finally:
        for process in ranks:
            process.kill()
    took = time.monotonic() - died
    assert took < 60, f"{took:.0f} s, {time.monotonic() - began:.0f} s with the start"
    for r, process in enumerate(ranks):
        assert "running" in outputs[r], outputs[r]
        if r != victim:
            assert process.returncode != 0
            last = outputs[r][outputs[r].rfind("RankError") :]
            assert f"Rank {victim} (" in last and words in last, outputs[r]
            assert f"rank {r} was in all_" in last, outputs[r]


def test_a_launched_job_ends_when_a_rank_dies(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    job = start(path, "kill", 1, "-m", "torch.distributed.run", "--nproc-per-node", "3",
                "--master-port", free_port())  # fmt: skip
    try:
        text = job.communicate(timeout=120)[0]
    finally:
        job.kill()
    assert job.returncode != 0
    assert "running" in text and "rank      : 1 (local_rank: 1)" in text, text
