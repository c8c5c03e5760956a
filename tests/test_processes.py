"""Training through `autopar.parallelize` in real gloo processes equals one device.

Every worker trains as a user would: DTensor parameters, `torch.optim`, `loss.backward()`,
`clip_grad_norm_`. The reference is the unmodified model in this process, or the same model on a
mesh of size 1 where it draws random numbers.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import make
from pool import Pool
from torch import Tensor, nn

import autopar
from autopar.verification import Trace, compare

STEPS = 3
CLIP = 0.5
CASTS = ("llama", "gpt2", "t5")  # they compute in float32 inside

Arrays = dict[str, Any]


def loss_of(out: Any) -> Tensor:
    """The loss in what a model returns."""
    if hasattr(out, "loss"):
        return out.loss
    return next(x for x in (out if isinstance(out, tuple) else (out,)) if x.dim() == 0)


def whole(tensor: Tensor) -> np.ndarray:
    """A plain copy that travels between processes."""
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().numpy().copy()


def train(
    model: nn.Module, step: Callable[[nn.Module], Tensor], make_optimizer: Any, steps: int = STEPS
) -> list[Arrays]:
    """A user's loop; each step's loss, norm and gradients, and the state after it."""
    optimizer = None
    rows = []
    for _ in range(steps):
        loss = step(model)
        loss.backward()
        optimizer = optimizer or make_optimizer(model.parameters())
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        grads = {n: p.grad for n, p in model.named_parameters()}
        row = {"loss": whole(loss), "norm": whole(norm)}
        row["grads"] = {n: None if g is None else whole(g) for n, g in grads.items()}
        optimizer.step()
        optimizer.zero_grad()
        state = model.full_state_dict() if hasattr(model, "full_state_dict") else model.state_dict()
        row["state"] = {n: whole(t) for n, t in state.items()}
        rows.append(row)
    return rows


def digest(rows: list[Arrays]) -> str:
    """Equal on ranks that saw the same bits."""
    found = hashlib.sha256()
    for row in rows:
        found.update(row["loss"].tobytes() + row["norm"].tobytes())
        for array in row["state"].values():
            found.update(array.tobytes())
    return found.hexdigest()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02)


def trace(rows: list[Arrays], model: nn.Module) -> Trace:
    """Rows as `compare` wants them."""
    parameters = {n for n, _ in model.named_parameters(remove_duplicate=False)}
    found = Trace()
    for row in rows:
        grads = {n: None if g is None else torch.from_numpy(g) for n, g in row["grads"].items()}
        state = {n: torch.from_numpy(np.asarray(t)) for n, t in row["state"].items()}
        found.losses.append(torch.from_numpy(np.asarray(row["loss"])))
        found.grads.append({**grads, "norm of all": torch.from_numpy(np.asarray(row["norm"]))})
        found.params.append({n: t for n, t in state.items() if n in parameters})
        found.buffers.append({n: t for n, t in state.items() if n not in parameters})
    return found


def agree(ranks: list[Any], want: list[Arrays], model: nn.Module, limit: float = 1e-10) -> None:
    """Rank 0 gave its rows, the others their digests; all equal `want`."""
    rows, *others = ranks
    assert set(others) <= {digest(rows)}, "ranks ended with different bits"
    assert list(rows[0]["grads"]) == list(want[0]["grads"])
    assert list(rows[0]["state"]) == list(want[0]["state"])
    worst = compare(trace(rows, model), trace(want, model), limit)
    assert all(r.ok for r in worst), "\n".join(map(str, worst))


def report(rank: int, rows: list[Arrays]) -> Any:
    return rows if rank == 0 else digest(rows)


# --- models that hold their loss ---------------------------------------------------------------


def trains(
    rank: int, n: int, name: str, mesh: str, rows: int, changes: dict[str, Any],
    options: dict[str, Any],
) -> Any:  # fmt: skip
    model, inputs = make(name, rows, **changes)
    parallel = autopar.parallelize(model, mesh, **options)
    return report(rank, train(parallel, lambda m: loss_of(m(**inputs)), sgd))


@pytest.mark.parametrize(
    ("name", "mesh", "rows", "changes", "options"),
    [
        ("gpt2", "dp=2", 4, {}, {}),
        ("llama", "tp=2", 4, {"num_attention_heads": 10, "num_key_value_heads": 5,
                              "hidden_size": 40}, {}),
        ("bert", "dp=2, tp=2", 4, {}, {}),
        ("t5", "tp=2", 4, {"num_layers": 1}, {}),
        ("vit", "tp=4", 4, {"num_attention_heads": 6, "hidden_size": 30}, {"sequence": False}),
        ("resnet", "dp=2", 4, {}, {}),
        ("resnet", "dp=2, tp=2", 4, {}, {}),
        ("gpt2", "dp=3", 5, {"vocab_size": 517}, {}),
        ("llama", "dp=4", 5, {}, {}),
        ("gpt", "tp=3", 4, {"heads": 4, "width": 32, "smoothing": 0.1, "weighted": True}, {}),
        ("waves", "dp=2, tp=2", 4, {}, {"sequence": False}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_training_equals_one_device(
    name: str, mesh: str, rows: int, changes: dict[str, Any], options: dict[str, Any], pool: Pool
) -> None:
    n = autopar.mesh(mesh).size
    ranks = pool.run(n, trains, name, mesh, rows, changes, options)
    model, inputs = make(name, rows, **changes)
    want = train(copy.deepcopy(model), lambda m: loss_of(m(**inputs)), sgd)
    agree(ranks, want, model, 1e-6 if name in CASTS else 1e-10)


def test_dropout_equals_that_of_a_mesh_of_one(pool: Pool) -> None:
    changes = {"dropout": 0.1}
    ranks = pool.run(4, trains, "gpt", "dp=2, tp=2", 4, changes, {"seed": 3})
    model, inputs = make("gpt", **changes)
    alone = autopar.parallelize(copy.deepcopy(model), 1, seed=3)
    want = train(alone, lambda m: loss_of(m(**inputs)), sgd)
    agree(ranks, want, model)


# --- batches, losses ---------------------------------------------------------------------------


def trains_own_rows(rank: int, n: int, mesh: str, counts: list[int]) -> Any:
    model, inputs = make("gpt", sum(counts), layers=1)
    parallel = autopar.parallelize(model, mesh, batch="local")
    at = autopar.mesh(mesh).coordinate(rank)["dp"]
    start = sum(counts[:at])
    mine = {k: v[start : start + counts[at]] for k, v in inputs.items()}
    return report(rank, train(parallel, lambda m: loss_of(m(**mine)), sgd))


@pytest.mark.parametrize(
    ("mesh", "counts"), [("dp=2", [2, 2]), ("dp=2, tp=2", [3, 2]), ("dp=3", [1, 3, 2])]
)
def test_rows_given_per_rank_equal_their_concatenation(
    mesh: str, counts: list[int], pool: Pool
) -> None:
    ranks = pool.run(autopar.mesh(mesh).size, trains_own_rows, mesh, counts)
    model, inputs = make("gpt", sum(counts), layers=1)
    agree(ranks, train(copy.deepcopy(model), lambda m: loss_of(m(**inputs)), sgd), model)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1)


def loss_in_the_loop(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    logits = model(inputs["x"])
    assert type(logits) is Tensor and logits.shape[:2] == inputs["x"].shape
    return cross_entropy(logits, inputs["targets"])


def trains_with_a_loss_in_the_loop(rank: int, n: int, mesh: str) -> Any:
    model, inputs = make("gpt", layers=1)
    parallel = autopar.parallelize(model, mesh)
    return report(rank, train(parallel, lambda m: loss_in_the_loop(m, inputs), sgd))


def trains_with_a_given_loss(rank: int, n: int, mesh: str) -> Any:
    model, inputs = make("gpt", layers=1)
    parallel = autopar.parallelize(model, mesh, loss=cross_entropy)
    return report(rank, train(parallel, lambda m: m(inputs["x"], targets=inputs["targets"]), sgd))


@pytest.mark.parametrize("worker", [trains_with_a_loss_in_the_loop, trains_with_a_given_loss])
@pytest.mark.parametrize("mesh", ["dp=2, tp=2", "tp=3"])
def test_loss_outside_the_model_is_exact(worker: Any, mesh: str, pool: Pool) -> None:
    ranks = pool.run(autopar.mesh(mesh).size, worker, mesh)
    model, inputs = make("gpt", layers=1)
    agree(ranks, train(copy.deepcopy(model), lambda m: loss_in_the_loop(m, inputs), sgd), model)


def trains_own_rows_with_a_loss_in_the_loop(rank: int, n: int) -> Any:
    model, inputs = make("regression", 4)
    parallel = autopar.parallelize(model.net, "dp=2", batch="local")
    x, y = (inputs[k][2 * rank : 2 * rank + 2] for k in ("x", "y"))
    rows = train(parallel, lambda m: F.mse_loss(m(x), y), sgd)
    return [{**row, "loss": row["loss"] * 0} for row in rows] if rank == 0 else ""


def test_means_over_own_rows_are_the_mean_over_all(pool: Pool) -> None:
    """Without the loss in the model, each rank's mean counts for its share of the batch."""
    rows, _ = pool.run(2, trains_own_rows_with_a_loss_in_the_loop)
    model, inputs = make("regression", 4)
    want = train(model.net, lambda m: F.mse_loss(m(inputs["x"]), inputs["y"]), sgd)
    agree([rows], [{**row, "loss": row["loss"] * 0} for row in want], model.net)


# --- optimizers, parameters, evaluation --------------------------------------------------------


def continued(model: nn.Module, inputs: Any, mesh: str | None) -> list[Arrays]:
    """An AdamW that has already stepped goes on, on a mesh or where it is."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model(**inputs)).backward()
        optimizer.step()
    optimizer.zero_grad()
    going = model if mesh is None else autopar.parallelize(model, mesh)
    return train(going, lambda m: loss_of(m(**inputs)), lambda _: optimizer)


def continues(rank: int, n: int, mesh: str) -> Any:
    model, inputs = make("mixer")
    return report(rank, continued(model, inputs, mesh))


def test_optimizer_made_before_goes_on_with_its_state(pool: Pool) -> None:
    ranks = pool.run(4, continues, "dp=2, tp=2")
    model, inputs = make("mixer")
    agree(ranks, continued(copy.deepcopy(model), inputs, None), model)


def holds(rank: int, n: int, name: str, mesh: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Facts about the parameters before any step."""
    from torch.distributed.tensor import DTensor

    model, inputs = make(name, **changes)
    before = {k: v.detach().clone() for k, v in model.state_dict().items()}
    parallel = autopar.parallelize(model, mesh, example_inputs=inputs)
    after = parallel.full_state_dict()
    parameters = dict(parallel.named_parameters())
    local = {k: p.to_local().numel() for k, p in parameters.items()}
    return {
        "names": list(parallel.state_dict()) == list(before),
        "types": all(isinstance(p, DTensor) for p in parameters.values()),
        "shapes": all(p.shape == before[k].shape for k, p in parameters.items()),
        "values": all(torch.equal(after[k], before[k]) for k in before),
        "plain": all(type(t) is Tensor for t in after.values()),
        "elements": sum(local.values()),
        "total": sum(before[k].numel() for k in parameters),
        "tied": len(parameters) == len(dict(model.named_parameters())),
    }


@pytest.mark.parametrize(
    ("name", "mesh", "changes"),
    [
        ("gpt", "tp=4", {"heads": 6, "width": 42, "vocab": 517}),  # uneven, and fused by heads
        ("gpt", "dp=2, tp=2", {}),
        ("gpt2", "tp=2", {}),
        ("llama", "tp=3", {"intermediate_size": 50}),
    ],
)
def test_parameters_keep_names_shapes_and_values(
    name: str, mesh: str, changes: dict[str, Any], pool: Pool
) -> None:
    found = pool.run(autopar.mesh(mesh).size, holds, name, mesh, changes)
    for facts in found:
        assert all(v for k, v in facts.items() if k not in ("elements", "total")), facts
        assert facts["elements"] < 0.75 * facts["total"], "little of the model was cut"


def evaluates(rank: int, n: int) -> Any:
    model, inputs = make("resnet")
    parallel = autopar.parallelize(model, "dp=2, tp=2")
    before = {k: v.clone() for k, v in parallel.full_state_dict().items()}
    parallel.eval()
    with torch.no_grad():
        out = parallel(**inputs)
    unchanged = all(torch.equal(before[k], v) for k, v in parallel.full_state_dict().items())
    parallel.train()
    trained = loss_of(parallel(**inputs))
    trained.backward()
    gradients = all(p.grad is not None for p in parallel.parameters())
    return {
        "logits": whole(out.logits), "loss": whole(out.loss), "trained": whole(trained),
        "unchanged": unchanged, "gradients": gradients, "type": type(out).__name__,
    }  # fmt: skip


def test_evaluation_and_training_take_turns(pool: Pool) -> None:
    found = pool.run(4, evaluates)
    model, inputs = make("resnet")
    with torch.no_grad():
        want = model.eval()(**inputs)
    trained = loss_of(model.train()(**inputs))
    for facts in found:
        assert facts["unchanged"] and facts["gradients"]
        assert facts["type"] == type(want).__name__
        np.testing.assert_allclose(facts["logits"], want.logits.numpy(), rtol=1e-10)
        np.testing.assert_allclose(facts["loss"], want.loss.numpy(), rtol=1e-10)
        np.testing.assert_allclose(facts["trained"], trained.detach().numpy(), rtol=1e-10)


def accumulates(rank: int, n: int) -> dict[str, np.ndarray]:
    model, inputs = make("gpt", layers=1)
    parallel = autopar.parallelize(model, "dp=2, tp=2")
    for rows in (slice(0, 2), slice(2, 4)):
        loss_of(parallel(**{k: v[rows] for k, v in inputs.items()})).backward()
    return {k: whole(p.grad) for k, p in parallel.named_parameters()}


def test_gradients_of_several_calls_accumulate(pool: Pool) -> None:
    found = pool.run(4, accumulates)
    model, inputs = make("gpt", layers=1)
    for rows in (slice(0, 2), slice(2, 4)):
        loss_of(model(**{k: v[rows] for k, v in inputs.items()})).backward()
    for name, p in model.named_parameters():
        for grads in found:
            np.testing.assert_allclose(grads[name], p.grad.numpy(), rtol=1e-9, atol=1e-12)
