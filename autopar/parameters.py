"""The parameters of a parallel module: whole ones become DTensors of the same names."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autopar.boxes import describe_pieces
from autopar.compat import StridedShard
from autopar.errors import InputError
from autopar.layout import Layout
from autopar.optimizers import adopt
from autopar.program import State
from autopar.runtime import Communicator, share
from autopar.runtime.pieces import piece

__all__ = ["Placer", "held", "home", "is_whole", "no_values", "state"]


def home(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The sub-module that holds a parameter or buffer, and its name there."""
    path, _, leaf = name.rpartition(".")
    return (module.get_submodule(path) if path else module), leaf


def held(owner: nn.Module, leaf: str) -> Tensor:
    """The parameter or buffer that a module holds itself."""
    found: Any = owner._parameters.get(leaf)
    if found is None:
        found = owner._buffers.get(leaf)
    return found  # type: ignore[no-any-return]


def state(module: nn.Module, name: str) -> Tensor:
    """The parameter or buffer of a fully-qualified name."""
    return held(*home(module, name))


def is_whole(tensor: Tensor) -> bool:
    """Whether a tensor is a plain one rather than a DTensor."""
    return not hasattr(tensor, "full_tensor")


def no_values(name: str) -> InputError:
    """The error for a parameter on the meta device that a call needs."""
    return InputError(
        "The model's parameters are on the meta device and have no values.",
        where=name,
        expected="parameters with values on every rank",
        hint="use autopar.compile to plan without values, or model.to_empty(device=...) and "
        "initialise before the first call",
    )


class Placer:
    """Places tensors on a torch device mesh.

    Args:
        comm: of this rank.
        device_mesh: the user's own, or None to make one when it is first needed.
    """

    def __init__(self, comm: Communicator, device_mesh: Any = None) -> None:
        self._comm, self.mesh, self.coordinate = comm, comm.mesh, comm.coordinate
        self.device_mesh = device_mesh
        if comm.mesh.size > 1:
            describe_pieces()

    def dtensor(self, local: Tensor, layout: Layout) -> Tensor:
        """The DTensor whose piece on this rank is `local`."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Replicate, Shard

        if self.device_mesh is None:
            sizes = tuple(self.mesh.sizes.values())
            self.device_mesh = init_device_mesh(
                local.device.type, sizes, mesh_dim_names=self.mesh.names
            )
        placements: list[Any] = []
        for axis in self.mesh.names:
            at = layout.sharded.get(axis)
            if at is None:
                placements.append(Replicate())
                continue
            d, i = at
            outer = math.prod(atom.size for atom in layout.dims[d][:i])
            axes, names = layout.dims[d][i].axes, self.mesh.names
            for inside in axes[: axes.index(axis)]:  # cut before, though later in the mesh
                if names.index(inside) > names.index(axis):
                    outer *= self.mesh.sizes[inside]
            placements.append(Shard(d) if outer == 1 else StridedShard(d, split_factor=outer))
        shape = torch.Size(layout.shape)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            local, self.device_mesh, placements, run_check=False, shape=shape, stride=stride
        )

    def bind(self, module: nn.Module, states: Sequence[State]) -> None:
        """Replace the whole parameters of `module` by the pieces of this rank.

        Rank 0's values are taken, so that unseeded initialisation cannot differ between ranks;
        optimizers that hold the old parameters go over to the new ones at their next step.

        Raises:
            InputError: the parameters have no values.
        """
        replaced: list[tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]] = []
        for s in states:
            if s.name.startswith("constant."):
                continue
            old = state(module, s.name)
            if not is_whole(old):
                continue
            if old.device.type == "meta":
                raise no_values(s.name)
            with torch.no_grad():
                share(self._comm, old.data)
            if not s.is_parameter:
                continue
            assert s.layout is not None, "lowering places every state"
            cut = partial(piece, layout=s.layout, mesh=self.mesh, coordinate=self.coordinate)
            local = cut(old.detach())
            local = local.clone(memory_format=torch.contiguous_format)
            new = nn.Parameter(self.dtensor(local, s.layout), requires_grad=old.requires_grad)
            replaced.append((old, new, cut))
            for name in (s.name, *s.aliases):
                owner, leaf = home(module, name)
                owner._parameters[leaf] = new
        adopt(replaced)
