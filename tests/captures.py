"""Captured graphs, kept: a model of `models.make` is the same each time, and so is its graph.

Capturing comes before all that a mesh, a plan or ZeRO decides, and costs a third of a compilation.
`keep()` lets compilations of this process take the graph of an equal model and call from an
earlier one. Passes do not change their input, so a kept graph is as good as a new one.
`keep_compiled()` does the same with whole programs, for the ranks of the pool: what they show is
training, and each of them would compile anew what it compiled for the test before.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["keep", "keep_compiled", "mark"]

MANY = 100
"""Graphs kept, those used last."""


def mark(model: nn.Module, made: Any) -> None:
    """Note what a model was made of; with `_state` it decides all that its forward pass does."""
    model.made = made


def keep() -> None:
    """Let this process keep the graphs of marked models."""
    import autopar.api as api

    capture, kept = api.capture, _Kept()

    @functools.wraps(capture)
    def found(model: nn.Module, arguments: Any, mesh: Any, **options: Any) -> Any:
        if not _known(model) or options.get("loss") is not None:
            return capture(model, arguments, mesh, **options)
        key = (*_call(model, arguments), options.get("promotes"))
        make = functools.partial(capture, model, arguments, mesh, **options)
        return kept.get(key, make).replace(mesh=mesh)

    api.capture = found  # type: ignore[assignment]


def keep_compiled() -> None:
    """Let this process keep the programs of marked models with options that are plain values."""
    import autopar.api as api

    compile_step, kept = api._compile, _Kept()

    @functools.wraps(compile_step)
    def found(
        bones: nn.Module, arguments: Any, mesh: Any, options: Any, grad: bool,
        held: Any = None, planned: bool = False,
    ) -> Any:  # fmt: skip
        make = functools.partial(compile_step, bones, arguments, mesh, options, grad, held, planned)
        if not _known(bones) or options.loss is not None or options.strategy is not None:
            return make()
        rest = (mesh, repr(options), grad, repr(sorted((held or {}).items())), planned)
        # more gradients may be asked of a program later, which binds other phases to it
        return dataclasses.replace(kept.get((*_call(bones, arguments), *rest), make))

    api._compile = found


class _Kept:
    """What was made last, by key."""

    def __init__(self) -> None:
        self.table: OrderedDict[Any, Any] = OrderedDict()

    def get(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self.table:
            self.table[key] = make()
        self.table.move_to_end(key)
        while len(self.table) > MANY:
            self.table.popitem(last=False)
        return self.table[key]


def _known(model: nn.Module) -> bool:
    """Whether a model is marked, and its modules run what their classes tell and nothing more."""
    return hasattr(model, "made") and not any(
        "forward" in vars(m) or any(v for k, v in vars(m).items() if k.endswith("_hooks"))
        for m in model.modules()
    )


def _call(model: Any, arguments: Any) -> tuple[Any, ...]:
    """What decides the graph of a call."""
    looks = tuple(map(_looks, arguments.tensors))
    call = (arguments.names, looks, repr(arguments.leaves), repr(arguments.spec))
    settings = (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))
    return model.made, _state(model), call, settings, torch.get_default_dtype()


def _looks(value: Tensor) -> Any:
    return (value.shape, value.stride(), value.dtype, value.device, value.requires_grad)


def _state(model: nn.Module) -> Any:
    """What a test may have changed: classes, flags, attributes, ties, dtypes, what trains."""
    number: dict[int, int] = {}
    found: list[Any] = [repr(getattr(model, "config", None))]
    for name, module in model.named_modules():
        own = vars(module)
        plain = {k: v for k, v in own.items() if isinstance(v, (bool, int, float, str, tuple))}
        found.append((name, type(module), repr(plain), tuple(own)))
        for group in (module._parameters, module._buffers):
            for each, tensor in group.items():
                if isinstance(tensor, Tensor):
                    tie = number.setdefault(id(tensor), len(number))
                    found.append((each, tie, type(tensor).__name__, _looks(tensor)))
    return tuple(found)
