"""One step of an optimizer on stand-ins: one for all parameters that it treats alike."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autopar.elementwise import (
    Arg,
    Asks,
    Call,
    Detail,
    NotElementwise,
    Recorder,
    Section,
    Watch,
)
from autopar.grouping import Grouping, Member

__all__ = ["Kind", "own_step", "record"]

aten = torch.ops.aten

_IMPLEMENTATIONS = ("foreach", "fused", "capturable")
"""Options that choose how a step is computed, not what; the generated code decides it here."""


@dataclass(slots=True)
class Kind:
    """Parameters that an optimizer treats alike: same group, dtype, state and step count.

    Args:
        group: index of the parameter group.
        section: what was recorded on the stand-in.
        after: the state after the step: index of a value, a tensor of no dims, or an object.
        new: states that this step makes, with their dtypes.
        drops: whether the step removes the gradient.
        touched: whether the step made an entry of state, be it empty.
    """

    group: int
    members: list[Member]
    standin: nn.Parameter
    state: dict[str, Any]
    section: Section
    after: dict[str, Any] = field(default_factory=dict)
    new: dict[str, torch.dtype] = field(default_factory=dict)
    drops: bool = False
    touched: bool = False


@dataclass(slots=True)
class _Scalar:
    """A parameter of no dims: it is whole on every rank, and its step is computed on a copy."""

    group: int
    member: Member
    copy: nn.Parameter


def own_step(cls: Any) -> Callable[[Any], Any]:
    """The step of an optimizer class without torch's wrapper, which runs the hooks."""
    step = cls.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


def record(
    optimizer: Any, step: Callable[[Any], Any], grouping: Grouping, dtypes: dict[Any, torch.dtype]
) -> tuple[list[Kind], Callable[[], None]]:
    """Run one step on stand-ins, which changes the optimizer's own attributes and nothing else.

    Where the grouping is new, the first and the last of the members that should be alike have
    stand-ins of their own, and are compared.

    Args:
        step: `own_step` of the optimizer's class.
        grouping: its members.
        dtypes: of results, kept from step to step.

    Returns:
        The kinds, and what to call to step the parameters of no dims.

    Raises:
        NotElementwise: the optimizer is as before.
        Asks: it needs another grouping; it is as before.
    """
    first = next(grouping.members(), None)
    recorder = Recorder(torch.device("cpu") if first is None else first.local.device, dtypes)
    kinds, pairs, scalars = _standins(recorder, grouping)
    each = grouping.detail is Detail.EACH
    watch = Watch(recorder.device, stop=grouping.detail is Detail.KIND)
    with _swapped(optimizer, kinds, scalars, each) as state:
        try:
            with recorder, watch:
                step(optimizer)
            for kind in kinds:
                kind.touched = kind.standin in state
                _conclude(recorder, kind, state[kind.standin])
        except (NotElementwise, Asks):
            raise
        except Exception as error:
            if not watch.found:
                text = f"it cannot run without values ({type(error).__name__}: {error})"
                raise NotElementwise(text) from error
        if watch.found:  # the optimizer may have caught the error
            raise Asks(Detail.SHAPE)
        for one, two in pairs:
            if not _same(one, two):
                raise Asks(Detail.EACH)
            one.members += two.members
    seconds = [id(two) for _, two in pairs]
    kinds = [kind for kind in kinds if id(kind) not in seconds]
    return kinds, lambda: _commit(optimizer, scalars, state)


def _standins(
    recorder: Recorder, grouping: Grouping
) -> tuple[list[Kind], list[tuple[Kind, Kind]], list[_Scalar]]:
    """Stand-ins, pairs of them to be compared, and copies of parameters without dims."""
    kinds: list[Kind] = []
    pairs, scalars = [], []
    for g, lists in enumerate(grouping.groups):
        for alike in lists:
            if not alike[0].local.dim():
                scalars += [_Scalar(g, m, _copy(m)) for m in alike]
            elif grouping.changed and len(alike) > 1:
                pairs.append((_kind(recorder, g, alike[:-1]), _kind(recorder, g, alike[-1:])))
                kinds += pairs[-1]
            else:
                kinds.append(_kind(recorder, g, list(alike)))
    return kinds, pairs, scalars


def _same(one: Kind, two: Kind) -> bool:
    """Whether the optimizer did the same to both."""

    def facts(kind: Kind) -> list[Any]:
        scalars = [*kind.section.tensors, *kind.after.values()]
        plain = [x.tolist() if isinstance(x, Tensor) else x for x in scalars]
        names = [*kind.after, *kind.new.items()]
        return [kind.section.key(), kind.section.numbers, kind.drops, kind.touched, names, plain]

    return facts(one) == facts(two)


class _Uncounted(list[Any]):
    """Stand-ins for more parameters than there are, so that their number tells nothing."""

    def __len__(self) -> int:
        raise Asks(Detail.EACH)

    def __getitem__(self, index: Any) -> Any:
        raise Asks(Detail.EACH)


def _kind(recorder: Recorder, group: int, members: list[Member]) -> Kind:
    """A stand-in for `members`, with its gradient and state."""
    first = members[0]
    shape, dtype = first.parameter.shape, first.parameter.dtype

    def blank(like: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=like, device="meta")

    standin = nn.Parameter(blank(dtype), requires_grad=first.parameter.requires_grad)
    section = Section(shape)
    section.inputs["param"] = recorder.add(section, standin)
    if first.grad is not None:
        standin.grad = blank(first.grad.dtype)
        section.inputs["grad"] = recorder.add(section, standin.grad)
    state: dict[str, Any] = {}
    for name, value in (first.state or {}).items():
        if isinstance(value, Tensor) and value.dim():
            state[name] = blank(value.dtype)
            section.inputs[f"state.{name}"] = recorder.add(section, state[name])
        else:
            state[name] = value.clone() if isinstance(value, Tensor) else value
    return Kind(group, members, standin, state, section)


def _copy(member: Member) -> nn.Parameter:
    copy = nn.Parameter(member.local.clone(), requires_grad=member.parameter.requires_grad)
    copy.grad = None if member.grad is None else member.grad.clone()
    return copy


def _commit(optimizer: Any, scalars: Sequence[_Scalar], state: dict[Any, Any]) -> None:
    """Take over the results of parameters without dims."""
    for scalar in scalars:
        member = scalar.member
        member.local.copy_(scalar.copy.detach())
        if scalar.copy in state:
            optimizer.state[member.parameter] = state[scalar.copy]
        if member.grad is not None and scalar.copy.grad is not None:
            member.grad.copy_(scalar.copy.grad)


@contextmanager
def _swapped(
    optimizer: Any, kinds: Sequence[Kind], scalars: Sequence[_Scalar], each: bool
) -> Iterator[dict[Any, Any]]:
    """The optimizer with stand-ins in its groups; an error undoes what it did to itself."""
    before = {k: _shallow(v) for k, v in optimizer.__dict__.items()}
    groups, real = optimizer.param_groups, optimizer.state
    saved = [dict(g) for g in groups]
    state: dict[Any, Any] = defaultdict(dict)
    state.update((k, v) for k, v in real.items() if not isinstance(k, Tensor))
    for kind in kinds:
        if kind.members[0].parameter in real:
            state[kind.standin] = dict(kind.state)
    for s in scalars:
        if s.member.parameter not in real:
            continue
        mine = real[s.member.parameter].items()
        state[s.copy] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in mine}
    for g, group in enumerate(groups):
        place = {id(p): i for i, p in enumerate(group["params"])}
        stand = [(place[id(k.members[0].parameter)], k.standin) for k in kinds if k.group == g]
        stand += [(place[id(s.member.parameter)], s.copy) for s in scalars if s.group == g]
        ordered = [p for _, p in sorted(stand, key=operator.itemgetter(0))]
        group["params"] = ordered if each else _Uncounted(ordered)
        group.update((name, False) for name in _IMPLEMENTATIONS if name in group)
    optimizer.state = state
    try:
        yield state
    except BaseException:
        optimizer.__dict__.clear()
        optimizer.__dict__.update(before)
        for group, old in zip(groups, saved, strict=True):
            group.clear()
            group.update(old)
        optimizer.param_groups = groups
        raise
    finally:
        optimizer.state = real
        for group, old in zip(groups, saved, strict=True):
            group.update((k, old[k]) for k in ("params", *_IMPLEMENTATIONS) if k in old)
    real.update((k, v) for k, v in state.items() if not isinstance(k, Tensor))


def _shallow(value: Any) -> Any:
    """A value that a step may change in place, copied."""
    return type(value)(value) if type(value) in (dict, list, set) else value


def _conclude(recorder: Recorder, kind: Kind, state: dict[str, Any]) -> None:
    """Write results that the step bound to names back into the tensors that hold them."""
    section = kind.section
    copies: list[tuple[int, int]] = []  # (value, where it goes)
    grad = kind.standin.grad
    kind.drops = grad is None and "grad" in section.inputs
    for name, held in (("param", kind.standin), ("grad", grad)):
        if held is not None:
            _bind(recorder, kind, name, held, copies)
    for name, value in state.items():
        if isinstance(value, Tensor) and value.is_meta:
            _bind(recorder, kind, f"state.{name}", value, copies)
            kind.after[name] = Arg("value", section.inputs[f"state.{name}"])
        elif isinstance(value, Tensor) and value.dim():
            raise NotElementwise(f"its state {name!r} has a shape of its own")
        else:
            kind.after[name] = value
    taken = set(section.inputs.values())
    safe: dict[int, int] = {}
    for source, _ in copies:
        if source in taken and source not in safe:  # it may be written before it is copied
            safe[source] = recorder.add(section, torch.empty_like(section.values[source]))
            section.calls.append(
                Call(aten.clone.default, (Arg("value", source),), (), safe[source])
            )
    for source, target in copies:
        args = (Arg("value", target), Arg("value", safe.get(source, source)))
        section.calls.append(Call(aten.copy_.default, args, (), target))


def _bind(
    recorder: Recorder, kind: Kind, name: str, held: Tensor, copies: list[tuple[int, int]]
) -> None:
    """See that the input `name` ends with the value `held`."""
    section = kind.section
    owner, index = recorder.find(held)
    if owner is not section or held.shape != section.shape:
        raise NotElementwise(f"its {name} takes the values of another tensor")
    if name == "grad" and name not in section.inputs:
        raise NotElementwise("it makes a gradient where there is none")
    if name not in section.inputs:
        dtype = section.values[index].dtype
        kind.new[name.removeprefix("state.")] = dtype
        section.values.append(torch.empty(section.shape, dtype=dtype, device="meta"))
        section.inputs[name] = len(section.values) - 1
    if section.inputs[name] != index:
        copies.append((index, section.inputs[name]))
