"""A run of repeated blocks written as one `for` loop."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from autopar.expression import AHEAD, Ref, affine, call, numbered
from autopar.program import info
from autopar.roll import Carried, Each, Fixed, Operand, Run, Same

__all__ = ["Family", "Loop"]


At = Callable[[fx.Node], Ref]
"""Where the value of a node outside a loop is."""


@dataclass(slots=True, eq=False)
class Family:
    """Values from outside a loop, one for each turn, and how a turn takes its own.

    Args:
        nodes: the values in the order of the turns.
        stored: the values by the loop's variable.
        name: of the list.
        text: the expression of a turn's value.
        following: the same for the turn after it.
        pops: whether that takes the value out of the list, so that the turn can release it.
        variable: what a turn calls it if it uses it more than once.
    """

    nodes: tuple[fx.Node, ...]
    stored: tuple[fx.Node, ...]
    name: str = ""
    text: str = ""
    following: str = ""
    pops: bool = False
    variable: str = ""
    uses: list[int] = field(default_factory=list)

    def take(self, name: str, turn: str, pops: bool, rising: bool, forwards: bool) -> None:
        """Settle how a turn takes its value from a list.

        Args:
            rising: whether the list holds the values in the order of the turns.
            forwards: whether the loop's variable counts up.
        """
        self.name, self.pops = name, pops
        if pops:
            self.text = self.following = f"{name}.pop(0)" if rising else f"{name}.pop()"
            return
        step = 1 if forwards else -1
        first, each = (0, 1) if rising == forwards else (-1, -1)
        self.text = f"{name}[{affine(first, each, turn)}]"
        self.following = f"{name}[{affine(first + each * step, each, turn)}]"


class Loop:
    """A run as a loop.

    Args:
        fresh: makes a name that is not taken.
        late: reductions that are only started where they stand.
        ahead: gathers that are only awaited where they stand.
    """

    def __init__(
        self,
        run: Run,
        turn: str,
        fresh: Callable[[str], str],
        late: Collection[fx.Node],
        ahead: Collection[fx.Node],
    ) -> None:
        self.run, self.turn, self.fresh, self.late = run, turn, fresh, late
        self.ahead = [j for j, node in enumerate(run.blocks[0]) if node in ahead]
        self.heads = run.blocks[0]
        self.forwards = not _counts_down(run)
        self.lists: dict[int, str] = {}
        self.families: dict[tuple[Any, ...], Family] = {}
        self.last_same: dict[int, int] = {}
        self.last_carried: dict[int, int] = {}
        self.before: list[str] = []  # statements that fill lists for the loop
        self.copied: list[Ref] = []  # what these take from elsewhere
        self.after: list[str] = []
        for j, row in enumerate(run.operands):
            if j in run.kept or self.heads[j] in late:
                self.lists[j] = fresh(f"{self.heads[j].name}_each")
            for operand in row:
                self.note(j, operand)

    def note(self, j: int, operand: Operand) -> None:
        """Record that offset `j` uses an operand."""
        if isinstance(operand, Same):
            self.last_same[operand.offset] = j
        elif isinstance(operand, Carried):
            self.last_carried[operand.offset] = j
        elif isinstance(operand, Each):
            values = operand.values
            family = Family(values, values if self.forwards else values[::-1])
            if isinstance(values[0], fx.Node):
                self.families.setdefault(values, family).uses.append(j)
            elif values not in self.families:
                self.families[values] = family
                family.text = self.constant(f"{self.heads[j].name}_each", values)

    def awaited(self, j: int) -> bool:
        """Whether an offset takes a member of a reduction that is awaited after the loop."""
        return self.heads[j].target is operator.getitem and self.heads[j].args[0] in self.late

    def constant(self, name: str, values: tuple[int, ...]) -> str:
        """The expression of a constant that differs from turn to turn."""
        step = values[1] - values[0]
        if all(v == values[0] + step * t for t, v in enumerate(values)):
            return self.index(values[0], step)
        name = self.fresh(name)
        stored = values if self.forwards else values[::-1]
        self.before.append(f"{name} = {list(stored)}")
        return f"{name}[{self.turn}]"

    def index(self, first: int, step: int) -> str:
        """`first` plus `step` for every turn, by the loop's variable."""
        if not self.forwards:
            first, step = first + step * (self.run.count - 1), -step
        return affine(first, step, self.turn)

    def head(self) -> str:
        """The first line."""
        turns = f"range({self.run.count})"
        return f"for {self.turn} in {turns if self.forwards else f'reversed({turns})'}:"

    def place(self, j: int) -> str:
        """Module path and source line of the calls at an offset."""
        records = [info(block[j]) for block in self.run.blocks]
        source = records[0].source if len({r.source for r in records}) == 1 else ""
        module = numbered([r.module for r in records], self.index)
        return " ".join(w for w in (module, f"({source})" if source else "") if w)

    def fixed(self) -> list[fx.Node]:
        """Nodes that all turns use."""
        operands = [o for row in self.run.operands for o in row]
        values = [o.value for o in operands if isinstance(o, Fixed)]
        return list(dict.fromkeys(v for v in values if isinstance(v, fx.Node)))

    def body(
        self, at: At, sizes: Mapping[str, int], remarks: bool, then: str = ""
    ) -> Iterator[str]:
        """The lines of a turn, not indented.

        Args:
            at: where the value of a node outside is.
            sizes: lengths of lists.
            remarks: whether to write placements.
            then: starts the gather that follows the last one of the last turn.
        """
        old = {}  # what a turn calls the value that the turn before has left
        for j, last in self.last_carried.items():
            old[j] = self.heads[j].name
            if last > j:
                old[j] = self.fresh(f"{self.heads[j].name}_before")
                yield f"{old[j]} = {self.heads[j].name}"
        here = ""
        for j, node in enumerate(self.heads):
            if self.awaited(j):
                continue
            place = self.place(j)
            if place and place != here:
                yield f"# {place}"
                here = place
            row = self.run.operands[j]
            taken = [self.families[o.values] for o in row if isinstance(o, Each)]
            yield from (
                f"{f.variable} = {f.text}"
                for f in dict.fromkeys(taken)
                if f.variable and f.uses[0] == j
            )
            values = iter([self.operand(o, old, at) for o in row])
            args, kwargs = _filled(node.args, values), _filled(node.kwargs, values)
            gone = self.gone(j, old)
            tail = f"; del {', '.join(gone)}" if gone else ""
            layouts = info(node).layouts
            remark = f"  # {layouts[0]}" if layouts and remarks else ""
            text = call(node, args, kwargs, sizes, node in self.late)
            text = f"{AHEAD}.wait()" if j in self.ahead else text
            yield from self.statements(j, text, tail + remark)
            if j in self.ahead:
                yield from self.start_next(j, at, sizes, then)

    def start_next(self, j: int, at: At, sizes: Mapping[str, int], then: str) -> Iterator[str]:
        """The lines that start the gather after the one at an offset."""
        later = [k for k in self.ahead if k > j]
        if later:
            yield f"{AHEAD} = {self.begun(later[0], at, sizes, self.present)}"
            return
        more = f"{self.turn} < {self.run.count - 1}" if self.forwards else f"{self.turn} > 0"
        yield f"if {more}:"
        yield f"    {AHEAD} = {self.begun(self.ahead[0], at, sizes, self.following)}"
        if then:
            yield "else:"
            yield f"    {AHEAD} = {then}"

    def begun(
        self, j: int, at: At, sizes: Mapping[str, int], turn: Callable[[Operand, At], Any]
    ) -> str:
        """The expression that starts the gather at an offset, with the operands of a turn."""
        node = self.heads[j]
        values = iter([turn(o, at) for o in self.run.operands[j]])
        args, kwargs = _filled(node.args, values), _filled(node.kwargs, values)
        return call(node, args, kwargs, sizes, True)

    def first(self, operand: Operand, at: At) -> Any:
        """What is written before the loop for an operand of the first turn."""
        if isinstance(operand, Each) and not self.families[operand.values].pops:
            return at(operand.values[0])
        return self.present(operand, at)

    def present(self, operand: Operand, at: At) -> Any:
        """What a turn writes for an operand from outside."""
        return self.operand(operand, {}, at)

    def following(self, operand: Operand, at: At) -> Any:
        """What a turn writes for an operand of the next."""
        if isinstance(operand, Each):
            return Ref(self.families[operand.values].following)
        return self.present(operand, at)

    def statements(self, j: int, text: str, rest: str) -> Iterator[str]:
        """The lines that compute and collect the value at an offset."""
        name = self.heads[j].name
        needed = (j in self.last_same or j in self.last_carried) and self.heads[j] not in self.late
        if j in self.lists and not needed:
            yield f"{self.lists[j]}.append({text}){rest}"
            return
        yield f"{name} = {text}{rest}"
        if j in self.lists:
            yield f"{self.lists[j]}.append({name})"
        elif not needed:
            yield f"del {name}"

    def operand(self, operand: Operand, old: dict[int, str], at: At) -> Any:
        """What a turn writes for an operand."""
        if isinstance(operand, Same):
            return Ref(self.heads[operand.offset].name)
        if isinstance(operand, Carried):
            return Ref(old[operand.offset])
        if isinstance(operand, Each):
            family = self.families[operand.values]
            return Ref(family.variable or family.text)
        return at(operand.value) if isinstance(operand.value, fx.Node) else operand.value

    def gone(self, j: int, old: dict[int, str]) -> list[str]:
        """Variables that a turn uses last at offset `j`, but for one that is bound anew there."""
        names: dict[str, None] = {}
        for operand in self.run.operands[j]:
            if isinstance(operand, Same):
                k, last, name = operand.offset, self.last_same, self.heads[operand.offset].name
                dead = last[k] == j and k not in old
            elif isinstance(operand, Carried):
                k, name = operand.offset, old[operand.offset]
                dead = self.last_carried[k] == j and (k != j)
            elif isinstance(operand, Each):
                family = self.families[operand.values]
                name, dead = family.variable, bool(family.variable) and family.uses[-1] == j
            else:
                continue
            if dead:
                names[name] = None
        return list(names)


def _counts_down(run: Run) -> bool:
    """Whether the number of the layer falls from block to block."""
    for one, two in zip(run.blocks[0], run.blocks[1], strict=True):
        for a, b in zip(info(one).module.split("."), info(two).module.split("."), strict=False):
            if a != b and a.isdigit() and b.isdigit():
                return int(b) < int(a)
    return False


def _filled(value: Any, leaf: Iterator[Any]) -> Any:
    """Nested arguments with other leaves."""
    if isinstance(value, (list, tuple)):
        return [_filled(v, leaf) for v in value]
    if isinstance(value, dict):
        return {k: _filled(v, leaf) for k, v in value.items()}
    return next(leaf)
