"""Gradients through what a model returns beside its loss equal those of one device."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import make
from pool import Pool
from test_processes import agree, report, sgd, train
from torch import Tensor, nn

import autopar
from autopar import api
from autopar.arguments import as_call, bind_arguments
from autopar.errors import AutoparError
from autopar.program import differentiable
from autopar.runtime import VirtualWorld
from autopar.runtime.executor import Code, Executor, More
from autopar.runtime.pieces import assemble, piece

MESH = "dp=2, tp=2"


def exact_loss(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    """The loss of a causal language model without the cast to float32 of the library."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def build(name: str, rows: int = 4, **changes: Any) -> tuple[nn.Module, dict[str, Any]]:
    model, inputs = make(name, rows, **({"n_layer": 1} if name == "gpt2" else {}), **changes)
    if name == "gpt2":
        model.loss_function = exact_loss
    return model, inputs


def parts(out: Any) -> tuple[Tensor, Any]:
    """(loss, the largest other output) of what a model returns."""
    if hasattr(out, "loss"):
        return out.loss, out.logits
    values = out.values() if isinstance(out, dict) else out
    tensors = sorted((v for v in values if v.is_floating_point()), key=lambda v: v.dim())
    return tensors[0], tensors[-1]


def squares(x: Any) -> Tensor:
    """The mean square of a whole output."""
    whole = x.full_tensor() if hasattr(x, "full_tensor") else x
    return whole.pow(2).mean()


def squares_of_dtensor(x: Any) -> Tensor:
    """The same, computed by DTensor operations on the pieces."""
    if not hasattr(x, "full_tensor"):
        return squares(x)
    return x.pow(2).mean().full_tensor()


def squares_of_pieces(x: Any) -> Tensor:
    """This rank's share of the same: what ranks compute from their pieces adds up."""
    piece = x.to_local() if hasattr(x, "to_local") else x
    return piece.pow(2).sum() / x.numel()


PENALTIES: dict[str, Callable[[Any], Tensor]] = {
    "whole": squares,
    "dtensor": squares_of_dtensor,
    "pieces": squares_of_pieces,
}
WEIGHTS = {"both": (1.0, 0.1), "penalty": (0.0, 1.0), "loss": (1.0, 0.0)}


def objective(out: Any, penalty: str = "whole", weights: str = "both") -> Tensor:
    """The sum of loss and penalty; what has no weight is left out and gets no gradient."""
    loss, other = parts(out)
    a, b = WEIGHTS[weights]
    terms = [a * loss] if a else []
    terms += [b * PENALTIES[penalty](other)] if b else []
    total = sum(terms)
    assert isinstance(total, Tensor)
    return total


# --- virtual ranks -----------------------------------------------------------------------------


def virtual(model: nn.Module, inputs: Any, mesh: str, **options: Any) -> dict[str, Tensor]:
    """Whole gradients of loss + 0.1 * mean square, first asked for in backward, on all ranks."""
    compiled = autopar.compile(model, mesh, inputs, **options)
    grid = compiled.annotated.mesh
    args, kwargs = as_call(inputs)
    tensors = bind_arguments(args, kwargs).tensors
    states = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    states |= compiled.annotated.constants

    every = tuple(sorted(differentiable(compiled.of_any().program)))
    functions = compiled.functions()
    grown = autopar.compile(model, mesh, inputs, **options)
    api._grow(grown, every, "cpu")  # before the threads: tracing is not for them
    more_functions = grown.functions()

    def body(comm: Any) -> list[Tensor]:
        key = compiled.signature(comm.coordinate)
        phases = compiled.phases[key]
        program = phases.program
        made: list[tuple[int, ...]] = []

        def grow(roots: tuple[int, ...]) -> Code:
            made.append(roots)
            found = more_functions[key]
            return Code(found.forward, found.backward, grown.phases[key].roots)

        more = More(differentiable(program), grow, [""] * 999)
        code = Code(functions[key].forward, functions[key].backward, phases.roots)
        executor = Executor(code, lambda i, g: g, comm, torch.device("cpu"), more)
        local = {
            s.name: piece(states[s.name].detach(), s.layout, grid, comm.coordinate).clone()
            for s in program.states
        }
        given = [
            piece(t, i.layout, grid, comm.coordinate)
            for t, i in zip(tensors, program.inputs, strict=True)
        ]
        grads = []
        for _ in range(2):  # found in backward, then known from the start
            leaves = [local[n].detach().requires_grad_() for n in phases.gradients]
            values = [local[s.name] for s in program.states]
            results = executor.run([*values, *given], leaves)
            floats = [o for o in program.outputs if o.index in differentiable(program)]
            loss = next(results[o.index] for o in floats if o.is_loss)
            total = loss
            for o in floats:
                if not o.is_loss:
                    total = total + 0.1 * results[o.index].pow(2).sum() / math.prod(o.layout.shape)
            total.backward()
            grads.append([leaf.grad for leaf in leaves])
        assert made == [every]
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True) if a is not None)
        return grads[0]

    ranks = VirtualWorld(grid).run(body)
    program = compiled.of_any().program
    layouts = {s.name: s.layout for s in program.states}
    names = compiled.of_any().gradients
    return {
        n: assemble([r[i] for r in ranks], layouts[n], grid)
        for i, n in enumerate(names)
        if ranks[0][i] is not None
    }


def alone(model: nn.Module, inputs: Any) -> dict[str, Tensor]:
    """The same gradients on one device."""
    model = copy.deepcopy(model)
    args, kwargs = as_call(inputs)
    out = model(*args, **kwargs)
    leaves = torch.utils._pytree.tree_leaves(out)
    floats = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    loss = next(x for x in floats if x.dim() == 0)
    others = [x for x in floats if x is not loss]
    (loss + sum(0.1 * x.pow(2).mean() for x in others)).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def equal(have: dict[str, Tensor], want: dict[str, Tensor], limit: float = 1e-10) -> None:
    assert set(have) == set(want)
    floor = 1e-3 * max(float(g.norm()) for g in want.values())
    for name, g in want.items():
        error = float((have[name] - g).norm()) / max(float(g.norm()), floor)
        assert error <= limit, f"{name}: {error:.1e}"


@pytest.mark.parametrize("mesh", ["dp=2, tp=2", "tp=3", "dp=3"])
@pytest.mark.parametrize("name", ["gpt2", "gpt", "unet", "mixer", "waves", "encoder", "resnet"])
def test_every_output_carries_its_gradient(name: str, mesh: str) -> None:
    model, inputs = build(name, 5 if "dp=3" in mesh else 4)
    equal(virtual(model, inputs, mesh), alone(model, inputs))


class Losses(nn.Module):
    """Two scalars, as a model with an auxiliary loss gives them, and hidden values."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.aside = nn.Linear(8, 16), nn.Linear(16, 6), nn.Linear(16, 1)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        hidden = torch.tanh(self.up(x))
        logits = self.down(hidden)
        return {
            "loss": F.cross_entropy(logits, y),
            "aux_loss": self.aside(hidden).pow(2).mean(),
            "hidden": (hidden, hidden * 2),
            "best": logits.argmax(-1),
            "name": "net",
        }


def losses() -> tuple[Losses, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Losses().double(), {"x": torch.randn(4, 8).double(), "y": torch.arange(4) % 3}


@pytest.mark.parametrize("mesh", ["dp=2, tp=2", "tp=2", "dp=3"])
def test_several_losses_and_hidden_values_are_exact(mesh: str) -> None:
    model, inputs = losses()
    equal(virtual(model, inputs, mesh), alone(model, inputs))


# --- a mesh of one -----------------------------------------------------------------------------


def grown(module: Any) -> list[tuple[int, ...]]:
    """Roots of the code of each call shape."""
    return [e.executor.code.roots for e in module._entries.values()]


@pytest.mark.parametrize("uses", ["loss", "aux_loss", "weighted", "hidden"])
def test_whichever_loss_is_used_is_exact(uses: str) -> None:
    def total(out: dict[str, Any]) -> Tensor:
        if uses == "weighted":
            return 2 * out["loss"] - 0.3 * out["aux_loss"]
        return out["hidden"][1].sin().sum() if uses == "hidden" else out[uses]

    model, inputs = losses()
    want = copy.deepcopy(model)
    total(want(**inputs)).backward()
    module = autopar.parallelize(model, 1)
    for _ in range(2):
        module.zero_grad()
        total(module(**inputs)).backward()
        for (name, p), q in zip(module.named_parameters(), want.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None) or not p.grad.any(), name
            assert q.grad is None or torch.allclose(p.grad, q.grad, rtol=1e-12), name


def test_the_loss_alone_compiles_and_runs_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = losses()
    module = autopar.parallelize(model, 1)
    module(**inputs)["loss"].backward()
    assert grown(module) == [(0,)]
    (entry,) = module._entries.values()
    runs = []
    forward = entry.executor.code.forward
    counted = Code(lambda *a: runs.append(1) or forward(*a), *_rest(entry.executor.code))
    entry.executor.code = counted
    for _ in range(3):
        module(**inputs)["loss"].backward()
    assert len(runs) == 3 and grown(module) == [(0,)]


def _rest(code: Code) -> tuple[Any, Any]:
    return code.backward, code.roots


def test_a_new_root_is_compiled_once_per_call_shape() -> None:
    model, inputs = losses()
    module = autopar.parallelize(model, 1)
    for _ in range(3):
        out = module(**inputs)
        (out["loss"] + out["aux_loss"]).backward()
    assert grown(module) == [(0, 1)]
    few = {k: v[:2] for k, v in inputs.items()}
    module(**few)["loss"].backward()
    assert grown(module) == [(0, 1), (0,)]
    assert module.compiled.of_any().roots == (0,)


def test_several_calls_before_the_first_backward() -> None:
    """The second and third are of code that knows one output less than is asked for."""
    model, inputs = losses()
    want = copy.deepcopy(model)
    module = autopar.parallelize(model, 1)
    for m in (module, want):
        outs = [m(**inputs) for _ in range(3)]
        outs[0]["loss"].backward()
        outs[1]["aux_loss"].backward()
        (outs[2]["hidden"][0].sum() + outs[2]["loss"]).backward()
    for p, q in zip(module.parameters(), want.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=1e-12)


def test_buffers_are_written_once() -> None:
    model, inputs = build("waves")
    want = copy.deepcopy(model)
    module = autopar.parallelize(model, 1)
    for m in (module, want):
        for _ in range(2):
            objective(m(**inputs)).backward()
    for (name, a), b in zip(module.named_buffers(), want.buffers(), strict=True):
        assert torch.allclose(a, b, rtol=1e-12), name
    for p, q in zip(module.parameters(), want.parameters(), strict=True):
        assert q.grad is None or torch.allclose(p.grad, q.grad, rtol=1e-9, atol=1e-12)


class Counter(nn.Module):
    """What it returns depends on a buffer that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls.add_(1)
        out = self.line(x) * self.calls
        return out.sum(), out


def test_a_repeated_call_reads_its_buffers_as_they_were() -> None:
    model, x = Counter().double(), torch.randn(2, 4).double()
    want = copy.deepcopy(model)
    module = autopar.parallelize(model, 1)
    for m in (module, want):
        for _ in range(2):
            m(x)[1].pow(2).sum().backward()
    assert module.calls == 2
    for p, q in zip(module.parameters(), want.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=1e-12)


def test_dropout_of_a_repeated_call_is_the_same() -> None:
    """Against the program without labels, whose logits are roots from the start."""
    gradients = []
    for labelled in (True, False):
        model, inputs = build("gpt", layers=1, dropout=0.3)
        module = autopar.parallelize(model, 1, seed=5)
        out = module(**inputs)[0] if labelled else module(inputs["x"])
        out.pow(2).mean().backward()
        gradients.append({n: p.grad for n, p in module.named_parameters()})
        assert module._comm.step == 1
    equal(*gradients, limit=1e-12)


@pytest.mark.parametrize("what", ["aside.weight", "x"])
def test_a_changed_state_or_input_is_named(what: str) -> None:
    model, inputs = losses()
    module = autopar.parallelize(model, 1)
    out = module(**inputs)
    with torch.no_grad():
        (inputs["x"] if what == "x" else model.aside.weight).mul_(2)
    with pytest.raises(AutoparError, match=f"{what} was changed.*\n(.*\n)*.*before optimizer"):
        out["aux_loss"].backward()
    out = module(**inputs)
    out["aux_loss"].backward()  # nothing is lost


def test_evaluation_carries_no_gradient() -> None:
    model, inputs = losses()
    module = autopar.parallelize(model, 1)
    with torch.no_grad():
        out, want = module(**inputs), model(**inputs)
    assert torch.allclose(out["hidden"][1], want["hidden"][1])
    assert not any(out[k].requires_grad for k in ("loss", "aux_loss", "best"))
    assert (
        module(**inputs)["hidden"][0].requires_grad and not module(**inputs)["best"].requires_grad
    )


# --- several processes -------------------------------------------------------------------------


def _trains(rank: int, n: int, name: str, mesh: str, batch: str, penalty: str, weights: str) -> Any:
    model, inputs = build(name)
    if batch == "local":
        at, k = autopar.mesh(mesh).coordinate(rank)["dp"], autopar.mesh(mesh).sizes["dp"]
        inputs = {key: v.chunk(k)[at] for key, v in inputs.items()}
    module = autopar.parallelize(model, mesh, batch=batch)
    rows = train(module, lambda m: objective(m(**inputs), penalty, weights), sgd)
    for row in rows if penalty == "pieces" else ():
        row["loss"] = row["loss"] * 0  # each rank has its own share
    return report(rank, rows)


@pytest.mark.parametrize(
    ("name", "mesh", "batch", "penalty", "weights"),
    [
        ("gpt2", "dp=2, tp=2", "global", "whole", "both"),
        ("gpt2", "dp=2, tp=2", "global", "whole", "penalty"),
        ("gpt2", "dp=2, tp=2", "local", "whole", "both"),
        ("gpt2", "dp=2, tp=2", "local", "pieces", "both"),
        ("gpt2", "dp=2, tp=2", "global", "dtensor", "both"),
        ("gpt2", "dp=2, tp=2", "local", "dtensor", "penalty"),
        ("gpt2", "dp=2, tp=2", "global", "whole", "loss"),
        ("resnet", "dp=2, tp=2", "global", "whole", "both"),
        ("mixer", "dp=2", "local", "pieces", "penalty"),
        ("gpt", "tp=3", "global", "whole", "both"),
        ("gpt", "tp=3", "global", "pieces", "both"),
    ],
)
def test_training_with_a_penalty_equals_one_device(
    name: str, mesh: str, batch: str, penalty: str, weights: str, pool: Pool
) -> None:
    n = autopar.mesh(mesh).size
    ranks = pool.run(n, _trains, name, mesh, batch, penalty, weights)
    model, inputs = build(name)
    want = train(copy.deepcopy(model), lambda m: objective(m(**inputs), "whole", weights), sgd)
    for row in want if penalty == "pieces" else ():
        row["loss"] = row["loss"] * 0
    agree(ranks, want, model)


def _two_losses(rank: int, n: int, uses: str) -> Any:
    model, inputs = losses()
    module = autopar.parallelize(model, MESH)

    def step(m: nn.Module) -> Tensor:
        out = m(**inputs)
        assert type(out["aux_loss"]) is Tensor
        return out["aux_loss"] if uses == "second" else out["loss"] + 0.5 * out["aux_loss"]

    return report(rank, train(module, step, sgd))


@pytest.mark.parametrize("uses", ["second", "sum"])
def test_two_losses_equal_one_device(uses: str, pool: Pool) -> None:
    def step(m: nn.Module) -> Tensor:
        out = m(**inputs)
        return out["aux_loss"] if uses == "second" else out["loss"] + 0.5 * out["aux_loss"]

    model, inputs = losses()
    ranks = pool.run(4, _two_losses, uses)
    agree(ranks, train(copy.deepcopy(model), step, sgd), model)
