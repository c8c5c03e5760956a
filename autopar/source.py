"""What decides the graph of a model beside shapes: its modules, their code and settings."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["Source"]

_SETTINGS = (bool, int, float, str)


class Source:
    """Notices when a model is no longer what a program was compiled from.

    A replaced sub-module, another `forward` (of a class or of one module) and a changed setting of
    one of torch's own layers (the p of a dropout) count; other attributes are constants of the
    capture, as the numbers in the code are.

    Args:
        model: the live model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._numbers: dict[Any, int] = {}
        self.looks = 0  # a module may be another one of the same kind after each
        self._look()

    def version(self) -> int:
        """A number for the present state of the model, the same when it comes back to it."""
        if self._changed():
            self._look()
        return self._number

    def training(self) -> tuple[bool, ...]:
        """The training flag of every module."""
        return tuple([m.training for m, *_ in self._modules])

    def _look(self) -> None:
        """Take down everything; `_changed` then compares with few lookups per module."""
        self.looks += 1
        self._modules: list[tuple[nn.Module, Any, Any, Any, tuple[Any, ...]]] = []
        self._values: list[tuple[dict[str, Any], str, Any]] = []
        found: list[Any] = []
        for name, module in self.model.named_modules():
            kind, own = type(module), module.__dict__
            children = tuple(own["_modules"].values())
            self._modules.append((module, kind, kind.forward, own.get("forward"), children))
            found += (name, kind, kind.forward, own.get("forward"))
            if kind.__module__.startswith("torch.nn."):
                for key, value in own.items():
                    if type(value) in _SETTINGS and key != "training":
                        self._values.append((own, key, value))
                        found.append((key, value))
        self._number = self._numbers.setdefault(tuple(found), len(self._numbers))

    def _changed(self) -> bool:
        for module, kind, function, mine, children in self._modules:
            own = module.__dict__
            if (
                type(module) is not kind
                or kind.forward is not function
                or own.get("forward") is not mine
                or tuple(own["_modules"].values()) != children
            ):
                return True
        return any(own.get(key) != value for own, key, value in self._values)
