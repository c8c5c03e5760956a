"""What compilations share changes no program: kept graphs of the tests, traces of the package."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from models import make
from torch import nn

import autopar
from autopar import api

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")

CASES: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("gpt2", "dp=2, tp=2", {"n_layer": 1}, {}),
    ("t5", "tp=3", {"num_layers": 1, "dropout_rate": 0.1}, {"remat": "full"}),
    ("resnet", "fsdp=3", {}, {}),
    ("gpt", "dp=2", {"layers": 1}, {"accumulate": 2, "zero": 1}),
    ("bert", "dp=3", {"num_hidden_layers": 1}, {"precision": "fp32"}),
]


def code(model: nn.Module, inputs: Any, mesh: str, **options: Any) -> str:
    compiled = autopar.compile(model, mesh, inputs, **options)
    return compiled.code() + compiled.plan_json()


@pytest.mark.parametrize(("name", "mesh", "changes", "options"), CASES)
def test_a_kept_graph_gives_the_program_of_a_new_one(
    name: str, mesh: str, changes: dict[str, Any], options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    model, inputs = make(name, 5, **changes)
    twice = [code(model, inputs, mesh, **options) for _ in range(2)]
    monkeypatch.setattr(api, "capture", api.capture.__wrapped__)  # type: ignore[attr-defined]
    assert set(twice) == {code(model, inputs, mesh, **options)}


def _frozen(model: Any) -> None:
    model.blocks[0]["up"].requires_grad_(False)


def _tied(model: Any) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


def _squared(model: Any) -> None:
    model.norm.forward = torch.square


def _hooked(model: Any) -> None:
    model.norm.register_forward_hook(lambda module, args, out: out.abs())


@pytest.mark.parametrize(
    "change",
    [
        nn.Module.eval,
        nn.Module.float,
        _frozen,
        _tied,
        _squared,
        _hooked,
        lambda model: setattr(model, "dropout", 0.4),
        lambda model: setattr(model, "norm", nn.RMSNorm(32).double()),
    ],
)
def test_a_changed_model_has_a_graph_of_its_own(change: Any) -> None:
    model, inputs = make("gpt", layers=1, dropout=0.2)
    before = code(model, inputs, "dp=1")
    change(model)
    assert code(model, inputs, "dp=1") != before


def test_another_call_has_a_graph_of_its_own() -> None:
    model, inputs = make("gpt", layers=1)
    found = {
        code(model, call, "dp=1")
        for call in (inputs, {"x": inputs["x"]}, {k: v[:3] for k, v in inputs.items()})
    }
    assert len(found) == 3


@pytest.mark.parametrize(("name", "mesh", "changes", "options"), CASES)
def test_code_does_not_depend_on_what_was_compiled_before(
    name: str, mesh: str, changes: dict[str, Any], options: dict[str, Any]
) -> None:
    """Traces are shared within a thread, so a new one traces all by itself."""
    for other in ("mixer", "unet"):
        code(*make(other, 5), mesh)
    model, inputs = make(name, 5, **changes)
    here, there = code(model, inputs, mesh, **options), []
    thread = threading.Thread(
        target=lambda: there.append(code(model, inputs, mesh, **options)), daemon=True
    )
    thread.start()
    thread.join()
    assert there == [here]
