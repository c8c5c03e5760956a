"""Backward passes inside `no_sync` reduce nothing; the first one after it reduces the sum."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import KINDS, make
from pool import Pool
from test_accumulate import moving
from test_equality import DROPOUT, one_thread
from test_processes import CASTS, whole
from torch import Tensor, nn

import autopar
from autopar.arguments import bind_arguments
from autopar.codegen import split_backward
from autopar.compat import pytree
from autopar.errors import AutoparError
from autopar.passes.defer import constants, defer
from autopar.runtime import Communicator, VirtualWorld
from autopar.runtime.executor import Code, Executor
from autopar.runtime.ledger import Ledger
from autopar.runtime.pieces import assemble, piece

__all__ = ["one_thread"]  # the fixture
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")

MODELS = ("bert", "gpt2", "llama", "t5", "vit", "resnet", *KINDS)
PLAIN = tuple(n for n in MODELS if n not in ("resnet", "autoencoder"))
MIXING = ("resnet", "waves", "recommender")
"""Rows of different ranks meet within: batch norm, a contrastive loss."""


# --- what is left out --------------------------------------------------------------------------


def reductions(graph: Any, axes: tuple[str, ...]) -> int:
    return sum("reduce" in name for axis in axes for name in moving(graph, axis))


LEFT_OUT = [(n, "dp=2, fsdp=2", 3) for n in MODELS if n not in MIXING]
LEFT_OUT += [("gpt2", m, z) for m, z in (("dp=2, tp=2", 0), ("dp=2, tp=2", 2), ("fsdp=3", 1))]


@pytest.mark.parametrize(("name", "mesh", "zero"), LEFT_OUT)
def test_no_gradient_is_reduced_over_data_axes(name: str, mesh: str, zero: int) -> None:
    axes = tuple(a for a in autopar.mesh(mesh).names if a != "tp")
    model, inputs = make(name, 7)
    phases: Any = autopar.compile(model, mesh, inputs, zero=zero).shared
    halves = defer(phases.backward, constants(phases))
    assert reductions(phases.backward, axes) > 0
    assert reductions(halves.partial, axes) == 0
    assert reductions(halves.finish, axes) == reductions(phases.backward, axes)


@pytest.mark.parametrize("name", MIXING)
def test_only_what_mixes_rows_is_still_reduced(name: str) -> None:
    """Sums over the batch within the backward pass are no gradients of parameters."""
    model, inputs = make(name, 8)
    phases: Any = autopar.compile(model, "dp=2", inputs).shared
    halves = defer(phases.backward, constants(phases))
    left = reductions(halves.partial, ("dp",))
    model.eval() if name != "recommender" else None
    norms = sum(isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d)) for m in model.modules())
    assert left == (1 if name == "recommender" else 2 * norms)
    assert reductions(halves.finish, ("dp",)) > 0


# --- virtual ranks -----------------------------------------------------------------------------


def virtual(
    model: nn.Module, mesh: str, batches: list[dict[str, Any]], inside: int, **options: Any
) -> tuple[list[str], dict[str, Tensor]]:
    """Collectives over data axes of the backward passes inside, and whole gradients at the end.

    All batches but those after the first `inside` run in `no_sync`.
    """
    steps = [autopar.compile(model, mesh, batches[0], **options)]
    rest = {k: v for k, v in options.items() if k != "zero"}  # the plan tells, as placements stay
    for one, batch in zip(batches, batches[1:], strict=False):
        again = all(one[k].shape == batch[k].shape for k in one)
        last = steps[-1]
        steps.append(last if again else autopar.compile(model, mesh, batch, plan=last.plan, **rest))
    grid = steps[0].annotated.mesh
    functions = [c.functions() for c in steps]
    splits = {id(c): split_backward(c.shared, "test") for c in steps}  # type: ignore[arg-type]
    values = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def body(comm: Communicator) -> Any:
        local: dict[str, Tensor] = {}
        ledger = Ledger(lambda name: local[name], lambda _, g: g, lambda g: g)
        seen: list[str] = []
        for turn, (compiled, batch) in enumerate(zip(steps, batches, strict=True)):
            comm.step = turn + 1
            phases: Any = compiled.shared
            states = compiled.of(comm.rank).program.states
            for s in states:
                if s.name not in local:
                    whole = {**values, **compiled.annotated.constants}[s.name].detach()
                    local[s.name] = piece(whole, s.layout, grid, comm.coordinate).clone()
                    local[s.name].requires_grad_(s.name in phases.gradients)
            found = functions[turn][compiled.signature(comm.coordinate)]
            split = splits[id(compiled)]
            code = Code(found.forward, found.backward, phases.roots, lambda split=split: split)
            executor = Executor(code, lambda _, g: g, comm, torch.device("cpu"), ledger=ledger)
            inputs = [
                piece(t, i.layout, grid, comm.coordinate)
                for t, i in zip(
                    bind_arguments((), batch).tensors, phases.program.inputs, strict=True
                )
            ]
            leaves = [local[n] for n in phases.gradients]
            results = executor.run([*(local[s.name].detach() for s in states), *inputs], leaves)
            loss = results[next(o.index for o in phases.program.outputs if o.is_loss)]
            ledger.holding = turn < inside
            before = len(comm.transport.seen)  # type: ignore[attr-defined]
            loss.backward()
            if ledger.holding:
                seen += comm.transport.seen[before:]  # type: ignore[attr-defined]
                assert all(not leaf.grad.any() for leaf in leaves if leaf.grad is not None)
        return seen, {n: local[n].grad for n in steps[0].of_any().gradients}

    ranks = VirtualWorld(grid).run(lambda comm: body(watched(comm)))
    layouts = {s.name: s.layout for s in steps[0].of_any().program.states}
    grads = {
        n: assemble([r[1][n] for r in ranks], layouts[n], grid)
        for n in ranks[0][1]
        if ranks[0][1][n] is not None
    }
    return [each for r in ranks for each in r[0]], grads


class Watching:
    """A transport that notes sums over data axes."""

    SUMS = ("start_reduce", "start_scatter")

    def __init__(self, inner: Any) -> None:
        self.inner, self.seen = inner, []
        assert all(hasattr(inner, name) for name in self.SUMS), "it would see nothing"

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.inner, name)
        if name not in self.SUMS:
            return function

        def noted(*args: Any) -> Any:
            if args[-1].axis in ("dp", "fsdp"):
                self.seen.append(f"{args[-1]}")
            return function(*args)

        return noted


def watched(comm: Communicator) -> Communicator:
    comm.transport = Watching(comm.transport)
    return comm


def loss_of(out: Any) -> Tensor:
    return next(x for x in pytree.tree_leaves(out) if x.dim() == 0)


def alone(model: nn.Module, batches: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Gradients of all calls on one device."""
    for p in model.parameters():
        p.grad = None
    for batch in batches:
        loss_of(model(**batch)).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def batches_of(name: str, counts: tuple[int, ...], **changes: Any) -> list[dict[str, Any]]:
    """Different rows in each call."""
    inputs = make(name, sum(counts), **changes)[1]
    cuts = {k: torch.split(v, list(counts)) for k, v in inputs.items()}
    return [{k: v[i] for k, v in cuts.items()} for i in range(len(counts))]


def close(have: dict[str, Tensor], want: dict[str, Tensor], limit: float = 1e-10) -> None:
    assert set(have) == set(want)
    floor = 1e-3 * max(float(t.norm()) for t in want.values())
    for name, t in want.items():
        error = float((have[name] - t).norm()) / max(float(t.norm()), floor)
        assert error <= limit, (name, error)


class Scaled(nn.Module):
    """A weight that is a product of parameters, a bias of which a part is masked: the gradients
    come from reductions by calls that are not linear in all they take."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.base = nn.Parameter(torch.rand(5, 1)), nn.Parameter(torch.randn(5, 6))
        self.bias = nn.Parameter(torch.randn(5))
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 2.0, 1.0, 0.5]))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.scale * self.base / self.base.norm(dim=1, keepdim=True)
        return F.linear(x, weight, self.bias * self.mask).exp().mean()


@pytest.mark.parametrize("mesh", ["dp=2", "fsdp=2"])
def test_sum_is_exact_where_parameters_are_multiplied(mesh: str) -> None:
    torch.manual_seed(2)
    model = Scaled().double()
    batches = [{"x": torch.randn(n, 6).double()} for n in (4, 4, 6)]
    _, grads = virtual(model, mesh, batches, 2)
    close(grads, alone(model, batches))


SUMS = [(n, "dp=2, fsdp=2" if i % 2 else "dp=3") for i, n in enumerate(PLAIN)]
SUMS += [(n, m) for n in ("bert", "gpt", "regression") for m in ("dp=2, tp=2", "fsdp=3")]


@pytest.mark.parametrize(("name", "mesh"), SUMS)
def test_sum_equals_that_of_one_device(name: str, mesh: str) -> None:
    """The first two calls share a program; the last has other sizes."""
    model = make(name, 4)[0]
    batches = batches_of(name, (5, 5, 7))
    seen, grads = virtual(model, mesh, batches, 2)
    assert not seen or name in MIXING, seen
    close(grads, alone(model, batches), 1e-6 if name in CASTS else 1e-10)


@pytest.mark.parametrize("name", ["gpt", "gpt2", "bert", "autoencoder"])
def test_sum_equals_that_of_one_rank_with_dropout(name: str) -> None:
    changes = DROPOUT.get(name, {})  # the autoencoder draws noise
    model = make(name, 4, **changes)[0]
    batches = batches_of(name, (5, 4, 4), **changes)
    _, want = virtual(model, "dp=1", batches, 0)
    seen, have = virtual(model, "dp=2, tp=2", batches, 2, zero=1)
    assert not seen
    close(have, want, 1e-6 if name in CASTS else 1e-10)


@pytest.mark.parametrize("options", [{"zero": 2}, {"zero": 3, "remat": "full"}, {"zero": 0}])
def test_sum_is_exact_with_frozen_parameters(options: dict[str, Any]) -> None:
    model = make("gpt", 4)[0]
    for name, p in model.named_parameters():
        p.requires_grad_("qkv" not in name)
    batches = batches_of("gpt", (6, 4, 5))
    seen, grads = virtual(model, "dp=2, tp=2", batches, 2, **options)
    assert not seen and not any("qkv" in n for n in grads)
    close(grads, alone(model, batches))


def test_calls_of_several_shapes_share_one_reduction() -> None:
    """Where no constant of the program is needed, sums do not depend on the shapes of the batch."""
    model = make("llama", 4)[0]
    keys = {
        split_backward(autopar.compile(model, "dp=2", batch).shared, "test").key
        for batch in batches_of("llama", (6, 4, 2))
    }
    assert len(keys) == 1


# --- the module, alone -------------------------------------------------------------------------


def pair(**options: Any) -> tuple[Any, nn.Module, list[dict[str, Any]]]:
    """A parallel module of one rank, the same model apart, and batches."""
    parallel = autopar.parallelize(make("gpt", 4)[0], "dp=1", **options)
    return parallel, make("gpt", 4)[0], batches_of("gpt", (4, 2, 4))


def call(model: Any, batch: dict[str, Any]) -> None:
    loss_of(model(**batch)).backward()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_appear_with_the_first_backward_outside(accumulate: int) -> None:
    parallel, model, batches = pair(accumulate=accumulate)
    call(parallel, batches[0])  # what was reduced before stays
    early = {n: g.clone() for n, g in gradients(parallel).items()}
    with parallel.no_sync():
        with parallel.no_sync():
            call(parallel, batches[1])
        call(parallel, batches[2])
        assert all(torch.equal(g, early[n]) for n, g in gradients(parallel).items())
        with torch.no_grad():
            parallel(**batches[0])
    parallel.eval()
    with torch.no_grad():
        parallel(**batches[0])
    parallel.train()
    call(parallel, batches[0])
    close(gradients(parallel), alone(model, [batches[i] for i in (0, 1, 2, 0)]))
    call(parallel, batches[1])
    close(gradients(parallel), alone(model, [batches[i] for i in (0, 1, 2, 0, 1)]))


def test_gradient_at_another_output_waits_too() -> None:
    parallel, model, batches = pair()

    def both(m: Any, batch: dict[str, Any]) -> None:
        logits, loss = m(**batch)
        (loss + logits.square().mean()).backward()

    with parallel.no_sync():
        both(parallel, batches[0])
        call(parallel, batches[1])
        assert not any(g.any() for g in gradients(parallel).values())
    both(parallel, batches[2])
    both(model, batches[0])
    call(model, batches[1])
    both(model, batches[2])
    close(gradients(parallel), gradients(model))


@contextlib.contextmanager
def refused(what: str) -> Iterator[None]:
    with pytest.raises(AutoparError, match=rf"{what}(.|\n)*outside no_sync"):
        yield


@pytest.mark.parametrize("ours", [False, True])
def test_what_needs_whole_gradients_is_refused(ours: bool) -> None:
    parallel, _, batches = pair()
    sgd: Any = torch.optim.SGD
    optimizer = parallel.optimizer(sgd, lr=0.1) if ours else sgd(parallel.parameters(), lr=0.1)
    other = sgd([nn.Parameter(torch.ones(2))], lr=0.1)
    before = {n: p.detach().clone() for n, p in parallel.named_parameters()}
    with parallel.no_sync():
        call(parallel, batches[0])
    with refused("SGD was to step"):
        optimizer.step()
    with refused("Gradients were to be clipped"):
        parallel.clip_grad_norm_(1.0)
    for access in (parallel.state_dict, parallel.full_state_dict):
        with refused("The state was asked for"):
            access()
    other.step()
    call(parallel, batches[1])
    parallel.clip_grad_norm_(1.0)
    parallel.state_dict()
    optimizer.step()
    assert all(not torch.equal(p, before[n]) for n, p in parallel.named_parameters())


def test_gradients_that_are_changed_meanwhile_are_refused() -> None:
    """Clipped by torch, scaled, zeroed in place: what waits would have been changed, too."""
    parallel, _, batches = pair()
    with parallel.no_sync():
        call(parallel, batches[0])
    nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)
    with pytest.raises(AutoparError, match=r"was changed(.|\n)*set_to_none=True"):
        call(parallel, batches[1])


@pytest.mark.parametrize("by", ["module", "optimizer", "zeros"])
def test_zero_grad_discards_what_waits(by: str) -> None:
    parallel, model, batches = pair()
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    with parallel.no_sync():
        call(parallel, batches[0])
        if by == "optimizer":
            optimizer.zero_grad()
        else:
            parallel.zero_grad(set_to_none=by == "module")
        assert all(g is None or not g.any() for g in (p.grad for p in parallel.parameters()))
        parallel.state_dict()
        call(parallel, batches[1])
    call(parallel, batches[2])
    close(gradients(parallel), alone(model, batches[1:]))


def test_zero_grad_of_some_parameters_discards_theirs() -> None:
    parallel, model, batches = pair()
    some = list(parallel.parameters())[::2]
    with parallel.no_sync():
        call(parallel, batches[0])
    torch.optim.SGD(some, lr=0.1).zero_grad()
    call(parallel, batches[1])
    want = alone(model, batches[:2])
    names = {n for n, p in parallel.named_parameters() if any(p is q for q in some)}
    want = {n: g.clone() for n, g in want.items() if n not in names}
    late = alone(model, batches[1:2])
    close(gradients(parallel), {**want, **{n: late[n] for n in names}})


def test_hooks_see_the_sum_outside_alone() -> None:
    parallel, model, batches = pair()
    call(parallel, batches[0])
    parallel.zero_grad()
    p = next(parallel.parameters())
    seen: list[Any] = []
    p.register_hook(lambda g: seen.append(None if g is None else g.clone()))
    with parallel.no_sync():
        call(parallel, batches[0])
    call(parallel, batches[1])
    want = next(iter(alone(model, batches[:2]).values()))
    assert seen[0] is None and torch.allclose(seen[1], want, rtol=1e-10)


# --- processes ---------------------------------------------------------------------------------


def trains(rank: int, n: int, name: str, mesh: str, options: dict[str, Any]) -> Any:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = loop(name, mesh, rank, options)
    return *found, sum("no_sync leaves out" in str(w.message) for w in told)


def loop(name: str, mesh: str, rank: int, options: dict[str, Any]) -> Any:
    """Two steps of three calls, and the sums over data axes in each backward pass."""
    model = make(name, 4)[0]
    batches = batches_of(name, (6, 4, 5))
    if options.get("batch") == "local":
        at = autopar.mesh(mesh).coordinate(rank)["dp"]
        batches = [{k: v[:2] if at == 0 else v[2:] for k, v in b.items()} for b in batches]
    parallel = autopar.parallelize(model, mesh, **options)
    transport = watched(parallel._comm).transport
    optimizer: Any = None
    counts, grads = [], {}
    for _ in range(2):
        for i, batch in enumerate(batches):
            with parallel.no_sync() if i < 2 else contextlib.nullcontext():
                loss = loss_of(parallel(**batch))
                before = len(transport.seen)  # type: ignore[attr-defined]
                loss.backward()
                counts.append(len(transport.seen) - before)  # type: ignore[attr-defined]
        optimizer = optimizer or torch.optim.AdamW(parallel.parameters(), lr=0.01)
        grads = {k: whole(p.grad) for k, p in parallel.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    state = {k: whole(v) for k, v in parallel.full_state_dict().items()}
    with parallel.no_sync():
        loss_of(parallel(**batches[0])).backward()
    try:
        optimizer.step()
    except AutoparError as error:
        return counts, grads, state, str(error)
    return counts, grads, state, "no error"


@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("gpt", "dp=2, tp=2", {}),
        ("gpt2", "fsdp=2", {}),
        ("gpt", "dp=2", {"batch": "local", "zero": 2}),
        ("llama", "dp=2", {"accumulate": 2}),
        ("gpt", "fsdp=2", {"accumulate": 2}),
    ],
)
def test_processes_equal_one_device(
    name: str, mesh: str, options: dict[str, Any], pool: Pool
) -> None:
    model, batches = make(name, 4)[0], batches_of(name, (6, 4, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        want = {n: g.clone() for n, g in alone(model, batches).items()}
        optimizer.step()
    limit = 1e-6 if name in CASTS else 1e-9
    told = int("fsdp" in mesh and "accumulate" in options)
    ranks = pool.run(autopar.mesh(mesh).size, trains, name, mesh, options)
    for rank, (counts, grads, state, error, warned) in enumerate(ranks):
        assert warned == (told if rank == 0 else 0)
        assert [c > 0 for c in counts] == [False, False, True] * 2, counts
        close({n: torch.from_numpy(g) for n, g in grads.items()}, want, limit)
        for n, p in model.state_dict().items():
            np.testing.assert_allclose(
                state[n], p.numpy(), rtol=0, atol=1e-4 if limit > 1e-9 else 1e-8
            )
        assert "AdamW was to step" in error
