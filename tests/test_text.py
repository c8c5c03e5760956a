"""The text form of programs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import AutoparError
from autopar.text import parse, show


class Net(nn.Module):
    """Dropout, batch norm and a tied weight: sites, buffers and aliases in one small model."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.norm = nn.BatchNorm1d(12)
        self.second = nn.Linear(12, 12)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        """Loss and result."""
        h = nn.functional.dropout(self.norm(self.first(x)), 0.1)
        out = self.second(h)
        return {"loss": nn.functional.cross_entropy(out, y), "out": out}


@pytest.fixture(scope="module")
def compiled() -> autopar.Compiled:
    inputs = {"x": torch.randn(6, 12), "y": torch.randint(0, 12, (6,))}
    return autopar.compile(Net(), "dp=2, fsdp=3, tp=3", inputs)


@pytest.mark.parametrize("level", ["annotated", "spmd"])
def test_text_parses_back_to_the_same_text(compiled: autopar.Compiled, level: str) -> None:
    at = {"dp": 0, "fsdp": 0, "tp": 0}
    program = compiled.annotated if level == "annotated" else compiled.of(0).program
    text = compiled.text(level)
    again = parse(text)
    assert show(again, at) == text
    assert [n.name for n in again.graph.graph.nodes] == [n.name for n in program.graph.graph.nodes]
    for a, b in zip(again.graph.graph.nodes, program.graph.graph.nodes, strict=True):
        assert a.target == b.target
        if isinstance(b.meta.get("val"), torch.Tensor):
            assert a.meta["val"].shape == b.meta["val"].shape
            assert a.meta["val"].dtype == b.meta["val"].dtype
    assert again.mutated == program.mutated
    assert [s.aliases for s in again.states] == [s.aliases for s in program.states]


def test_text_of_parsed_program_computes_the_same() -> None:
    model = nn.Sequential(nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 4))
    x = torch.randn(4, 8)
    program = autopar.compile(model, "dp=2", x).annotated
    again = parse(show(program))
    states = dict(model.named_parameters())
    values = [states[s.name] for s in again.states]
    (got,) = again.graph(*values, x)
    torch.testing.assert_close(got, model(x))


@pytest.mark.parametrize(
    "text", ["", "x = 1", "# level spmd on dp=2\ndef program():\n    y: 'q9[3]' = aten.mm(x, x)\n"]
)
def test_text_that_is_no_program_is_refused(text: str) -> None:
    with pytest.raises(AutoparError, match="not a program"):
        parse(text)
