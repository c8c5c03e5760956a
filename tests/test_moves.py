"""The optimizer's graph as a whole: reduce the gradient, update the piece, gather the parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import make
from pool import Pool
from torch import Tensor, nn

import autopar
from autopar.codegen import split_backward
from autopar.collectives import collective_of
from autopar.moves import moves_of
from autopar.runtime import Communicator, VirtualWorld
from autopar.runtime.executor import Code, Executor
from autopar.runtime.kernels import runnable
from autopar.runtime.pieces import assemble, piece
from autopar.standins import Kind
from autopar.tracing import generated, stepper_of
from autopar.update import as_graph

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")
ADAM: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}
STATES = ("exp_avg", "exp_avg_sq")


def arguments(kind: Kind, parts: list[Tensor], values: dict[str, Tensor]) -> list[Any]:
    """What a graph takes for one parameter, in order; it may write what it is given."""
    found: list[Any] = [*kind.section.numbers, *kind.section.tensors]
    for name in kind.section.inputs:
        found += parts if name == "grad" else [values[name].clone()]
    return found


def values_of(parameter: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A parameter and its state as they are now, by the names of inputs."""
    local: Any = lambda t: t.to_local() if hasattr(t, "to_local") else t  # noqa: E731
    values = {"param": parameter, **{f"state.{k}": state[k] for k in STATES}}
    return {k: local(v.detach()).clone() for k, v in values.items()}


# --- on virtual ranks, of every parameter, from what the backward program reduces --------------


def ranks(compiled: Any, model: nn.Module, inputs: dict[str, Tensor]) -> list[dict[str, Any]]:
    """By rank and parameter, what its graph gives and what the second step of AdamW gives."""
    mesh = compiled.annotated.mesh
    whole = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    whole |= compiled.annotated.constants
    functions = compiled.functions()
    split = split_backward(compiled.shared, compiled.title)
    device = torch.device("cpu")

    def body(comm: Communicator) -> dict[str, Any]:
        phases = compiled.phases[compiled.signature(comm.coordinate)]
        code = functions[compiled.signature(comm.coordinate)]
        local = {
            s.name: piece(whole[s.name].detach(), s.layout, mesh, comm.coordinate).clone()
            for s in phases.program.states
        }
        rows = [
            piece(t, i.layout, mesh, comm.coordinate)
            for t, i in zip(inputs.values(), phases.program.inputs, strict=True)
        ]
        params = {n: local[n].requires_grad_(True) for n in phases.gradients}
        opt: Any = generated(torch.optim.AdamW)(list(params.values()), **ADAM)
        bound = Code(code.forward, code.backward, phases.roots)
        executor = Executor(bound, lambda _, g: g, comm, device)

        def values() -> list[Tensor]:
            return [*(local[s.name].detach() for s in phases.program.states), *rows]

        def train() -> None:
            opt.zero_grad()
            results = executor.run(values(), list(params.values()))
            results[phases.roots[0]].backward()  # type: ignore[no-untyped-call]
            opt.step()

        train()
        before = {n: values_of(p, opt.state[p]) for n, p in params.items()}
        with torch.no_grad():
            results, saved = code.forward(comm, device, values())
            loss = results[phases.roots[0]]
            parts = split.partial(comm, device, [*saved, torch.ones_like(loss)])
        train()
        moves, found = moves_of(compiled, comm.coordinate), {}
        kinds = {id(m.parameter): row for row in stepper_of(opt).latest for m in row[0].members}
        for name, p in params.items():
            kind, update = kinds[id(p)]
            own = [parts[int(n.name.removeprefix("partial_"))] for _, n in moves[name].takes]
            graph = runnable(as_graph([("", update, moves[name])]), comm)
            have = graph(*arguments(kind, own, before[name]))
            after = values_of(p, opt.state[p])
            found[name] = have, [after["param"], p.grad, *(after[f"state.{k}"] for k in STATES)]
        return found

    found: list[dict[str, Any]] = VirtualWorld(mesh, timeout_s=60.0).run(body)
    return found


CASES: list[tuple[str, str, int, dict[str, Any]]] = [
    ("gpt", "dp=2", 1, {}),
    ("gpt", "dp=2, fsdp=2, tp=2", 3, {}),
    ("gpt", "fsdp=3", 2, {}),
    ("gpt", "tp=2, dp=2", 0, {}),
    ("gpt", "fsdp=2, tp=2", 3, {"precision": "bf16", "reduce": "bf16"}),
    ("gpt2", "dp=2, tp=2", 1, {}),
    ("t5", "fsdp=2", 3, {}),
]


@pytest.mark.parametrize(("name", "mesh", "zero", "options"), CASES)
def test_graph_of_every_parameter_gives_what_the_step_gives(
    name: str, mesh: str, zero: int, options: dict[str, Any]
) -> None:
    model, inputs = make(name)
    if options:
        model = model.float()
    compiled = autopar.compile(model, mesh, inputs, zero=zero, **options)
    grid = compiled.annotated.mesh
    found = ranks(compiled, model, inputs)
    moved = 0
    for state in compiled.of_any().program.states:
        if state.name not in found[0]:
            continue
        for have, want in (row[state.name] for row in found):
            for a, b in zip(have[: len(want)], want, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=0)
        cut = state.layout != state.used
        assert state.layout is not None and state.used is not None
        joined = assemble([row[state.name][1][0] for row in found], state.layout, grid)
        for rank, row in enumerate(found):
            wholes = row[state.name][0][4:]
            assert bool(wholes) == cut, state.name
            want = piece(joined, state.used, grid, grid.coordinate(rank))
            for whole in wholes:
                assert torch.equal(whole, want.to(whole.dtype)), state.name
                moved += 1
    assert bool(moved) == bool(zero)


# --- in processes, from gradients that plain PyTorch computes of a rank's own rows -------------


def plain(frozen: bool) -> tuple[nn.Sequential, Tensor, Tensor]:
    """A model with a tied weight, whose second bias may be frozen, and twelve rows."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)]
    layers[1].weight = layers[0].weight
    assert layers[1].bias is not None
    layers[1].bias.requires_grad_(not frozen)
    model = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2]).double()
    return model, torch.randn(12, 6).double(), torch.randn(12, 3).double()


def distance(y: Tensor, targets: Tensor) -> Tensor:
    return (y - targets).square().mean()


def runs(rank: int, n: int, mesh: str, options: dict[str, Any]) -> Any:
    """What the graph gives from plain gradients of the rank's rows, and what the step gives."""
    model, x, y = plain(frozen=True)
    alone, _, _ = plain(frozen=True)
    parallel: Any = autopar.parallelize(model, mesh, loss=distance, **options)
    opt: Any = parallel.optimizer(torch.optim.AdamW, **ADAM)

    def train() -> None:
        opt.zero_grad()
        parallel(x, targets=y).backward()
        opt.step()

    train()
    named = {id(p): name for name, p in parallel.named_parameters()}
    before = {
        name: values_of(p, opt.state[p])
        for name, p in parallel.named_parameters()
        if p.requires_grad
    }
    alone.load_state_dict(parallel.full_state_dict())
    mine = slice(rank * 12 // n, (rank + 1) * 12 // n)
    (distance(alone(x[mine]), y[mine]) / n).backward()
    partial = {name: p.grad for name, p in alone.named_parameters()}
    train()
    graph = parallel.graph(phase="optimizer")
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    given, want = [], []
    stepped = [kind for kind, _ in stepper_of(opt).latest if kind.section.calls]
    for kind in stepped:
        assert len(kind.members) == 4, "three layers, a tied weight, and a frozen bias"
        p = kind.members[0].parameter  # it stands for the others
        name = named[id(p)]
        given += arguments(kind, [partial[name]], before[name])
        after = values_of(p, opt.state[p])
        want += [after["param"], p.grad.to_local(), *(after[f"state.{k}"] for k in STATES)]
        want += [p.full_tensor()] if "whole" in {node.name for node in calls} else []
    have = graph(*given)
    close = [torch.allclose(a, b, rtol=1e-12, atol=1e-15) for a, b in zip(have, want, strict=True)]
    moved = [(node.target.__name__, *node.args[1:2]) for node in calls if collective_of(node)]
    return close, moved, parallel.code(phase="optimizer")


SCATTER, GATHER = "reduce_scatter.default", "all_gather.default"


@pytest.mark.parametrize(
    ("mesh", "options", "moved"),
    [
        ("dp=2", {"zero": 0}, [("all_reduce.default", "dp")]),
        ("dp=2", {"zero": 1}, [(SCATTER, "dp"), (GATHER, "dp")]),
        ("dp=2", {"zero": 1, "accumulate": 2}, [(SCATTER, "dp"), (GATHER, "dp")]),
        ("dp=2", {"zero": 2, "accumulate": 2}, [(SCATTER, "dp"), (GATHER, "dp")]),
        ("fsdp=3", {}, [(SCATTER, "fsdp"), (GATHER, "fsdp")]),
        (
            "dp=2, fsdp=2", {},
            [(SCATTER, "fsdp"), ("all_reduce.default", "dp"), (GATHER, "fsdp")],
        ),
    ],
)  # fmt: skip
def test_graph_runs_from_gradients_of_own_rows(
    mesh: str, options: dict[str, Any], moved: list[tuple[str, str]], pool: Pool
) -> None:
    for close, calls, _ in pool.run(autopar.mesh(mesh).size, runs, mesh, options):
        assert all(close) and len(close) == 4 + (GATHER in dict(moved))
        assert calls == moved


def test_code_says_which_part_runs_where(golden: Any, pool: Pool) -> None:
    texts = {code for _, _, code in pool.run(2, runs, "fsdp=2", {})}
    assert len(texts) == 1
    golden(texts.pop())
