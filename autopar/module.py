"""The parallel module: the user's module, run as generated programs on this rank."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.capture import Arguments, bind_arguments, empty_like, skeleton
from autopar.codegen import generate, load
from autopar.compat import FakeTensorMode, StridedShard, local_of, pytree, wrap_like
from autopar.compiled import Compiled
from autopar.errors import BatchError, InputError, MeshError
from autopar.layout import Layout, Mesh
from autopar.program import State
from autopar.runtime import Communicator, VirtualWorld, connect
from autopar.runtime.executor import Executor
from autopar.runtime.pieces import piece

__all__ = ["ParallelModule"]

Compile = Callable[[nn.Module, Arguments, bool, "int | None"], Compiled]
"""(skeleton, arguments with global shapes, with gradients, rank) -> compiled step."""


@dataclass(slots=True)
class _Entry:
    """One compiled call shape on this rank."""

    compiled: Compiled
    executor: Executor
    inputs: list[Layout]
    states: list[State]
    checked: bool = False


class ParallelModule(nn.Module):
    """A module whose forward runs the generated program of this rank.

    It shares the sub-modules of the model it was made from; at the first call their parameters are
    replaced by DTensors of the same names. Attributes that are not found here are looked up on the
    original model.
    """

    def __init__(
        self, model: nn.Module, mesh: Mesh, compile_step: Compile, *, batch: str, seed: int,
        has_loss: bool, device_mesh: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if batch not in ("global", "local"):
            raise InputError(f"batch={batch!r}", expected="'global' or 'local'")
        self.__dict__["_model"] = model
        self._parameters, self._buffers = model._parameters, model._buffers
        self._modules = model._modules
        self.training = model.training
        self._mesh, self._batch, self._compile_step = mesh, batch, compile_step
        self._has_loss = has_loss
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._skeleton: list[nn.Module] = [skeleton(model, self._mode)]  # not a sub-module
        self._entries: dict[Any, _Entry] = {}
        self._latest: _Entry | None = None
        self._bound = False
        self._steps = 0
        self._comm = _communicator(mesh)
        self._comm.seed = seed
        tensors = [*model.parameters(), *model.buffers()]
        self._device = tensors[0].device if tensors else torch.device("cpu")
        self._device_mesh = device_mesh

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
        """The graph of a phase on this rank, see `Compiled.graph`."""
        return self.compiled.graph(phase, self._comm.rank)

    def code(self) -> str:
        """The generated Python of this rank."""
        return self.compiled.code(self._comm.rank)

    def explain(self) -> str:
        """Placements and traffic as text, see `Compiled.explain`."""
        return self.compiled.explain()

    # --- running it ----------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own result, see docs/usage.md for what is a DTensor in it."""
        arguments = bind_arguments(args, kwargs)
        entry = self.entry(arguments)
        tensors = arguments.tensors
        if not entry.checked:
            self._check_batch(arguments)
            entry.checked = True
        comm = self._comm
        states = [self._local(s.name, entry.compiled) for s in entry.states]
        inputs = [
            t if self._batch == "local" and "dp" in layout.sharded and self._mesh.size > 1
            else piece(t, layout, self._mesh, comm.coordinate)
            for t, layout in zip(tensors, entry.inputs, strict=True)
        ]  # fmt: skip
        if torch.is_grad_enabled():
            self._steps += 1
        comm.step = self._steps
        leaves = [self.state(n) for n in entry.compiled.of_any().gradients]
        results = entry.executor.run([*states, *inputs], leaves)
        return self._result(entry, results)

    def entry(self, arguments: Arguments) -> _Entry:
        """The compiled step for a call, compiled now where its shapes are new."""
        grad = torch.is_grad_enabled()
        flags = tuple(m.training for m in self.modules())
        wanted = tuple(p.requires_grad for p in self.parameters())
        key = (arguments.key(), grad, flags, wanted)
        if key not in self._entries:
            self._entries[key] = self._compile(arguments, grad)
        self._latest = self._entries[key]
        return self._latest

    def _compile(self, arguments: Arguments, grad: bool) -> _Entry:
        bones = self._skeleton[0]
        live = dict(self.named_modules())
        for name, module in bones.named_modules():
            module.training = live[name].training
        for name, p in bones.named_parameters(remove_duplicate=False):
            p.requires_grad_(self.state(name).requires_grad)
        compiled = self._compile_step(bones, self._whole(arguments), grad, self._comm.rank)
        phases = compiled.of(self._comm.rank)
        source = generate(phases, compiled.title)
        name = f"<autopar {hashlib.sha1(source.encode()).hexdigest()[:12]}>"
        functions = load(source, name)
        states = list(phases.program.states)
        self._bind(states, phases.program.constants)
        params = [self.state(n) for n in phases.gradients]
        plain = self._mesh.size == 1

        def wrap(i: int, g: Tensor) -> Tensor:
            return g if plain else wrap_like(g, params[i])

        executor = Executor(
            functions.forward, functions.backward, phases.roots, wrap, self._comm, self._device
        )
        layouts = [i.layout for i in phases.program.inputs]
        assert all(x is not None for x in layouts), "lowering places every input"
        return _Entry(compiled, executor, layouts, states)  # type: ignore[arg-type]

    def _whole(self, arguments: Arguments) -> Arguments:
        """The arguments as fake tensors of the global batch."""
        tensors = []
        scale = self._mesh.sizes.get("dp", 1) if self._batch == "local" else 1
        rows = [t.shape[0] for t in arguments.tensors if t.dim()]
        batch = max(set(rows), key=rows.count) if rows else 0
        for t in arguments.tensors:
            shape = list(t.shape)
            if scale > 1 and shape and shape[0] == batch:
                shape[0] *= scale
            tensors.append(empty_like(t, self._mode, shape))
        return Arguments(arguments.names, tuple(tensors), arguments.leaves, arguments.spec)

    def _check_batch(self, arguments: Arguments) -> None:
        if self._mesh.size == 1:
            return
        mine = [_fingerprint(t) for t in arguments.tensors]
        everyone = self._comm.exchange(mine)
        here = self._comm.coordinate
        for rank, theirs in enumerate(everyone):
            there = self._mesh.coordinate(rank)
            same_rows = self._batch == "global" or there.get("dp") == here.get("dp")
            if same_rows and theirs != mine:
                bad = [n for n, a, b in zip(arguments.names, mine, theirs, strict=True) if a != b]
                hint = (
                    "pass batch='local' if every data-parallel rank loads its own rows"
                    if self._batch == "global"
                    else "ranks that differ only in other axes than dp need the same rows"
                )
                raise BatchError(
                    f"Ranks {self._comm.rank} and {rank} were given different batches "
                    f"(batch={self._batch!r}).",
                    where=", ".join(bad),
                    expected="the same values on both ranks",
                    hint=hint,
                )
        if self._batch == "local" and self._mesh.sizes.get("dp", 1) > 1:
            if all(theirs == mine for theirs in everyone):
                warnings.warn(
                    "batch='local', but all ranks were given the same rows; is the sampler "
                    "distributed? Pass batch='global' if that is meant.",
                    stacklevel=4,
                )

    def _result(self, entry: _Entry, results: list[Tensor]) -> Any:
        program = entry.compiled.of_any().program
        for name, index in program.mutated:
            with torch.no_grad():
                self.state(name).copy_(results[index])
        leaves = []
        for out in program.outputs:
            if out.index < 0:
                leaves.append(out.constant)
                continue
            value = results[out.index]
            layout = out.layout
            if layout is not None and layout.sharded and self._has_loss_in(entry):
                value = self._dtensor(value, layout)
            leaves.append(value)
        return pytree.tree_unflatten(leaves, program.out_spec)

    def _has_loss_in(self, entry: _Entry) -> bool:
        return any(o.is_loss for o in entry.compiled.annotated.outputs)

    # --- parameters ----------------------------------------------------------------------------

    def state(self, name: str) -> Tensor:
        """The parameter or buffer of a fully-qualified name."""
        path, _, leaf = name.rpartition(".")
        owner = self.get_submodule(path) if path else self
        found: Any = owner._parameters.get(leaf)
        if found is None:
            found = owner._buffers.get(leaf)
        return found  # type: ignore[no-any-return]

    def _local(self, name: str, compiled: Compiled) -> Tensor:
        tensor = (
            compiled.annotated.constants[name]
            if name.startswith("constant.")
            else self.state(name)
        )
        return tensor.detach() if self._mesh.size == 1 or _is_plain(tensor) else local_of(tensor)

    def _bind(self, states: list[State], constants: Any) -> None:
        """Replace whole parameters by the pieces of this rank, once."""
        if self._bound or self._mesh.size == 1:
            return
        replaced: list[tuple[Tensor, Tensor]] = []
        for s in states:
            if s.name.startswith("constant.") or not _is_plain(self.state(s.name)):
                continue
            old = self.state(s.name)
            _same_everywhere(old)
            if not s.is_parameter:
                continue
            assert s.layout is not None, "lowering places every state"
            local = piece(old.detach(), s.layout, self._mesh, self._comm.coordinate).clone()
            new = nn.Parameter(self._dtensor(local, s.layout), requires_grad=old.requires_grad)
            replaced.append((old, new))
            for name in (s.name, *s.aliases):
                path, _, leaf = name.rpartition(".")
                owner = self.get_submodule(path) if path else self
                owner._parameters[leaf] = new
        _repoint_optimizers(replaced)
        self._bound = True

    def _dtensor(self, local: Tensor, layout: Layout) -> Tensor:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        placements: list[Any] = []
        for axis in self._mesh.names:
            at = layout.sharded.get(axis)
            if at is None:
                placements.append(Replicate())
                continue
            d, i = at
            outer = 1
            for atom in layout.dims[d][:i]:
                outer *= atom.size
            placements.append(Shard(d) if outer == 1 else StridedShard(d, split_factor=outer))
        shape = torch.Size(layout.shape)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            local, self._torch_mesh(), placements, run_check=False, shape=shape, stride=stride
        )

    def _torch_mesh(self) -> Any:
        if self._device_mesh is None:
            from torch.distributed.device_mesh import init_device_mesh

            sizes = tuple(self._mesh.sizes.values())
            self._device_mesh = init_device_mesh(
                self._device.type, sizes, mesh_dim_names=self._mesh.names
            )
        return self._device_mesh

    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole plain state dict, the same on every rank."""
        out = {}
        for name, tensor in self.state_dict().items():
            value = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            out[name] = value.detach().clone()
        return out


def _is_plain(tensor: Tensor) -> bool:
    return not hasattr(tensor, "full_tensor")


def _same_everywhere(tensor: Tensor) -> None:
    """Take rank 0's values, so that unseeded initialisation cannot differ between ranks."""
    if tensor.device.type == "meta":
        raise InputError(
            "The model's parameters are on the meta device and have no values.",
            hint="use autopar.compile to plan without values, or model.to_empty(device=...) and "
            "initialise before parallelize",
        )
    with torch.no_grad():
        dist.broadcast(tensor.data, 0)


def _fingerprint(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous()
    digest = hashlib.blake2b(digest_size=12)
    digest.update(str((tuple(data.shape), data.dtype)).encode())
    digest.update(data.reshape(-1).view(torch.uint8).numpy().tobytes() if data.numel() else b"")
    return digest.hexdigest()


def _communicator(mesh: Mesh) -> Communicator:
    if mesh.size == 1:
        return VirtualWorld(mesh).communicators[0]
    if not dist.is_initialized():
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            raise MeshError(
                f"The mesh {mesh} needs {mesh.size} processes, but this one was started alone.",
                hint=f"start the script with: torchrun --nproc-per-node {mesh.size} script.py",
            )
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return connect(mesh)



def _repoint_optimizers(replaced: list[tuple[Tensor, Tensor]]) -> None:
    """Let optimizers made before the first call step the new parameters.

    torch calls the hook before every optimizer step of the process. Old parameters are held weakly:
    one that no optimizer holds is gone, and its id may belong to another tensor.
    """
    table: WeakTensorKeyDictionary[Tensor] = WeakTensorKeyDictionary()
    for old, new in replaced:
        table[old] = new

    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not len(table):
            handle.remove()
            return
        for group in optimizer.param_groups:
            for i, p in enumerate(group["params"]):
                new = table.get(p)
                if new is None:
                    continue
                group["params"][i] = new
                if p in optimizer.state:
                    optimizer.state[new] = {
                        k: _like_parameter(v, p, new) for k, v in optimizer.state.pop(p).items()
                    }

    handle = register_optimizer_step_pre_hook(hook)


def _like_parameter(value: Any, old: Tensor, new: Any) -> Any:
    """Optimizer state of a whole parameter, cut like its DTensor."""
    from torch.distributed.tensor import distribute_tensor

    if not isinstance(value, Tensor) or value.shape != old.shape or value.dim() == 0:
        return value
    return distribute_tensor(value, new.device_mesh, new.placements)
