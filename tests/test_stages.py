"""A model cut into pipeline stages equals the whole, in every schedule, beside every strategy."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
import torch
from models import KINDS, make
from pool import Pool
from test_equality import DROPOUT, equal, one_thread
from test_processes import CASTS
from torch import nn

import autopar
from autopar.errors import AutoparError, InputError, PlanError, ScheduleError
from autopar.mistakes import changes, harmless
from autopar.mutation import edited
from autopar.passes.split import staging_problems
from autopar.pipeline import ORDERS, order, parse
from autopar.program import info
from autopar.verification import caught_virtually, compare, run_connected, run_eager

__all__ = ["one_thread"]  # the fixture
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")

MODELS = ("bert", "gpt2", "llama", "t5", "vit", "unet")
CASES: list[Any] = [(n, f"pp={p}", 4 + p, {}) for n in MODELS for p in (2, 3)]
CASES += [(n, "pp=4", 8, {"microbatches": 8}) for n in ("gpt2", "vit")]
CASES += [  # the first stage also holds the last of the tied weights, and stages without parameters
    ("gpt2", "pp=2", 8, {"schedule": name, "microbatches": 4}) for name in ORDERS
]
CASES += [
    ("t5", "pp=2", 8, {"schedule": "interleaved", "stages": 6, "microbatches": 4}),
    ("t5", "pp=2", 8, {"schedule": "dualpipe-v", "microbatches": 5}),
    ("unet", "pp=2", 8, {"schedule": "zb-v", "remat": "selective"}),
    ("llama", "pp=2", 7, {"schedule": "zb-h1", "microbatches": 3, "remat": "full"}),
    ("bert", "pp=2", 3, {"microbatches": 1}),
    ("gpt", "pp=2", 8, {"accumulate": 2, "microbatches": 2, "schedule": "gpipe"}),
]
CASES += [
    ("gpt2", "dp=2, pp=2", 8, {"zero": 1}),
    ("gpt2", "pp=2, dp=2", 8, {"zero": 2, "schedule": "zb-v"}),
    ("gpt2", "fsdp=2, pp=2", 8, {"zero": 3, "remat": "full"}),
    ("bert", "tp=2, pp=2", 6, {}),
    ("llama", "dp=2, tp=2, pp=2", 8, {"schedule": "zb-h2"}),
    ("t5", "fsdp=2, tp=2, pp=2", 8, {"microbatches": 2}),
    ("vit", "dp=2, pp=2", 7, {"microbatches": 2}),
]


@pytest.mark.parametrize(("name", "mesh", "rows", "options"), CASES)
def test_stages_equal_one_device(name: str, mesh: str, rows: int, options: dict[str, Any]) -> None:
    equal(*make(name, rows, **DROPOUT.get(name, {})), mesh, **options)


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("waves", "recommender", "unet")])
def test_every_kind_of_model_is_cut(kind: str) -> None:
    equal(*make(kind, 6, **DROPOUT.get(kind, {})), "pp=2")


def test_stages_equal_one_device_in_mixed_precision() -> None:
    model, inputs = make("gpt", 8)
    autopar.verify(model, "fsdp=2, pp=2", inputs, precision="bf16").raise_if_failed()


def test_a_schedule_of_ones_own_is_run(tmp_path: Any) -> None:
    model, inputs = make("gpt", 6)
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0F1,0B1,,0B0\n1F0,1F1,1B1,1I0,1W0\n")
    equal(model, inputs, "pp=2", schedule=path)
    equal(model, inputs, "pp=2", schedule=parse(path.read_text()))
    path.write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    with pytest.raises(ScheduleError, match=">1F1<"):
        autopar.compile(model, "pp=2", inputs, schedule=path)


# --- where stages begin ------------------------------------------------------------------------


def stages_of(compiled: Any, kind: str) -> list[set[str]]:
    """The modules that compute calls of a kind in each stage."""
    found: list[set[str]] = [set() for _ in compiled.staging.schedule.owners]
    for node in compiled.annotated.graph.graph.nodes:
        if info(node).stage >= 0 and kind in str(node.target):
            found[info(node).stage].add(info(node).module or node.name)
    return found


def test_stages_weigh_what_they_compute() -> None:
    """Ten layers over four stages: the last, which has the head, gets fewer of them."""
    model, inputs = make("gpt", 8, layers=10, vocab=515)
    found = stages_of(autopar.compile(model, "pp=4", inputs), "scaled_dot_product")
    counts = [len(s) for s in found]
    assert sum(counts) == 10 and max(counts) <= 3 and counts[-1] == min(counts), counts
    wide, batch = make("gpt", 8, layers=4, vocab=20_003)
    found = stages_of(autopar.compile(wide, "pp=2", batch), "scaled_dot_product")
    assert [len(s) for s in found] == [4, 0], "the head alone is more than all layers"


def test_stages_begin_at_named_modules() -> None:
    model, inputs = make("gpt2", 8, n_layer=4)
    names = ["transformer.h.1", "transformer.h.3"]
    compiled = autopar.compile(model, "pp=3", inputs, stages=names)
    found = stages_of(compiled, "scaled_dot_product")
    layers = [{m.split(".attn")[0][-1] for m in s} for s in found]
    assert layers == [{"0"}, {"1", "2"}, {"3"}]
    for wrong in (names[::-1], ["transformer.h.1", "nowhere"], names[:1]):
        with pytest.raises(PlanError):
            autopar.compile(model, "pp=3", inputs, stages=wrong)


def test_a_rank_holds_what_its_stages_use() -> None:
    model, inputs = make("gpt2", 8)
    compiled = autopar.compile(model, "pp=2", inputs)
    first, last = (compiled.held({"pp": r}) for r in range(2))
    assert set(first) & set(last) == {"transformer.wte.weight"}, "tied, so both"
    assert set(first) | set(last) == {s.name for s in compiled.annotated.states}
    assert "transformer.wpe.weight" in first and "transformer.ln_f.weight" in last
    graph = compiled.graph("F0", 0)
    assert isinstance(graph, torch.fx.GraphModule) and "def F1(" in compiled.code(1)
    assert {"F1", "B1", "I1", "W1"} <= set(compiled.staging.graphs[1])


def test_the_weight_gradients_are_apart_from_the_input_gradients() -> None:
    model, inputs = make("gpt", 8)
    staging = autopar.compile(model, "pp=2", inputs, schedule="zb-h1").staging
    assert staging is not None
    for rank, number in ((0, 0), (1, 1)):
        step = staging.ranks[rank].step
        halves = {*step.gives[f"I{number}"], *step.gives[f"W{number}"]}
        assert set(step.gives[f"B{number}"]) <= halves
    sums = {j.operand for j in staging.ranks[1].step.summed}
    weights = sums & set(staging.ranks[1].step.gives["W1"])
    assert weights and weights.isdisjoint(staging.ranks[1].step.gives["I1"])
    assert not set(staging.ranks[0].step.gives["I0"]), "the first stage returns nothing"


def test_one_value_goes_from_block_to_block() -> None:
    """The stream between two blocks of a transformer, once each way, whatever reads it."""
    model, inputs = make("gpt", 8, layers=4)
    staging = autopar.compile(model, "pp=4", inputs).staging
    assert staging is not None
    messages = staging.ranks[0].messages
    assert sorted(messages) == sorted(
        [("F", s, s + 1) for s in range(3)] + [("B", s + 1, s) for s in range(3)]
    )
    assert [len(names) for names in messages.values()] == [1] * 6


# --- what is wrong is said ---------------------------------------------------------------------


def test_what_cannot_be_cut_is_refused() -> None:
    model, inputs = make("gpt", 8)
    with pytest.raises(PlanError, match="not trained by parallelize yet"):
        autopar.parallelize(model, "pp=2")
    for name, value in (("microbatches", 2), ("schedule", "gpipe"), ("stages", 4)):
        with pytest.raises(PlanError, match="pipelines"):
            autopar.compile(model, "dp=2", inputs, **{name: value})
    with pytest.raises(InputError, match="microbatches"):
        autopar.compile(model, "pp=2", inputs, microbatches=0)
    with pytest.raises(PlanError, match="spread"):
        autopar.compile(model, "pp=2", inputs, stages=3)
    with pytest.raises(ScheduleError, match="no schedule"):
        autopar.compile(model, "pp=2", inputs, schedule="2f2b")
    with pytest.raises(PlanError, match="ranks"):
        autopar.compile(model, "pp=2", inputs, schedule=order("1f1b", 3, 4))
    with pytest.raises(AutoparError, match="rows"):
        autopar.compile(model, "pp=2", inputs, microbatches=9)
    resnet, images = make("resnet", 8)
    with pytest.raises(PlanError, match="normalization"):
        autopar.compile(resnet, "pp=2", images)

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))

        def forward(self, x: torch.Tensor) -> Any:
            return self.layers(x)

    with pytest.raises(PlanError, match="loss"):
        autopar.compile(Logits(), "pp=2", {"x": torch.randn(4, 4)})
    with pytest.raises(PlanError, match="fewer than"):
        autopar.compile(
            Logits(), "pp=32", {"x": torch.randn(32, 4), "targets": torch.randn(32, 2)},
            loss=nn.functional.mse_loss,
        )  # fmt: skip


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def test_every_mistake_in_what_goes_between_ranks_is_caught() -> None:
    """Messages, sums over stages and functions left out, or of another stage."""
    model, inputs = make("gpt2", 8)
    staging = autopar.compile(model, "dp=2, pp=2", inputs, schedule="zb-h1").staging
    assert staging is not None and not staging_problems(staging)
    missed = []

    def check(what: str, rank: int, **fields: Any) -> None:
        ranks = list(staging.ranks)
        ranks[rank] = replace(ranks[rank], **fields)
        if not staging_problems(replace(staging, ranks=tuple(ranks))):
            missed.append(what)

    for rank, stages in enumerate(staging.ranks):
        for edge in stages.messages:
            check(f"no {edge}", rank, messages={**stages.messages, edge: ()})
        for i in range(len(stages.moves)):
            check(f"move {i}", rank, moves=stages.moves[:i] + stages.moves[i + 1 :])
        for name, gives in stages.step.gives.items():
            used = (
                [n for n in gives if n]
                if name not in ("end", "finish", "count", "B0", "B1")
                else []
            )
            for n in used:
                changed = {**stages.step.gives, name: tuple(g for g in gives if g != n)}
                check(f"{name} without {n}", rank, step=replace(stages.step, gives=changed))
        lists = list(stages.schedule.ranks)
        for at, i in enumerate(lists[rank]):
            if i.kind in ("F", "I", "W") and stages.step.gives[f"{i.kind}{i.stage}"]:
                less = (*lists[rank][:at], *lists[rank][at + 1 :])
                ranks = tuple(less if r == rank else x for r, x in enumerate(lists))
                check(f"no {i}", rank, schedule=replace(stages.schedule, ranks=ranks))
    assert staging.ranks[0].moves, "the gradient of the tied weight goes both ways"
    assert not missed


def test_every_mistake_in_the_functions_is_caught() -> None:
    """Collectives left out, doubled, scaled, of another kind, in any function of any rank."""
    model, inputs = make("gpt", 6, layers=2, vocab=23)
    found = autopar.compile(model, "dp=2, pp=2", inputs, microbatches=2)
    assert found.staging is not None
    want = run_eager(model, inputs, 1, sgd)
    assert caught_virtually(found, model, inputs, want) == ""
    missed, count = [], 0
    for rank, graphs in enumerate(found.staging.graphs):
        for name, part in graphs.items():
            used = name[0] != "I" and name[0] != "W"  # the schedule has whole backwards
            for at, node in enumerate(part.graph.nodes if used else ()):
                for kind, change in changes(node, found.annotated.mesh):
                    graph = edited(part, at, change)
                    if graph is None or harmless(node, kind):
                        continue
                    own = {**graphs, name: graph}
                    every = tuple(
                        own if r == rank else g for r, g in enumerate(found.staging.graphs)
                    )
                    wrong = dataclasses.replace(found.staging, graphs=every)
                    try:
                        caught = caught_virtually(
                            replace(found, staging=wrong), model, inputs, want
                        )
                    except Exception:  # the generated code does not even run
                        caught = "error"
                    count += 1
                    if not caught:
                        missed.append(f"rank {rank} {name}: {node} {kind}")
    assert not missed and count > 10, (missed, count)


# --- real processes ----------------------------------------------------------------------------


def steps(rank: int, n: int, name: str, mesh: str, rows: int, options: dict[str, Any]) -> Any:
    model, inputs = make(name, rows)
    compiled = autopar.compile(model, mesh, inputs, **options)
    return run_connected(compiled, model, inputs, 3, sgd)


@pytest.mark.parametrize(
    ("name", "mesh", "rows", "options"),
    [
        ("gpt2", "pp=2", 7, {"microbatches": 3, "schedule": "zb-v"}),
        ("t5", "pp=3", 6, {}),
        ("unet", "dp=2, pp=2", 8, {"schedule": "zb-h1"}),
        ("llama", "fsdp=2, pp=2", 8, {"schedule": "interleaved", "microbatches": 2}),
        ("gpt2", "dp=2, tp=2, pp=2", 8, {"microbatches": 2, "zero": 1}),
    ],
)
def test_processes_train_as_one_device(
    pool: Pool, name: str, mesh: str, rows: int, options: dict[str, Any]
) -> None:
    model, inputs = make(name, rows)
    traces = pool.run(autopar.mesh(mesh).size, steps, name, mesh, rows, options)
    want = run_eager(model, inputs, 3, sgd)
    limit = 1e-6 if name in CASTS else 1e-10
    for trace in traces:
        wrong = [str(r) for r in compare(trace, want, limit) if not r.ok]
        assert not wrong, wrong
