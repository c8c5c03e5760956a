"""The parameters of an optimizer, grouped by what it can tell them apart by."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autopar.compat import local_like, local_of
from autopar.elementwise import Detail, NotElementwise

__all__ = ["Grouping", "Groups", "Member"]


@dataclass(slots=True)
class Member:
    """A parameter that an optimizer holds.

    Args:
        parameter: as the optimizer holds it, maybe a DTensor.
        placed: whether it is a DTensor.
        local: its piece on this rank.
        grad: the piece of its gradient, during a step.
        state: the optimizer's own dict; None where it has none.
    """

    parameter: Any
    placed: bool
    local: Tensor
    grad: Tensor | None
    state: dict[str, Any] | None

    def take_grad(self) -> Tensor | None:
        """Look the gradient up."""
        self.grad = grad = self.parameter.grad
        if grad is not None and self.placed and hasattr(grad, "full_tensor"):
            self.grad = local_like(grad, self.parameter)
        return self.grad


Groups = list[list[list[Member]]]
"""Of each parameter group, the lists of members that are alike."""


@dataclass(slots=True)
class Grouping:
    """Groups members, and knows from step to step whether that changed: most often not.

    Args:
        detail: what members are told apart by, beside dtype and state.
        changed: whether the latest grouping differs from the one before.
    """

    detail: Detail = Detail.KIND
    changed: bool = True
    groups: Groups = field(default_factory=list)
    _params: list[list[Any]] = field(default_factory=list)
    _objects: list[Any] = field(default_factory=list)
    _facts: list[Any] = field(default_factory=list)
    _counts: list[list[Tensor]] = field(default_factory=list)

    def members(self) -> Iterator[Member]:
        """All members."""
        return (m for group in self.groups for alike in group for m in alike)

    def update(self, optimizer: Any) -> Groups:
        """The groups at this step.

        Raises:
            NotElementwise: the state tells that elements are mixed.
        """
        self.changed = not self._unchanged(optimizer)
        if self.changed:
            self._params = [list(group["params"]) for group in optimizer.param_groups]
            self.groups = [
                _alike(_members(group["params"], optimizer.state), self.detail)
                for group in optimizer.param_groups
            ]
        return self.groups

    def release(self, optimizer: Any) -> None:
        """End a step: let gradients go, and remember what the next one may find unchanged."""
        members = list(self.members())
        if self.changed:
            self._facts = _facts(members)
        for m in members:
            m.grad = None
            if m.state is None:
                m.state = optimizer.state.get(m.parameter)
        self._objects = _objects(members)
        self._counts = [
            tensors for group in self.groups for alike in group for tensors in _counts(alike)
        ]

    def _unchanged(self, optimizer: Any) -> bool:
        params = [group["params"] for group in optimizer.param_groups]
        if len(params) != len(self._params) or not all(map(_same, params, self._params)):
            return False
        members = list(self.members())
        for m in members:
            m.take_grad()
            m.state = optimizer.state.get(m.parameter)
        objects = _objects(members)
        return (
            _same(objects, self._objects)
            and _facts(members) == self._facts
            and all(len(set(torch.stack(t).tolist())) == 1 for t in self._counts)
        )


def _same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))


def _facts(members: Iterable[Member]) -> list[Any]:
    """What may change of a parameter that stays."""
    return [
        (
            id(local_of(m.parameter)) if m.placed else m.parameter.data_ptr(),
            None if m.grad is None else (m.grad.dtype, m.grad.layout),
            m.parameter.requires_grad,
        )
        for m in members
    ]


def _objects(members: Iterable[Member]) -> list[Any]:
    return [v for m in members for v in ((m.state or {}).values())]


def _counts(alike: Sequence[Member]) -> Iterator[list[Tensor]]:
    """State without dims, name by name."""
    for name, value in (alike[0].state or {}).items():
        if isinstance(value, Tensor) and not value.dim() and alike[0].local.dim():
            yield [(m.state or {})[name] for m in alike]


def _members(params: Iterable[Any], state: Any) -> Iterator[Member]:
    for p in params:
        placed = hasattr(p, "full_tensor")
        m = Member(p, placed, local_of(p) if placed else p.detach(), None, state.get(p))
        m.take_grad()
        yield m


def _alike(members: Iterable[Member], detail: Detail) -> list[list[Member]]:
    found: dict[Any, list[Member]] = {}
    if detail is Detail.EACH:
        return [[m] for m in members]
    for m in members:
        found.setdefault(_key(m, detail), []).append(m)
    return list(found.values())


def _key(member: Member, detail: Detail) -> tuple[Any, ...]:
    """What an elementwise optimizer can tell parameters apart by."""
    p, grad = member.parameter, member.grad
    if grad is not None and grad.layout is not torch.strided:
        raise NotElementwise("a gradient is sparse")
    key: list[Any] = [p.dtype, p.device, None if grad is None else grad.dtype, p.requires_grad]
    key.append(p.shape if detail or not p.dim() else None)
    for name, value in (member.state or {}).items():
        if not isinstance(value, Tensor):
            key += [name, type(value), value]
        elif not value.dim():
            key += [name, value.dtype, value.item()]
        elif value.shape == p.shape:
            key += [name, value.dtype, "elements"]
        else:
            raise NotElementwise(f"its state {name!r} has a shape of its own")
    try:
        hash(tuple(key))
    except TypeError as error:
        raise NotElementwise(f"its state holds what cannot be compared ({error})") from error
    return tuple(key)
