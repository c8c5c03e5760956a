"""Checkpoints: every mesh to every other and to one device, and what goes wrong on the way.

A chain of runs saves on one mesh and goes on upon the next; its losses are those of one run that
was never interrupted.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import make
from pool import Pool
from test_processes import loss_of
from torch import Tensor, nn

import autopar

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")

EACH = 2  # steps on a mesh


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, dampening=0.1, nesterov=False)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def rmsprop(parameters: Any) -> torch.optim.Optimizer:
    """Two groups, centered and with momentum: three states a parameter."""
    first, *others = parameters
    groups = [{"params": [first], "lr": 0.001}, {"params": others}]
    return torch.optim.RMSprop(groups, lr=0.005, centered=True, momentum=0.5)


def freeze(model: nn.Module) -> nn.Module:
    for i, p in enumerate(model.parameters()):
        p.requires_grad_(i % 3 != 1)
    return model


class Tiny(nn.Module):
    """Buffers that count and average, and sizes of which some ranks of four hold nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.last = nn.BatchNorm1d(5), nn.Linear(6, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        z = self.last(F.gelu(self.norm(self.first(x))))
        return F.mse_loss(z.squeeze(1), y), z


def built(name: str, changes: dict[str, Any]) -> tuple[nn.Module, dict[str, Tensor]]:
    changes = dict(changes)
    frozen = changes.pop("frozen", False)
    if name == "tiny":
        torch.manual_seed(0)
        model, inputs = Tiny().double(), {"x": torch.randn(8, 6), "y": torch.randn(8)}
        inputs = {k: v.double() for k, v in inputs.items()}
    else:
        model, inputs = make(name, layers=1, **changes)
    return (freeze(model) if frozen else model), inputs


def batch(inputs: dict[str, Tensor], step: int) -> dict[str, Tensor]:
    """Another batch each step."""
    return {k: v.roll(step, 0) if v.dim() else v for k, v in inputs.items()}


def steps(
    model: nn.Module, optimizer: Any, inputs: dict[str, Tensor], first: int, last: int
) -> list[float]:
    losses = []
    for step in range(first, last):
        loss = loss_of(model(**batch(inputs, step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def parallel(model: nn.Module, mesh: str | None, **options: Any) -> nn.Module:
    return model if mesh is None else autopar.parallelize(model, mesh, **options)


def tidy(work: Any) -> Any:
    """Let ranks drop their models together: a heart that beats alone lingers for the others."""

    @functools.wraps(work)
    def done(*args: Any) -> Any:
        try:
            return work(*args)
        finally:
            gc.collect()

    return done


@tidy
def part(
    rank: int, n: int, name: str, changes: dict[str, Any], mesh: str | None, make_optimizer: Any,
    folder: str, late: bool, wait: bool,
) -> tuple[int, list[float]]:  # fmt: skip
    """Go on where the run before ended; `late` spoils everything by two steps before loading."""
    torch.manual_seed(rank)  # nothing may hang on it
    model, inputs = built(name, changes)
    model = parallel(model, mesh, seed=99 if late else 3)
    optimizer = make_optimizer(model.parameters())
    checkpoints = autopar.Checkpoints(folder)
    if late:
        steps(model, optimizer, inputs, 5, 7)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    resumed = checkpoints.load(model, optimizer)
    if resumed is None:
        model, inputs = built(name, changes)
        model = parallel(model, mesh, seed=3)
        optimizer = make_optimizer(model.parameters())
    else:
        assert resumed.extra == {"next": resumed.step}
    first = 0 if resumed is None else resumed.step
    losses = steps(model, optimizer, inputs, first, first + EACH)
    checkpoints.save(first + EACH, model, optimizer, {"next": first + EACH}, wait=wait)
    if not wait:  # what is saved must be what was there
        steps(model, optimizer, inputs, 0, 1)
        checkpoints.wait()
    return first, losses


def chain(
    pool: Pool, name: str, changes: dict[str, Any], meshes: list[str | None], make_optimizer: Any,
    folder: Path,
) -> list[float]:  # fmt: skip
    losses: list[float] = []
    for i, mesh in enumerate(meshes):
        n = 1 if mesh is None else autopar.mesh(mesh).size
        late, wait = i % 2 == 1, i % 3 != 1
        ranks = pool.run(n, part, name, changes, mesh, make_optimizer, str(folder), late, wait)
        assert {first for first, _ in ranks} == {EACH * i}, f"{mesh} resumed elsewhere"
        for _, found in ranks:
            assert found == ranks[0][1], "ranks differ"
        losses += ranks[0][1]
    return losses


def uninterrupted(
    name: str, changes: dict[str, Any], make_optimizer: Any, count: int, mesh: Any
) -> list[float]:
    model, inputs = built(name, changes)
    model = parallel(model, mesh, seed=3)
    return steps(model, make_optimizer(model.parameters()), inputs, 0, count)


UNEVEN = {"heads": 6, "width": 42, "vocab": 517}

CHAINS: list[tuple[str, dict[str, Any], list[str | None], Any]] = [
    ("gpt", {"weighted": True}, ["fsdp=2", "tp=2", "dp=2", None, "dp=2, tp=2"], adamw),
    ("gpt", UNEVEN, ["tp=4", "fsdp=3", "tp=2", "fsdp=2, tp=2", None], sgd),
    ("gpt", {"dropout": 0.2}, ["dp=2", "tp=3", "fsdp=2, tp=2", "dp=1", "tp=2, fsdp=2"], adamw),
    ("gpt", {"frozen": True}, ["dp=2, fsdp=2", "tp=2", None], rmsprop),
    ("tiny", {}, ["fsdp=4", "dp=2", "tp=2", None, "fsdp=3"], sgd),
]


@pytest.mark.parametrize(("name", "changes", "meshes", "make_optimizer"), CHAINS, ids=str)
def test_losses_go_on_upon_another_mesh(
    name: str, changes: dict[str, Any], meshes: list[str | None], make_optimizer: Any, pool: Pool,
    tmp_path: Path,
) -> None:  # fmt: skip
    losses = chain(pool, name, changes, meshes, make_optimizer, tmp_path)
    reference = 1 if "dropout" in changes else None
    want = uninterrupted(name, changes, make_optimizer, EACH * len(meshes), reference)
    assert losses == pytest.approx(want, rel=1e-10, abs=0)
    assert autopar.Checkpoints(tmp_path).steps() == [EACH * i for i in range(1, len(meshes) + 1)][-2:]
    assert not list(tmp_path.glob("*.partial"))
