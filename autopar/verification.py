"""Prove a compiled step: statically, on virtual ranks against the single device, by mutation."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from autopar.api import NARROW, compile
from autopar.arguments import as_call, bind_arguments
from autopar.check import spmd_problems
from autopar.comparison import Report, Trace, compare
from autopar.compat import pytree
from autopar.compiled import Compiled
from autopar.errors import InputError
from autopar.layout import MICRO, Layout, Mesh
from autopar.layout import mesh as make_mesh
from autopar.passes.split import staging_problems
from autopar.program import Phases, State, info
from autopar.promotion import Promotion
from autopar.runtime import Communicator, VirtualWorld, connect
from autopar.runtime.executor import Code, Executor
from autopar.runtime.microbatches import Microbatches
from autopar.runtime.pieces import assemble, piece
from autopar.runtime.stages import Pipeline
from autopar.static import check_phases, check_ranks, count_collectives
from autopar.tracing import generated, stepper_of

__all__ = ["Report", "Trace", "compare", "run_virtual", "static", "verify"]


MakeOptimizer = Callable[..., torch.optim.Optimizer]


def verify(
    model: nn.Module,
    mesh: Any,
    example_inputs: Any,
    *,
    steps: int = 3,
    optimizer: MakeOptimizer = torch.optim.SGD,
    lr: float = 0.1,
    traced: bool | None = None,
    **options: Any,
) -> Report:
    """Run all ranks' programs in this process and compare with the unmodified model.

    Losses, gradients, buffers and updated parameters of `steps` optimizer steps are compared. A
    model with random calls is compared with the same model on a mesh of size 1.

    Args:
        example_inputs: a dict of keyword arguments, a tuple, or a tensor: one global batch.
        optimizer: an elementwise optimizer class, or a `functools.partial` of one, made as
            ``optimizer(params, lr=lr)``.
        traced: whether the ranks step by the program that `model.optimizer` generates of it, rather
            than by its own step on their pieces; by default they do where there is one.
        options: as for `parallelize`.

    Returns:
        Report: ``.ok``, a table by ``str()``, ``.raise_if_failed()``.
    """
    options.pop("batch", None)  # the whole batch is cut here; how ranks load it does not matter
    grid = make_mesh(mesh)
    compiled = compile(model, grid, example_inputs, **options)
    report = Report(f"{compiled.title} on {grid}")
    report.problems, report.checked = static(compiled), _checked(compiled)
    random = any(info(n).site >= 0 for n in compiled.annotated.graph.graph.nodes)
    make = _bound(optimizer, lr)
    ranks = _Steps(optimizer, lr, traced)
    narrow = NARROW.get(options.get("precision") or "")
    seed = options.get("seed", 0)

    def alone(model: nn.Module, inputs: Any, narrow: torch.dtype | None) -> Trace:
        if not random:
            return run_eager(model, inputs, steps, make, options.get("loss"), narrow)
        one = Mesh(tuple((axis, 1) for axis in grid.names))  # a given strategy names these axes
        given = options if narrow is not None else {**options, "precision": None, "reduce": None}
        return run_virtual(compile(model, one, inputs, **given), model, inputs, steps, make, seed)

    @functools.cache
    def exact() -> Trace:
        double = pytree.tree_map_only(Tensor, _doubled, example_inputs)
        return alone(copy.deepcopy(model).double(), double, None)

    want = alone(model, example_inputs, narrow)
    have = run_virtual(compiled, model, example_inputs, steps, ranks, seed)
    report.stepped = ranks.told()
    limit = tolerance(compiled, narrow, NARROW.get(options.get("reduce") or ""))
    report.rows = compare(have, want, limit, exact if limit >= 1e-4 else None)
    return report


def _doubled(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


def _bound(optimizer: MakeOptimizer, lr: float) -> Callable[[list[Tensor]], Any]:
    return lambda params: optimizer(params, lr=lr)


class _Steps:
    """Makes the optimizers of the ranks, by the generated step where that is wanted and can be."""

    def __init__(self, optimizer: MakeOptimizer, lr: float, traced: bool | None) -> None:
        self.traced, self.reason = traced, "traced=False" if traced is False else ""
        self.made: list[Any] = []
        given = isinstance(optimizer, functools.partial)
        cls: Any = getattr(optimizer, "func", optimizer) if given else optimizer
        self.name = getattr(cls, "__name__", str(cls))
        self.make = _bound(optimizer, lr)
        if traced is False:
            return
        try:
            found = generated(cls)
        except InputError as error:
            if traced:
                raise
            self.reason = error.what
            return
        options = getattr(optimizer, "keywords", {}) if given else {}
        self.make = _bound(functools.partial(found, **options), lr)

    def __call__(self, params: list[Tensor]) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = self.make(params)
        self.made.append(made)
        return made

    def told(self) -> str:
        """Which code made the steps.

        Raises:
            InputError: the generated step was asked for, and there is none.
        """
        reason = self.reason
        if not reason:
            reason = next((r for o in self.made if (r := stepper_of(o).reason)), "")
            if reason and self.traced:
                raise InputError(
                    f"{self.name} has no generated step: {reason}.",
                    expected="an elementwise optimizer",
                    hint="leave out traced=True",
                )
        if not reason:
            return f"{self.name}, by the generated step, as of model.optimizer"
        return f"{self.name}, by its own step on each rank's pieces ({reason.rstrip('.')})"


def static(compiled: Compiled) -> list[str]:
    """Problems found without running: with the sizes of each place, and between ranks."""
    mesh = compiled.annotated.mesh
    places: dict[Any, list[dict[str, int]]] = {}
    for rank in range(mesh.size):
        coordinate = mesh.coordinate(rank)
        places.setdefault(compiled.signature(coordinate), []).append(coordinate)
    problems = []
    for key, phases in compiled.phases.items():
        problems += spmd_problems(phases.program, places[key]) + check_phases(phases)
    if compiled.staging is not None:
        problems += staging_problems(compiled.staging)
    return problems + check_ranks(compiled.phases, mesh, compiled.signature)


def _checked(compiled: Compiled) -> str:
    programs = compiled.phases.values()
    moving = sum(map(count_collectives, programs))
    gradients = sum(len(p.gradients) for p in programs)
    return (
        f"{moving} collectives and {gradients} gradients with {len(programs)} set(s) of sizes "
        f"for {_ranks(compiled).size} ranks"
    )


def tolerance(
    compiled: Compiled, narrow: torch.dtype | None = None, wire: torch.dtype | None = None
) -> float:
    """1e-10 in float64; 1e-6 where the model itself computes in float32; 1e-4 in float32.

    Where bfloat16 or float16 is computed in, 8 of its roundings (2^-8 and 2^-11).

    Args:
        narrow: dtype that the whole model is cast to.
        wire: dtype that gradients are sent in.
    """
    dtypes = {s.dtype for s in compiled.annotated.states if s.dtype.is_floating_point}
    inner = {
        n.meta["val"].dtype
        for n in compiled.annotated.graph.graph.nodes
        if isinstance(n.meta.get("val"), Tensor)
    } | ({wire} if wire is not None else set())
    half = [torch.finfo(d).eps for d in inner if d.is_floating_point and d.itemsize < 4]
    if half:
        return 4 * max(half)
    if dtypes - {torch.float64} or narrow == torch.float32:
        return 1e-4
    return 1e-6 if torch.float32 in inner and _casts(compiled) else 1e-10


def _casts(compiled: Compiled) -> bool:
    return any(
        n.meta["val"].dtype == torch.float32 and n.meta.get("requires_grad")
        for n in compiled.annotated.graph.graph.nodes
        if isinstance(n.meta.get("val"), Tensor)
    )


# --- runs --------------------------------------------------------------------------------------


def run_eager(
    model: nn.Module,
    example_inputs: Any,
    steps: int,
    make: Any,
    loss: Any = None,
    narrow: torch.dtype | None = None,
) -> Trace:
    """The unmodified model with plain autograd.

    Args:
        narrow: dtype that floating parameters and inputs are cast to for the forward pass.
    """
    model = copy.deepcopy(model)
    args, kwargs = as_call(example_inputs)
    targets = kwargs.pop("targets") if loss is not None else None

    def cast(value: Any) -> Any:
        wide = isinstance(value, Tensor) and value.is_floating_point() and narrow is not None
        return value.to(narrow) if wide else value

    args, kwargs = pytree.tree_map(cast, (args, kwargs))
    opt = make([p for p in model.parameters() if p.requires_grad])
    trace = Trace()
    for _ in range(steps):
        opt.zero_grad()
        used = {n: cast(p) for n, p in model.named_parameters()} if narrow is not None else {}
        with Promotion() if narrow is not None else contextlib.nullcontext():
            out = torch.func.functional_call(model, used, args, kwargs)
            out = loss(out, targets) if loss is not None else out
        value = _first_scalar(out)
        value.backward()  # type: ignore[no-untyped-call]
        named = dict(model.named_parameters())
        trace.losses.append(value.detach().clone())
        trace.grads.append({n: _clone(p.grad) for n, p in named.items()})
        opt.step()
        trace.params.append({n: p.detach().clone() for n, p in named.items()})
        trace.buffers.append({n: b.detach().clone() for n, b in model.named_buffers()})
    return trace


def _clone(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _first_scalar(out: Any) -> Tensor:
    """The loss in a result; without one, a fixed weighted sum of the float outputs."""
    leaves = [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]
    for leaf in leaves:
        if leaf.dim() == 0 and leaf.dtype.is_floating_point:
            return leaf
    floats = [x for x in leaves if x.dtype.is_floating_point and x.requires_grad]
    return sum((x * _weights(x)).sum() for x in floats)  # type: ignore[return-value]


def _weights(x: Tensor) -> Tensor:
    """Weights that tell every element of `x` apart."""
    n = torch.arange(x.numel(), dtype=x.dtype, device=x.device)
    return torch.sin(n * 0.7 + 0.3).reshape(x.shape)


def run_virtual(
    compiled: Compiled,
    model: nn.Module,
    example_inputs: Any,
    steps: int,
    make: Any,
    seed: int = 0,
    timeout_s: float = 60.0,
) -> Trace:
    """The generated programs of all ranks, each in a thread of this process."""
    body = _steps(compiled, model, example_inputs, steps, make, seed)
    ranks = VirtualWorld(_ranks(compiled), timeout_s=timeout_s).run(body)
    return _assembled(compiled, ranks, steps)


def run_connected(
    compiled: Compiled, model: nn.Module, example_inputs: Any, steps: int, make: Any, seed: int = 0
) -> Trace:
    """The same in this process and those it is connected with by `torch.distributed`.

    Every process calls it with equal arguments, and gets the trace of the whole.
    """
    comm = connect(_ranks(compiled))
    rows = _steps(compiled, model, example_inputs, steps, make, seed)(comm)
    return _assembled(compiled, comm.exchange(rows), steps)


def _steps(
    compiled: Compiled, model: nn.Module, example_inputs: Any, steps: int, make: Any, seed: int
) -> Callable[[Communicator], list[dict[str, Any]]]:
    """What a rank runs: optimizer steps on the same batch; it gives what came of each."""
    full, mesh = compiled.annotated.mesh, _ranks(compiled)
    whole = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
        **compiled.annotated.constants,
    }
    args, kwargs = as_call(example_inputs)
    tensors = bind_arguments(args, kwargs).tensors
    staged = compiled.staging is not None
    stages = list(map(compiled.stage_functions, range(mesh.sizes["pp"]))) if staged else []
    micro = compiled.accumulation is not None
    functions = {} if compiled.over_microbatches else compiled.functions()
    parts = compiled.parts() if micro else {}

    def body(comm: Communicator) -> list[dict[str, Any]]:
        comm.seed = seed
        key = compiled.signature({**dict.fromkeys(full.names, 0), **comm.coordinate})
        phases = compiled.phases[key]
        program = phases.program
        local = {
            s.name: piece(whole[s.name].detach(), s.layout, mesh, comm.coordinate).clone()  # type: ignore[arg-type]
            for s in program.states
        }
        inputs = [
            piece(t, _on(i.layout, mesh), mesh, comm.coordinate)
            for t, i in zip(tensors, program.inputs, strict=True)
        ]
        for name, value in local.items():  # what a stage does not need it need not have
            if name not in compiled.held(comm.coordinate) and value.is_floating_point():
                value.fill_(float("nan"))
        params = {n: local[n].requires_grad_(True) for n in phases.gradients}
        opt = make(list(params.values()))
        executor: Executor | Microbatches
        placed = [*[None] * len(program.states), *(i.layout for i in program.inputs)]
        if staged:
            executor = Pipeline(
                compiled.stages(comm.coordinate), compiled.place, stages[comm.coordinate["pp"]],
                full, placed, _plain, comm, tensors[0].device,
            )  # fmt: skip
        elif micro:
            step = compiled.step(comm.coordinate)
            executor = Microbatches(step, parts, full, placed, _plain, comm, tensors[0].device)
        else:
            code = functions[key]
            bound = Code(code.forward, code.backward, phases.roots)
            executor = Executor(bound, _plain, comm, tensors[0].device)
        rows = []
        for turn in range(steps):
            comm.step = turn + 1
            opt.zero_grad()
            values = [local[s.name].detach() for s in program.states]
            results = executor.run([*values, *inputs], list(params.values()))
            loss = _loss(results, phases)
            loss.backward()  # type: ignore[no-untyped-call]
            for name, index in program.mutated:
                local[name] = results[index].detach().clone()
            grads = {n: _clone(p.grad) for n, p in params.items()}
            opt.step()
            rows.append(
                {
                    "loss": loss.detach(),
                    "grads": grads,
                    "states": {n: t.detach().clone() for n, t in local.items()},
                }
            )
        return rows

    return body


def _ranks(compiled: Compiled) -> Mesh:
    """The mesh of ranks; microbatches that do not run in a loop are ranks, too."""
    mesh = compiled.annotated.mesh
    if not compiled.over_microbatches:
        return mesh
    return Mesh(tuple((a, n) for a, n in mesh.axes if a != MICRO))


def _on(layout: Layout | None, mesh: Mesh) -> Layout:
    """A layout with the axes of `mesh` alone."""
    assert layout is not None, "lowering places every input"
    return layout if MICRO in mesh.names else layout.without(MICRO)


def _plain(_: int, gradient: Tensor) -> Tensor:
    return gradient


def _loss(results: list[Tensor], phases: Phases) -> Tensor:
    losses = [o.index for o in phases.program.outputs if o.is_loss]
    if losses:
        return results[losses[0]]
    return _first_scalar([results[i] for i in phases.roots])


def _assembled(compiled: Compiled, ranks: list[Any], steps: int) -> Trace:
    """Whole tensors from all ranks' pieces; copies on different ranks must agree exactly."""
    mesh = _ranks(compiled)
    states = {s.name: s for s in compiled.of_any().program.states}
    trace = Trace()

    coordinates = [mesh.coordinate(rank) for rank in range(mesh.size)]

    def holder(name: str, rank: int) -> int:
        """A rank that holds what a rank would of a state: itself, if its stages need it."""
        at, ranks = coordinates[rank], range(mesh.sizes.get("pp", 1))
        if name in compiled.held(at):
            return rank
        there = ({**at, "pp": r} for r in ranks)
        return next(mesh.rank(c) for c in there if name in compiled.held(c))

    def join(given: list[Any], state: State) -> Tensor | None:
        assert state.layout is not None, "lowering places every state"
        pieces = [given[holder(state.name, rank)] for rank in range(mesh.size)]
        if pieces[0] is None:
            return None
        out = assemble(pieces, state.layout, mesh)
        for rank, part in enumerate(pieces):
            mine = piece(out, state.layout, mesh, mesh.coordinate(rank))
            if not _close(mine, part):
                out = out + float("nan")  # ranks hold different copies
        return out

    for step in range(steps):
        rows = [r[step] for r in ranks]
        losses = torch.stack([r["loss"] for r in rows])
        agree = _close(losses, losses[0].expand_as(losses))
        trace.losses.append(losses[0] if agree else losses[0] * float("nan"))
        grads: dict[str, Tensor | None] = {}
        for name in rows[0]["grads"]:
            grads[name] = join([r["grads"][name] for r in rows], states[name])
        trace.grads.append(grads)
        found = {n: join([r["states"][n] for r in rows], s) for n, s in states.items()}
        whole = {n: t for n, t in found.items() if t is not None}
        trace.params.append({n: t for n, t in whole.items() if states[n].is_parameter})
        trace.buffers.append(
            {
                n: t
                for n, t in whole.items()
                if not states[n].is_parameter and not n.startswith("constant.")
            }
        )
    return trace


def _close(a: Tensor, b: Tensor) -> bool:
    if a.dtype.is_floating_point:
        eps = torch.finfo(a.dtype).eps
        return bool(torch.allclose(a, b, rtol=64 * eps, atol=64 * eps, equal_nan=True))
    return bool(torch.equal(a, b))


# --- mutation ----------------------------------------------------------------------------------


def caught(
    compiled: Compiled, model: nn.Module, example_inputs: Any, want: Trace, *, seed: int = 0
) -> str:
    """How a (mutated) program is caught: 'static', 'virtual', an error's name, or ''."""
    if static(compiled):
        return "static"
    return caught_virtually(compiled, model, example_inputs, want, seed=seed)


def caught_virtually(
    compiled: Compiled, model: nn.Module, example_inputs: Any, want: Trace, *, seed: int = 0
) -> str:
    """'virtual' or an error's name where running all ranks shows a difference, else ''."""
    steps = len(want.losses)
    try:
        have = run_virtual(
            compiled, model, example_inputs, steps, _bound(torch.optim.SGD, 0.1), seed, 10.0
        )
    except Exception as error:
        return type(error).__name__
    rows = compare(have, want, tolerance(compiled))
    return "" if all(r.ok for r in rows) else "virtual"
