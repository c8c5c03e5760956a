"""What a rule says about one call: which dims of its operands and results are the same factor."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.layout import Atom, Layout, Mesh

__all__ = ["Call", "Dims", "Factors", "Local", "Spec"]

Dims = tuple[tuple[str, ...], ...]
"""For each dim of a tensor, its factors, major to minor; size-1 dims have none."""


@dataclass(frozen=True, slots=True)
class Local:
    """Local sizes handed to `Spec.adjust`: shapes of the results and sizes of the factors."""

    outputs: tuple[tuple[int, ...], ...]
    sizes: Mapping[str, int]


Adjust = Callable[[tuple[Any, ...], dict[str, Any], Local], tuple[tuple[Any, ...], dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Spec:
    """A rule applied to one call.

    Args:
        sizes: global size of each factor.
        inputs: dims of each tensor operand, in argument order.
        outputs: dims of each result.
        whole: factors that no axis may cut.
        expand: factors that may be cut once the call is replaced by its expansion.
        lookup: factor -> operand number of the integer indices into it; a cut factor is looked up
            by shifted, masked indices and the result is partial.
        linear: sets of operands through which a partial sum passes: partial in all of one set and
            in nothing else gives a partial result.
        reductions: reduction of a contracted factor where it is not 'sum'; those are not
            differentiable and hold only for values without gradient.
        adjust: rewrites the arguments for local sizes.
        heavy: the call is a product worth splitting (matrix product, convolution, attention).
        nonempty: factors that may be cut only where every rank gets at least one element, because
            the operation refuses an empty piece.
    """

    sizes: Mapping[str, int]
    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    whole: frozenset[str] = frozenset()
    expand: frozenset[str] = frozenset()
    lookup: Mapping[str, int] = field(default_factory=dict)
    linear: tuple[frozenset[int], ...] = ()
    reductions: Mapping[str, str] = field(default_factory=dict)
    adjust: Adjust | None = None
    heavy: bool = False
    nonempty: frozenset[str] = frozenset()

    def factors_of(self, dims: Dims) -> set[str]:
        """Factors that occur in `dims`."""
        return {f for dim in dims for f in dim}

    def split(self, factor: str, sizes: Sequence[int]) -> Spec:
        """This spec with `factor` seen as the product of new factors of `sizes`, major first."""
        names = [f"{factor}.{i}" for i in range(len(sizes))]

        def dims(old: Dims) -> Dims:
            return tuple(
                tuple(n for f in dim for n in (names if f == factor else [f])) for dim in old
            )

        def names_of(old: frozenset[str]) -> frozenset[str]:
            return (old - {factor}) | set(names) if factor in old else old

        new_sizes = {f: n for f, n in self.sizes.items() if f != factor}
        new_sizes.update(zip(names, sizes, strict=True))
        lookup = dict(self.lookup)
        whole = names_of(self.whole)
        if factor in lookup:  # shifted indices need one contiguous range
            operand = lookup.pop(factor)
            lookup[names[0]] = operand
            whole = whole | set(names[1:])
        reductions = dict(self.reductions)
        if factor in reductions:
            reductions.update(dict.fromkeys(names, reductions[factor]))
        return dataclasses.replace(
            self,
            sizes=new_sizes,
            inputs=tuple(map(dims, self.inputs)),
            outputs=tuple(map(dims, self.outputs)),
            whole=whole,
            expand=names_of(self.expand),
            lookup=lookup,
            reductions=reductions,
            adjust=None if self.adjust is None else _merged(self.adjust, factor, names),
            nonempty=names_of(self.nonempty),
        )

    def operand_layout(self, i: int, choice: Mapping[str, str], mesh: Mesh) -> Layout:
        """The layout that operand `i` must have under `choice`."""
        cut: dict[str, list[str]] = {}
        partial: list[tuple[str, str]] = []
        varying: list[str] = []
        here = self.factors_of(self.inputs[i])
        for axis in mesh.cut_order:
            option = choice.get(axis, "R")
            if option == "R":
                continue
            if option[0] == "P" and i in self.linear[int(option[1:])]:
                partial.append((axis, "sum"))
            elif option not in ("V",) and option[0] != "P" and option.split("+")[0] in here:
                cut.setdefault(option, []).append(axis)
            else:
                varying.append(axis)
        return self._layout(self.inputs[i], cut, partial, varying)

    def result_layout(self, i: int, choice: Mapping[str, str], mesh: Mesh) -> Layout:
        """The layout that result `i` has under `choice`."""
        cut: dict[str, list[str]] = {}
        partial: list[tuple[str, str]] = []
        varying: list[str] = []
        here = self.factors_of(self.outputs[i])
        for axis in mesh.cut_order:
            option = choice.get(axis, "R")
            first = option.split("+")[0]
            if option == "R":
                continue
            if option == "V":
                varying.append(axis)
            elif option[0] == "P":
                partial.append((axis, "sum"))
            elif first in here:
                cut.setdefault(option, []).append(axis)
            elif first not in self.expand:
                partial.append((axis, self.reductions.get(first, "sum")))
        return self._layout(self.outputs[i], cut, partial, varying)

    def _layout(
        self,
        dims: Dims,
        cut: Mapping[str, list[str]],
        partial: list[tuple[str, str]],
        varying: list[str],
    ) -> Layout:
        merged = {o.split("+")[0]: (o.split("+"), axes) for o, axes in cut.items()}
        out = []
        for dim in dims:
            atoms: list[Atom] = []
            i = 0
            while i < len(dim):
                if dim[i] in merged:
                    parts, axes = merged[dim[i]]
                    size = math.prod(self.sizes[p] for p in parts)
                    atoms.append(Atom(size, tuple(axes)))
                    i += len(parts)
                else:
                    atoms.append(Atom(self.sizes[dim[i]]))
                    i += 1
            out.append(tuple(atoms))
        return Layout(tuple(out), tuple(partial), tuple(varying))


def _merged(adjust: Adjust, factor: str, names: Sequence[str]) -> Adjust:
    """`adjust` for a spec in which `factor` was split into `names`."""

    def merged(args: tuple[Any, ...], kwargs: dict[str, Any], local: Local) -> Any:
        size = math.prod(local.sizes[n] for n in names)
        return adjust(args, kwargs, Local(local.outputs, {**local.sizes, factor: size}))

    return merged


class Factors:
    """Hands out fresh factor names while a rule is written.

    A factor of size 1 cannot be cut and is left out.
    """

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}

    def new(self, size: int, name: str = "f") -> tuple[str, ...]:
        """A fresh factor as a dim: one name, or none for size 1."""
        if size == 1:
            return ()
        label, n = name, len(self.sizes)
        while label in self.sizes:
            label, n = f"{name}{n}", n + 1
        self.sizes[label] = int(size)
        return (label,)

    def like(self, shape: Sequence[int], name: str = "f") -> Dims:
        """Fresh factors for a shape."""
        return tuple(self.new(n, f"{name}{i}") for i, n in enumerate(shape))

    def broadcast(self, out: Dims, shape: Sequence[int]) -> Dims:
        """Dims of an operand of `shape` that broadcasts to `out`, aligned at the last dim."""
        tail = out[len(out) - len(shape) :]
        return tuple(() if n == 1 else d for n, d in zip(shape, tail, strict=True))


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an operation: arguments by schema name, shapes of operands and results."""

    node: fx.Node
    arguments: Mapping[str, Any]

    @staticmethod
    def of(node: fx.Node) -> Call:
        """The call that `node` makes, defaults filled in."""
        target = node.target
        arguments: dict[str, Any] = {}
        schema = getattr(target, "_schema", None)
        if schema is not None:
            for i, argument in enumerate(schema.arguments):
                if i < len(node.args) and not argument.kwarg_only:
                    arguments[argument.name] = node.args[i]
                elif argument.name in node.kwargs:
                    arguments[argument.name] = node.kwargs[argument.name]
                else:
                    arguments[argument.name] = argument.default_value
        return Call(node, arguments)

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @property
    def operands(self) -> list[fx.Node]:
        """Tensor operands in argument order."""
        from autopar.program import tensor_inputs

        return tensor_inputs(self.node)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the tensor operands."""
        return [tuple(n.meta["val"].shape) for n in self.operands]

    @property
    def results(self) -> list[tuple[int, ...]]:
        """Shapes of the results (an undefined result counts as a scalar)."""
        val = self.node.meta["val"]
        vals = [val] if isinstance(val, torch.Tensor) else list(val)
        return [tuple(v.shape) if isinstance(v, torch.Tensor) else () for v in vals]

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of the tensor argument `name`, None where it was not given."""
        value = self.arguments.get(name)
        return tuple(value.meta["val"].shape) if isinstance(value, fx.Node) else None

    def needs_grad(self) -> bool:
        """Whether a float operand may carry a gradient."""
        return any(n.meta.get("requires_grad", False) for n in self.operands)
