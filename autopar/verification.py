"""Prove a compiled step: statically, on virtual ranks against the single device, by mutation."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar.api import compile
from autopar.capture import as_call, bind_arguments
from autopar.check import check_phases, check_ranks
from autopar.codegen import generate, load
from autopar.collectives import collective_of, ops
from autopar.compat import pytree
from autopar.compiled import Compiled
from autopar.errors import VerificationError
from autopar.layout import Mesh
from autopar.layout import mesh as make_mesh
from autopar.program import Phases, State, info
from autopar.runtime import Communicator, VirtualWorld
from autopar.runtime.executor import Executor
from autopar.runtime.pieces import assemble, piece

__all__ = ["Report", "mutations", "run_virtual", "verify"]


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison: largest relative error of a kind of tensor at a step."""

    step: int
    what: str
    name: str
    error: float
    limit: float

    @property
    def ok(self) -> bool:
        """Whether the error is within the limit (a NaN is not)."""
        return self.error <= self.limit


@dataclass(slots=True)
class Report:
    """What `verify` found.

    Args:
        rows: numeric comparisons with the single device.
        problems: findings of the static check.
    """

    title: str
    rows: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.problems and all(r.ok for r in self.rows)

    def raise_if_failed(self) -> None:
        """Raise VerificationError with the table where something was found."""
        if not self.ok:
            raise VerificationError(f"The parallel program differs from one device.\n{self}")

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        table = Table(title=f"{self.title}: {'equal' if self.ok else 'DIFFERENT'}")
        for column in ("step", "compared", "worst", "relative error", "limit", ""):
            table.add_column(column)
        for r in self.rows:
            table.add_row(
                str(r.step), r.what, r.name, f"{r.error:.1e}", f"{r.limit:.0e}",
                "ok" if r.ok else "FAIL",
            )  # fmt: skip
        console = Console(file=io.StringIO(), width=100)
        console.print(table)
        for problem in self.problems:
            console.print(f"static: {problem}", markup=False)
        return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


@dataclass(slots=True)
class Trace:
    """Whole tensors of a run, step by step."""

    losses: list[Tensor] = field(default_factory=list)
    grads: list[dict[str, Tensor | None]] = field(default_factory=list)
    params: list[dict[str, Tensor]] = field(default_factory=list)
    buffers: list[dict[str, Tensor]] = field(default_factory=list)


MakeOptimizer = Callable[..., torch.optim.Optimizer]


def verify(
    model: nn.Module,
    mesh: Any,
    example_inputs: Any,
    *,
    steps: int = 3,
    optimizer: MakeOptimizer = torch.optim.SGD,
    lr: float = 0.1,
    **options: Any,
) -> Report:
    """Run all ranks' programs in this process and compare with the unmodified model.

    Losses, gradients, buffers and updated parameters of `steps` optimizer steps are compared. A
    model with random calls is compared with the same model on a mesh of size 1.

    Args:
        example_inputs: a dict of keyword arguments, a tuple, or a tensor: one global batch.
        optimizer: an elementwise `torch.optim` class, made as ``optimizer(params, lr=lr)``.
        options: as for `parallelize`.

    Returns:
        Report: ``.ok``, a table by ``str()``, ``.raise_if_failed()``.
    """
    options.pop("batch", None)  # the whole batch is cut here; how ranks load it does not matter
    grid = make_mesh(mesh)
    compiled = compile(model, grid, example_inputs, **options)
    report = Report(f"{compiled.title} on {grid}")
    report.problems = static(compiled)
    random = any(info(n).site >= 0 for n in compiled.annotated.graph.graph.nodes)
    make = _bound(optimizer, lr)
    if random:
        one = Mesh(tuple((axis, 1) for axis in grid.names))  # a given strategy names these axes
        alone = compile(model, one, example_inputs, **options)
        want = run_virtual(alone, model, example_inputs, steps, make, options.get("seed", 0))
    else:
        want = run_eager(model, example_inputs, steps, make, options.get("loss"))
    have = run_virtual(compiled, model, example_inputs, steps, make, options.get("seed", 0))
    report.rows = compare(have, want, tolerance(compiled))
    return report


def _bound(optimizer: MakeOptimizer, lr: float) -> Callable[[list[Tensor]], Any]:
    return lambda params: optimizer(params, lr=lr)


def static(compiled: Compiled) -> list[str]:
    """Problems found without running: between ranks, and in each distinct program."""
    problems = check_ranks(compiled.phases, compiled.places())
    for phases in compiled.phases.values():
        problems += check_phases(phases)
    return problems


def tolerance(compiled: Compiled) -> float:
    """1e-10 in float64; 1e-6 where the model itself computes in float32; 1e-4 in float32."""
    dtypes = {s.dtype for s in compiled.annotated.states if s.dtype.is_floating_point}
    if dtypes - {torch.float64}:
        return 1e-4
    inner = {
        n.meta["val"].dtype
        for n in compiled.annotated.graph.graph.nodes
        if isinstance(n.meta.get("val"), Tensor)
    }
    return 1e-6 if torch.float32 in inner and _casts(compiled) else 1e-10


def _casts(compiled: Compiled) -> bool:
    return any(
        n.meta["val"].dtype == torch.float32 and n.meta.get("requires_grad")
        for n in compiled.annotated.graph.graph.nodes
        if isinstance(n.meta.get("val"), Tensor)
    )


# --- runs --------------------------------------------------------------------------------------


def run_eager(
    model: nn.Module, example_inputs: Any, steps: int, make: Any, loss: Any = None
) -> Trace:
    """The unmodified model with plain autograd."""
    model = copy.deepcopy(model)
    args, kwargs = as_call(example_inputs)
    targets = kwargs.pop("targets") if loss is not None else None
    opt = make([p for p in model.parameters() if p.requires_grad])
    trace = Trace()
    for _ in range(steps):
        opt.zero_grad()
        out = model(*args, **kwargs)
        value = _first_scalar(loss(out, targets) if loss is not None else out)
        value.backward()
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
    mesh = compiled.annotated.mesh
    whole = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
        **compiled.annotated.constants,
    }
    args, kwargs = as_call(example_inputs)
    tensors = bind_arguments(args, kwargs).tensors
    functions = {
        key: load(generate(p, compiled.title), f"<virtual {compiled.title} {key}>")
        for key, p in compiled.phases.items()
    }

    def body(comm: Communicator) -> list[dict[str, Any]]:
        comm.seed = seed
        key = compiled.signature(comm.coordinate)
        phases, code = compiled.phases[key], functions[key]
        program = phases.program
        local = {
            s.name: piece(whole[s.name].detach(), s.layout, mesh, comm.coordinate).clone()  # type: ignore[arg-type]
            for s in program.states
        }
        inputs = [
            piece(t, i.layout, mesh, comm.coordinate)  # type: ignore[arg-type]
            for t, i in zip(tensors, program.inputs, strict=True)
        ]
        params = {n: local[n].requires_grad_(True) for n in phases.gradients}
        opt = make(list(params.values()))
        executor = Executor(
            code.forward, code.backward, phases.roots, lambda i, g: g, comm, tensors[0].device
        )
        rows = []
        for step in range(steps):
            comm.step = step + 1
            opt.zero_grad()
            values = [local[s.name].detach() for s in program.states]
            results = executor.run([*values, *inputs], list(params.values()))
            loss = _loss(results, phases)
            loss.backward()
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

    ranks = VirtualWorld(mesh, timeout_s=timeout_s).run(body)
    return _assembled(compiled, ranks, steps)


def _loss(results: list[Tensor], phases: Phases) -> Tensor:
    losses = [o.index for o in phases.program.outputs if o.is_loss]
    if losses:
        return results[losses[0]]
    return _first_scalar([results[i] for i in phases.roots])


def _assembled(compiled: Compiled, ranks: list[Any], steps: int) -> Trace:
    """Whole tensors from all ranks' pieces; copies on different ranks must agree exactly."""
    mesh = compiled.annotated.mesh
    states = {s.name: s for s in compiled.of_any().program.states}
    trace = Trace()

    def join(pieces: list[Tensor], state: State) -> Tensor:
        assert state.layout is not None, "lowering places every state"
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
            parts = [r["grads"][name] for r in rows]
            grads[name] = None if parts[0] is None else join(parts, states[name])
        trace.grads.append(grads)
        whole = {n: join([r["states"][n] for r in rows], s) for n, s in states.items()}
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


def compare(have: Trace, want: Trace, limit: float) -> list[Row]:
    """Largest relative error of each kind of tensor at each step.

    Errors are relative to the tensor's norm, but not below 1e-3 of the largest norm of its kind:
    a gradient that is exactly zero on paper (a key bias under softmax) holds only rounding.
    """
    rows = []
    for step, (a, b) in enumerate(zip(have.losses, want.losses, strict=True)):
        rows.append(Row(step, "loss", "", _error(a, b, 0.0), limit))
        for what in ("grads", "params", "buffers"):
            one, two = getattr(have, what)[step], getattr(want, what)[step]
            floor = 1e-3 * max((_norm(t) for t in two.values() if t is not None), default=0.0)
            worst, name = 0.0, ""
            for key, t in one.items():
                error = _pair_error(t, two.get(key), floor)
                if not error <= worst:
                    worst, name = error, key
            rows.append(Row(step, what, name, worst, limit))
    return rows


def _norm(t: Tensor) -> float:
    return float(t.double().norm()) if t.numel() else 0.0


def _pair_error(a: Tensor | None, b: Tensor | None, floor: float) -> float:
    if a is None or b is None:
        present = a if a is not None else b
        return 0.0 if present is None or not bool(present.any()) else float("inf")
    return _error(a, b, floor)


def _error(a: Tensor, b: Tensor, floor: float) -> float:
    if a.shape != b.shape:
        return float("inf")
    return _norm(a.double() - b.double()) / max(_norm(b), floor, 1e-300) if a.numel() else 0.0


# --- mutation ----------------------------------------------------------------------------------


def mutations(compiled: Compiled) -> Iterator[tuple[str, Compiled]]:
    """Every program in which one collective is dropped, doubled or sent over another axis."""
    for key, phases in compiled.phases.items():
        for phase in ("forward", "backward"):
            gm = getattr(phases, phase)
            for i, node in enumerate(gm.graph.nodes):
                row = collective_of(node)
                if row is None:
                    continue
                for label, change in _changes(node, compiled.annotated.mesh):
                    mutant = _edited(gm, i, change)
                    if mutant is None:
                        continue
                    altered = phases.replace(**{phase: mutant})
                    yield (
                        f"{phase} {node.name}: {label}",
                        Compiled(
                            compiled.annotated,
                            compiled.title,
                            compiled.atoms,
                            {**compiled.phases, key: altered},
                        ),
                    )


Change = Callable[[fx.Graph, fx.Node], bool]


def _changes(node: fx.Node, mesh: Mesh) -> list[tuple[str, Change]]:
    found: list[tuple[str, Change]] = [("dropped", _drop)]
    if node.target is ops.all_reduce.default:
        found += [("doubled", _double), ("sum for max", _other_reduction)]
    if node.target is ops.all_reduce_bucket.default:
        found.append(("doubled", _double))
    if node.target in (ops.all_reduce.default, ops.all_reduce_bucket.default):
        for axis, size in mesh.axes:
            if axis != node.args[1] and size > 1:
                found.append((f"over {axis}", _over(axis)))
    return found


def _edited(gm: fx.GraphModule, index: int, change: Change) -> fx.GraphModule | None:
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    out = graph.graph_copy(gm.graph, mapping)
    for before, after in mapping.items():
        after.meta = dict(before.meta)
    graph.output(out)
    node = list(graph.nodes)[index]
    if not change(graph, node):
        return None
    return fx.GraphModule(nn.Module(), graph)


def _drop(graph: fx.Graph, node: fx.Node) -> bool:
    """Leave the collective out; a resized operand is filled up or cut without communication."""
    operand = node.args[0]
    name = str(node.target).split(".")[1]
    if isinstance(operand, (list, tuple)):
        for user in list(node.users):
            user.replace_all_uses_with(operand[user.args[1]])  # type: ignore[arg-type]
            graph.erase_node(user)
        graph.erase_node(node)
        return True
    assert isinstance(operand, fx.Node)
    with graph.inserting_after(node):
        if name in ("all_gather", "all_gather_replicated"):
            args = node.args
            new = graph.call_function(ops.pad.default, args)
        elif name in ("reduce_scatter",):
            new = graph.call_function(ops.cut.default, node.args)
        elif name in ("pad", "shard", "cut", "all_to_all"):
            return False
        else:
            node.replace_all_uses_with(operand)
            graph.erase_node(node)
            return True
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    graph.erase_node(node)
    return True


def _double(graph: fx.Graph, node: fx.Node) -> bool:
    """Reduce twice: the value is multiplied by the size of the axis."""
    if isinstance(node.args[0], (list, tuple)):
        users = list(node.users)
        with graph.inserting_after(max(users, key=lambda u: list(graph.nodes).index(u))):
            again = graph.call_function(ops.all_reduce_bucket.default, (users, node.args[1]))
        for i, user in enumerate(users):
            with graph.inserting_after(again):
                taken = graph.call_function(getitem, (again, i))
            user.replace_all_uses_with(taken, delete_user_cb=lambda u: u is not again)
        return True
    with graph.inserting_after(node):
        again = graph.call_function(node.target, (node, *node.args[1:]))  # type: ignore[arg-type]
    again.meta = dict(node.meta)
    node.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)
    return True


def _other_reduction(graph: fx.Graph, node: fx.Node) -> bool:
    node.args = (*node.args[:2], "max" if node.args[2] == "sum" else "sum")
    return True


def _over(axis: str) -> Change:
    def change(graph: fx.Graph, node: fx.Node) -> bool:
        node.args = (node.args[0], axis, *node.args[2:])
        return True

    return change


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


