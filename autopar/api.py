"""parallelize, compile and verify; the order of the passes stands here, once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from autopar.capture import (
    Arguments,
    as_call,
    bind_arguments,
    capture,
    empty_like,
    skeleton,
)
from autopar.check import check_annotated, check_global, check_spmd
from autopar.compat import FakeTensorMode
from autopar.compiled import Compiled, uneven_atoms
from autopar.errors import PlanError, RuleError, VerificationError
from autopar.layout import Mesh
from autopar.layout import mesh as make_mesh
from autopar.module import ParallelModule
from autopar.passes.bucket import Bucket
from autopar.passes.differentiate import Differentiate
from autopar.passes.expand import Expand
from autopar.passes.fuse import Fuse
from autopar.passes.normalize import Normalize
from autopar.passes.shard import Shard
from autopar.program import Phases, Program, call_text
from autopar.rules import find
from autopar.static import check_phases
from autopar.strategies.data import Data
from autopar.strategies.follow import Follow
from autopar.strategies.tensor import Tensors

__all__ = ["Options", "compile", "parallelize"]


@dataclass(frozen=True, slots=True)
class Options:
    """What the user may choose; see `parallelize`."""

    batch: str = "global"
    loss: Callable[..., Any] | None = None
    sequence: bool = True
    pins: Mapping[str, str] = field(default_factory=dict)
    batch_dims: Mapping[str, int | None] = field(default_factory=dict)
    strategy: Any = None
    backend: str = "eager"
    seed: int = 0
    strict: bool = False


def parallelize(
    model: nn.Module, mesh: Any, *, example_inputs: Any = None, **options: Any
) -> ParallelModule:
    """Make a single-device model run on a mesh; losses and gradients stay the same.

    Args:
        model: any `nn.Module`; its parameters are taken over.
        mesh: text such as ``"dp=2, tp=2"``, a Mesh, a DeviceMesh with named dims, or an int.
        example_inputs: a dict of keyword arguments, a tuple or a tensor: compile now rather than
            at the first call.
        batch: ``"global"``: every rank passes the same whole batch; ``"local"``: each
            data-parallel rank passes its own rows.
        loss: ``fn(outputs, targets)``, captured with the model; call it as
            ``model(x, targets=y)``.
        sequence: cut activations between tensor-parallel products (default) or replicate them.
        pins: parameter name pattern -> placement on ``tp``: ``"R"`` or ``"S(dim)"``.
        batch_dims: input name -> its batch dim, or None where every rank needs it whole.
        strategy: a strategy, or several, in place of the ones chosen from the mesh's axis names.
        backend: ``"eager"`` or ``"inductor"``.
        seed: seed of dropout and other random calls.
        strict: raise for an operation without a rule instead of computing it replicated.

    Raises:
        MeshError: mesh and world size differ, or the mesh text is wrong.
        CaptureError, RuleError, PlanError, BatchError: see autopar.errors.
    """
    chosen = Options(**options)
    grid = make_mesh(mesh)

    def compile_step(
        bones: nn.Module, arguments: Arguments, grad: bool, rank: int | None
    ) -> Compiled:
        return _compile(bones, arguments, grid, chosen, grad, rank)

    device_mesh = mesh if hasattr(mesh, "mesh_dim_names") else None
    module = ParallelModule(
        model, grid, compile_step, batch=chosen.batch, seed=chosen.seed,
        batch_dims=chosen.batch_dims, backend=chosen.backend, device_mesh=device_mesh,
    )  # fmt: skip
    if example_inputs is not None:
        args, kwargs = as_call(example_inputs)
        module.entry(bind_arguments(args, kwargs))
    return module


def compile(model: nn.Module, mesh: Any, example_inputs: Any, **options: Any) -> Compiled:
    """Compile a step without a process group: to plan, inspect and verify.

    Args: as `parallelize`; `example_inputs` has the shapes of the global batch, and may be on the
    meta device like the model.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    args, kwargs = as_call(example_inputs)
    arguments = bind_arguments(args, kwargs)
    fakes = tuple(empty_like(t, mode) for t in arguments.tensors)
    bound = Arguments(arguments.names, fakes, arguments.leaves, arguments.spec)
    return _compile(skeleton(model, mode), bound, make_mesh(mesh), Options(**options), True, None)


def _compile(
    bones: nn.Module,
    arguments: Arguments,
    mesh: Mesh,
    options: Options,
    grad: bool,
    rank: int | None,
) -> Compiled:
    """Capture, annotate, lower and differentiate. `rank` limits it to the program of one rank."""
    program = capture(bones, arguments, mesh, loss=options.loss)
    check_global(program, "capture")
    program = Normalize().run(program)
    check_global(program, "normalize")
    _check_rules(program, options.strict)
    for strategy in _strategies(mesh, options):
        strategy.annotate(program)
    program = Expand().run(program)
    for axis in mesh.names:
        Follow(axis).annotate(program)
    check_annotated(program, "expand")
    compiled = Compiled(program, type(bones).__name__, uneven_atoms(program))
    places = compiled.places()
    if rank is not None:
        coordinate = mesh.coordinate(rank)
        places = {compiled.signature(coordinate): coordinate}
    device = arguments.tensors[0].device.type
    differentiate = Differentiate(device, gradients=grad)  # its traces serve all places
    for signature, coordinate in places.items():
        compiled.phases[signature] = _lower(program, coordinate, options, differentiate)
    return compiled


def _lower(
    program: Program,
    coordinate: Mapping[str, int],
    options: Options,
    differentiate: Differentiate,
) -> Phases:
    has_loss = any(o.is_loss for o in program.outputs)
    rows = ("dp",) if options.batch == "local" else ()
    lowered = Shard(coordinate, whole_outputs=not has_loss, row_axes=rows).run(program)
    check_spmd(lowered, "shard")
    lowered = Fuse().run(lowered)
    check_spmd(lowered, "fuse")
    phases = Bucket().run(differentiate.run(lowered))
    problems = check_phases(phases, [coordinate])
    if problems:
        raise VerificationError("The generated program is wrong:\n  " + "\n  ".join(problems))
    return phases


def _strategies(mesh: Mesh, options: Options) -> list[Any]:
    if options.strategy is not None:
        given = options.strategy
        return list(given) if isinstance(given, (list, tuple)) else [given]
    made: list[Any] = []
    for axis in mesh.names:
        if axis == "dp":
            made.append(Data(axis, options.batch_dims))
        elif axis == "tp":
            made.append(Tensors(axis, options.sequence, options.pins))
        else:
            raise PlanError(
                f"There is no strategy for the mesh axis '{axis}'.",
                expected="axes named dp (data) and tp (tensor)",
                hint="rename the axis, or pass strategy=",
            )
    return made


def _check_rules(program: Program, strict: bool) -> None:
    missing: dict[str, Any] = {}
    for node in program.graph.graph.nodes:
        known = node.op != "call_function" or find(node.target) or "getitem" in str(node.target)
        if not known:
            missing.setdefault(str(node.target).replace("torch.ops.", ""), node)
    for name, node in missing.items():
        row = f'autopar.rules.register("{name}", "a.. -> a..")'
        if strict:
            raise RuleError(
                f"There is no rule for {name}.",
                where=call_text(node),
                hint=f"register one, for example: {row}",
            )
        warnings.warn(
            f"autopar has no rule for {name} ({call_text(node)}); it is computed on every rank. "
            f"To cut it, register a rule, for example: {row}",
            stacklevel=4,
        )
