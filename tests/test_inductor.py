"""The inductor backend runs the same program; where it could not be trusted it is not used."""

from __future__ import annotations

import shutil
import warnings
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn

import autopar

pytestmark = pytest.mark.skipif(
    not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")),
    reason="inductor compiles C++ on the CPU",
)


def loss(out: Tensor, targets: Tensor) -> Tensor:
    return (out - targets).square().mean()


def trains(rank: int, n: int, mesh: str, rows: int) -> Any:
    """Losses of three steps by both backends, and the warnings of inductor."""
    found = []
    for backend in ("eager", "inductor"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4)).double()
        x, y = torch.randn(rows, 6).double(), torch.randn(rows, 4).double()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            parallel = autopar.parallelize(model, mesh, backend=backend, loss=loss)
            optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.1)
            for _ in range(3):
                value = parallel(x, targets=y)
                value.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(float(value.detach()))
    said = [str(w.message) for w in seen if "sizes that do not divide" in str(w.message)]
    return found[:3], found[3:], said


@pytest.mark.parametrize("mesh", ["dp=2", "fsdp=2"])
def test_inductor_trains_alike(mesh: str, pool: Pool) -> None:
    for eager, inductor, said in pool.run(2, trains, mesh, 4, timeout_s=300.0):
        assert inductor == pytest.approx(eager, rel=1e-12)
        assert eager[2] < eager[0] and not said


def test_ranks_with_uneven_pieces_run_python(pool: Pool) -> None:
    """Inductor orders what does not depend on each other as it likes: ranks would wait forever."""
    results = pool.run(2, trains, "dp=2", 3)
    for rank, (eager, inductor, said) in enumerate(results):
        assert inductor == eager
        assert len(said) == (rank == 0)
