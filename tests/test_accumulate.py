"""A call split into microbatches equals the whole batch, and reduces once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from models import KINDS, make
from pool import Pool
from test_equality import DROPOUT, equal, one_thread
from test_processes import CASTS, agree, loss_of, report, sgd, train
from torch import nn

import autopar
from autopar.collectives import collective_of
from autopar.errors import AutoparError, BatchError, InputError, PlanError
from autopar.mistakes import changes, harmless
from autopar.mutation import edited
from autopar.runtime.microbatches import side_by_side
from autopar.schedule import PARTS, Join, Step
from autopar.sizes import Size
from autopar.verification import caught_virtually, run_eager

__all__ = ["one_thread"]  # the fixture
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")

ROWS = (
    "bert",
    "gpt2",
    "llama",
    "t5",
    "vit",
    *(k for k in KINDS if k not in ("waves", "recommender")),
)
"""Models whose loss is a sum over rows divided by counts."""


CASES: list[Any] = [(n, "dp=2", 7, 3, {}) for n in ROWS]  # microbatches of 2, 2, 0 and 1, 1, 1
CASES += [(n, "fsdp=2", 8, 4, {"remat": "full"}) for n in ("gpt2", "llama", "gpt", "unet")]
CASES += [("gpt", "dp=1", 4, 1, {}), ("vit", "dp=1", 5, 2, {})]


@pytest.mark.parametrize(("name", "mesh", "rows", "count", "options"), CASES)
def test_step_is_that_of_the_whole_batch(
    name: str, mesh: str, rows: int, count: int, options: dict[str, Any]
) -> None:
    equal(*make(name, rows, **DROPOUT.get(name, {})), mesh, accumulate=count, **options)


BESIDE = [(name, "dp=2, tp=2") for name in ("bert", "gpt2", "llama", "gpt", "einsum", "encoder")]


@pytest.mark.parametrize(("name", "mesh"), [*BESIDE, ("encoder", "tp=2, dp=2"), ("t5", "tp=3")])
def test_step_is_exact_beside_tensor_parallelism(name: str, mesh: str) -> None:
    """A cut of rows over tp lies inside the microbatch, else only all rows could be gathered."""
    equal(*make(name, 8), mesh, accumulate=3, zero=1 if "dp" in mesh else None)


def test_step_is_exact_in_mixed_precision() -> None:
    model, inputs = make("gpt", 8)
    autopar.verify(model, "fsdp=2", inputs, accumulate=2, precision="fp32").raise_if_failed()


def moving(graph: Any, axis: str) -> list[str]:
    rows = ((collective_of(n), n) for n in graph.graph.nodes)
    return [row.name for row, n in rows if row is not None and row.factor and n.args[1] == axis]


def test_gradients_are_reduced_once_for_all_microbatches() -> None:
    model, inputs = make("gpt", 8)
    found = autopar.compile(model, "dp=2", inputs, accumulate=4).accumulation
    assert found is not None
    assert not moving(found.graphs["count"], "dp") and not moving(found.graphs["body"], "dp")
    assert moving(found.graphs["start"], "dp") == ["all_reduce"], "the count"
    assert set(moving(found.graphs["finish"], "dp")) <= {"all_reduce_bucket", "all_reduce"}
    held = [n for n in found.graphs["count"].graph.nodes if n.op == "placeholder"]
    assert len(held) == 1, "labels are counted without the model"


def test_every_mistake_in_the_parts_is_caught() -> None:
    """Left out, doubled, scaled, of another kind: in what runs once, and in what runs in turns."""
    model, inputs = make("gpt", 6, layers=1, vocab=23)
    found = autopar.compile(model, "dp=2", inputs, accumulate=2)

    def sgd_of(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)

    want = run_eager(model, inputs, 1, sgd_of)
    assert caught_virtually(found, model, inputs, want) == ""
    missed, count = [], 0
    for name, part in found.accumulation.graphs.items():
        for i, node in enumerate(part.graph.nodes):
            for kind, change in changes(node, found.annotated.mesh):
                graph = edited(part, i, change)
                if graph is None or harmless(node, kind):
                    continue
                graphs = {**found.accumulation.graphs, name: graph}
                wrong = replace(found.accumulation, graphs=graphs)
                try:
                    caught = caught_virtually(
                        replace(found, accumulation=wrong), model, inputs, want
                    )
                except Exception:  # the generated code does not even run
                    caught = "error"
                count += 1
                if not caught:
                    missed.append(f"{name}: {node} {kind}")
    assert not missed and count > 20, (missed, count)


def test_parameters_are_gathered_once_in_the_first_stages() -> None:
    model, inputs = make("gpt", 8)
    for zero, times in ((1, "once"), (3, "for each")):
        found: Any = autopar.compile(model, "fsdp=2", inputs, accumulate=4, zero=zero).accumulation
        start, body = (moving(found.graphs[name], "fsdp") for name in ("start", "body"))
        assert any("gather" in name for name in start if zero == 1 or "replicated" in name)
        assert any("gather" in name for name in body) == (times == "for each")
        weights = {n for n in found.step.gives["start"] if "gather" in n or n.startswith("getitem")}
        assert bool(weights) == (times == "once"), "held from one microbatch to the next"


@pytest.mark.parametrize(("name", "culprit"), [("resnet", "normalization"), ("waves", "norm1")])
def test_batch_norm_is_refused_by_name(name: str, culprit: str) -> None:
    model, inputs = make(name, 8)
    with pytest.raises(PlanError, match=rf"microbatches meet(.|\n)*{culprit}"):
        autopar.compile(model, "dp=2", inputs, accumulate=2)
    equal(model.eval(), inputs, "dp=2", accumulate=2)  # its statistics stand still


def test_contrastive_loss_is_refused_by_name() -> None:
    model, inputs = make("recommender", 8)
    with pytest.raises(PlanError, match=r"microbatches meet(.|\n)*matmul"):
        autopar.compile(model, "dp=2", inputs, accumulate=2)


def test_misuse_is_refused() -> None:
    model, inputs = make("gpt", 4)
    with pytest.raises(InputError, match="accumulate=0"):
        autopar.compile(model, "dp=2", inputs, accumulate=0)
    with pytest.raises(BatchError, match="4 rows cannot be spread over dp=2 x accumulate=3"):
        autopar.compile(model, "dp=2", inputs, accumulate=3)
    with pytest.raises(PlanError, match="needs the loss inside"):
        autopar.compile(nn.Linear(4, 4), "dp=2", torch.randn(8, 4), accumulate=2)


def test_loop_of_the_user_stays_as_it_is() -> None:
    """Scaled losses, several calls before a step, evaluation, a second backward."""
    model, inputs = make("gpt", 4)
    x, y = inputs["x"], inputs["targets"]
    alone = make("gpt", 4)[0]
    (3 * alone(x, y)[1]).backward()
    alone(x, y)[1].backward()
    parallel = autopar.parallelize(model, "dp=1", accumulate=2)
    logits, loss = parallel(x, y)
    assert torch.allclose(logits, alone(x, y)[0], atol=1e-12)
    (3 * loss).backward()
    with pytest.raises(RuntimeError, match="backward was called twice"):
        loss.backward()
    parallel(x, y)[1].backward()
    for (name, p), q in zip(alone.named_parameters(), model.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=1e-10, atol=1e-12), name
    with torch.no_grad():
        assert torch.allclose(parallel(x)[0], alone(x)[0], atol=1e-12)
    logits, loss = parallel(x, y)
    with pytest.raises(AutoparError, match="an output beside the loss"):
        (loss + logits.sum()).backward()
    parallel.eval()
    assert torch.allclose(parallel(x), alone.eval()(x), atol=1e-12), "nothing to split"


def trains(rank: int, n: int, name: str, mesh: str, options: dict[str, Any]) -> Any:
    model, inputs = make(name, 8)
    if options.get("batch") == "local":
        cut = (0, 5) if rank == 0 else (5, 8)
        inputs = {k: v[cut[0] : cut[1]] for k, v in inputs.items()}
    parallel = autopar.parallelize(model, mesh, **options)
    return report(rank, train(parallel, lambda m: loss_of(m(**inputs)), sgd))


@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("gpt2", "dp=2, tp=2", {"accumulate": 2}),
        ("llama", "fsdp=2", {"accumulate": 4, "remat": "selective"}),
        ("gpt", "dp=2", {"accumulate": 3, "batch": "local"}),
    ],
)
def test_processes_equal_one_device(
    name: str, mesh: str, options: dict[str, Any], pool: Pool
) -> None:
    ranks = pool.run(autopar.mesh(mesh).size, trains, name, mesh, options)
    model, inputs = make(name, 8)
    want = train(make(name, 8)[0], lambda m: loss_of(m(**inputs)), sgd)
    agree(ranks, want, model, 1e-6 if name in CASTS else 1e-10)


def test_pieces_of_microbatches_stand_within_the_elements_before_them() -> None:
    """A dim of heads, uneven over ranks, times rows: each head has the rows of all microbatches."""
    whole = torch.arange(12).reshape(3, 4)
    pieces = [whole[:, :2].reshape(6), whole[:, 2:].reshape(6)]
    assert torch.equal(side_by_side(pieces, 0, 3), whole.reshape(12))
    join = Join("a", "b", "gather", 0, Size("n0", 'comm.piece(3, "tp")', (2, 1), 10009))
    none: dict[str, Any] = dict.fromkeys(PARTS, ())
    tangent = ("t", torch.float64)
    step = Step(none, none, (join,), (), (), (), {}, tangent, 0, frozenset(), frozenset())
    assert [step.at(k).counted[0].outer for k in (0, 1)] == [2, 1]


@pytest.mark.parametrize(
    ("mesh", "options"),
    [("fsdp=2", {}), ("dp=2, fsdp=2", {"precision": "fp32"}), ("fsdp=3, tp=2", {"remat": "full"})],
)
def test_first_stage_of_zero_scatters_once(mesh: str, options: dict[str, Any]) -> None:
    """The bytes of one step without microbatches; from stage 2 on each scatters its own."""
    model, inputs = make("gpt", 24)
    scattered = {}
    for stage in (1, 2, 3):
        found = autopar.compile(model, mesh, inputs, accumulate=4, zero=stage, **options)
        assert found.accumulation is not None
        graphs = found.accumulation.graphs
        scattered[stage] = [
            part for part in graphs for name in moving(graphs[part], "fsdp") if "scatter" in name
        ]
    assert set(scattered[1]) == {"finish"}
    assert set(scattered[2]) == set(scattered[3]) == {"body"}
    equal(model, inputs, mesh, accumulate=3, zero=1, **options)
