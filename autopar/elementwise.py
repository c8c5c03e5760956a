"""Records what an optimizer does to one parameter, and whether it does it element by element.

The optimizer's own Python runs on stand-ins: tensors of the parameter's whole shape without values
(the meta device). Every operation on them is recorded, not computed. Numbers, and tensors of no
dims such as step counts, have values and are computed as always; so a schedule, a bias correction
or a branch on the step count is the optimizer's own at every step.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.compat import TorchDispatchMode, schema_of, storage_of

__all__ = ["Arg", "Asks", "Call", "Detail", "NotElementwise", "Recorder", "Section", "Watch"]

aten = torch.ops.aten


class NotElementwise(Exception):
    """The update of an element depends on more than that element.

    Args:
        reason: what the optimizer does, for the user.
        random: whether it draws random numbers, which no gathering makes equal to one device.
    """

    def __init__(self, reason: str, random: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.random = reason, random


class Detail(IntEnum):
    """How far an optimizer tells parameters apart, beside group, dtype and state."""

    KIND = 0
    SHAPE = 1  # it asks for shapes
    EACH = 2  # it goes by the place of a parameter in its group, or by how many there are


class Asks(Exception):
    """The optimizer tells apart parameters for which there is one stand-in."""

    def __init__(self, detail: Detail) -> None:
        super().__init__(detail.name)
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Arg:
    """An argument of a recorded call.

    Args:
        kind: "value" (elements), "number", "tensor" (of no dims); `index` is among its kind.
    """

    kind: str
    index: int


@dataclass(frozen=True, slots=True)
class Call:
    """An operation on all elements; `out` is the value it makes or writes."""

    op: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    out: int


@dataclass(slots=True)
class Section:
    """The calls recorded on one stand-in.

    Args:
        shape: of the stand-in.
        inputs: values that the update is given, by name: "param", "grad", then states.
        values: the stand-ins of all values; they stay alive so that storages stay apart.
        numbers: what the calls took as numbers this time.
        tensors: what they took as tensors of no dims.
    """

    shape: torch.Size
    inputs: dict[str, int] = field(default_factory=dict)
    values: list[Tensor] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    numbers: list[float | int] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)

    def key(self) -> tuple[Any, ...]:
        """What a program depends on: everything but the values of numbers and tensors."""
        dtypes = tuple(self.values[i].dtype for i in self.inputs.values())
        scalars = tuple(t.dtype for t in self.tensors)
        return (tuple(self.inputs.items()), dtypes, scalars, tuple(self.calls))


@dataclass(frozen=True, slots=True)
class _Traits:
    """What matters of an operator: does it work on elements, what it writes, its numbers."""

    elementwise: bool
    random: bool
    mutable: bool
    numbers: frozenset[Any]


_SAME_ELEMENTS = frozenset(
    f"aten::{name}"
    for name in (
        "clone", "copy_", "_to_copy", "fill_", "zero_", "fill", "zeros_like", "ones_like",
        "full_like", "empty_like", "view_as_real", "view_as_complex", "where",
    )
)  # fmt: skip
"""Not tagged pointwise by torch, though each element of the result comes from one of its place."""

_ALIASES = (aten.detach.default, aten.alias.default)


@functools.cache
def _traits(op: Any) -> _Traits:
    schema = schema_of(op)
    listed = any("List[Tensor]" in str(a.type) for a in schema.arguments)
    numbers = {
        key
        for i, a in enumerate(schema.arguments)
        if str(a.type) in ("number", "float", "Optional[number]", "Optional[float]")
        for key in (i, a.name)
    }
    return _Traits(
        not listed and (torch.Tag.pointwise in op.tags or schema.name in _SAME_ELEMENTS),
        torch.Tag.nondeterministic_seeded in op.tags,
        schema.is_mutable,
        frozenset(numbers),
    )


def _is_standin(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _standins(values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if _is_standin(value):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _standins(value)
    return found


def _one_by_one(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An operator on lists of tensors as the same on each, `name` being that of the method."""
    rest = list(args)
    named = dict(kwargs)
    if name.rstrip("_") in ("addcmul", "addcdiv") and len(rest) == 4:
        named["value"] = rest.pop()
    method = getattr(Tensor, name, None)
    out = []
    for i, tensor in enumerate(rest[0]):
        mine = [a[i] if isinstance(a, (list, tuple)) else a for a in rest[1:]]
        options = {k: v[i] if isinstance(v, (list, tuple)) else v for k, v in named.items()}
        if method is not None:
            out.append(method(tensor, *mine, **options))
        else:  # as maximum_
            out.append(tensor.copy_(getattr(Tensor, name[:-1])(tensor, *mine, **options)))
    return None if name.endswith("_") else out


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations on stand-ins.

    Args:
        device: where tensors are made that the optimizer asks for on the stand-ins' device.
    """

    def __init__(self, device: torch.device, dtypes: dict[Any, torch.dtype]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.dtypes = dtypes  # of results by operator and operands; meta kernels are slow
        self.homes: dict[tuple[int, torch.dtype], tuple[Section, int]] = {}

    def add(self, section: Section, tensor: Tensor) -> int:
        """Make `tensor` a value of `section`."""
        section.values.append(tensor)
        index = len(section.values) - 1
        self.homes[storage_of(tensor), tensor.dtype] = (section, index)
        return index

    def find(self, tensor: Tensor) -> tuple[Section, int]:
        """The section and index of a stand-in."""
        found = self.homes.get((storage_of(tensor), tensor.dtype))
        if found is None:
            raise NotElementwise("it makes tensors that autopar cannot follow")
        return found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Record an operation on stand-ins, run any other."""
        kwargs = kwargs or {}
        operands = _standins((*args, *kwargs.values()))
        if not operands:
            return self.concrete(func, args, kwargs)
        if func in _ALIASES:
            return func(*args, **kwargs)
        name = schema_of(func).name.removeprefix("aten::_foreach_")
        if not name.startswith("aten::"):
            with self:
                return _one_by_one(name, args, kwargs)
        if func is aten.index_put_.default or func is aten.index_put.default:
            self.check_mask(func, args)
        elif _traits(func).random:
            raise NotElementwise(f"{func} draws random numbers", random=True)
        elif func is aten._local_scalar_dense.default:
            raise NotElementwise("it reads a value of a tensor to decide what to do")
        elif not _traits(func).elementwise:
            raise NotElementwise(f"{func} mixes elements")
        section = self.section_of(func, operands)
        return self.record(section, func, args, kwargs, operands[0])

    def concrete(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operation without stand-ins; only tensors of no dims may come out."""
        device = kwargs.get("device")
        if device is None or torch.device(device).type != "meta":
            return func(*args, **kwargs)
        out = func(*args, **{**kwargs, "device": self.device})
        if isinstance(out, Tensor) and out.dim():
            raise NotElementwise(f"{func} makes a tensor that is not like a parameter")
        return out

    def check_mask(self, func: Any, args: Sequence[Any]) -> None:
        """`x[mask] = number` is elementwise, other indexing is not."""
        target, indices, value = args[:3]
        mask = indices[0] if len(indices) == 1 else None
        fine = mask is not None and mask.dtype == torch.bool and mask.shape == target.shape
        if not fine or value.dim():
            raise NotElementwise(f"{func} mixes elements")

    def section_of(self, func: Any, operands: Sequence[Tensor]) -> Section:
        """The one section whose stand-in all operands are like."""
        section, _ = self.find(operands[0])
        shape = operands[0].shape
        if shape != section.shape and tuple(shape) != (*section.shape, 2):
            raise NotElementwise(f"{func} works on another shape")
        for other in operands[1:]:
            if self.find(other)[0] is not section:
                raise NotElementwise(f"{func} combines two parameters")
            if other.shape != shape:
                raise NotElementwise(f"{func} combines different shapes")
        return section

    def record(
        self, section: Section, func: Any, args: Sequence[Any], kwargs: Any, like: Tensor
    ) -> Tensor:
        """Write the call down and give a stand-in of its result."""
        traits = _traits(func)
        if "device" in kwargs:  # results stay beside their operands
            kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory")}
        coded = tuple(self.coded(section, a, i in traits.numbers) for i, a in enumerate(args))
        named = tuple((k, self.coded(section, v, k in traits.numbers)) for k, v in kwargs.items())
        if traits.mutable:
            target = kwargs["out"] if "out" in kwargs else args[0]
            if not _is_standin(target):
                raise NotElementwise(f"{func} writes elements into a tensor of no dims")
            section.calls.append(Call(func, coded, named, self.find(target)[1]))
            return target  # type: ignore[no-any-return]
        out = self.result(func, args, kwargs, like)
        section.calls.append(Call(func, coded, named, self.add(section, out)))
        return out

    def result(self, func: Any, args: Sequence[Any], kwargs: Any, like: Tensor) -> Tensor:
        """A stand-in of the result."""
        if func is aten.view_as_real.default or func is aten.view_as_complex.default:
            return func(*args)  # type: ignore[no-any-return]
        kinds = tuple(
            (a.dtype, a.dim() > 0) if isinstance(a, Tensor) else type(a)
            for a in (*args, *kwargs.values())
        )
        key = (func, kinds, kwargs.get("dtype"))
        dtype = self.dtypes.get(key)
        if dtype is None:
            out = func(*args, **kwargs)
            if not isinstance(out, Tensor) or out.shape != like.shape:
                raise NotElementwise(f"{func} changes the shape")
            dtype = self.dtypes[key] = out.dtype
        return torch.empty(like.shape, dtype=dtype, device="meta")

    def coded(self, section: Section, value: Any, number: bool) -> Any:
        """An argument as the recording keeps it."""
        if isinstance(value, Tensor):
            if value.is_meta:
                return Arg("value", self.find(value)[1])
            if value.dim():
                raise NotElementwise("it combines a parameter with a tensor of its own")
            section.tensors.append(value.clone())
            return Arg("tensor", len(section.tensors) - 1)
        if isinstance(value, float) or (number and type(value) is int):
            section.numbers.append(value)
            return Arg("number", len(section.numbers) - 1)
        if isinstance(value, (list, tuple)):
            return tuple(self.coded(section, v, number) for v in value)
        return value


_SHAPELESS = frozenset(
    (
        "__hash__", "_grad", "_version", "data", "device", "dtype", "grad", "grad_fn",
        "is_complex", "is_cpu", "is_cuda", "is_floating_point", "is_inference", "is_leaf",
        "is_meta", "is_mkldnn", "is_mps", "is_nested", "is_quantized", "is_sparse", "is_xla",
        "is_xpu", "layout", "output_nr", "requires_grad", "requires_grad_",
    )
)  # fmt: skip
"""What can be asked of a tensor without learning its shape."""


class Watch(TorchFunctionMode):
    """Stops an optimizer that asks for the shape of a stand-in for several shapes.

    Args:
        device: where tensors are made that the optimizer asks for on the stand-ins' device.
        stop: whether stand-ins stand for several shapes.
    """

    def __init__(self, device: torch.device, stop: bool) -> None:
        super().__init__()
        self.device, self.stop = device, stop
        self.found = False

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run `func` and look at what it tells."""
        kwargs = kwargs or {}
        on = kwargs.get("device")
        if on is not None and torch.device(on).type == "meta" and not _standins(args):
            kwargs = {**kwargs, "device": self.device}  # as_tensor(0.1, device=p.device)
        out = func(*args, **kwargs)
        if out is None or isinstance(out, Tensor) or not self.stop:
            return out
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = func.__self__.__name__
        if name not in _SHAPELESS and _standins(args):
            self.found = True
            raise Asks(Detail.SHAPE)
        return out
