"""A run that somebody kills: one rank of it, for `test_crash`.

It is imported by the server that forks the ranks, and those of the pool (see `forks`); a program is
compiled there once, too, and models of transformers are made, to warm what these import.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import HUGGING_FACE, make
from torch import Tensor, nn

import autopar
from autopar import checkpoint

__all__ = ["LAST", "alone", "model_of", "rank", "steps"]

LAST = 300  # steps that the run would take
ROWS = 8


class Model(nn.Module):
    """Dropout, a norm with buffers and odd sizes: whatever a resumed run could get wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 1)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor]:
        z = F.dropout(F.gelu(self.norm(self.first(x))), 0.2, self.training)
        return (F.mse_loss(self.last(z).squeeze(1), y),)


def batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, 6, generator=generator, dtype=torch.float64)
    return {"x": x, "y": x.sum(1).sin()}


def model_of(mesh: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = autopar.parallelize(Model().double(), mesh, seed=5)
    return model, torch.optim.AdamW(model.parameters(), lr=0.003)


def steps(model: nn.Module, optimizer: Any, first: int, last: int) -> Any:
    """The loss after each step."""
    for step in range(first, last):
        (loss,) = model(**batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield step, loss.item()


def mined(number: int) -> None:
    """Let this process die at its n-th operation on files from here, before or after it."""
    left = [number]

    def laid(function: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 2
            here = left[0]  # one operation calls others
            if here == -1:  # an odd number: before it
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return function(*args, **kwargs)
            finally:
                if here == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        return step

    for owner, name in ((os, "fsync"), (os, "mkdir"), (os, "rename"), (os, "rmdir"),
                        (os, "unlink"), (shutil, "rmtree")):  # fmt: skip
        setattr(owner, name, laid(getattr(owner, name)))
    checkpoint.Writer.write_data = laid(checkpoint.Writer.write_data)  # type: ignore


def rank(me: int, n: int, mesh: str, folder: str, store: str, tell: Connection, mine: int) -> None:
    """One rank: resume, train, save at every step, tell of each; `mine` is where to die, or 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, n), rank=me, world_size=n)
    model, optimizer = model_of(mesh)
    checkpoints = autopar.Checkpoints(folder)
    resumed = checkpoints.load(model, optimizer)
    first = 0 if resumed is None else resumed.step
    tell.send(("resumed", first))
    if mine:
        mined(mine)
    for step, loss in steps(model, optimizer, first, LAST):
        tell.send(("loss", step, loss))
        checkpoints.wait()
        tell.send(("saved", step))
        checkpoints.save(step + 1, model, optimizer, wait=step % 2 == 0)
        if step % 2 == 0:
            tell.send(("saved", step + 1))


def alone(me: int, n: int, folder: str, store: str, tell: Connection) -> None:
    """Rank 0 saves and the others train on."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, n), rank=me, world_size=n)
    model, optimizer = model_of("dp=2")
    for _ in steps(model, optimizer, 0, 2):
        pass
    try:
        if me == 0:
            autopar.Checkpoints(folder).save(2, model, optimizer)
        for _ in steps(model, optimizer, 2, 10_000):
            pass
    except autopar.AutoparError as error:
        tell.send(f"{type(error).__name__}: {error}")


def warm() -> None:
    torch.set_num_threads(1)
    autopar.compile(Model().double(), "tp=2", batch(0))
    for name in HUGGING_FACE:
        make(name)
    gc.collect()
    gc.freeze()  # what is there need not be looked through in each process


if os.environ.get("AUTOPAR_TEST_WARM"):
    warm()
