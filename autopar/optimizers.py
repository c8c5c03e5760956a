"""Optimizers of torch on the parameters of a parallel module.

Two hooks that torch calls around every optimizer step of the process: one made before the first
call goes over to the DTensors that replaced its parameters, and elementwise ones step the local
pieces, as DTensor dispatch costs more than the arithmetic. Others step whole tensors.
"""

from __future__ import annotations

import inspect
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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
from autopar.elementwise import Asks, Detail, NotElementwise
from autopar.errors import InputError
from autopar.grouping import Grouping
from autopar.standins import own_step, record

__all__ = [
    "Generated",
    "adopt",
    "cut_like",
    "guard",
    "on_whole_tensors",
    "refuse_random",
    "repoint",
]

Cut = Callable[[Tensor], Tensor]
"""Takes this rank's piece of a whole tensor, maybe as a view."""

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


class Generated:
    """Base of optimizers that take the pieces themselves (`autopar.tracing`)."""


class _Replaced(nn.Parameter):
    """A parameter of before, whose gradient is that of the DTensor in its place.

    So `zero_grad` and `clip_grad_norm_` on a list made before the first call act on the real one.
    """

    @property
    def successor(self) -> Tensor:
        """The parameter that took this one's place."""
        found: Tensor = self.__dict__["successor"]
        return found

    @property
    def grad(self) -> Tensor | None:
        """Gradient of the successor."""
        return self.successor.grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.successor.grad = value


class _Adopted:
    """The parameters of all parallel modules of the process, held weakly.

    Args:
        ours: DTensor parameter -> how a whole tensor of its shape is cut.
        pairs: of each optimizer, the pieces that it stepped last.
        inside: optimizers that hold pieces or whole tensors now.
        warned: optimizers whose users know that it steps whole tensors.
        guards: what refuses steps on gradients that are not whole, see `guard`.
    """

    def __init__(self) -> None:
        self.ours: Any = WeakTensorKeyDictionary()
        self.pairs: WeakKeyDictionary[Any, dict[Tensor, _Pair]] = WeakKeyDictionary()
        self.inside: WeakSet[Any] = WeakSet()
        self.warned: WeakSet[Any] = WeakSet()
        self.guards: WeakSet[Any] = WeakSet()
        register_optimizer_step_pre_hook(self.before)
        register_optimizer_step_post_hook(self.after)

    def before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Go over to the new parameters, and to local pieces where that gives the same."""
        self.leave(optimizer)  # a step that raised
        self.repoint(optimizer)
        closure = any(callable(a) for a in (*args, *kwargs.values()))  # it computes gradients
        for guard in () if closure else tuple(self.guards):
            parameters = [p for _, _, p in _slots(optimizer)]
            guard.require_none(f"{type(optimizer).__name__} was to step", parameters)
        if isinstance(optimizer, Generated) or closure:
            return
        if type(optimizer) in _ELEMENTWISE:
            self.enter(optimizer)
        elif any(self.owns(p) for _, _, p in _slots(optimizer)):
            reason = _why_whole(optimizer)
            if reason:
                self.warn(optimizer, reason)
            self.enter(optimizer, whole=bool(reason))

    def owns(self, p: Tensor) -> bool:
        """Whether a parameter is a DTensor of a parallel module."""
        return type(p) is not nn.Parameter and p in self.ours  # asking the table is slow

    def after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Go back to DTensors."""
        self.leave(optimizer)

    def repoint(self, optimizer: Any) -> None:
        """Put new parameters in the place of old ones, with their state."""
        for group, i, p in _slots(optimizer):
            if type(p) is not _Replaced:
                continue
            new = group["params"][i] = p.successor
            if p in optimizer.state:
                optimizer.state[new] = {
                    k: cut_like(v, new) for k, v in optimizer.state.pop(p).items()
                }

    def warn(self, optimizer: Any, reason: str) -> None:
        """Say once what an optimizer that mixes elements costs."""
        cut = [p for _, _, p in _slots(optimizer) if self.owns(p) and _is_cut(p)]
        if optimizer in self.warned or not cut:
            return
        self.warned.add(optimizer)
        size = sum(p.numel() * p.element_size() for p in cut) / 2**20
        name = type(optimizer).__name__
        warnings.warn(
            f"{name} steps whole tensors: {reason}. Each step gathers the {len(cut)} cut "
            f"parameters ({size:.1f} MiB), their gradients and their state on every rank; "
            "the result is that of one device.",
            stacklevel=5,
        )

    def enter(self, optimizer: Any, whole: bool = False) -> None:
        """Put local pieces, or whole tensors, in the place of our DTensors."""
        known = {} if whole else self.pairs.get(optimizer, {})
        pairs = {}
        for group, i, p in _slots(optimizer):
            if not self.owns(p):
                continue
            pair = known.get(p)
            if whole and _is_cut(p):
                pair = _Pair(p, _whole(p.detach()), {}, {}, self.ours[p])
                pair.local.requires_grad_(p.requires_grad)
            elif pair is None or pair.local is not local_of(p):  # new, moved or loaded
                pair = _Pair(p, local_of(p), {}, {}, None)
            pair.local.grad = None if p.grad is None else pair.taken(p.grad)
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
            pair.give_back()
            local.grad = None
            if local in optimizer.state:
                optimizer.state[pair.parameter] = pair.whole_state(optimizer.state.pop(local))
        self.inside.discard(optimizer)


@dataclass(slots=True)
class _Pair:
    """A DTensor parameter and what is stepped in its place, with the optimizer's state of each.

    Args:
        local: its local piece, or all of it where `cut` tells how to take the piece.
        whole, pieces: the state of the DTensor, and what it became for the step.
    """

    parameter: Tensor
    local: Tensor
    whole: dict[str, Any]
    pieces: dict[str, Any]
    cut: Cut | None

    def taken(self, value: Any) -> Any:
        """A gradient or state of the DTensor as one of `local`."""
        if self.cut is None:
            return _local(value)
        return _whole(value) if hasattr(value, "full_tensor") else value

    def give_back(self) -> None:
        """Write a whole parameter and its gradient into the pieces."""
        if self.cut is None:
            return
        with torch.no_grad():
            local_of(self.parameter).copy_(self.cut(self.local.detach()))
            grad: Any = self.parameter.grad
            if grad is not None and self.local.grad is not None:
                _local(grad).copy_(self.cut(self.local.grad))

    def local_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """`state` of the DTensor as the state of the piece."""
        self.whole = dict(state)
        self.pieces = {k: self.taken(v) for k, v in state.items()}
        return dict(self.pieces)

    def whole_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """`state` of the piece as the state of the DTensor; what was not replaced is kept."""
        if self.cut is not None:
            return {k: self.wrapped(v) for k, v in state.items()}
        return {
            k: self.whole[k] if k in self.whole and v is self.pieces[k] else self.wrapped(v)
            for k, v in state.items()
        }

    def wrapped(self, value: Any) -> Any:
        """A piece of state as DTensor; counts and what has a shape of its own stay."""
        if not isinstance(value, Tensor) or value.shape != self.local.shape or value.dim() == 0:
            return value
        if self.cut is not None:
            value = self.cut(value).clone(memory_format=torch.contiguous_format)
        return wrap_like(value, self.parameter)


@contextmanager
def on_whole_tensors(optimizer: Any, reason: str) -> Iterator[None]:
    """Let an optimizer hold whole tensors in the place of cut ones, and cut what it made of them.

    Args:
        reason: why, for the warning.
    """
    if not _adopted:
        yield
        return
    table = _adopted[0]
    table.warn(optimizer, reason)
    table.enter(optimizer, whole=True)
    try:
        yield
    finally:
        table.leave(optimizer)


def refuse_random(optimizer: Any, why: NotElementwise) -> None:
    """Raise for an optimizer that draws random numbers, where ranks would draw different ones."""
    if why.random and any(hasattr(p, "full_tensor") for _, _, p in _slots(optimizer)):
        raise InputError(
            f"{type(optimizer).__name__} cannot step on several ranks: {why.reason}, which "
            "would differ between copies and pieces of a parameter.",
            expected="an optimizer whose steps follow from gradients and state",
        ) from why


def _why_whole(optimizer: Any) -> str:
    """Why an optimizer of the user's must step whole tensors; '' where pieces give the same.

    One step is tried on a twin, without values.
    """
    cls = type(optimizer)
    twin = object.__new__(cls)
    twin.__dict__.update(
        (k, type(v)(v) if type(v) in (dict, list, set) else v)
        for k, v in optimizer.__dict__.items()
    )
    twin.param_groups = [dict(g) for g in optimizer.param_groups]
    twin.state = defaultdict(dict, {k: dict(v) for k, v in optimizer.state.items()})
    parameters = inspect.signature(cls.step).parameters.values()
    if any(p.name != "self" and p.default is p.empty and p.kind < 2 for p in parameters):
        return "its step takes arguments"
    try:
        with torch.no_grad():
            grouping = Grouping()
            grouping.update(twin)
            record(twin, own_step(cls), grouping, {})
    except Asks as asks:
        if asks.detail is Detail.SHAPE:
            return "it asks for the shapes of parameters"
        return "it goes by the place or the number of parameters"
    except NotElementwise as why:
        refuse_random(optimizer, why)
        return why.reason
    return ""


def _is_cut(p: Any) -> bool:
    return any(not x.is_replicate() for x in getattr(p, "placements", ()))


def _whole(value: Any) -> Tensor:
    """All of a DTensor, in memory of its own."""
    out: Tensor = value.full_tensor()
    return out.clone() if out is local_of(value) else out


def _local(value: Any) -> Any:
    return local_of(value) if hasattr(value, "full_tensor") else value


def _slots(optimizer: Any) -> Iterator[tuple[Any, int, Tensor]]:
    for group in optimizer.param_groups:
        for i, p in enumerate(group["params"]):
            yield group, i, p


def cut_like(value: Any, new: Any) -> Any:
    """Optimizer state of a whole parameter as a DTensor cut like `new`; other state as it is."""
    if not isinstance(value, Tensor) or value.shape != new.shape or value.dim() == 0:
        return value
    if hasattr(value, "full_tensor"):  # loaded after the parameter was replaced
        return value
    cut: Cut = _adopted[0].ours[new]
    return wrap_like(cut(value).clone(memory_format=torch.contiguous_format), new)


_adopted: list[_Adopted] = []


def repoint(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer made before the first call hold the new parameters now, with its state."""
    for adopted in _adopted:
        adopted.leave(optimizer)  # a step that raised
        adopted.repoint(optimizer)


def adopt(replaced: Iterable[tuple[Tensor, Tensor, Cut]]) -> None:
    """Let optimizers step the second parameter of each row in place of the first.

    The third member of a row takes this rank's piece of a whole tensor of that shape.

    Old parameters are held weakly: one that no optimizer holds is gone, and its id may belong to
    another tensor.
    """
    table = _table()
    for old, new, cut in replaced:
        if old.grad is not None and not hasattr(old.grad, "full_tensor"):
            old.grad = None  # a gradient of before; DTensor parameters start without
        move_hooks(old, new)
        old.__class__ = _Replaced
        old.__dict__["successor"] = new
        table.ours[new] = cut


def guard(ledger: Any) -> None:
    """Let optimizers ask a ledger's `require_none` before they step; it is held weakly."""
    _table().guards.add(ledger)


def _table() -> _Adopted:
    """The one of the process; torch calls its hooks from now on."""
    if not _adopted:
        _adopted.append(_Adopted())
    return _adopted[0]
