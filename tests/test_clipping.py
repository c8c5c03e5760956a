"""Norms and clipping of gradients are those of one device on every mesh."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from models import make
from pool import Pool
from test_processes import loss_of, whole
from torch import nn

import autopar
from autopar.errors import InputError

NORMS = (2.0, 1.0, 3.0, math.inf)


def clipped(going: Any, inputs: Any, own: bool) -> Any:
    """Norm and clipped gradients, for each type of norm and two limits."""
    found = {}
    going.zero_grad()
    loss_of(going(**inputs)).backward()
    fresh = {q: q.grad.clone() for q in going.parameters() if q.grad is not None}
    for p in NORMS:
        for limit in (0.05, 1e6):
            for q, grad in fresh.items():
                q.grad = grad.clone()
            if own:
                norm = going.clip_grad_norm_(limit, norm_type=p)
                assert not hasattr(norm, "full_tensor")
            else:
                norm = nn.utils.clip_grad_norm_(going.parameters(), limit, norm_type=p)
            grads = [whole(q.grad) for q in going.parameters() if q.grad is not None]
            found[p, limit] = (whole(norm), grads)
    return found


def clips(rank: int, n: int, name: str, mesh: str, rows: int, changes: Any) -> Any:
    model, inputs = make(name, rows, **changes)
    freeze(model)
    parallel = autopar.parallelize(model, mesh, example_inputs=inputs)
    return clipped(parallel, inputs, True), clipped(parallel, inputs, False)


def freeze(model: nn.Module) -> None:
    list(model.parameters())[1].requires_grad_(False)


@pytest.mark.parametrize(
    ("name", "mesh", "rows", "changes"),
    [
        ("mixer", "dp=2", 4, {}),
        ("mixer", "fsdp=2", 4, {}),
        ("mixer", "tp=2", 4, {}),
        ("gpt", "dp=2, fsdp=2, tp=2", 8, {"layers": 1}),
        ("gpt", "fsdp=3", 5, {"heads": 4, "width": 32}),  # uneven pieces, 5 rows
        ("gpt", "tp=3", 4, {"heads": 4, "width": 32}),
        ("gpt2", "dp=2, tp=2", 4, {"vocab_size": 517}),  # a tied embedding, unevenly cut
    ],
)
def test_norm_is_that_of_one_device(
    name: str, mesh: str, rows: int, changes: Any, pool: Pool
) -> None:
    model, inputs = make(name, rows, **changes)
    freeze(model)
    want = clipped(model, inputs, False)
    limit = 1e-6 if name == "gpt2" else 1e-10
    for ways in pool.run(autopar.mesh(mesh).size, clips, name, mesh, rows, changes):
        for have in ways:
            for key, (norm, grads) in want.items():
                assert float(have[key][0]) == pytest.approx(float(norm), rel=limit), key
                assert len(have[key][1]) == len(grads)
                for a, b in zip(have[key][1], grads, strict=True):
                    assert np.allclose(a, b, rtol=limit, atol=limit * abs(b).max() + 1e-15)


def test_norm_that_is_not_finite_is_told() -> None:
    model = autopar.parallelize(nn.Linear(3, 1), "dp=1", loss=lambda out, t: out.sum() * t)
    assert float(model.clip_grad_norm_(1.0)) == 0  # nothing has a gradient
    model(torch.ones(2, 3), targets=torch.tensor(math.inf)).backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        model.clip_grad_norm_(1.0, error_if_nonfinite=True)
    with pytest.raises(InputError, match="norm_type=0"):
        model.clip_grad_norm_(1.0, norm_type=0)


def test_norm_type_of_float32_is_float32() -> None:
    model = autopar.parallelize(nn.Linear(3, 1), "dp=1", loss=lambda out, t: out.sum() * t)
    model(torch.ones(2, 3), targets=torch.tensor(1.0)).backward()
    assert model.clip_grad_norm_(1.0).dtype == torch.float32
