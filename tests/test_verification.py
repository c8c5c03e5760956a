"""`autopar.verify` covers the generated optimizer step, and says what it used and what it found."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from models import make
from test_equality import one_thread
from test_optimizers import Lion
from test_update import Lamb
from torch import Tensor, nn

import autopar
from autopar import tracing
from autopar.comparison import Trace, compare
from autopar.errors import AutoparError, InputError, VerificationError

__all__ = ["one_thread"]  # the fixture

OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, momentum=0.9, weight_decay=0.1),
    "adamw": partial(torch.optim.AdamW, weight_decay=0.1, eps=1e-3),
    "rmsprop": partial(torch.optim.RMSprop, weight_decay=0.1, eps=1e-3),
}


class Small(nn.Module):
    """Two layers; 5 rows of a weight are cut unevenly."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x))).square().mean()


def verified(optimizer: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    model, x = Small().double(), torch.randn(4, 6).double()
    return autopar.verify(model, "fsdp=2", x, optimizer=optimizer, lr=0.05, steps=3, **options)


# --- which step --------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS.values(), Lion, torch.optim.NAdam])
def test_generated_step_equals_the_class(optimizer: Any) -> None:
    report = verified(optimizer)
    report.raise_if_failed()
    assert "by the generated step" in str(report)


def test_generated_step_verifies_beside_tensor_parallelism() -> None:
    model, inputs = make("gpt", 5)
    report = autopar.verify(model, "dp=2, tp=2", inputs, optimizer=OPTIMIZERS["adamw"], zero=1)
    report.raise_if_failed()
    assert report.stepped.startswith("AdamW, by the generated step")


def test_own_step_is_used_where_asked_or_without_another() -> None:
    own = verified(torch.optim.AdamW, traced=False)
    own.raise_if_failed()
    assert "AdamW, by its own step on each rank's pieces (traced=False)" in str(own)
    factory = verified(lambda params, lr: torch.optim.SGD(params, lr=lr))
    factory.raise_if_failed()
    assert "is no optimizer class" in factory.stepped
    assert "by its own step" in verified(Lamb).stepped, "it mixes elements"
    with pytest.raises(InputError, match="Lamb has no generated step: .*norm"):
        verified(Lamb, traced=True)
    with pytest.raises(InputError, match="is no optimizer class"):
        verified(lambda params, lr: torch.optim.SGD(params, lr=lr), traced=True)


# --- mistakes in it ----------------------------------------------------------------------------


def sources(optimizer: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The generated steps of a run: of the first step, and of those after."""
    found: list[str] = []
    load = tracing.load_update

    def noted(source: str) -> Any:
        found.append(source)
        return load(source)

    with monkeypatch.context() as patch:
        patch.setattr(tracing, "load_update", noted)
        verified(optimizer).raise_if_failed()
    return list(dict.fromkeys(found))


SIGNS = {"add_(": "sub_(", "sub_(": "add_(", "mul_(": "div_(", "div_(": "mul_("}


def mistakes(source: str) -> list[str]:
    """Each statement that writes left out, and each with another sign."""
    lines, found = source.splitlines(), []
    for i, line in enumerate(lines):
        if not line.strip().startswith("foreach."):
            continue
        wrong = ["    pass"]
        wrong += [line.replace(f".{a}", f".{b}") for a, b in SIGNS.items() if f".{a}" in line]
        if "value=" in line:
            wrong.append(line.replace("value=", "value=-"))
        found += ["\n".join([*lines[:i], new, *lines[i + 1 :]]) for new in wrong]
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_mistake_in_the_generated_step_is_caught(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong sign, weight decay left out, state that is not written."""
    source = sources(OPTIMIZERS[name], monkeypatch)[-1]  # that of the first step works on zeros
    load = tracing.load_update
    missed = []
    wrong = mistakes(source)
    for text in wrong:

        def changed(given: str, text: str = text) -> Any:
            return load(text if given == source else given)

        monkeypatch.setattr(tracing, "load_update", changed)
        if verified(OPTIMIZERS[name]).ok:
            missed.append(text)
    assert not missed and len(wrong) >= 6, "\n".join(missed)


def stale(function: Callable[..., Any]) -> Callable[..., Any]:
    """Works on copies, so that the shard stays as it was."""

    def copied(rows: Any, inputs: Any) -> Any:
        return function([[t.clone() for t in row] for row in rows], inputs)

    return copied


def test_stale_shard_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_chunked", stale(tracing._chunked))
    report = verified(torch.optim.AdamW)
    assert {r.what for r in report.rows if not r.ok and r.step == 0} == {"params"}
    with pytest.raises(VerificationError, match="differs from one device"):
        report.raise_if_failed()
    verified(torch.optim.AdamW, traced=False).raise_if_failed()


# --- NaN ---------------------------------------------------------------------------------------


class Lost(Small):
    """Its loss is NaN."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (x.sum() * 0 - 1).sqrt()


def test_nan_on_one_device_is_told_apart_from_a_difference() -> None:
    model, x = Lost().double(), torch.randn(4, 6).double()
    report = autopar.verify(model, "dp=2", x, steps=1)
    assert not report.ok and "DIFFERENT" not in str(report)
    assert "the model itself gives NaN on one device" in str(report)
    with pytest.raises(AutoparError, match="could not be compared with one device"):
        report.raise_if_failed()


# --- gradients that one device rounds away -----------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}])
def test_gradient_that_is_zero_on_paper_may_differ_as_on_one_device(options: Any) -> None:
    """A bias before a batch norm: its gradient is all rounding, in float32 more than 1e-4."""
    model, inputs = make("waves")
    inputs = {k: v.float() if v.is_floating_point() else v for k, v in inputs.items()}
    report = autopar.verify(model.float(), "dp=2, tp=2", inputs, steps=2, lr=0.02, **options)
    report.raise_if_failed()


def traces(gradient: float, rest: float = 1.0) -> Trace:
    step = {"bias": torch.tensor([gradient]), "weight": torch.tensor([rest])}
    return Trace([torch.ones(())], [dict(step)], [dict(step)], [{}])


def test_only_what_one_device_rounds_is_let_pass() -> None:
    want, exact = traces(3e-7), traces(0.0)
    near, far, wrong = traces(-9e-7), traces(9e-6), traces(3e-7, 1.001)

    def fine(have: Trace, truth: Trace | None) -> bool:
        made = None if truth is None else lambda: truth
        return all(row.ok for row in compare(have, want, 1e-4, made))

    assert fine(near, exact) and not fine(near, None)
    assert not fine(far, exact) and not fine(wrong, exact)
