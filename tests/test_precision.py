"""Compute in a narrow dtype on wide parameters: narrow ones are gathered, wide ones reduced."""

from __future__ import annotations

import math
from operator import getitem
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import HUGGING_FACE, KINDS, make
from pool import Pool
from test_equality import one_thread
from test_processes import loss_of
from torch import Tensor, nn
from torch.func import functional_call

import autopar
from autopar.collectives import collective_of, members_of
from autopar.errors import InputError
from autopar.program import shares_memory
from autopar.promotion import Promotion
from autopar.verification import Trace, run_eager, run_virtual

__all__ = ["one_thread"]  # the fixture
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")

ROUNDED = {"waves"}  # biases before norms: gradients that are zero on paper, all of them rounding
MODELS = (*HUGGING_FACE, *(k for k in KINDS if k not in ROUNDED))


CASES: list[Any] = [(n, "fsdp=3", None) for n in MODELS]
CASES += [(n, "dp=2, tp=2", 1) for n in ("bert", "gpt2", "llama", "gpt")]


@pytest.mark.parametrize(("name", "mesh", "zero"), CASES)
def test_float32_on_float64_parameters_is_exact(name: str, mesh: str, zero: int | None) -> None:
    """A gap of nine digits: a cast in the wrong place or a reduction too narrow shows."""
    model, inputs = make(name, 5 if "3" in mesh else 4)
    options = {"precision": "fp32", "zero": zero, "steps": 2, "lr": 0.01}
    autopar.verify(model, mesh, inputs, **options).raise_if_failed()


NARROW, WIDE = torch.bfloat16, torch.float32


def promoted(function: Any, *args: Any, **kwargs: Any) -> Tensor:
    with Promotion():
        found: Tensor = function(*args, **kwargs)
    return found


def test_products_meet_narrow_and_losses_wide() -> None:
    """Against casts written out; torch itself refuses each of these."""
    x, w, b = torch.randn(5, 4, dtype=NARROW), torch.randn(3, 4), torch.randn(3, dtype=NARROW)
    y, weights, goals = torch.tensor([0, 2, 1, 1, 0]), torch.rand(4), torch.rand(5, 4)
    cases: list[tuple[Any, tuple[Any, ...], Tensor]] = [
        (F.linear, (x, w, b), F.linear(x, w.to(NARROW), b)),
        (torch.matmul, (x, w.T), x @ w.T.to(NARROW)),
        (F.cross_entropy, (x, y, weights), F.cross_entropy(x.float(), y, weights)),
        (
            F.binary_cross_entropy, (x.sigmoid(), goals),
            F.binary_cross_entropy(x.sigmoid().float(), goals),
        ),
    ]  # fmt: skip
    for function, args, want in cases:
        with pytest.raises(RuntimeError):
            function(*args)
        have = promoted(function, *args)
        assert have.dtype == want.dtype and torch.equal(have, want), function


@pytest.mark.parametrize(("narrow", "wide"), [(NARROW, WIDE), (WIDE, torch.float64)])
def test_norms_keep_the_dtype_of_their_input(narrow: torch.dtype, wide: torch.dtype) -> None:
    x, weight = torch.randn(6, 4).to(narrow), torch.rand(4).to(narrow)
    mean, var = torch.zeros(4, dtype=wide), torch.ones(4, dtype=wide)
    kept = mean.clone(), var.clone()
    have = promoted(F.batch_norm, x, mean, var, weight, training=True)
    want = F.batch_norm(x.to(wide), *kept, weight.to(wide), training=True)
    assert have.dtype == narrow
    torch.testing.assert_close(have, want.to(narrow))
    torch.testing.assert_close((mean, var), kept)
    assert promoted(F.linear, x, x) is not None and mean.dtype == wide


def test_one_dtype_is_left_alone() -> None:
    x, w = torch.randn(2, 3), torch.randn(4, 3)
    assert torch.equal(promoted(F.linear, x, w), F.linear(x, w))
    with pytest.raises(RuntimeError):
        promoted(F.linear, x, w[:, :2])


class Mixed(nn.Module):
    """Calls that refuse to mix dtypes, on buffers beside parameters that are cast."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 6, 3, bias=False)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 5)
        self.register_buffer("basis", torch.randn(6, 6))
        self.register_buffer("scale", torch.rand(6))
        self.register_buffer("weights", torch.rand(5))

    def forward(self, x: Tensor, y: Tensor, goals: Tensor) -> Tensor:
        x = self.norm(self.conv(x))
        x = (x.transpose(1, 2) @ self.basis).tanh()  # a product: in the dtype of x
        x = F.layer_norm(x, (6,), self.scale).mean(1)
        out = self.head(x)
        loss = F.cross_entropy(out, y, self.weights, label_smoothing=0.1)
        return loss + F.binary_cross_entropy_with_logits(out, goals * self.weights)


@pytest.mark.parametrize(("mesh", "precision"), [("dp=2", "fp32"), ("fsdp=3", "fp32")])
def test_buffers_meet_cast_parameters(mesh: str, precision: str) -> None:
    torch.manual_seed(1)
    model = Mixed().double()
    x, y, goals = torch.randn(5, 4, 9).double(), torch.randint(5, (5,)), torch.rand(5, 5).double()
    inputs = {"x": x, "y": y, "goals": goals}
    options: Any = {"precision": precision, "steps": 3, "lr": 0.05}
    autopar.verify(model, mesh, inputs, **options).raise_if_failed()
    with pytest.raises(RuntimeError):  # what the single device says to it
        narrow = {n: p.float() for n, p in model.named_parameters()}
        functional_call(model, narrow, (x.float(), y, goals))


def single(name: str, rows: int = 4) -> tuple[nn.Module, dict[str, Any]]:
    model, inputs = make(name, rows)
    inputs = {k: v.float() if v.is_floating_point() else v for k, v in inputs.items()}
    return model.float(), inputs


@pytest.mark.parametrize("mesh", ["dp=2", "fsdp=2, tp=2"])
@pytest.mark.parametrize("name", ["gpt", "gpt2", "llama"])
def test_bfloat16_is_as_near_as_on_one_device(name: str, mesh: str) -> None:
    model, inputs = single(name)
    compiled = autopar.compile(model, mesh, inputs, precision="bf16")
    steps = (1, lambda params: torch.optim.SGD(params, lr=0.1))
    exact = run_eager(model, inputs, *steps)
    alone = run_eager(model, inputs, *steps, narrow=torch.bfloat16)
    ranks = run_virtual(compiled, model, inputs, *steps)

    def distance(run: Trace) -> float:
        rows = zip(run.grads[0].values(), (exact.grads[0][n] for n in run.grads[0]), strict=True)
        pairs = [(a, b) for a, b in rows if a is not None and b is not None]
        return math.sqrt(sum(float((a - b).square().sum()) for a, b in pairs))

    assert set(ranks.grads[0]) == set(exact.grads[0])
    assert 0 < distance(ranks) < 1.2 * distance(alone)


@pytest.mark.parametrize(("mesh", "zero"), [("fsdp=2", 3), ("dp=2, tp=2", 2), ("dp=2, tp=2", 0)])
def test_gathers_are_narrow_and_reductions_wide(mesh: str, zero: int) -> None:
    model, inputs = single("gpt")
    found = autopar.compile(model, mesh, inputs, precision="bf16", zero=zero)
    phases = found.of(0)
    states = {s.name: s for s in phases.program.states}
    assert {states[n].dtype for n in phases.gradients} == {torch.float32}
    data = "fsdp" if "fsdp" in mesh else "dp"
    for gm in (phases.forward, phases.backward):
        for node in gm.graph.nodes:
            row = collective_of(node)
            if row is None or node.args[1] != data:
                continue
            results = node.meta["val"] if row.name.endswith("bucket") else [node.meta["val"]]
            if "gather" in row.name and zero:
                assert {r.dtype for r in results} == {torch.bfloat16}, node
            elif row.name in ("reduce_scatter_bucket", "all_reduce_bucket"):
                moved = {x.meta["val"].dtype for _, x, _ in members_of(node)}
                assert moved == {torch.float32}, node


def wires(found: Any, axis: str) -> set[Any]:
    """Dtypes in which the backward pass sends sums over an axis."""
    nodes = [n for n in found.of(0).backward.graph.nodes if collective_of(n) is not None]
    return {
        n.kwargs.get("wire") or x.meta["val"].dtype
        for n in nodes
        for name, x, _ in members_of(n)
        if n.args[1] == axis and "reduce" in name
    }


@pytest.mark.parametrize(
    ("mesh", "zero", "more"),
    [
        ("dp=2, fsdp=2", 3, {}),
        ("fsdp=3", 1, {}),
        ("dp=2, tp=2", 0, {}),
        ("fsdp=2", 3, {"accumulate": 2}),
    ],
)
def test_gradients_are_sent_narrow_where_asked(mesh: str, zero: int, more: dict[str, Any]) -> None:
    """Over data axes alone, and the result is within roundings of what is reduced wide."""
    model, inputs = single("gpt", 6)
    wide, narrow = (
        autopar.compile(model, mesh, inputs, precision="bf16", zero=zero, **more, **options)
        for options in ({}, {"reduce": "bf16"})
    )
    assert {s.dtype for s in narrow.of(0).program.states if s.is_parameter} == {torch.float32}
    for axis in autopar.mesh(mesh).names:
        if axis == "tp":
            assert wires(narrow, axis) == wires(wide, axis)
        else:
            assert wires(narrow, axis) == {torch.bfloat16}
            assert torch.float32 in wires(wide, axis)
    one, two = (
        run_virtual(c, model, inputs, 1, lambda params: torch.optim.SGD(params, lr=0.1))
        for c in (wide, narrow)
    )
    assert torch.equal(one.losses[0], two.losses[0])
    largest = max(float(g.norm()) for g in one.grads[0].values() if g is not None)
    differ = False
    for name, want in one.grads[0].items():
        have = two.grads[0][name]
        assert have is not None and want is not None and have.dtype == torch.float32
        error = float((have - want).norm()) / max(float(want.norm()), 1e-3 * largest)
        assert error < 4 * 2**-8, name
        differ |= error > 0
    assert differ, "it was not rounded at all"


@pytest.mark.parametrize("mesh", ["dp=2, tp=2", "fsdp=3"])
def test_narrow_reduction_verifies(mesh: str) -> None:
    """As far as what is sent goes: six digits of float32, two of bfloat16."""
    model, inputs = make("gpt", 5)
    options = {"precision": "fp32", "steps": 2, "lr": 0.01}
    autopar.verify(model, mesh, inputs, reduce="fp32", **options).raise_if_failed()
    coarse = autopar.verify(model, mesh, inputs, reduce="bf16", **options)
    coarse.raise_if_failed()
    assert max(r.error for r in coarse.rows) > 1e-4


def bytes_sent(found: Any) -> float:
    return sum(size for phase, *_, size in found.traffic() if phase == "backward")


def test_narrow_reduction_halves_the_bytes() -> None:
    model, inputs = single("gpt")
    wide, narrow = (
        bytes_sent(autopar.compile(model, "dp=2", inputs, precision="bf16", reduce=reduce))
        for reduce in (None, "bf16")
    )
    assert 0.5 * wide <= narrow < 0.51 * wide


def reduces_narrow(rank: int, n: int, mesh: str) -> Any:
    model, inputs = single("gpt")
    parallel = autopar.parallelize(model, mesh, precision="bf16", reduce="bf16")
    with parallel.no_sync():
        loss_of(parallel(**inputs)).backward()
    loss_of(parallel(**inputs)).backward()
    return {k: p.grad.full_tensor().numpy() for k, p in parallel.named_parameters()}


@pytest.mark.parametrize("mesh", ["fsdp=2", "dp=2, tp=2"])
def test_narrow_reduction_in_processes_equals_virtual_ranks(mesh: str, pool: Pool) -> None:
    model, inputs = single("gpt")
    compiled = autopar.compile(model, mesh, inputs, precision="bf16", reduce="bf16")
    want = run_virtual(compiled, model, inputs, 1, lambda ps: torch.optim.SGD(ps, lr=0.1)).grads[0]
    for grads in pool.run(autopar.mesh(mesh).size, reduces_narrow, mesh):
        for name, g in want.items():
            assert g is not None
            error = float((torch.from_numpy(grads[name]) - 2 * g).norm() / (2 * g.norm() + 1e-6))
            assert error < 2**-7, name


def test_narrow_reduction_needs_a_narrow_computation() -> None:
    with pytest.raises(InputError, match=r"reduce='bf16' was given without precision(.|\n)*add"):
        autopar.parallelize(nn.Linear(2, 2), "dp=1", reduce="bf16")
    with pytest.raises(InputError, match="reduce='int8' is not known"):
        autopar.parallelize(nn.Linear(2, 2), "dp=1", precision="bf16", reduce="int8")


def state_bytes(rank: int, n: int, zero: int) -> tuple[int, int]:
    """Bytes of parameters, gradients and Adam's moments on this rank, and what AdamW adds."""
    model, inputs = single("gpt")
    parallel = autopar.parallelize(model, f"dp={n}", precision="bf16", zero=zero)
    loss_of(parallel(**inputs)).backward()
    optimizer = torch.optim.AdamW(parallel.parameters())
    optimizer.step()
    local: Any = lambda t: t.to_local() if hasattr(t, "to_local") else t  # noqa: E731
    params = [t for p in parallel.parameters() for t in (p, p.grad)]
    moments = [t for state in optimizer.state.values() for t in state.values() if t.dim()]
    return sum(local(t).nbytes for t in params), sum(local(t).nbytes for t in moments)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_states_take_sixteen_bytes_a_parameter(zero: int, pool: Pool) -> None:
    """4 of a master, 4 of its gradient, 8 of Adam; 1/n of it where they are cut, between steps."""
    count = sum(p.numel() for p in single("gpt")[0].parameters())
    parts = 2 if zero else 1
    for rank in pool.run(2, state_bytes, zero):
        assert rank == (8 * count / parts, 8 * count / parts)


@pytest.mark.parametrize(("zero", "most"), [(1, 2), (2, 2), (3, 0)])
def test_gathered_weights_take_two_bytes_between_the_passes(zero: int, most: int) -> None:
    """Stages 1 and 2 hold them from forward to backward, stage 3 does not."""
    model, inputs = single("gpt")
    phases = autopar.compile(model, "dp=4", inputs, precision="bf16", zero=zero).of(0)
    saved: Any = phases.forward.graph.output_node().args[0][phases.n_results :]
    found = set()
    for node in saved:
        while shares_memory(node):
            node = node.args[0]
        source = node.args[0] if node.target is getitem else node
        if "all_gather" in str(source.target):
            found.add(node)
    held = sum(n.meta["val"].nbytes for n in found)
    count = sum(p.numel() for p in model.parameters())
    assert 0.7 * most * count <= held <= most * count


def test_floating_inputs_are_cast_and_targets_are_not() -> None:
    seen: list[torch.dtype] = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.extend([outputs.dtype, targets.dtype])
        return (outputs - targets).square().mean()

    model, x, y = nn.Linear(8, 4), torch.randn(4, 8), torch.randn(4, 4)
    found = autopar.compile(model, "dp=2", {"input": x, "targets": y}, loss=loss, precision="bf16")
    assert seen[-2:] == [torch.bfloat16, torch.float32]
    assert {i.dtype for i in found.of(0).program.inputs} == {torch.float32}


def test_unknown_precision_is_refused() -> None:
    with pytest.raises(InputError, match="precision='int8' is not known"):
        autopar.parallelize(nn.Linear(2, 2), "dp=1", precision="int8")


# --- loss scaling ------------------------------------------------------------------------------


def scaled(model: Any, inputs: Any, names: list[str]) -> list[tuple[float, float, dict[str, Any]]]:
    """Loss, scale and parameters after each of four steps; the first overflows."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=2)
    optimizer = None
    rows = []
    for _ in range(4):
        loss = model(**inputs)
        scaler.scale(loss_of(loss)).backward()
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        params = dict(model.named_parameters())
        whole = {
            n: getattr(p, "full_tensor", lambda p=p: p)().detach().clone()
            for n, p in params.items()
        }
        rows.append(
            (
                float(loss_of(loss).detach()),
                scaler.get_scale(),
                {n: whole[n].numpy() for n in names},
            )
        )
    return rows


class Narrowed(nn.Module):
    """The single-device meaning of precision="fp16"."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Any:
        half = {n: p.half() for n, p in self.model.named_parameters()}
        return functional_call(self.model, half, (), inputs)


NAMES = ["head.weight", "blocks.0.qkv.bias", "norm.weight"]


def trains(rank: int, n: int, mesh: str) -> Any:
    model, inputs = single("gpt")
    names = [name for name in NAMES if name in dict(model.named_parameters())]
    return scaled(autopar.parallelize(model, mesh, precision="fp16"), inputs, names)


@pytest.mark.parametrize("mesh", ["fsdp=2", "dp=2, tp=2"])
def test_overflow_is_decided_once_for_all_ranks(mesh: str, pool: Pool) -> None:
    model, inputs = single("gpt")
    names = [name for name in NAMES if name in dict(model.named_parameters())]
    start = {n: p.detach().clone().numpy() for n, p in model.named_parameters()}
    want = scaled(Narrowed(model), inputs, [f"model.{n}" for n in names])
    ranks = pool.run(autopar.mesh(mesh).size, trains, mesh)
    for rows in ranks:
        assert [r[1] for r in rows] == [r[1] for r in want], "ranks scale by the same"
        for have, one in zip(rows, want, strict=True):
            assert math.isclose(have[0], one[0], rel_tol=4e-3)
            for n in names:
                error = abs(have[2][n] - one[2][f"model.{n}"]).max()
                assert error <= 4e-3 * abs(one[2][f"model.{n}"]).max(), n
    assert want[0][1] < 2.0**24, "the first step overflows"
    assert all((ranks[0][0][2][n] == start[n]).all() for n in names), "and is skipped"
