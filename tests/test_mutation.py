"""Verification must notice every single mistake in the collectives of a compiled program."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.mutation import mutants
from autopar.strategies.data import Data
from autopar.strategies.tensor import Tensors
from autopar.verification import caught_virtually, compare, run_eager, run_virtual, static


class Gpt(nn.Module):
    """One layer with tied embedding, attention and label smoothing; 23 words cut unevenly."""

    def __init__(self, words=23, width=8, heads=2, length=6):
        super().__init__()
        self.heads = heads
        self.wte, self.wpe = nn.Embedding(words, width), nn.Embedding(length, width)
        self.ln1, self.ln2, self.lnf = nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        rows, length = x.shape
        h = self.wte(x) + self.wpe(torch.arange(length, device=x.device))
        q, k, v = (
            z.view(rows, length, self.heads, -1).transpose(1, 2)
            for z in self.qkv(self.ln1(h)).chunk(3, -1)
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.out(a.transpose(1, 2).reshape(rows, length, -1))
        h = h + self.down(F.gelu(self.up(self.ln2(h))))
        logits = self.head(self.lnf(h))
        return F.cross_entropy(logits.flatten(0, 1), y.flatten(), label_smoothing=0.1)


class Conv(nn.Module):
    """Convolution and BatchNorm; the bias before the norm would have no gradient."""

    def __init__(self):
        super().__init__()
        self.one, self.norm = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.two, self.head = nn.Conv2d(4, 6, 3, padding=1), nn.Linear(6, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = F.relu(self.two(F.relu(self.norm(self.one(x)))))
        return F.cross_entropy(self.head(h.mean((2, 3))), y)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.two(F.gelu(self.norm(self.one(x)))), y)


def make(kind: type[nn.Module], rows: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model without special values: a norm of ones and zeros would hide a wrong order."""
    torch.manual_seed(0)
    model = kind().double()
    for p in model.parameters():
        nn.init.normal_(p, 0.3 if p.dim() < 2 else 0.0, 0.5)
    for b in model.buffers():
        if b.is_floating_point():
            b.uniform_(0.5, 1.5)
    if kind is Gpt:
        y = torch.randint(0, 23, (rows, 6))
        y[0, :4] = -100
        return model, {"x": torch.randint(0, 23, (rows, 6)), "y": y}
    if kind is Conv:
        x = torch.randn(rows, 3, 6, 6, dtype=torch.float64)
        y = torch.randint(0, 5, (rows,))
        y[0] = -100  # or each rank would count the same rows, whatever the axis
        return model, {"x": x, "y": y}
    x, y = torch.randn(rows, 6).double(), torch.randn(rows, 4).double()
    return model, {"x": x, "y": y}


CASES = [
    (kind, mesh, rows, many)
    for kind in (Mlp, Conv, Gpt)
    for mesh, rows, many in [
        ("dp=2", 4, False),
        ("dp=3", 5, False),
        ("tp=2", 4, False),
        ("tp=2", 4, True),
        ("dp=2, tp=2", 4, True),
    ]
] + [(Gpt, "fsdp=2, tp=2", 4, False), (Conv, "fsdp=3", 5, False)]
OPTIONS = [
    (Mlp, "dp=2", 4, {"accumulate": 2}),
    (Mlp, "fsdp=2", 4, {"precision": "fp32"}),
    (Mlp, "dp=2", 4, {"reduce": "fp32", "precision": "fp32"}),
    (Gpt, "fsdp=2", 4, {"zero": 1}),
    (Mlp, "dp=2, tp=2", 4, {"remat": "selective"}),
]


def options(mesh: str, many: bool) -> dict:
    """`many`: charge only bytes, so that the plan has many small collectives."""
    if not many:
        return {}
    made = [Data("dp")] if "dp" in mesh else []
    return {"strategy": [*made, Tensors("tp", latency_bytes=0.0)]}


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


@pytest.fixture(scope="module")
def tally() -> Iterator[Counter]:
    """Counts over all cases; printed with -s."""
    counts: Counter = Counter()
    yield counts
    print("\n" + "; ".join(f"{k}: {n}" for k, n in counts.items()))
    assert counts["mistakes"] == 0 or counts["static"] > 0.9 * counts["mistakes"]


@pytest.mark.parametrize(
    ("kind", "mesh", "rows", "many"),
    CASES,
    ids=[f"{k.__name__}-{m.replace(', ', '-')}{'-many' * x}" for k, m, _, x in CASES],
)
def test_every_mistake_is_caught(kind, mesh, rows, many, tally):
    check(kind, mesh, rows, options(mesh, many), tally)


@pytest.mark.parametrize(
    ("kind", "mesh", "rows", "chosen"), OPTIONS, ids=[next(iter(o)) for *_, o in OPTIONS]
)
def test_every_mistake_is_caught_with(kind, mesh, rows, chosen, tally):
    check(kind, mesh, rows, chosen, tally)


def check(kind, mesh, rows, chosen, tally):
    """Every mutant fails, statically or virtually; those that alter no number do not.

    Of those that the static check finds, every tenth is run as well; the others are run all.
    """
    model, inputs = make(kind, rows)
    compiled = autopar.compile(model, mesh, inputs, **chosen)
    narrow = torch.float32 if "precision" in chosen else None
    want = run_eager(model, inputs, 1, sgd, narrow=narrow)
    assert static(compiled) == []
    assert caught_virtually(compiled, model, inputs, want) == ""
    missed, unequal, slow = [], [], []
    for i, mutant in enumerate(mutants(compiled)):
        start = time.monotonic()
        try:
            wrong = mutant.build()
        except Exception:
            tally.update(["mistakes", "static"])  # the compiler itself refuses it
            continue
        found = bool(static(wrong))
        if found and not mutant.equal and i % 10:
            tally.update(["mistakes", "static"])
            continue
        ran = caught_virtually(wrong, model, inputs, want)
        if mutant.equal:
            tally.update(["equal"])
            if ran not in ("", "RankError"):  # uneven pieces: only some ranks are changed
                unequal.append(f"{mutant}: {ran}")
            continue
        tally.update(["mistakes"] + ["static"] * found + ["virtual"] * bool(ran))
        if not ran:
            missed.append(str(mutant))
        if "by one rank" in mutant.kind and not found:
            missed.append(f"{mutant}: not found without running")
        if time.monotonic() - start > 8:  # nobody waits for a time limit
            slow.append(str(mutant))
    assert not missed, "\n".join(missed)
    assert not unequal, "\n".join(unequal)
    assert not slow, "\n".join(slow)


def test_wrong_random_numbers_are_caught():
    class Drop(Mlp):
        def forward(self, x, y):
            return F.mse_loss(self.two(F.dropout(self.one(x), 0.5, self.training)), y)

    model, inputs = make(Drop, 4)
    compiled = autopar.compile(model, "dp=2", inputs)
    alone = autopar.compile(model, "dp=1", inputs)
    want = run_virtual(alone, model, inputs, 1, sgd)
    assert caught_virtually(compiled, model, inputs, want) == ""
    kinds = {}
    for mutant in mutants(compiled):
        if "random" in mutant.kind:
            kinds[mutant.kind] = caught_virtually(mutant.build(), model, inputs, want)
    assert kinds and all(kinds.values()), kinds


def test_a_nan_in_one_gradient_fails_the_comparison():
    """A comparison with NaN is never true, so a later finite error must not replace it."""
    model, inputs = make(Mlp, 4)
    want = run_eager(model, inputs, 1, sgd)
    for name in list(want.grads[0]):
        have = run_eager(model, inputs, 1, sgd)
        have.grads[0][name] = have.grads[0][name] * float("nan")
        assert [r for r in compare(have, want, 1e-10) if not r.ok], name
        del have.grads[0][name]
        assert [r for r in compare(have, want, 1e-10) if not r.ok], f"{name} left out"


def test_verify_tells_what_it_checked():
    model, inputs = make(Mlp, 4)
    report = autopar.verify(model, "dp=2, tp=2", inputs, steps=1)
    assert report.ok, report
    text = str(report)
    assert "collectives and" in text and "for 4 ranks: no problem" in text


def test_static_problems_name_the_line():
    model, inputs = make(Mlp, 4)
    compiled = autopar.compile(model, "dp=2", inputs)
    mutant = next(m for m in mutants(compiled) if "gradient not reduced" in m.kind)
    text = "\n".join(static(mutant.build()))
    assert "on dp" in text and "its gradient is partial" in text and "test_mutation.py" in text
