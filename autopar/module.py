"""The parallel module: the user's module, run as generated programs on this rank."""

from __future__ import annotations

import hashlib
import itertools
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from autopar.arguments import Arguments, bind_arguments, position_names
from autopar.batch import Batch, Rows
from autopar.capture import skeleton
from autopar.codegen import load, split_backward, split_finish
from autopar.compat import FakeTensorMode, local_of, pytree, wrap_like
from autopar.compiled import Compiled
from autopar.errors import BatchError, InputError, MeshError
from autopar.inductor import compiled_functions
from autopar.layout import MICRO, Layout, Mesh
from autopar.moves import Moves, moves_of
from autopar.parameters import Placer, held, home, is_whole, no_values, state
from autopar.program import State, differentiable
from autopar.runtime import Communicator, VirtualWorld, connect, join
from autopar.runtime.executor import Code, Executor, More
from autopar.runtime.kernels import runnable
from autopar.runtime.ledger import Ledger
from autopar.runtime.microbatches import Microbatches
from autopar.schedule import Split
from autopar.source import Source
from autopar.training import Trained

__all__ = ["ParallelModule"]

Compile = Callable[[nn.Module, Arguments, bool, Mapping[str, Layout]], Compiled]
"""(skeleton, arguments with global shapes, with gradients, placements that parameters have
already) -> compiled step."""

Grow = Callable[[Compiled, tuple[int, ...], str], None]
"""(step, results whose gradients are wanted, device): compile it again with these roots."""


Home = tuple[nn.Module, str]
"""The sub-module that holds a tensor, and its name there."""


@dataclass(slots=True)
class _Entry:
    """One compiled call shape on this rank."""

    compiled: Compiled
    executor: Executor | Microbatches
    inputs: list[Layout]
    states: list[State]
    gradients: Sequence[str]
    signature: str
    checked: bool = False
    homes: dict[str, Home] = field(default_factory=dict)
    looks: int = -1  # of the source, when the homes were looked up


class ParallelModule(Trained):
    """A module whose forward runs the generated program of this rank.

    It shares the sub-modules of the model it was made from; at the first call their parameters are
    replaced by DTensors of the same names. Attributes that are not found here are looked up on the
    original model.
    """

    def __init__(
        self, model: nn.Module, mesh: Mesh, compile_step: Compile, grow: Grow, *, batch: str,
        seed: int,
        batch_dims: Mapping[str, int | None], backend: str = "eager", device_mesh: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self._backend = backend
        self.__dict__["_model"] = model
        self._parameters, self._buffers = model._parameters, model._buffers
        self._modules = model._modules
        self.training = model.training
        self._mesh, self._compile_step, self._grow = mesh, compile_step, grow
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._source = Source(model)
        self._version = self._source.version()
        self._positions = position_names(model)
        self._skeleton: list[nn.Module] = [skeleton(model, self._mode)]  # not a sub-module
        self._entries: dict[Any, _Entry] = {}
        self._latest: _Entry | None = None
        self._hinted = self._told = False
        self._held: dict[str, Layout] = {}  # placements of the states, chosen at the first call
        self._steps = 0
        self._comm = _communicator(mesh)
        self._comm.seed = seed
        self._batch = Batch(batch, mesh, self._comm, batch_dims)
        self._placer = Placer(self._comm, device_mesh)
        alone = mesh.size == 1
        self._ledger = Ledger(
            partial(state, self),
            (lambda _, g: g) if alone else (lambda p, g: wrap_like(g, p)),
            (lambda g: g) if alone else local_of,
        )

    # --- looking at it -------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_model"], name)

    @property
    def compiled(self) -> Compiled:
        """The compiled step of the latest call.

        Raises:
            InputError: nothing was compiled yet.
        """
        if self._latest is None:
            raise InputError(
                "The module has not been compiled yet.",
                hint="call it once, or pass example_inputs to parallelize",
            )
        return self._latest.compiled

    @property
    def plan(self) -> dict[str, Any]:
        """See `Compiled.plan`."""
        return self.compiled.plan

    def graph(self, phase: str = "forward") -> fx.GraphModule:
        """The graph of a phase on this rank: "optimizer", or see `Compiled.graph`.

        Raises:
            InputError: there is no such phase, or none yet.
        """
        if phase == "optimizer":
            return runnable(self.stepper().graph(self._moves()), self._comm)
        return self.compiled.graph(phase, self._comm.rank)

    def code(self, phase: str = "") -> str:
        """The generated Python of this rank; with `phase="optimizer"` that of its step.

        Raises:
            InputError: there is no such phase, or none yet.
        """
        if phase == "optimizer":
            return self.stepper().code(self._moves())
        if phase:
            raise InputError(f"There is no code of {phase!r} alone.", expected="optimizer, or none")
        return self.compiled.code(self._comm.rank)

    def _moves(self) -> dict[int, Moves]:
        """What moves around the updates of parameters, in the latest program with gradients."""
        entries = [e for e in (*self._entries.values(), self._latest) if e and e.gradients]
        if self._mesh.size == 1 or not entries:
            return {}
        found = moves_of(entries[-1].compiled, self._comm.coordinate)
        return {id(state(self, name)): moves for name, moves in found.items()}

    def explain(self) -> str:
        """Placements and traffic as text, see `Compiled.explain`."""
        return self.compiled.explain()

    # --- running it ----------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own result, see docs/usage.md for what is a DTensor in it."""
        arguments = bind_arguments(args, kwargs, self._positions)
        _check_gradients(arguments)
        rows = self._batch.rows(arguments, self._manner())
        entry = self.entry(arguments, rows)
        if not entry.checked:
            self._batch.check(arguments, entry.compiled.plan_json())
            entry.checked = True
        self._find_homes(entry)
        states = [self._local(s, entry) for s in entry.states]
        inputs = self._batch.pieces(arguments, rows, entry.inputs)
        if torch.is_grad_enabled():
            self._steps += 1
        self._comm.step = self._steps
        leaves = [held(*entry.homes[n]) for n in entry.gradients]
        results = entry.executor.run([*states, *inputs], leaves)
        return self._result(entry, results, rows)

    @property
    def _device(self) -> torch.device:
        """Where the parameters live; they may move before the first call."""
        found = next(itertools.chain(self.parameters(), self.buffers()), None)
        return torch.device("cpu") if found is None else found.device

    def _manner(self) -> str:
        """What beside shapes decides which collectives a call enters."""
        held = ", inside no_sync()" if self._ledger.holding else ""
        grads = "" if torch.is_grad_enabled() else " without gradients"
        return ("training" if self.training else "evaluation") + grads + held

    def _check_devices(self, arguments: Arguments) -> None:
        here = self._device
        if here.type == "meta":
            raise no_values(next((n for n, _ in self.named_parameters()), ""))
        for name, t in zip(arguments.names, arguments.tensors, strict=True):
            if t.device.type != here.type and t.dim():
                raise InputError(
                    f"The argument {name} is on {t.device}, the parameters are on {here}.",
                    where=f"argument {name}",
                    expected=f"all tensors of a call on {here}",
                    hint=f"{name} = {name}.to({str(here)!r}), or move the model before parallelize",
                )

    def entry(self, arguments: Arguments, rows: Rows | None = None) -> _Entry:
        """The compiled step for a call, compiled now where its shapes or the model are new."""
        self._check_devices(arguments)
        if rows is None:
            rows = self._batch.rows(arguments, self._manner())
        version = self._source.version()
        if version != self._version:  # a forward or a sub-module was replaced
            self._version = version
            self._held = {n: v for n, v in self._held.items() if not is_whole(state(self, n))}
            self._positions = position_names(self.__dict__["_model"])
            self._skeleton[0] = skeleton(self.__dict__["_model"], self._mode)
        grad = torch.is_grad_enabled()
        flags = (self.training, *self._source.training())
        wanted = tuple(p.requires_grad for p in self.parameters())
        shapes = self._batch.shapes(arguments, rows)
        key = (arguments.key(shapes), rows.total, grad, flags, wanted, version)
        entry = self._entries.get(key)
        if entry is None:
            settings = ("training" if self.training else "evaluation", grad, flags, wanted)
            signature = _signature(arguments, settings)
            self.agree(signature, new=True)
            entry = self._entries[key] = self._compile(arguments, rows, grad, signature)
        else:
            self.agree(entry.signature)
        self._latest = entry
        return entry

    def _compile(self, arguments: Arguments, rows: Rows, grad: bool, signature: str) -> _Entry:
        bones = self._skeleton[0]
        live = dict(self.named_modules())
        for name, module in bones.named_modules():
            module.training = live[name].training
        for name, p in bones.named_parameters(remove_duplicate=False):
            p.requires_grad_(state(self, name).requires_grad)
        whole = self._batch.whole(arguments, rows, self._mode)
        compiled = self._compile_step(bones, whole, grad, self._held)
        phases = compiled.of(self._comm.rank)
        if grad and phases.gradients and not any(o.is_loss for o in phases.program.outputs):
            self._hint_loss()
        states = list(phases.program.states)
        if self._mesh.size > 1:  # a single rank keeps its parameters as they are
            new = [s for s in states if s.name not in self._held]
            self._placer.bind(self, new)
            self._held.update((s.name, s.layout) for s in new if s.layout is not None)
        params = [state(self, n) for n in phases.gradients]
        alone = self._mesh.size == 1

        def wrap(i: int, g: Tensor) -> Tensor:
            return g if alone else wrap_like(g, params[i])

        layouts = [i.layout for i in phases.program.inputs if i.layout is not None]
        executor: Executor | Microbatches
        if compiled.accumulation is not None:
            whole_mesh, placed = compiled.annotated.mesh, [*[None] * len(states), *layouts]
            step = compiled.step(self._comm.coordinate)
            split = cache(partial(self._split, compiled))
            executor = Microbatches(
                step, compiled.parts(), whole_mesh, placed, wrap, self._comm, self._device,
                self._ledger, split,
            )  # fmt: skip
            layouts = [x.without(MICRO) for x in layouts]
        else:
            code, more = self._code(compiled), self._more(compiled)
            executor = Executor(code, wrap, self._comm, self._device, more, self._ledger)
        return _Entry(compiled, executor, layouts, states, phases.gradients, signature)

    def _split(self, compiled: Compiled) -> Split:
        """The end of a step over microbatches in two, when `no_sync` first asks for it."""
        assert compiled.accumulation is not None, "only with accumulate="
        scatters = compiled.accumulation.scatters and not self._comm.rank
        if scatters and not self._told:
            self._told = True
            warnings.warn(
                "no_sync leaves out what is reduced in backward; with accumulate= and parameters "
                "cut at rest, most gradients are scattered within the call. The sums are exact.",
                stacklevel=2,
            )
        names = compiled.of(self._comm.rank).gradients
        return split_finish(compiled.accumulation, names, compiled.title)

    def _find_homes(self, entry: _Entry) -> None:
        """Look up which sub-modules hold the states, where one may have been replaced."""
        if entry.looks != self._source.looks:
            names = [s.name for s in entry.states if not s.name.startswith("constant.")]
            entry.homes = {n: home(self, n) for n in names}
            entry.looks = self._source.looks

    def _hint_loss(self) -> None:
        """Say once that a loss inside the program saves gathering the outputs."""
        if self._hinted or self._mesh.size == 1 or self._comm.rank:
            return
        self._hinted = True
        warnings.warn(
            "The model returns no loss, so its outputs are gathered on every rank. Faster: "
            "parallelize(model, mesh, loss=fn), called as model(x, targets=y).",
            stacklevel=7,
        )

    def _code(self, compiled: Compiled) -> Code:
        phases = compiled.of(self._comm.rank)
        apart = len(compiled.places()) > 1
        if self._backend == "inductor" and apart and not self._comm.rank:
            warnings.warn(
                f"{compiled.title} has sizes that do not divide, and inductor might order the "
                "collectives of ranks with different sizes differently; the generated Python runs "
                "instead of backend='inductor'.",
                stacklevel=7,
            )
        traced = self._backend == "inductor" and not apart
        shared = phases if compiled.shared is None else compiled.shared
        if traced:
            found = compiled_functions(phases, self._comm)
        else:
            source = compiled.code()
            name = hashlib.sha1(source.encode()).hexdigest()[:12]
            found = load(source, f"<autopar {name}>")
        split = cache(partial(split_backward, shared, compiled.title, traced=traced))
        return Code(found.forward, found.backward, phases.roots, split)

    def _more(self, compiled: Compiled) -> More:
        """How to take the gradient of outputs beside the loss, should one ever arrive there."""
        program = compiled.of(self._comm.rank).program

        def grow(roots: tuple[int, ...]) -> Code:
            self._grow(compiled, roots, self._device.type)
            return self._code(compiled)

        names = [s.name for s in program.states] + [i.name for i in program.inputs]
        mutated = dict(program.mutated)
        written = {s.name: i for i, s in enumerate(program.states) if s.name in mutated}
        read = program.states_of(differentiable(program))
        return More(
            differentiable(program), grow, names, frozenset(written.values()),
            frozenset(i for n, i in written.items() if n in read),
        )  # fmt: skip

    def _local(self, s: State, entry: _Entry) -> Tensor:
        """What this rank's program takes for a state."""
        if s.name.startswith("constant."):
            return entry.compiled.annotated.constants[s.name]
        at = entry.homes[s.name]
        tensor = held(*at)
        if not is_whole(tensor):
            return local_of(tensor)
        if tuple(tensor.shape) != s.shape:
            raise InputError(
                f"{s.name} was replaced by a tensor of another shape.",
                where=f"{s.name} of shape {list(tensor.shape)}",
                expected=f"shape {list(s.shape)}, for which the program was compiled",
                hint="replace the module that holds it, or call parallelize again",
            )
        if self._mesh.size > 1 and s.is_parameter:  # a new parameter in place of the old
            self._placer.bind(self, [s])
            return local_of(held(*at))
        return tensor.detach()

    def _result(self, entry: _Entry, results: list[Tensor], rows: Rows) -> Any:
        program = entry.compiled.of_any().program
        for name, index in program.mutated:
            with torch.no_grad():
                state(self, name).copy_(results[index])
        has_loss = any(o.is_loss for o in program.outputs)
        leaves = []
        for out in program.outputs:
            if out.index < 0:
                leaves.append(out.constant)
                continue
            value = results[out.index]
            layout = None if out.layout is None else out.layout.without(MICRO)
            if layout is not None and layout.sharded:
                if has_loss:
                    value = self._placer.dtensor(value, layout)
                else:
                    _own_rows(value, rows)
            leaves.append(value)
        return pytree.tree_unflatten(leaves, program.out_spec)


def _check_gradients(arguments: Arguments) -> None:
    """A program has no gradients of its inputs: one that is asked for must not be lost."""
    for name, t in zip(arguments.names, arguments.tensors, strict=True):
        if t.requires_grad and torch.is_grad_enabled():
            raise InputError(
                f"The argument {name} requires a gradient, which is computed for parameters only.",
                where=f"argument {name}",
                expected="inputs without a gradient",
                hint=f"pass {name}.detach(), or make what computes it a part of the model",
            )


def _signature(arguments: Arguments, settings: tuple[str, bool, Any, Any]) -> str:
    """What ranks must have in common in a call, as text: shapes, and a digest of the settings."""
    mode, grad, *rest = settings
    plain = [x for x in arguments.leaves if isinstance(x, (int, float, str, type(None)))]
    digest = hashlib.sha1(repr((rest, plain)).encode()).hexdigest()[:4]
    grads = "" if grad else " without gradients"
    return f"{arguments.shapes()} ({mode}{grads}, settings {digest})"


def _own_rows(value: Tensor, rows: Rows) -> None:
    """An output of this rank's rows: a mean over them counts for its share of the batch."""
    if not rows.in_place:
        raise BatchError(
            f"The ranks passed {list(rows.counts)} rows, and the model returns no loss.",
            expected="equal rows on all ranks where the loss is computed outside the model",
            hint="pass loss=fn to parallelize, or drop the last short batch",
        )
    if value.requires_grad:
        share = rows.mine / rows.total
        hooked: Any = value
        hooked.register_hook(lambda g: g * share)


def _communicator(mesh: Mesh) -> Communicator:
    if mesh.size == 1:
        return VirtualWorld(mesh).communicators[0]
    if not dist.is_initialized():
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            raise MeshError(
                f"The mesh {mesh} needs {mesh.size} processes, but this one was started alone.",
                hint=f"start the script with: torchrun --nproc-per-node {mesh.size} script.py",
            )
        join("nccl" if torch.cuda.is_available() else "gloo")
    return connect(mesh)
