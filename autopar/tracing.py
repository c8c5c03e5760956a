"""Optimizers whose step is a generated program over the local pieces of the parameters."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from autopar.compat import disclaim_scaling, foreach, local_like, wrap_like
from autopar.elementwise import Arg, Asks, NotElementwise
from autopar.errors import InputError
from autopar.grouping import Grouping, Member
from autopar.moves import Moves
from autopar.optimizers import Generated, cut_like, on_whole_tensors, refuse_random
from autopar.standins import Kind, own_step, record
from autopar.update import Update, as_graph, as_source, load_update

__all__ = ["Stepper", "generated", "stepper_of"]

_CHUNK = {"cpu": 2**18, "cuda": 2**26}
"""Elements that an update works on at a time: what caches hold on a CPU thread; on a GPU enough to
keep it busy. Temporaries are as large, not as large as all parameters."""


def generated(cls: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """The subclass of an optimizer class whose step is a generated program.

    Raises:
        InputError: a step of the class needs a closure that it calls repeatedly.
    """
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise InputError(f"{cls!r} is no optimizer class.", expected="as torch.optim.AdamW")
    closure = inspect.signature(cls.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise InputError(
            f"{cls.__name__} evaluates the model within its step.",
            expected="an optimizer that steps from gradients alone",
            hint=f"{cls.__name__}(model.parameters()) steps the DTensors",
        )

    anything: Any = cls
    found: type[torch.optim.Optimizer] = _subclass(anything)
    return found


@functools.cache
def _subclass(cls: Any) -> Any:
    @functools.wraps(cls.__init__)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, *args, **kwargs)
        disclaim_scaling(self)

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters from their gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            stepper_of(self).step()
        return loss

    def __reduce__(self: Any) -> Any:
        return _remade, (cls,), self.__getstate__()

    own = {"__init__": __init__, "__reduce__": __reduce__, "step": step}
    return type(cls.__name__, (Generated, cls), {**own, "__module__": cls.__module__})


def _remade(cls: Any) -> Any:
    """An instance without attributes, for copies and pickles."""
    made = _subclass(cls)
    return made.__new__(made)


def stepper_of(optimizer: Any) -> Stepper:
    """The stepper of an optimizer; a copy of the optimizer gets its own."""
    found: Stepper | None = optimizer.__dict__.get("_stepper")
    if found is None or found.optimizer is not optimizer:
        found = Stepper(optimizer, own_step(type(optimizer).__mro__[2]))
        object.__setattr__(optimizer, "_stepper", found)
    return found


@dataclass(slots=True)
class _Lists:
    """The pieces of the members of a kind, in chunks.

    Args:
        cuts: per member, whether it is taken flat and in parts.
        chunks: per chunk, one list for each input, and the (member, part) of its elements.
    """

    cuts: list[bool]
    chunks: list[tuple[list[list[Tensor]], list[tuple[int, int]]]]


@dataclass(slots=True)
class Stepper:
    """Runs the steps of one optimizer.

    Args:
        optimizer: an instance of a `generated` class.
        original: the step of the class it was made from.
        updates: programs by what they depend on, with their compiled functions.
        reason: why whole tensors are stepped instead, once that is known.
        grouping: the parameters, as finely as the optimizer tells them apart.
        latest: kinds of the latest step and their programs.
        dtypes: of results, see `record`.
        lists: pieces by kind, kept while the tensors stay the same.
    """

    optimizer: Any
    original: Callable[[Any], Any]
    updates: dict[Any, tuple[Update, Callable[..., None]]] = field(default_factory=dict)
    reason: str = ""
    grouping: Grouping = field(default_factory=Grouping)
    latest: list[tuple[Kind, Update]] = field(default_factory=list)
    dtypes: dict[Any, torch.dtype] = field(default_factory=dict)
    lists: dict[tuple[Any, ...], _Lists] = field(default_factory=dict)

    def step(self) -> None:
        """One step on the pieces, or on whole tensors where elements are mixed.

        Raises:
            InputError: the optimizer draws random numbers, or is differentiable.
        """
        if any(g.get("differentiable") for g in self.optimizer.param_groups):
            raise InputError("differentiable=True has no generated step.", hint="leave it out")
        reason = self.reason
        if not reason:
            try:
                kinds, rest = self.recorded()
            except NotElementwise as error:
                refuse_random(self.optimizer, error)
                self.latest, self.grouping, reason = [], Grouping(), error.reason
            else:
                self.run_all(kinds)
                rest()
                self.grouping.release(self.optimizer)
                return
        with on_whole_tensors(self.optimizer, reason):
            self.original(self.optimizer)
        self.reason = reason  # now that it is not a mistake of the caller's, which raises as always

    def recorded(self) -> tuple[list[Kind], Callable[[], None]]:
        """The optimizer's own Python, run on stand-ins."""
        while True:
            self.grouping.update(self.optimizer)
            try:
                return record(self.optimizer, self.original, self.grouping, self.dtypes)
            except Asks as asks:
                assert asks.detail > self.grouping.detail, "each question is answered once"
                self.grouping = Grouping(asks.detail)

    # --- running a program ---------------------------------------------------------------------

    def run_all(self, kinds: list[Kind]) -> None:
        """Update all parameters."""
        known, self.lists = self.lists, {}
        if self.grouping.changed:
            known.clear()
        self.latest = [(kind, self.run(kind, known)) for kind in kinds]

    def run(self, kind: Kind, known: dict[tuple[Any, ...], _Lists]) -> Update:
        """Update the members of a kind and their state.

        Args:
            known: lists of the step before, whose tensors are still the same.
        """
        key = kind.section.key()
        found = self.updates.get(key)
        if found is None:
            update = Update.of(kind.section)
            source = as_source(type(self.optimizer).__name__, [("update", "One kind.", update)])
            found = self.updates[key] = (update, load_update(source)["update"])
        update, function = found
        self.make_states(kind)
        section = kind.section
        if section.calls:
            lists = self.pieces(kind, (kind.group, id(kind.members[0]), key), known)
            for chunk in self.with_gradients(kind, lists, update):
                function(section.numbers, section.tensors, *chunk)
        self.set_scalars(kind)
        return update

    def make_states(self, kind: Kind) -> None:
        """Memory for the states that a step makes; the program writes all of it."""
        if not kind.touched or not (kind.new or kind.members[0].state is None):
            return
        for m in kind.members:
            m.state = self.optimizer.state[m.parameter]
            for name, dtype in kind.new.items():
                made = torch.empty_like(m.local, dtype=dtype)
                m.state[name] = wrap_like(made, m.parameter) if m.placed else made

    def set_scalars(self, kind: Kind) -> None:
        """Give every member the step count and other state without dims."""
        states = [m.state for m in kind.members if m.state is not None]
        for name, value in kind.after.items():
            if isinstance(value, Arg):
                continue
            if isinstance(value, Tensor) and isinstance(kind.state.get(name), Tensor):
                foreach.copy_([s[name] for s in states], [value] * len(states))
                continue
            for s in states:
                s[name] = value.clone() if isinstance(value, Tensor) else value
        if kind.drops:
            for m in kind.members:
                m.parameter.grad = None
        if list(kind.after) != list(kind.state):  # in the order of the optimizer itself
            for s in states:
                ordered = {name: s[name] for name in kind.after}
                s.clear()
                s.update(ordered)

    def pieces(self, kind: Kind, place: Any, known: dict[tuple[Any, ...], _Lists]) -> _Lists:
        """The pieces of a kind in chunks."""
        if place not in known:
            inputs = list(kind.section.inputs)
            names = [n.removeprefix("state.") for n in inputs if n.startswith("state.")]
            rows = [[m.local, *(_local_state(m, name) for name in names)] for m in kind.members]
            known[place] = _chunked(rows, inputs)
        self.lists[place] = known[place]
        return known[place]

    def with_gradients(self, kind: Kind, lists: _Lists, update: Update) -> Any:
        """The chunks, with this step's gradients in them."""
        at = list(kind.section.inputs).index("grad") if "grad" in kind.section.inputs else -1
        if at < 0:
            yield from (chunk for chunk, _ in lists.chunks)
            return
        size = _chunk_size(kind.members[0].local)
        parts: list[Sequence[Tensor]] = []
        late: list[tuple[Tensor, Tensor]] = []
        for m, cut in zip(kind.members, lists.cuts, strict=True):
            assert m.grad is not None, "members of a kind have gradients or none has"
            flat = m.grad.reshape(-1) if cut else m.grad
            if cut and update.writes_grad and not m.grad.is_contiguous():
                late.append((m.grad, flat))
            parts.append(torch.split(flat, size) if cut else (flat,))
        for chunk, places in lists.chunks:
            chunk[at] = [parts[i][k] for i, k in places]
            yield chunk
            chunk[at] = []
        for grad, flat in late:
            grad.copy_(flat.view(grad.shape))

    # --- looking at it -------------------------------------------------------------------------

    def graph(self, moves: Mapping[int, Moves]) -> fx.GraphModule:
        """The graph of the latest step, for one parameter of each kind.

        Args:
            moves: what moves around the updates of parameters, by their ids.

        Raises:
            InputError: there was no step, or it worked on whole tensors.
        """
        return as_graph([(f"kind{i}", s.update, s.moves) for i, s in enumerate(self.shown(moves))])

    def code(self, moves: Mapping[int, Moves]) -> str:
        """The generated Python of the latest step; takes and raises as `graph`."""
        names: dict[tuple[int, int], str] = {}
        updates: list[tuple[str, str, Update]] = []
        around: list[tuple[str, str, str, Update, Moves]] = []
        shown = self.shown(moves)
        for s in shown:
            at = (s.kind.group, id(s.update))
            if at not in names:
                n = sum(k.count for k in shown if (k.kind.group, id(k.update)) == at)
                names[at] = f"update_{len(names)}"
                remark = f"Parameter group {at[0]}, {n} of {s.kind.standin.dtype}."
                updates.append((names[at], remark, s.update))
            if s.moves is not None:
                alike = f", and {s.count - 1} alike" if s.count > 1 else ""
                remark = f"{s.moves.name}{alike}."
                around.append((f"step_{len(around)}", remark, names[at], s.update, s.moves))
        return as_source(f"{type(self.optimizer).__name__} step", updates, around)

    def shown(self, moves: Mapping[int, Moves]) -> list[_Shown]:
        """One parameter of each kind that the latest step updated."""
        if self.reason:
            raise InputError(
                f"{type(self.optimizer).__name__} is not elementwise: {self.reason}.",
                expected="an elementwise optimizer; this one runs its own Python on whole tensors",
            )
        found: dict[Any, _Shown] = {}
        for kind, update in self.latest:
            for m in kind.members if kind.section.calls else ():
                own = moves.get(id(m.parameter))
                key = (kind.group, id(update), None if own is None else own.key())
                found.setdefault(key, _Shown(kind, update, own)).count += 1
        if not found:
            raise InputError(
                "The optimizer has not stepped yet.", hint="call it once after loss.backward()"
            )
        return list(found.values())


@dataclass(slots=True)
class _Shown:
    """A parameter that stands for those whose steps are alike, and how many these are."""

    kind: Kind
    update: Update
    moves: Moves | None
    count: int = 0


def _local_state(m: Member, name: str) -> Tensor:
    """The piece of a state tensor; whole ones, as after loading, are cut first."""
    assert m.state is not None, "a state that the program takes exists"
    value: Any = m.state[name]
    if not m.placed:
        return value  # type: ignore[no-any-return]
    if not hasattr(value, "full_tensor"):
        value = m.state[name] = cut_like(value, m.parameter)
    piece = local_like(value, m.parameter)
    if piece is not local_like(value, value):
        m.state[name] = wrap_like(piece, m.parameter)
    return piece


def _chunk_size(like: Tensor) -> int:
    """Elements worked on at a time."""
    size = _CHUNK.get(like.device.type, _CHUNK["cuda"])
    return size * torch.get_num_threads() if like.device.type == "cpu" else size


def _chunked(rows: Sequence[Sequence[Tensor]], inputs: Sequence[str]) -> _Lists:
    """Chunks of the tensors of all members.

    Args:
        rows: per member its tensors, for all inputs but "grad".
    """
    cuts: list[bool] = []
    chunks: list[tuple[list[list[Tensor]], list[tuple[int, int]]]] = []
    left = 0
    size = _chunk_size(rows[0][0])
    where = [i for i, name in enumerate(inputs) if name != "grad"]
    for i, row in enumerate(rows):
        cut = row[0].numel() > size and all(t.is_contiguous() for t in row)
        cuts.append(cut)
        parts = (
            list(zip(*(torch.split(t.view(-1), size) for t in row), strict=True)) if cut else [row]
        )
        for k, part in enumerate(parts):
            if not chunks or part[0].numel() > left:
                chunks.append(([[] for _ in inputs], []))
                left = size
            left -= part[0].numel()
            lists, places = chunks[-1]
            places.append((i, k))
            for at, t in zip(where, part, strict=True):
                lists[at].append(t)
    return _Lists(cuts, chunks)
