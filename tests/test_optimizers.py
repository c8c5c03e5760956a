"""Optimizers of torch on a mesh step as on one device (real gloo processes)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import make
from pool import Pool
from test_processes import Arrays, agree, loss_of, report, train, whole
from torch import Tensor, nn

import autopar

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, maximize=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "own": lambda p: Lion(p, lr=0.01),
}


class Lion(torch.optim.Optimizer):
    """A user's class (Chen et al. 2023, algorithm 2)."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.add_(torch.sign(0.9 * m + 0.1 * p.grad), alpha=-group["lr"])
                m.mul_(0.99).add_(p.grad, alpha=0.01)


def moments(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The whole state of each parameter, in order."""
    states = optimizer.state_dict()["state"]
    return [
        {k: whole(v) if isinstance(v, Tensor) else v for k, v in states[i].items()}
        for i in sorted(states)
    ]


def steps(model: nn.Module, inputs: Any, name: str) -> tuple[list[Arrays], list[dict[str, Any]]]:
    """A loop, and the optimizer's state after it."""
    made: list[torch.optim.Optimizer] = []

    def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
        made.append(OPTIMIZERS[name](parameters))
        return made[0]

    rows = train(model, lambda m: loss_of(m(**inputs)), make_optimizer)
    return rows, moments(made[0])


def trains(rank: int, n: int, name: str, mesh: str) -> Any:
    model, inputs = make("mixer")
    rows, state = steps(autopar.parallelize(model, mesh), inputs, name)
    return report(rank, rows), state


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_every_optimizer_steps_as_on_one_device(name: str, pool: Pool) -> None:
    found = pool.run(4, trains, name, "dp=2, tp=2")
    model, inputs = make("mixer")
    rows, want = steps(copy.deepcopy(model), inputs, name)
    agree([ranks for ranks, _ in found], rows, model)
    for _, have in found:
        assert len(have) == len(want) > 0
        for a, b in zip(have, want, strict=True):
            assert list(a) == list(b)
            for key in a:
                torch.testing.assert_close(
                    torch.as_tensor(a[key]), torch.as_tensor(b[key]), rtol=1e-9, atol=1e-13
                )


def keeps_list(rank: int, n: int) -> list[float]:
    """Everything is made from a list of parameters of before the first call."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)).double()
    x, y = torch.randn(4, 6, dtype=torch.double), torch.randn(4, 1, dtype=torch.double)
    going: Any = model
    if n > 1:
        going = autopar.parallelize(model, "dp=2", loss=lambda out, t: (out - t).square().mean())
    parameters = list(going.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    def loss() -> Tensor:
        return going(x, targets=y) if n > 1 else (going(x) - y).square().mean()

    loss().backward()
    optimizer.zero_grad()  # a skipped step: its gradients must not stay
    loss().backward()
    norm = nn.utils.clip_grad_norm_(parameters, 0.1)
    optimizer.step()
    return [float(whole(norm)), float(loss().detach())]


def test_parameters_listed_before_the_first_call_lead_to_the_real_ones(pool: Pool) -> None:
    want = keeps_list(0, 1)
    for have in pool.run(2, keeps_list):
        assert have == pytest.approx(want, rel=1e-10)


def fails_once(rank: int, n: int) -> tuple[bool, bool]:
    """A step that raises leaves pieces behind; the next one goes on with DTensors."""
    model, inputs = make("mixer")
    parallel = autopar.parallelize(model, "tp=2", example_inputs=inputs)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    loss_of(parallel(**inputs)).backward()
    first = next(iter(parallel.parameters()))
    lr, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], "no number"
    with pytest.raises((TypeError, RuntimeError)):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = lr
    before = whole(first)
    optimizer.step()
    same = all(
        p is q
        for p, q in zip(optimizer.param_groups[0]["params"], parallel.parameters(), strict=True)
    )
    return same, bool((whole(first) != before).any())


def test_step_that_raised_is_undone(pool: Pool) -> None:
    assert pool.run(2, fails_once) == [(True, True)] * 2


def hooked(rank: int, n: int) -> list[bool]:
    """Hooks of before the first call go on, and can be removed."""
    model, inputs = make("mixer")
    seen: list[str] = []
    first = next(iter(model.parameters()))
    handle = first.register_hook(lambda g: 2 * g)
    first.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    parallel = autopar.parallelize(model, "dp=2")
    loss_of(parallel(**inputs)).backward()
    now = next(iter(parallel.parameters()))
    twice = whole(now.grad)
    now.grad = None
    handle.remove()
    loss_of(parallel(**inputs)).backward()
    return [bool((twice == 2 * whole(now.grad)).all()), seen == ["accumulated"] * 2]


def test_hooks_registered_before_the_first_call_stay(pool: Pool) -> None:
    assert pool.run(2, hooked) == [[True, True]] * 2
