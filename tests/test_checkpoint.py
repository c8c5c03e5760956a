"""Checkpoints: every mesh to every other and to one device, and what goes wrong on the way.

A chain of runs saves on one mesh and goes on upon the next; its losses are those of one run that
was never interrupted.
"""

from __future__ import annotations

import errno
import functools
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import make
from pool import Pool
from test_processes import loss_of
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import autopar
from autopar.boxes import boxes
from autopar.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")

EACH = 2  # steps on a mesh


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, dampening=0.1, nesterov=False)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def rmsprop(parameters: Any) -> torch.optim.Optimizer:
    """Two groups, centered and with momentum: three states a parameter."""
    first, *others = parameters
    groups = [{"params": [first], "lr": 0.001}, {"params": others}]
    return torch.optim.RMSprop(groups, lr=0.005, centered=True, momentum=0.5)


def freeze(model: nn.Module) -> nn.Module:
    for i, p in enumerate(model.parameters()):
        p.requires_grad_(i % 3 != 1)
    return model


class Tiny(nn.Module):
    """Buffers that count and average, and sizes of which some ranks of four hold nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.last = nn.BatchNorm1d(5), nn.Linear(6, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        z = self.last(F.gelu(self.norm(self.first(x))))
        return F.mse_loss(z.squeeze(1), y), z


def built(name: str, changes: dict[str, Any]) -> tuple[nn.Module, dict[str, Tensor]]:
    changes = dict(changes)
    frozen = changes.pop("frozen", False)
    if name == "tiny":
        torch.manual_seed(0)
        model, inputs = Tiny().double(), {"x": torch.randn(8, 6), "y": torch.randn(8)}
        inputs = {k: v.double() for k, v in inputs.items()}
    else:
        model, inputs = make(name, layers=1, **changes)
    return (freeze(model) if frozen else model), inputs


def batch(inputs: dict[str, Tensor], step: int) -> dict[str, Tensor]:
    """Another batch each step."""
    return {k: v.roll(step, 0) if v.dim() else v for k, v in inputs.items()}


def steps(
    model: nn.Module, optimizer: Any, inputs: dict[str, Tensor], first: int, last: int
) -> list[float]:
    losses = []
    for step in range(first, last):
        loss = loss_of(model(**batch(inputs, step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def parallel(model: nn.Module, mesh: str | None, **options: Any) -> nn.Module:
    return model if mesh is None else autopar.parallelize(model, mesh, **options)


def tidy(work: Any) -> Any:
    """Let ranks drop their models together: a heart that beats alone lingers for the others."""

    @functools.wraps(work)
    def done(*args: Any) -> Any:
        try:
            return work(*args)
        finally:
            gc.collect()

    return done


@tidy
def part(
    rank: int, n: int, name: str, changes: dict[str, Any], mesh: str | None, make_optimizer: Any,
    folder: str, late: bool, wait: bool,
) -> tuple[int, list[float]]:  # fmt: skip
    """Go on where the run before ended; `late` spoils everything by two steps before loading."""
    torch.manual_seed(rank)  # nothing may hang on it
    model, inputs = built(name, changes)
    model = parallel(model, mesh, seed=99 if late else 3)
    optimizer = make_optimizer(model.parameters())
    checkpoints = autopar.Checkpoints(folder)
    if late:
        steps(model, optimizer, inputs, 5, 7)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    resumed = checkpoints.load(model, optimizer)
    if resumed is None:
        model, inputs = built(name, changes)
        model = parallel(model, mesh, seed=3)
        optimizer = make_optimizer(model.parameters())
    else:
        assert resumed.extra == {"next": resumed.step}
    first = 0 if resumed is None else resumed.step
    losses = steps(model, optimizer, inputs, first, first + EACH)
    checkpoints.save(first + EACH, model, optimizer, {"next": first + EACH}, wait=wait)
    if not wait:  # what is saved must be what was there
        steps(model, optimizer, inputs, 0, 1)
        checkpoints.wait()
    return first, losses


def chain(
    pool: Pool, name: str, changes: dict[str, Any], meshes: list[str | None], make_optimizer: Any,
    folder: Path,
) -> list[float]:  # fmt: skip
    losses: list[float] = []
    for i, mesh in enumerate(meshes):
        n = 1 if mesh is None else autopar.mesh(mesh).size
        late, wait = i % 2 == 1, i % 3 != 1
        ranks = pool.run(n, part, name, changes, mesh, make_optimizer, str(folder), late, wait)
        assert {first for first, _ in ranks} == {EACH * i}, f"{mesh} resumed elsewhere"
        for _, found in ranks:
            assert found == ranks[0][1], "ranks differ"
        losses += ranks[0][1]
    return losses


def uninterrupted(
    name: str, changes: dict[str, Any], make_optimizer: Any, count: int, mesh: Any
) -> list[float]:
    model, inputs = built(name, changes)
    model = parallel(model, mesh, seed=3)
    return steps(model, make_optimizer(model.parameters()), inputs, 0, count)


UNEVEN = {"heads": 6, "width": 42, "vocab": 517}

CHAINS: list[tuple[str, dict[str, Any], list[str | None], Any]] = [
    ("gpt", {"weighted": True}, ["fsdp=2", "tp=2", "dp=2", None, "dp=2, tp=2"], adamw),
    ("gpt", UNEVEN, ["tp=4", "fsdp=3", "tp=2", "fsdp=2, tp=2", None], sgd),
    ("gpt", {"dropout": 0.2}, ["dp=2", "tp=3", "fsdp=2, tp=2", "dp=1", "tp=2, fsdp=2"], adamw),
    ("gpt", {"frozen": True}, ["dp=2, fsdp=2", "tp=2", None], rmsprop),
    ("tiny", {}, ["fsdp=4", "dp=2", "tp=2", None, "fsdp=3"], sgd),
]


def named(value: Any) -> str:
    """An id that is the same in every process."""
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize(("name", "changes", "meshes", "make_optimizer"), CHAINS, ids=named)
def test_losses_go_on_upon_another_mesh(
    name: str, changes: dict[str, Any], meshes: list[str | None], make_optimizer: Any, pool: Pool,
    tmp_path: Path,
) -> None:  # fmt: skip
    losses = chain(pool, name, changes, meshes, make_optimizer, tmp_path)
    reference = 1 if "dropout" in changes else None
    want = uninterrupted(name, changes, make_optimizer, EACH * len(meshes), reference)
    assert losses == pytest.approx(want, rel=1e-10, abs=0)
    assert (
        autopar.Checkpoints(tmp_path).steps() == [EACH * i for i in range(1, len(meshes) + 1)][-2:]
    )
    assert not list(tmp_path.glob("*.partial"))


# --- torch's own functions ---------------------------------------------------------------------


@tidy
def plain_part(rank: int, n: int, mesh: str | None, folder: str, first: int) -> list[float]:
    """As a user writes it with torch alone; from the second part on it loads first."""
    model, inputs = built("gpt", {"dropout": 0.2})
    model = parallel(model, mesh, seed=3)
    optimizer = adamw(model.parameters())
    rng = model.get_rng_state()
    if first:
        steps(model, optimizer, inputs, 5, 6)
        state, states = get_state_dict(model, optimizer)
        found = {"model": state, "optimizer": states, "rng": rng}
        dcp.load(found, checkpoint_id=f"{folder}/{first}")
        set_state_dict(
            model, optimizer, model_state_dict=state, optim_state_dict=found["optimizer"]
        )
        model.set_rng_state(found["rng"])
    losses = steps(model, optimizer, inputs, first, first + EACH)
    state, states = get_state_dict(model, optimizer)
    found = {"model": state, "optimizer": states, "rng": model.get_rng_state()}
    at = f"{folder}/{first + EACH}"
    if first:
        dcp.async_save(found, checkpoint_id=at).result()
    else:
        dcp.save(found, checkpoint_id=at)
    return losses


def test_torch_alone_saves_and_loads(pool: Pool, tmp_path: Path) -> None:
    meshes = ["tp=2", "dp=2, tp=2", "fsdp=3", "dp=1"]  # the first two hold a fused dim in runs
    losses: list[float] = []
    for i, mesh in enumerate(meshes):
        losses += pool.run(autopar.mesh(mesh).size, plain_part, mesh, str(tmp_path), EACH * i)[0]
    want = uninterrupted("gpt", {"dropout": 0.2}, adamw, len(losses), 1)
    assert losses == pytest.approx(want, rel=1e-10, abs=0)


def cut(rank: int, n: int, mesh: str, changes: dict[str, int]) -> list[Any]:
    """Where the boxes of the fused weight stand, and their values."""
    model, inputs = built("gpt", changes)
    model = autopar.parallelize(model, mesh, example_inputs=inputs)
    weight: Any = dict(model.named_parameters())["blocks.0.qkv.weight"]
    piece, rows = weight.to_local().detach(), []
    for box in boxes(weight):
        window = tuple(slice(s, s + k) for s, k in zip(box.local, box.sizes, strict=True))
        rows.append((box.offsets, piece[window].numpy()))
    return rows


@pytest.mark.parametrize(
    ("mesh", "heads", "copies", "counts"),
    [("tp=3", 6, 1, [3, 3, 3]), ("tp=2", 6, 1, [3, 3]), ("dp=2, tp=2", 4, 2, [3] * 4)],
)
def test_boxes_make_up_the_whole(
    mesh: str, heads: int, copies: int, counts: list[int], pool: Pool
) -> None:
    changes = {"heads": heads, "width": 7 * heads}
    found = pool.run(len(counts), cut, mesh, changes)
    want = built("gpt", changes)[0].blocks[0]["qkv"].weight
    assert [len(rows) for rows in found] == counts, "query, key and value"
    found = found[: len(found) // copies]
    whole = torch.full_like(want, float("nan"))
    for offsets, part_of_it in (row for rows in found for row in rows):
        window = tuple(slice(o, o + k) for o, k in zip(offsets, part_of_it.shape, strict=True))
        assert whole[window].isnan().all(), "boxes overlap"
        whole[window] = torch.from_numpy(part_of_it)
    assert torch.equal(whole, want)


# --- errors ------------------------------------------------------------------------------------


def put(model: nn.Module, name: str) -> nn.Module:
    setattr(model, name, nn.Linear(5, 2).double())
    return model


def saved(folder: Path, name: str = "tiny", number: int = 3, optimizer: Any = sgd) -> Any:
    model, inputs = built(name, {})
    made = optimizer(model.parameters())
    steps(model, made, inputs, 0, 1)
    checkpoints = autopar.Checkpoints(folder)
    checkpoints.save(number, model, made, {"a": 1})
    return checkpoints, model, made


def test_nothing_to_load_is_none(tmp_path: Path) -> None:
    assert autopar.Checkpoints(tmp_path / "none").load(nn.Linear(2, 2)) is None
    with pytest.raises(CheckpointError, match="no complete checkpoint of step 4"):
        autopar.Checkpoints(tmp_path).load(nn.Linear(2, 2), step=4)


def test_incomplete_checkpoints_are_not_seen_and_go(tmp_path: Path) -> None:
    checkpoints, model, _ = saved(tmp_path)
    left = tmp_path / "step-00000009.abc.partial"
    left.mkdir()
    assert checkpoints.load(model).step == 3
    checkpoints.save(4, model)
    assert not left.exists() and checkpoints.steps() == [3, 4]
    with pytest.raises(CheckpointError, match="later than step 2"):
        checkpoints.save(2, model)
    assert checkpoints.load(model, step=3).step == 3


def test_a_replaced_checkpoint_counts_until_the_new_one_does(
    tmp_path: Path, monkeypatch: Any
) -> None:
    checkpoints, model, _ = saved(tmp_path)
    with torch.no_grad():
        model.first.weight.add_(1)

    def fails(self: Path, target: Any) -> Any:
        if str(self).endswith(".partial"):
            raise OSError(errno.EIO, "broken")
        return Path_rename(self, target)

    Path_rename = Path.rename
    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(CheckpointError, match="checkpoint of step 3 is intact"):
        checkpoints.save(3, model)
    monkeypatch.undo()
    want = model.first.weight.detach() - 1
    assert checkpoints.load(model).step == 3
    torch.testing.assert_close(model.first.weight.detach(), want)
    checkpoints.save(3, model)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000003"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (nn.Sequential, ["another model", "not in the model: first.bias", "and 6 more"]),
        (lambda m: put(m, "last"), ["other sizes", "last.weight: [1, 5]", "[2, 5]"]),
        (lambda m: put(m, "more"), ["not in the checkpoint: more.bias"]),
    ],
)
def test_another_model_is_refused_untouched(change: Any, words: list[str], tmp_path: Path) -> None:
    checkpoints, model, _ = saved(tmp_path)
    other = change(built("tiny", {})[0])
    before = {k: v.clone() for k, v in other.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        checkpoints.load(other)
    assert all(word in str(caught.value) for word in words), caught.value
    assert all(torch.equal(before[k], v) for k, v in other.state_dict().items())


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    checkpoints, model, optimizer = saved(tmp_path)
    with pytest.raises(CheckpointError, match="of the optimizer SGD"):
        checkpoints.load(model, adamw(model.parameters()))
    with pytest.raises(CheckpointError, match="groups its parameters differently"):
        first, *others = model.parameters()
        checkpoints.load(model, torch.optim.SGD([{"params": [first]}, {"params": others}]))
    with pytest.raises(CheckpointError, match="does not have"):
        checkpoints.save(5, model, sgd(nn.Linear(2, 2).parameters()))
    checkpoints.save(6, model)
    with pytest.raises(CheckpointError, match="holds no optimizer"):
        checkpoints.load(model, optimizer)
    with pytest.raises(CheckpointError, match="extra cannot be pickled"):
        checkpoints.save(7, model, extra=lambda: 0)


def loads(rank: int, n: int, folder: str) -> str:
    model, _ = built("tiny", {})
    with pytest.raises(CheckpointError) as caught:
        autopar.Checkpoints(folder).load(parallel(model, "dp=2"))
    return str(caught.value)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
        (lambda f: os.truncate(f / "__0_0.distcp", 900), "__0_0.distcp is cut short"),
        (lambda f: (f / ".metadata").unlink(), "metadata cannot be read (FileNotFoundError"),
        (lambda f: (f / ".metadata").write_bytes(b"no"), "metadata cannot be read"),
        (lambda f: (f / "__0_0.distcp").write_bytes(bytes(200_000)), "Could not load"),
    ],
)
def test_damage_is_named_on_all_ranks(damage: Any, words: str, pool: Pool, tmp_path: Path) -> None:
    saved(tmp_path)
    damage(tmp_path / "step-00000003")
    for text in pool.run(2, loads, str(tmp_path)):
        assert words in text and "step-00000003" in text, text


@tidy
def fills_the_disk(rank: int, n: int, folder: str, wait: bool) -> tuple[str, list[str], float]:
    """Rank 1 finds no room: its file is the device that is always full."""
    model, inputs = built("gpt", {})
    model = parallel(model, "fsdp=2")
    optimizer = adamw(model.parameters())
    losses = steps(model, optimizer, inputs, 0, 2)
    checkpoints = autopar.Checkpoints(folder)
    checkpoints.save(2, model, optimizer)
    create = FileSystem.create_stream

    def full(self: Any, path: Any, mode: str) -> Any:
        return create(self, "/dev/full" if rank == 1 else path, mode)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileSystem, "create_stream", full)
        with pytest.raises(CheckpointError) as caught:
            checkpoints.save(4, model, optimizer, wait=wait)
            checkpoints.wait()
    names = sorted(p.name for p in Path(folder).iterdir())
    losses = steps(model, optimizer, inputs, 2, 4)
    assert checkpoints.load(model, optimizer).step == 2
    assert steps(model, optimizer, inputs, 2, 4) == losses
    checkpoints.save(4, model, optimizer)
    assert checkpoints.steps() == [2, 4]
    return str(caught.value), names, losses[0]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has a full device")
@pytest.mark.parametrize("wait", [True, False])
def test_a_full_disk_leaves_the_last_checkpoint(wait: bool, pool: Pool, tmp_path: Path) -> None:
    for text, names, _ in pool.run(2, fills_the_disk, str(tmp_path), wait):
        assert "The disk is full: could not save step 4." in text
        assert "on rank 1 (" in text and "checkpoint of step 2 is intact" in text
        assert "step-00000002" in names
