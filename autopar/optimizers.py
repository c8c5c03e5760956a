"""Optimizers of torch on the parameters of a parallel module.

Two hooks that torch calls around every optimizer step of the process: one made before the first
call goes over to the DTensors that replaced its parameters, and elementwise ones step the local
pieces, as DTensor dispatch costs more than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.compat import local_of, move_hooks, wrap_like

__all__ = ["adopt", "repoint"]

_ELEMENTWISE = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
"""Their update of an element depends on that element of parameter, gradient and state alone."""


class _Replaced(nn.Parameter):
    """A parameter of before, whose gradient is that of the DTensor in its place.

    So `zero_grad` and `clip_grad_norm_` on a list made before the first call act on the real one.
    """

    @property
    def grad(self) -> Tensor | None:
        """Gradient of the parameter that took this one's place."""
        found: Tensor | None = self.__dict__["successor"].grad
        return found

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.__dict__["successor"].grad = value


class _Adopted:
    """The parameters of all parallel modules of the process, held weakly.

    Args:
        successors: replaced parameter -> DTensor parameter.
        ours: DTensor parameters.
        pairs: of each optimizer, the pieces that it stepped last.
        inside: optimizers that hold pieces now.
    """

    def __init__(self) -> None:
        self.successors: Any = WeakTensorKeyDictionary()
        self.ours: Any = WeakTensorKeyDictionary()
        self.pairs: WeakKeyDictionary[Any, dict[Tensor, _Pair]] = WeakKeyDictionary()
        self.inside: WeakSet[Any] = WeakSet()
        register_optimizer_step_pre_hook(self.before)
        register_optimizer_step_post_hook(self.after)

    def before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Go over to the new parameters, and to local pieces where that gives the same."""
        self.leave(optimizer)  # a step that raised
        self.repoint(optimizer)
        closure = any(callable(a) for a in (*args, *kwargs.values()))  # it computes gradients
        if type(optimizer) in _ELEMENTWISE and not closure:
            self.enter(optimizer)

    def after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Go back to DTensors."""
        self.leave(optimizer)

    def repoint(self, optimizer: Any) -> None:
        """Put new parameters in the place of old ones, with their state."""
        for group, i, p in _slots(optimizer):
            new = self.successors.get(p)
            if new is None:
                continue
            group["params"][i] = new
            if p in optimizer.state:
                optimizer.state[new] = {
                    k: _cut_like(v, p, new) for k, v in optimizer.state.pop(p).items()
                }

    def enter(self, optimizer: Any) -> None:
        """Put local pieces in the place of our DTensors."""
        known = self.pairs.get(optimizer, {})
        pairs = {}
        for group, i, p in _slots(optimizer):
            if p not in self.ours:
                continue
            pair = known.get(p)
            if pair is None or pair.local is not local_of(p):  # new, moved or loaded
                pair = _Pair(p, local_of(p), {}, {})
            pair.local.grad = None if p.grad is None else _local(p.grad)
            if p in optimizer.state:
                optimizer.state[pair.local] = pair.local_state(optimizer.state.pop(p))
            group["params"][i] = pair.local
            pairs[p] = pair
        if pairs:
            self.pairs[optimizer] = pairs
            self.inside.add(optimizer)

    def leave(self, optimizer: Any) -> None:
        """Undo `enter`."""
        if optimizer not in self.inside:
            return
        pairs = {pair.local: pair for pair in self.pairs[optimizer].values()}
        for group, i, local in _slots(optimizer):
            pair = pairs.get(local)
            if pair is None:
                continue
            group["params"][i] = pair.parameter
            local.grad = None
            if local in optimizer.state:
                optimizer.state[pair.parameter] = pair.whole_state(optimizer.state.pop(local))
        self.inside.discard(optimizer)


@dataclass(slots=True)
class _Pair:
    """A DTensor parameter and its local piece, with the optimizer's state of each."""

    parameter: Tensor
    local: Tensor
    whole: dict[str, Any]
    pieces: dict[str, Any]

    def local_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """`state` of the DTensor as the state of the piece."""
        self.whole = dict(state)
        self.pieces = {k: _local(v) for k, v in state.items()}
        return dict(self.pieces)

    def whole_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """`state` of the piece as the state of the DTensor; what was not replaced is kept."""
        return {
            k: self.whole[k] if k in self.whole and v is self.pieces[k] else self.wrapped(v)
            for k, v in state.items()
        }

    def wrapped(self, value: Any) -> Any:
        """A piece of state as DTensor; counts and other scalars stay."""
        if not isinstance(value, Tensor) or value.shape != self.local.shape or value.dim() == 0:
            return value
        return wrap_like(value, self.parameter)


def _local(value: Any) -> Any:
    return local_of(value) if hasattr(value, "full_tensor") else value


def _slots(optimizer: Any) -> Iterator[tuple[Any, int, Tensor]]:
    for group in optimizer.param_groups:
        for i, p in enumerate(group["params"]):
            yield group, i, p


def _cut_like(value: Any, old: Tensor, new: Any) -> Any:
    """Optimizer state of a whole parameter, cut like its DTensor."""
    if not isinstance(value, Tensor) or value.shape != old.shape or value.dim() == 0:
        return value
    if hasattr(value, "full_tensor"):  # loaded after the parameter was replaced
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, new.device_mesh, new.placements)


_adopted: list[_Adopted] = []


def repoint(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer made before the first call hold the new parameters now, with its state."""
    for adopted in _adopted:
        adopted.leave(optimizer)  # a step that raised
        adopted.repoint(optimizer)


def adopt(replaced: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Let optimizers step the second parameter of each pair in place of the first.

    Old parameters are held weakly: one that no optimizer holds is gone, and its id may belong to
    another tensor.
    """
    if not _adopted:
        _adopted.append(_Adopted())
    for old, new in replaced:
        if old.grad is not None and not hasattr(old.grad, "full_tensor"):
            old.grad = None  # a gradient of before; DTensor parameters start without
        move_hooks(old, new)
        old.__class__ = _Replaced
        old.__dict__["successor"] = new
        _adopted[0].successors[old] = new
        _adopted[0].ours[new] = True
