"""Parameters that rest cut over a data axis: exact, and never whole where they are not used."""

from __future__ import annotations

from operator import getitem
from typing import Any

import pytest
import torch
from models import HUGGING_FACE, KINDS, make
from pool import Pool
from test_equality import DROPOUT, ODD, equal, one_thread
from test_processes import CASTS, agree, loss_of, report, sgd, train
from torch import nn

import autopar
from autopar.errors import PlanError

__all__ = ["one_thread"]  # the fixture
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")

MODELS = (*HUGGING_FACE, "gpt")


@pytest.mark.parametrize("mesh", ["dp=2, fsdp=2, tp=2", "tp=2, fsdp=3"])
@pytest.mark.parametrize("name", MODELS)
def test_model_equals_one_device(name: str, mesh: str) -> None:
    equal(*make(name, 5 if "3" in mesh else 4), mesh)


@pytest.mark.parametrize("name", [*HUGGING_FACE, *KINDS])
def test_rank_without_rows_is_exact(name: str) -> None:
    """Five rows over four ranks, 2, 2, 1 and 0: the last one must enter every gather."""
    equal(*make(name, 5), "fsdp=4")


@pytest.mark.parametrize(("name", "mesh", "sizes"), ODD[1::2])
def test_sizes_that_do_not_divide_are_exact(name: str, mesh: str, sizes: dict[str, Any]) -> None:
    tp = mesh.rpartition("tp=")[2]
    equal(*make(name, 5, **sizes), f"fsdp=3, tp={tp}")


@pytest.mark.parametrize("name", DROPOUT)
def test_dropout_is_that_of_one_rank(name: str) -> None:
    equal(*make(name, 4, **DROPOUT[name]), "fsdp=2, tp=2")


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("mesh", ["dp=2, tp=2", "dp=2, fsdp=2"])
def test_every_stage_is_exact(mesh: str, stage: int) -> None:
    equal(*make("gpt", layers=1), mesh, zero=stage)


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_parameters_gathered_once_are_exact(name: str) -> None:
    """Five rows over three ranks, and many dims that do not divide."""
    equal(*make(name, 5), "fsdp=3", zero=2)


class Attention(nn.Module):
    """Three heads over two ranks, seven rows over two: pieces of different sizes side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.attend, self.out = nn.MultiheadAttention(6, 3, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.attend(x, x, x, need_weights=False)[0]).square().mean()


@pytest.mark.parametrize(
    ("mesh", "options"), [("fsdp=2, tp=2", {}), ("dp=2, tp=2", {"zero": 3, "accumulate": 2})]
)
def test_uneven_heads_and_rows_are_exact(mesh: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    equal(Attention().double(), torch.randn(7, 4, 6).double(), mesh, **options)


def test_frozen_parameters_stay() -> None:
    model, inputs = make("gpt")
    for name, p in model.named_parameters():
        p.requires_grad_("blocks.1" in name)
    equal(model, inputs, "fsdp=2, tp=2")


def compiled(mesh: str = "dp=2, fsdp=2, tp=2", **options: Any) -> Any:
    model, inputs = make("gpt")
    return autopar.compile(model, mesh, inputs, **options)


def test_every_parameter_rests_in_equal_parts() -> None:
    """Up to biases that two axes cannot cut, a rank holds a quarter of each."""
    found = compiled()
    for state in found.of(0).program.states:
        if state.is_parameter and "qkv.bias" not in state.name:
            assert "fsdp" in state.layout.sharded, state


def test_no_gathered_parameter_is_saved() -> None:
    """What the backward graph takes is smaller than the whole of any parameter it was cut from."""
    phases = compiled("fsdp=4").of(0)
    results = phases.forward.graph.output_node().args[0]
    gathered = {n for n in phases.forward.graph.nodes if "all_gather" in str(n.target)}
    stack, seen = list(results[phases.n_results :]), set()
    views = (torch.ops.aten.t.default, torch.ops.aten.reshape.default, getitem)
    while stack:
        node = stack.pop()
        assert node not in gathered, f"{node} is saved"
        if node.target in views and node not in seen:
            seen.add(node)
            stack += node.all_input_nodes
    again = [n for n in phases.backward.graph.nodes if "all_gather" in str(n.target)]
    assert again, "weights are gathered for the backward pass"


def test_parameters_move_three_times() -> None:
    """Section 7 of the paper: gather, gather again and reduce-scatter; a replica moves two."""
    psi = sum(s.numel() for s in make("gpt")[0].parameters()) * 8 * 3 / 4
    moved = sum(b for _, axis, name, _, b in compiled("fsdp=4").traffic() if "all_r" not in name)
    norms = 0.1 * psi  # norms, biases and the embedding are not read again
    assert 3 * psi - norms <= moved <= 3 * psi


@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_move_twice_in_the_first_stages(stage: int) -> None:
    sizes = {n: p.numel() * 8 * 3 / 4 for n, p in make("gpt")[0].named_parameters()}
    psi = sum(sizes.values())
    found = compiled("fsdp=4", zero=stage)
    moved = {"gather": 0.0, "scatter": 0.0}
    for _, _, name, _, n_bytes in found.traffic():
        kind = name.split("_")[1]
        moved[kind] = moved.get(kind, 0.0) + n_bytes
    # positions are looked up alike on all ranks: their gradient is summed before it is scattered
    assert moved["gather"] == psi and moved["scatter"] == psi - sizes["positions.weight"]
    calls = [n for n in found.of(0).backward.graph.nodes if n.op == "call_function"]
    assert not [n for n in calls if "all_gather" in str(n.target)]


def test_plan_knows_what_is_gathered_once() -> None:
    twice, once = compiled("fsdp=4"), compiled("fsdp=4", zero=2)
    assert set(twice.plan["zero"].values()) == {3} and set(once.plan["zero"].values()) == {2}
    assert compiled("fsdp=4", plan=once.plan).code() == once.code() != twice.code()
    assert compiled("fsdp=4", plan=twice.plan).code() == twice.code()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_without_an_axis_is_refused(stage: int) -> None:
    with pytest.raises(PlanError, match=f"zero={stage} needs ranks with different rows"):
        compiled("tp=2", zero=stage)


def trains(rank: int, n: int, name: str, mesh: str, options: dict[str, Any]) -> Any:
    model, inputs = make(name, 8)
    if options.get("batch") == "local":  # uneven rows over nested axes
        cut = {0: (0, 3), 1: (3, 4), 2: (4, 6), 3: (6, 8)}[rank]
        inputs = {k: v[cut[0] : cut[1]] for k, v in inputs.items()}
    parallel = autopar.parallelize(model, mesh, **options)
    return report(rank, train(parallel, lambda m: loss_of(m(**inputs)), sgd))


@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("gpt2", "fsdp=2, tp=2", {}),
        ("llama", "tp=2, fsdp=2", {"sequence": False}),
        ("resnet", "fsdp=3", {}),
        ("gpt", "dp=2, fsdp=2", {"batch": "local"}),
        ("bert", "dp=2", {"zero": 3}),
        ("gpt2", "dp=2, tp=2", {"zero": 1}),
    ],
)
def test_processes_equal_one_device(
    name: str, mesh: str, options: dict[str, Any], pool: Pool
) -> None:
    ranks = pool.run(autopar.mesh(mesh).size, trains, name, mesh, options)
    model, inputs = make(name, 8)
    want = train(make(name, 8)[0], lambda m: loss_of(m(**inputs)), sgd)
    agree(ranks, want, model, 1e-6 if name in CASTS else 1e-10)
