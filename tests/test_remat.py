"""Values computed again in the backward pass: the same numbers, in less memory."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from models import HUGGING_FACE, KINDS, make
from test_codegen import history
from test_equality import DROPOUT, equal, one_thread
from torch import nn

import autopar
from autopar.errors import InputError, PlanError
from autopar.memory import peak_bytes, saved_bytes
from autopar.program import Phases, info

__all__ = ["one_thread"]  # the fixture
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")


CASES = [(n, m, r) for n in HUGGING_FACE for m, r in (("dp=3", "selective"), ("tp=3", "full"))]
CASES += [(n, "dp=3", "full") for n in KINDS] + [(n, "fsdp=2, tp=2", "full") for n in ("gpt", "t5")]


@pytest.mark.parametrize(("name", "mesh", "remat"), CASES)
def test_model_equals_one_device(name: str, mesh: str, remat: str) -> None:
    """Three ranks have uneven rows or sizes; dropout must come out alike both times."""
    equal(*make(name, 5 if "dp=3" in mesh else 4, **DROPOUT.get(name, {})), mesh, remat=remat)


ROWS = 32  # so that activations outweigh gradients


@functools.cache
def phases(remat: Any, mesh: str = "dp=2", **changes: Any) -> Phases:
    changes = {"layers": 6, "vocab": 40, **changes}
    model, inputs = make("gpt", ROWS, **changes)
    return autopar.compile(model, mesh, inputs, remat=remat).of(0)


def repeated(found: Phases) -> list[str]:
    return [str(n.target) for n in found.backward.graph.nodes if info(n).again]


def test_what_is_cheap_is_repeated_and_products_are_not() -> None:
    none, selective, full = (phases(mode) for mode in ("none", "selective", "full"))
    dear = re.compile(r"mm|bmm|attention|all_|scatter")
    assert not repeated(none)
    assert any("gelu" in t for t in repeated(selective))
    assert not [t for t in repeated(selective) if dear.search(t)]
    assert [t for t in repeated(full) if dear.search(t)]
    assert saved_bytes(full) < 0.5 * saved_bytes(selective) < 0.4 * saved_bytes(none)
    assert peak_bytes(full) < peak_bytes(selective) < peak_bytes(none)


def test_blocks_are_repeated_one_at_a_time() -> None:
    """What one more layer keeps is what goes from block to block: one value of its width."""
    wide = {depth: saved_bytes(phases("full", layers=depth)) for depth in (6, 8)}
    one = ROWS // 2 * 16 * 32 * 8  # rows of a rank, tokens, width, bytes
    assert wide[8] - wide[6] <= 2 * 1.1 * one
    peaks = {depth: peak_bytes(phases("full", layers=depth)) for depth in (6, 8)}
    gradients = 2 * sum(p.nbytes for p in make("gpt", layers=1)[0].blocks.parameters())
    assert peaks[8] - peaks[6] <= 2 * 1.1 * one + gradients


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("gpt", "dp=2, tp=2"),
        ("gpt", "fsdp=2"),
        ("llama", "dp=2, tp=2"),
        ("vit", "fsdp=2"),
        ("resnet", "dp=1"),
        ("resnet", "dp=2, tp=2"),
    ],
)
@pytest.mark.parametrize("remat", ["none", "selective", "full"])
def test_predicted_peak_is_the_measured_one(name: str, remat: str, mesh: str) -> None:
    """A meter of every tensor that the generated code makes; on the mesh of size 1, on the CPU."""
    model, inputs = make(name)
    found = autopar.compile(model, mesh, inputs, remat=remat).of(0)
    device = "cpu" if mesh == "dp=1" else "meta"
    given = [n.meta["val"] for n in found.forward.graph.nodes if n.op == "placeholder"]
    held = sum(v.numel() * v.itemsize for v in given)
    measured = max(size for _, size in history(found, True, device, keep=True)) - held
    assert 0.98 * measured < peak_bytes(found) < 1.02 * measured


def test_bytes_given_are_kept_to_with_least_repeated() -> None:
    model, inputs = make("gpt", ROWS, layers=4, vocab=40)

    @functools.cache
    def made(remat: Any) -> Any:
        return autopar.compile(model, "dp=2", inputs, remat=remat)

    none, selective, full = (made(mode).peak_bytes for mode in ("none", "selective", "full"))
    assert full < selective < none
    last = -1
    for limit in (none, (none + selective) // 2, selective, (selective + full) // 2, full):
        found = made(limit)
        assert found.peak_bytes <= limit
        count = len(repeated(found.of(0)))
        assert count > last or last == -1
        last = count
    assert repeated(made(none).of(0)) == [] and last <= len(repeated(made("full").of(0)))
    half = made((none + selective) // 2)
    assert 0 < half.remat.blocks < 4, "only some of the blocks"
    autopar.verify(model, "dp=2", inputs, remat=(none + selective) // 2).raise_if_failed()


def test_bytes_that_are_too_few_are_refused() -> None:
    with pytest.raises(PlanError, match=r"at least [\d,]+ bytes on a rank, more than remat=1,000"):
        phases(1000)
    with pytest.raises(InputError, match="remat='some' is not known"):
        phases("some")
    with pytest.raises(InputError, match="remat=-5 bytes"):
        phases(-5)


def test_loops_stay_loops() -> None:
    lines = {}
    for layers in (6, 12):
        model, inputs = make("gpt", 4, layers=layers)
        code = autopar.compile(model, "dp=2", inputs, remat="full").code()
        lines[layers] = len(code.splitlines())
    assert lines[12] - lines[6] <= 8


class Noisy(nn.Module):
    """Dropout whose mask is needed for the gradient of the weight alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            nn.functional.dropout(torch.tanh(x @ self.weight), 0.5, self.training).square().mean()
        )


def test_masks_are_those_of_the_call_though_another_came_between() -> None:
    torch.manual_seed(0)
    model, x = Noisy().double(), torch.randn(4, 8).double()
    state = {n: t.clone() for n, t in model.state_dict().items()}
    grads = {}
    for remat in ("none", "selective"):
        fresh = Noisy().double()
        fresh.load_state_dict(state)
        parallel = autopar.parallelize(fresh, "dp=1", remat=remat)
        first, second = parallel(x), parallel(x + 1)
        first.backward()
        second.backward()
        grads[remat] = fresh.weight.grad
    kinds = repeated(autopar.compile(model, "dp=1", x, remat="selective").of(0))
    assert any("keep_mask" in t for t in kinds)
    assert torch.equal(grads["none"], grads["selective"])
