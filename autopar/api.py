"""parallelize, compile and verify; the order of the passes stands here, once."""

from __future__ import annotations

import contextlib
import difflib
import gc
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopar.arguments import Arguments, as_call, bind_arguments, position_names
from autopar.capture import capture, empty_like, skeleton
from autopar.check import check_annotated, check_global, check_spmd
from autopar.compat import FakeTensorMode, lazy_graph_modules
from autopar.compiled import Compiled, uneven_atoms
from autopar.errors import InputError, PlanError, RuleError, VerificationError
from autopar.layout import DATA_AXES, MICRO, Layout, Mesh
from autopar.layout import mesh as make_mesh
from autopar.module import ParallelModule
from autopar.passes.accumulate import accumulate
from autopar.passes.bucket import Bucket
from autopar.passes.cast import Cast, narrowed
from autopar.passes.differentiate import Differentiate
from autopar.passes.expand import Expand
from autopar.passes.fuse import Fuse
from autopar.passes.merge import merge, place
from autopar.passes.normalize import Normalize, is_normalized
from autopar.passes.shard import Shard
from autopar.passes.split import split, staging_problems
from autopar.passes.trace import Traces
from autopar.pipeline import ORDERS, Schedule, parse
from autopar.pipeline import order as pipeline_order
from autopar.program import Phases, Program, call_text, info, tensor_inputs
from autopar.rules import find
from autopar.sizes import Sizes
from autopar.static import check_phases
from autopar.strategies.data import Data
from autopar.strategies.follow import Follow
from autopar.strategies.pipeline import Pipeline
from autopar.strategies.planned import Inserted, Planned, read_plan
from autopar.strategies.remat import MODES, Remat, within
from autopar.strategies.tensor import Tensors
from autopar.strategies.zero import Zero

__all__ = ["Options", "compile", "parallelize"]


NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Dtypes of the option precision."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the user may choose; see `parallelize`."""

    batch: str = "global"
    loss: Callable[..., Any] | None = None
    sequence: bool = True
    pins: Mapping[str, str] = field(default_factory=dict)
    batch_dims: Mapping[str, int | None] = field(default_factory=dict)
    strategy: Any = None
    plan: Any = None
    backend: str = "eager"
    seed: int = 0
    strict: bool = False
    zero: int | None = None
    precision: str | None = None
    reduce: str | None = None
    remat: str | int = "none"
    accumulate: int = 1
    microbatches: int | None = None
    schedule: str | Path | Schedule = "1f1b"
    stages: int | Sequence[str] = 0

    def __post_init__(self) -> None:
        if type(self.accumulate) is not int or self.accumulate < 1:
            raise InputError(
                f"accumulate={self.accumulate!r}", expected="a number of microbatches, 1 or more"
            )
        if self.microbatches is not None and (
            type(self.microbatches) is not int or self.microbatches < 1
        ):
            raise InputError(
                f"microbatches={self.microbatches!r}", expected="a number, 1 or more, or None"
            )
        budget = type(self.remat) is int
        if budget and int(self.remat) <= 0:
            raise InputError(f"remat={self.remat} bytes", expected="a positive number of bytes")
        for name, value, known in (
            ("batch", self.batch, ("global", "local")),
            ("backend", self.backend, ("eager", "inductor")),
            ("zero", self.zero, (None, 0, 1, 2, 3)),
            ("precision", self.precision, (None, *NARROW)),
            ("reduce", self.reduce, (None, *NARROW)),
            *([] if budget else [("remat", self.remat, MODES)]),
        ):
            if value not in known:
                raise InputError(
                    f"{name}={value!r} is not known.", expected=" or ".join(map(repr, known))
                )
        if self.reduce is not None and self.precision is None:
            raise InputError(
                f"reduce={self.reduce!r} was given without precision=.",
                expected="gradients of a narrow computation: reduced wide they lose nothing",
                hint=f"add precision={self.reduce!r}, or leave out reduce",
            )
        others = {"pins": self.pins or None, "strategy": self.strategy, "zero": self.zero}
        given = [name for name, value in others.items() if value is not None]
        if self.plan is not None and given:
            raise InputError(
                f"plan= was given beside {given[0]}=.",
                expected="one of them: a plan holds every placement",
                hint="edit the plan's states in place of pins and zero",
            )


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
        plan: what `.plan` gave, perhaps edited: a dict, its JSON text or the path of a file.
        backend: ``"eager"`` or ``"inductor"``.
        seed: seed of dropout and other random calls.
        strict: raise for an operation without a rule instead of computing it replicated.
        zero: stage of ZeRO over fsdp, or over dp where there is no fsdp: parameters, gradients and
            optimizer state are cut at rest. 1 and 2 gather the parameters once a step, 3 gathers
            them where they are used, forward and backward; 1 scatters gradients once a step, 2 and
            3 in each microbatch; 0 keeps all whole. By default 3 over fsdp and 0 over dp.
        precision: "bf16", "fp16" or "fp32": parameters and floating inputs are cast to it where
            they are used; parameters are kept, reduced and stepped as the model has them (float32
            masters).
        reduce: "bf16", "fp16" or "fp32", beside precision: dtype in which gradients of parameters
            go over dp and fsdp. Half the bytes, and sums rounded to it; by default that of the
            parameters.
        remat: what the backward pass computes again in place of keeping it: "none"; "selective":
            what is cheap, no products and no collectives; "full": repeated blocks but for what
            goes from one to the next; or the bytes that a step may hold on a rank beside states
            and inputs: then as little as fits.
        accumulate: number of microbatches that a training call is split into. The result is that of
            the whole batch: the call runs forward and backward of each, and reduces once.
        microbatches: on a mesh with an axis pp, the same number of a pipeline, times `accumulate`;
            by default twice its ranks, or as many as the rows fill.
        schedule: what the ranks of a pipeline compute when: a name of `autopar.pipeline.ORDERS`, a
            Schedule, or the path of a text or CSV file with one.
        stages: of the pipeline: their number, by default one for each rank or what the schedule
            has; or the names of the modules that all stages but the first begin with.

    Raises:
        MeshError: mesh and world size differ, or the mesh text is wrong.
        CaptureError, RuleError, PlanError, BatchError: see autopar.errors.
    """
    chosen, grid = _options(options), make_mesh(mesh)
    _strategies(grid, chosen)  # a wrong plan fails here, not at the first call
    _check_pipeline(grid, chosen)
    if grid.sizes.get("pp", 1) > 1:
        raise PlanError(
            "Pipeline stages can be compiled and verified, but not trained by parallelize yet.",
            where=f"mesh '{grid}'",
            expected="a mesh without the axis pp",
            hint="autopar.verify(model, mesh, inputs) runs all its stages in this process",
        )

    planned = False  # the plan is for the first program; later ones may have other calls

    def compile_step(
        bones: nn.Module, arguments: Arguments, grad: bool, held: Mapping[str, Layout]
    ) -> Compiled:
        nonlocal planned
        compiled = _compile(bones, arguments, grid, chosen, grad, held, planned)
        planned = chosen.plan is not None
        return compiled

    device_mesh = mesh if hasattr(mesh, "mesh_dim_names") else None
    module = ParallelModule(
        model, grid, compile_step, _grow, batch=chosen.batch, seed=chosen.seed,
        batch_dims=chosen.batch_dims, backend=chosen.backend, device_mesh=device_mesh,
    )  # fmt: skip
    if example_inputs is not None:
        args, kwargs = as_call(example_inputs)
        module.entry(bind_arguments(args, kwargs, position_names(model)))
    return module


def compile(model: nn.Module, mesh: Any, example_inputs: Any, **options: Any) -> Compiled:
    """Compile a step without a process group: to plan, inspect and verify.

    Args: as `parallelize`; `example_inputs` has the shapes of the global batch, and may be on the
    meta device like the model.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    args, kwargs = as_call(example_inputs)
    arguments = bind_arguments(args, kwargs, position_names(model))
    fakes = tuple(empty_like(t, mode) for t in arguments.tensors)
    bound = Arguments(arguments.names, fakes, arguments.leaves, arguments.spec)
    chosen, grid = _options(options), make_mesh(mesh)
    _check_pipeline(grid, chosen)
    return _compile(skeleton(model, mode), bound, grid, chosen, True)


def _options(given: Mapping[str, Any]) -> Options:
    names = [f.name for f in fields(Options)]
    for name in given:
        if name not in names:
            close = difflib.get_close_matches(name, names, 1)
            raise TypeError(
                f"parallelize has no option '{name}'."
                + (f" Did you mean '{close[0]}'?" if close else "")
                + f" Options: {', '.join(names)}."
            )
    if given.get("plan") is not None:
        given = {**given, "plan": read_plan(given["plan"])}
    return Options(**given)


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    """What takes a third of the time to compile and gives nothing rests inside.

    The many small objects of a graph live on, so no cyclic collection looks through them; and a
    graph that is only a step from pass to pass is not written as Python.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        with lazy_graph_modules(True):
            yield
    finally:
        if before:
            gc.enable()


@_compiling()
def _compile(
    bones: nn.Module,
    arguments: Arguments,
    mesh: Mesh,
    options: Options,
    grad: bool,
    held: Mapping[str, Layout] | None = None,
    planned: bool = False,
) -> Compiled:
    """Capture, annotate, lower and differentiate.

    Args:
        held: placements that parameters have already.
        planned: another program of the model has come from the given plan.
    """
    kept: dict[str, torch.dtype] = {}
    if options.precision is not None:
        bones, arguments, kept = narrowed(bones, arguments, NARROW[options.precision])
    program = capture(
        bones, arguments, mesh, loss=options.loss, known=is_normalized, promotes=bool(kept)
    )
    check_global(program, "capture")
    has_loss = any(o.is_loss for o in program.outputs)
    piped = grad and mesh.sizes.get("pp", 1) > 1
    order = _order(mesh, options, program.batch_size) if piped else None
    count = (
        options.accumulate * (options.microbatches or 1) if order is None else order.microbatches
    )
    if order is not None or (count > 1 and grad and (has_loss or bones.training)):
        mesh = Mesh((*mesh.axes, (MICRO, count)))
        program = program.replace(mesh=mesh)
    program = Cast(kept).run(program)
    check_global(program, "cast")
    program = Normalize().run(program)
    check_global(program, "normalize")
    _check_rules(program, options.strict)
    held = held or {}
    placed = tuple(replace(s, layout=held.get(s.name)) for s in program.states)
    program = program.replace(states=placed)
    finish = _annotate(program, options, planned)
    calls = [n for n in program.graph.graph.nodes if info(n).choice and n.op == "call_function"]
    decisions = {n.name: info(n).choice for n in calls}
    program = Expand().run(program)
    for strategy in finish:
        strategy.annotate(program)
    if order is not None:
        names = () if isinstance(options.stages, int) else tuple(options.stages)
        Pipeline(len(order.owners), at=names).annotate(program)
    program = program.replace(level="annotated")
    check_annotated(program, "expand")
    compiled = Compiled(program, type(bones).__name__, uneven_atoms(program), decisions=decisions)
    device = arguments.tensors[0].device.type
    lowered = _lower(program, compiled, options)
    traces = Traces(sizes=compiled.sizes)
    differentiate = Differentiate(device, gradients=grad, traces=traces)
    compiled.remat, phases = _differentiated(lowered, differentiate, options.remat)
    _bind(compiled, phases)
    if order is not None:
        again = replace(differentiate, repeat=compiled.remat.choose)
        compiled.staging = split(again.run(lowered), order)
        wrong = staging_problems(compiled.staging)
        if wrong:
            raise VerificationError("The stages do not fit:\n  " + "\n  ".join(wrong))
    elif MICRO in mesh.names:
        again = replace(differentiate, repeat=compiled.remat.choose)
        compiled.accumulation = accumulate(again.run(lowered))
    _check_held(compiled, held)
    return compiled


def _check_held(compiled: Compiled, held: Mapping[str, Layout]) -> None:
    mesh = compiled.annotated.mesh
    for s in compiled.of_any().program.states:
        have = held.get(s.name)
        if have is not None and s.layout is not None and s.layout.normal(mesh) != have.normal(mesh):
            raise PlanError(
                f"The program of this call wants {s.name} as {s.layout}, but it is held as {have}.",
                expected="one placement of each parameter for all calls",
                hint="make the module anew with parallelize, or use a strategy that keeps "
                "State.layout where it is given",
            )


def _lower(program: Program, compiled: Compiled, options: Options) -> Program:
    """The lowered program of all ranks; sizes in which they differ go into `compiled`."""
    has_loss = any(o.is_loss for o in program.outputs)
    rows = DATA_AXES if options.batch == "local" else ()
    wire = None if options.reduce is None else NARROW[options.reduce]
    places = list(compiled.places().values())
    made = []
    for coordinate in places:
        shard = Shard(coordinate, whole_outputs=not has_loss, row_axes=rows, wire=wire)
        made.append(shard.run(program))
        check_spmd(made[-1], "shard", coordinate)
    lowered = made[0]
    if len(places) > 1:
        compiled.sizes = Sizes(program.mesh, places, compiled.atoms)
        lowered = merge(made, compiled.sizes)
    lowered = Fuse().run(lowered)
    for k, coordinate in enumerate(places):
        check_spmd(place(lowered, k), "fuse", coordinate)
    return lowered


def _differentiated(
    program: Program, differentiate: Differentiate, remat: str | int
) -> tuple[Remat, Phases]:
    """The differentiated program, and what of it is computed again.

    Raises:
        PlanError: no choice keeps the step within the bytes given.
    """

    def attempt(choice: Remat) -> Phases:
        return Bucket().run(replace(differentiate, repeat=choice.choose).run(program))

    if isinstance(remat, str):
        return Remat(remat), attempt(Remat(remat))
    return within(remat, attempt)


def _bind(compiled: Compiled, phases: Phases) -> None:
    """Let all ranks run `phases`, checked with the sizes of each place."""
    compiled.bind(phases)
    problems = [p for placed in compiled.phases.values() for p in check_phases(placed)]
    if problems:
        raise VerificationError("The generated program is wrong:\n  " + "\n  ".join(problems))


@_compiling()
def _grow(compiled: Compiled, roots: tuple[int, ...], device: str) -> None:
    """Take the gradients of these results, in place of that of the loss alone."""
    assert compiled.shared is not None, "set by every compilation"
    differentiate = Differentiate(
        device, traces=Traces(sizes=compiled.sizes), roots=roots, repeat=compiled.remat.choose
    )
    with torch.enable_grad():  # it is asked for in a backward, which runs without
        _bind(compiled, Bucket().run(differentiate.run(compiled.shared.program)))


def _annotate(program: Program, options: Options, planned: bool) -> list[Any]:
    """Choose for every node; returns what places the calls that passes insert after.

    Where an earlier program of the model has come from the given plan, one with other calls (an
    evaluation without labels, say) keeps the plan's states and the rest is chosen.
    """
    if planned and not Planned(options.plan).fits(program):
        Planned(options.plan).place_states(program)
        options = replace(options, plan=None)
    for strategy in _strategies(program.mesh, options):
        strategy.annotate(program)
    if options.plan is not None:
        return [Inserted(options.plan)]
    return [Follow(axis) for axis in program.mesh.names]


def _strategies(mesh: Mesh, options: Options) -> list[Any]:
    if options.plan is not None:
        plan = Planned(options.plan)
        plan.check_mesh(mesh)
        return [plan]
    if options.strategy is not None:
        given = options.strategy
        chosen = list(given) if isinstance(given, (list, tuple)) else [given]
        for strategy in chosen:
            if not hasattr(strategy, "annotate"):
                raise PlanError(
                    f"strategy={strategy!r} is not a strategy.",
                    expected="an object with annotate(program), such as strategies.data.Data",
                )
            axis = getattr(strategy, "axis", None)
            if axis is not None and axis not in mesh.names:
                raise PlanError(
                    f"{type(strategy).__name__} works on the axis '{axis}', which the mesh "
                    f"'{mesh}' does not have.",
                    expected=f"one of {', '.join(mesh.names)}",
                )
        if MICRO in mesh.names:
            chosen = [*chosen, Data(MICRO, options.batch_dims)]
        return chosen if options.zero is None else [*chosen, *_zero(mesh, options)]
    made: list[Any] = []
    for axis in sorted(mesh.names, key=lambda a: a != MICRO):
        if axis in DATA_AXES:
            made.append(Data(axis, options.batch_dims))
        elif axis == "pp":
            continue  # its ranks compute other calls, see passes.split
        elif axis == "tp":
            made.append(Tensors(axis, options.sequence, options.pins))
        else:
            raise PlanError(
                f"There is no strategy for the mesh axis '{axis}'.",
                where=f"mesh '{mesh}'",
                expected="axes named dp or fsdp (data), tp (tensor) and pp (pipeline)",
                hint="rename the axis, or pass strategy=",
            )
    return [*made, *_zero(mesh, options)]


def _check_pipeline(mesh: Mesh, options: Options) -> None:
    """Options of a pipeline want the axis of one."""
    usual = Options()
    for name in ("microbatches", "schedule", "stages"):
        if getattr(options, name) != getattr(usual, name) and "pp" not in mesh.names:
            raise PlanError(
                f"{name}= is an option of pipelines, which the mesh '{mesh}' has none of.",
                expected="an axis pp, such as 'dp=2, pp=4'",
                hint="accumulate= splits a call into microbatches on any mesh"
                if name == "microbatches"
                else f"leave out {name}",
            )


def _order(mesh: Mesh, options: Options, rows: int) -> Schedule:
    """What each rank of the pipeline computes when: stages, microbatches and their order.

    Without a number of microbatches there are twice as many as ranks, or as the rows can fill.
    """
    ranks, given = mesh.sizes["pp"], options.schedule
    if isinstance(given, Path):
        given = parse(given)
    if isinstance(given, Schedule):
        if len(given.ranks) != ranks:
            raise PlanError(
                f"schedule {given.name!r} is for {len(given.ranks)} ranks, pp is {ranks}.",
                expected="as many ranks in the schedule as on the axis pp",
            )
        return given
    data = math.prod(n for a, n in mesh.axes if a in DATA_AXES)
    count = options.microbatches or max(1, min(2 * ranks, rows // max(1, data)))
    wanted = options.stages if isinstance(options.stages, int) else len(options.stages) + 1
    if wanted % ranks:
        raise PlanError(
            f"{wanted} stages cannot be spread over pp={ranks}.",
            expected="a multiple of the ranks of the pipeline",
        )
    virtual = wanted // ranks
    found = ORDERS.get(given)
    if not virtual and found is not None and found.virtual == 0:
        virtual = 2
    return pipeline_order(given, ranks, count * options.accumulate, virtual)


def _zero(mesh: Mesh, options: Options) -> list[Zero]:
    """ZeRO over fsdp where the mesh has it, else over dp where it is asked for."""
    if options.zero is None:
        return [Zero("fsdp")] if "fsdp" in mesh.names else []
    axis = next((a for a in ("fsdp", "dp") if a in mesh.names), None)
    if axis is None and options.zero:
        raise PlanError(
            f"zero={options.zero} needs ranks with different rows to share a state between.",
            where=f"mesh '{mesh}'",
            expected="an axis fsdp or dp",
            hint="add one, such as 'fsdp=2, tp=4', or drop zero",
        )
    return [Zero(axis, options.zero)] if axis and options.zero else []


def _check_rules(program: Program, strict: bool) -> None:
    missing: dict[str, Any] = {}
    for node in program.graph.graph.nodes:
        known = node.op != "call_function" or find(node.target) or "getitem" in str(node.target)
        if not known:
            missing.setdefault(str(node.target).replace("torch.ops.", ""), node)
    for name, node in missing.items():
        row = _row(name, node)
        advice = (
            f"{row} computes it whole as now; take the '!' from each dim whose elements are "
            "computed apart from each other, and ranks may share them"
        )
        if strict:
            raise RuleError(
                f"There is no rule for {name}.",
                where=call_text(node),
                expected="a row in the operation table for every operation (strict=True)",
                hint=advice,
            )
        warnings.warn(
            f"autopar has no rule for {name}; it is computed whole on every rank.\n"
            f"  where:    {call_text(node)}\n  try:      {advice}",
            stacklevel=4,
        )


def _row(name: str, node: Any) -> str:
    """A row for an operation that keeps every dim whole; dims of the result's shape share names."""
    letters = iter("abcdefghijklmnopqrstuvwxyz" * 4)
    names: dict[tuple[int, ...], str] = {}

    def side(values: list[Any]) -> str:
        for v in values:
            shape = tuple(v.shape)
            names.setdefault(shape, " ".join(f"!{next(letters)}" for _ in shape))
        return ", ".join(names[tuple(v.shape)] for v in values)

    val = node.meta["val"]
    results = [val] if isinstance(val, Tensor) else [v for v in val if isinstance(v, Tensor)]
    left = side([n.meta["val"] for n in tensor_inputs(node)])
    return f'autopar.rules.register("{name}", "{left} -> {side(results)}")'
