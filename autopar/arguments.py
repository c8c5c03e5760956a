"""The arguments of a call, taken apart into tensors and the rest."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from autopar.compat import pytree
from autopar.errors import InputError

__all__ = ["Arguments", "Slot", "as_call", "bind_arguments", "position_names"]


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of one call, taken apart: tensors by path, everything else as constants.

    Args:
        names: path of each tensor, such as ``input_ids`` or ``batch.0``.
        tensors: the tensors, in the order of `names`.
        leaves: all leaves; tensors replaced by their index in `tensors` wrapped in `Slot`.
    """

    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec

    def key(self, shapes: Sequence[tuple[int, ...]]) -> tuple[Any, ...]:
        """Equal for calls that one program can serve; `shapes` are of the whole batch."""
        pairs = zip(shapes, self.tensors, strict=True)
        looks = tuple((shape, t.dtype, t.device.type) for shape, t in pairs)
        rest = tuple(
            leaf if isinstance(leaf, (int, float, bool, str, Slot, type(None))) else id(leaf)
            for leaf in self.leaves
        )
        return (self.names, looks, rest, str(self.spec))

    def shapes(self) -> str:
        """Name, dtype and shape of every tensor."""
        pairs = zip(self.names, self.tensors, strict=True)
        return ", ".join(f"{n} {str(t.dtype)[6:]}{list(t.shape)}" for n, t in pairs)

    def rebuild(self, tensors: tuple[Tensor, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) with other tensors in place."""
        leaves = [tensors[x.index] if isinstance(x, Slot) else x for x in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return tuple(args), dict(kwargs)


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands for a tensor among the leaves, by its index."""

    index: int


def bind_arguments(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], positions: Sequence[str] = ()
) -> Arguments:
    """Take the arguments of a call apart.

    Args:
        positions: names of the positional parameters, see `position_names`.

    Raises:
        InputError: no argument is a tensor.
    """
    paths, spec = pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))
    names: list[str] = []
    tensors: list[Tensor] = []
    leaves: list[Any] = []
    for path, leaf in paths:
        if isinstance(leaf, Tensor):
            words = re.findall(r"[\w]+", "".join(str(k) for k in path[1:]))
            positional = "[0]" in str(path[0])  # of (args, kwargs)
            if positional and int(words[0]) < len(positions):
                words[0] = positions[int(words[0])]
            names.append(".".join(words) or f"arg{len(tensors)}")
            leaves.append(Slot(len(tensors)))
            tensors.append(leaf)
        else:
            leaves.append(leaf)
    if not tensors:
        raise InputError(
            "No argument of the call is a tensor.",
            expected="at least one tensor with the batch as its first dim",
        )
    return Arguments(tuple(names), tuple(tensors), tuple(leaves), spec)


def position_names(model: nn.Module) -> list[str]:
    """Names of the parameters that a call of `model` may give by position."""
    try:
        found = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def as_call(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`example_inputs` as (args, kwargs): a dict of keyword arguments, a tuple, or one tensor."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    return (example_inputs,), {}
