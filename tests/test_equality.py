"""The parallel program equals one device: losses, gradients, buffers, parameters after 3 steps.

All ranks are virtual and every model is in float64, so the limits are those of `tolerance`: 1e-10,
or 1e-6 where the model itself computes in float32. `strict` makes an operation without a rule an
error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import GPT, HUGGING_FACE, KINDS, labels, make, tokens
from torch import nn

import autopar
from autopar.strategies.data import Data
from autopar.strategies.tensor import Tensors

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")

MODELS = (*HUGGING_FACE, "gpt")
MESHES = ("dp=2", "tp=2", "dp=2, tp=2", "tp=4", "dp=3", "dp=2, tp=4")
PLANS = ("sequence", "replicated", "latency-free")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The ranks are threads; each of them needs no more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def equal(model: nn.Module, inputs: Any, mesh: str, plan: str = "sequence", **options: Any) -> None:
    """Fail with the table unless three steps on the mesh equal those on one device."""
    if plan == "latency-free":  # finds other plans: residuals cut in width, cut norms and softmaxes
        axes = autopar.mesh(mesh).names
        made = {"dp": Data("dp"), "tp": Tensors("tp", latency_bytes=0.0)}
        options["strategy"] = [made[axis] for axis in axes]
    options.setdefault("lr", 0.02)  # larger steps blow up the roundings of models that cast
    report = autopar.verify(
        model, mesh, inputs, steps=3, sequence=plan != "replicated", strict=True, **options
    )
    report.raise_if_failed()


def rows(mesh: str) -> int:
    """A batch that three ranks share unevenly, else one that divides."""
    return 5 if "dp=3" in mesh else 4


@pytest.mark.parametrize(
    ("mesh", "plan"),
    [(m, p) for m in MESHES for p in PLANS[:2] if "tp" in m or p == "sequence"],
)
@pytest.mark.parametrize("name", MODELS)
def test_model_equals_one_device(name: str, mesh: str, plan: str) -> None:
    equal(*make(name, rows(mesh)), mesh, plan)


@pytest.mark.parametrize("name", MODELS)
def test_model_equals_one_device_under_plans_without_latency(name: str) -> None:
    equal(*make(name), "dp=2, tp=2", "latency-free")


@pytest.mark.parametrize(
    ("mesh", "plan"),
    [
        ("dp=3", "sequence"),
        ("dp=2, tp=2", "sequence"),
        ("dp=2, tp=2", "latency-free"),
        ("tp=3", "replicated"),
        ("tp=3", "latency-free"),
    ],
)
@pytest.mark.parametrize(
    "name",
    ["unet", "mixer", "waves", "einsum", "encoder", "recommender", "regression", "autoencoder"],
)
def test_kind_of_model_equals_one_device(name: str, mesh: str, plan: str) -> None:
    equal(*make(name, rows(mesh)), mesh, plan)


@pytest.mark.parametrize("name", [*HUGGING_FACE, *KINDS])
def test_rank_without_rows_is_exact(name: str) -> None:
    """Five rows over four ranks: the pieces are 2, 2, 1 and 0."""
    equal(*make(name, 5), "dp=4")


ODD: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "tp=2", {"num_attention_heads": 10, "num_key_value_heads": 5, "hidden_size": 40}),
    (
        "llama",
        "tp=4",
        {
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
            "hidden_size": 36,
            "intermediate_size": 50,
            "vocab_size": 517,
        },
    ),
    (
        "llama",
        "dp=2, tp=4",
        {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48},
    ),
    ("gpt2", "dp=3, tp=2", {"vocab_size": 517, "n_head": 3, "n_embd": 33}),
    ("gpt2", "tp=4", {"vocab_size": 517, "n_head": 6, "n_embd": 36}),
    ("gpt", "tp=4", {"vocab": 517, "heads": 6, "width": 42}),
    ("bert", "tp=4", {"num_attention_heads": 6, "hidden_size": 30, "intermediate_size": 50}),
    ("t5", "tp=2", {"num_heads": 3, "d_ff": 50, "vocab_size": 517}),
    ("vit", "tp=4", {"num_attention_heads": 6, "hidden_size": 30, "num_labels": 7}),
    ("resnet", "dp=2, tp=4", {"embedding_size": 6, "hidden_sizes": [6, 10], "num_labels": 7}),
]


DEPTH = {"gpt": "layers", "gpt2": "n_layer", "t5": "num_layers", "resnet": ""}  # or as most do


@pytest.mark.parametrize("plan", ["sequence", "latency-free"])
@pytest.mark.parametrize(("name", "mesh", "sizes"), ODD)
def test_sizes_that_do_not_divide_are_exact(
    name: str, mesh: str, sizes: dict[str, Any], plan: str
) -> None:
    depth = DEPTH.get(name, "num_hidden_layers")
    equal(*make(name, rows(mesh), **sizes, **({depth: 1} if depth else {})), mesh, plan)


@pytest.mark.parametrize(
    ("mesh", "plan"),
    [("dp=4", "sequence"), ("dp=2, tp=2", "sequence"), ("tp=3", "latency-free")],
)
@pytest.mark.parametrize(
    "changes",
    [{"smoothing": 0.1}, {"weighted": True}, {"smoothing": 0.1, "weighted": True}],
    ids=["smoothing", "weights", "both"],
)
def test_loss_options_are_exact(changes: dict[str, Any], mesh: str, plan: str) -> None:
    equal(*make("gpt", layers=1, **changes), mesh, plan)


DROPOUT: dict[str, dict[str, Any]] = {
    "gpt": {"dropout": 0.1},
    "gpt2": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    "bert": {
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "num_hidden_layers": 1,
    },
    "t5": {"dropout_rate": 0.1, "num_layers": 1},
    "encoder": {"dropout": 0.1},
}


@pytest.mark.parametrize(
    ("name", "mesh", "plan"),
    [
        *((n, "dp=3", "sequence") for n in DROPOUT),
        *((n, "tp=2", "sequence") for n in DROPOUT),
        *((n, "dp=2, tp=2", "replicated") for n in DROPOUT),
        ("gpt", "dp=2, tp=2", "latency-free"),
    ],
)
def test_dropout_is_that_of_one_rank(name: str, mesh: str, plan: str) -> None:
    equal(*make(name, rows(mesh), **DROPOUT[name]), mesh, plan)


def test_dropout_depends_on_the_seed_alone() -> None:
    model, inputs = make("gpt", layers=1, dropout=0.2)
    equal(model, inputs, "dp=2, tp=2", seed=7)
    one, two = (
        autopar.parallelize(make("gpt", layers=1, dropout=0.2)[0], 1, seed=s) for s in (7, 8)
    )
    assert not torch.equal(one(**inputs)[1], two(**inputs)[1])


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop])
def test_elementwise_optimizers_are_exact(optimizer: Any) -> None:
    # not a transformer: the gradient of a key bias is zero on paper, and these optimizers divide
    # the rounding that is left of it by its own size
    equal(*make("mixer"), "dp=2, tp=2", optimizer=optimizer, lr=0.01)


def flat_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1)


@pytest.mark.parametrize("mesh", ["dp=2, tp=2", "tp=3"])
def test_loss_function_of_the_user_is_exact(mesh: str) -> None:
    model, inputs = make("gpt", layers=1)
    equal(model, inputs, mesh, loss=flat_loss)


@pytest.mark.parametrize("mesh", ["dp=2, tp=2", "tp=3", "dp=3"])
def test_outputs_without_a_loss_are_exact(mesh: str) -> None:
    model, inputs = make("gpt", layers=1)
    equal(model, {"x": inputs["x"]}, mesh, lr=1e-3)  # the sum of the logits is a wild loss


def test_float32_is_equal_to_rounding() -> None:
    model, inputs = make("gpt", layers=1)
    equal(model.float(), inputs, "dp=2, tp=2")


def test_evaluation_mode_is_exact() -> None:
    model, inputs = make("resnet")
    equal(model.eval(), inputs, "dp=2, tp=2")


def test_frozen_parameters_stay() -> None:
    model, inputs = make("gpt")
    for name, p in model.named_parameters():
        p.requires_grad_("blocks.1" in name)
    equal(model, inputs, "dp=2, tp=2")


def test_batch_of_a_whole_number_of_ignored_rows_is_exact() -> None:
    """The first of two ranks has no label that counts: its mean alone would be 0 / 0."""
    model = GPT(layers=1).double()
    targets = labels(4)
    targets[:2] = -100
    equal(model, {"x": tokens(4), "targets": targets}, "dp=2")


class Biased(nn.Module):
    """Sums that look like biases beside products and convolutions that have one."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.conv = nn.Linear(6, 5), nn.Conv1d(1, 3, 3)
        self.more, self.plane = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.line(x) + self.more + self.line(2 * x).mean(0)
        z = self.conv(x[:, None]) + self.plane.reshape(1, 3, 1)
        w = torch.addmm(self.more, x, self.line.weight.t()) + self.more
        return y.pow(2).mean() + z.pow(3).mean() + w.sin().mean()


class Fourier(nn.Module):
    """Complex numbers on the way, whose gradient torch finishes by a write into a view."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(6, 8)
        self.filter = nn.Parameter(torch.randn(5, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(self.line(x)) * self.filter
        return torch.fft.irfft(spectrum * spectrum.abs()).pow(2).mean()


class Recurrent(nn.Module):
    """A gated recurrence of several steps: torch's own kernel writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(3, 5, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gru(x.view(-1, 2, 3))[0].pow(2).mean()


@pytest.mark.filterwarnings("ignore:autopar has no rule")
@pytest.mark.parametrize("mesh", ["dp=1", "dp=2, tp=2", "fsdp=3"])
@pytest.mark.parametrize("kind", [Biased, Fourier, Recurrent])
def test_odd_model_equals_one_device(kind: type[nn.Module], mesh: str) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(7, 6, dtype=torch.double)
    autopar.verify(model.double(), mesh, x, steps=2, lr=0.02).raise_if_failed()


class Flags(nn.Module):
    """A frozen norm and a frozen dropout in a model that trains, and one that drops always."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(7, 5), nn.BatchNorm1d(5)
        self.frozen, self.drop = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.frozen(self.norm(self.first(x)))).square().mean()


def test_modules_keep_their_own_training_flags() -> None:
    torch.manual_seed(0)
    model, x = Flags().double(), torch.randn(8, 7).double()
    model.norm.eval(), model.frozen.eval(), model.drop.eval()
    equal(model, x, "dp=2")  # no dropout at all: the reference is plain torch
    parallel = autopar.parallelize(model, "dp=1")
    assert torch.allclose(parallel(x), model(x), rtol=1e-12)
    model.eval()
    still = parallel(x).item()
    model.drop.train()  # Monte Carlo dropout
    assert len({round(parallel(x).item(), 9) for _ in range(3)} | {round(still, 9)}) == 4
