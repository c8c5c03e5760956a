"""The recorded update of a parameter as FX graph and as generated Python over lists of pieces.

Both also show what moves around it, which runs elsewhere: see `autopar.moves`.
"""

from __future__ import annotations

import hashlib
import keyword
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.codegen import executed
from autopar.compat import foreach, schema_of
from autopar.elementwise import Arg, Call, Section
from autopar.expression import Ref
from autopar.expression import call as written_call
from autopar.moves import STEPPED, Moves
from autopar.program import NodeInfo, info, set_info

__all__ = ["Update", "as_graph", "as_source", "load_update"]

aten = torch.ops.aten

_RESERVED = ("aten", "foreach", "inf", "nan", "torch")

Function = Callable[..., None]
"""(numbers, tensors, one list of pieces per input) -> None; writes in place."""


@dataclass(frozen=True, slots=True)
class Update:
    """The program for parameters that an optimizer treats alike.

    Args:
        names: of the inputs in generated code, in order.
        number_names: of the numbers, by the argument that takes them.
        writes_grad: whether gradients are written.
    """

    section: Section
    names: tuple[str, ...]
    number_names: tuple[str, ...]
    writes_grad: bool

    @classmethod
    def of(cls, section: Section) -> Update:
        """The program of what was recorded."""
        used = {"numbers", "tensors", *_RESERVED}
        names = tuple(_fresh(name.rpartition(".")[2], used) for name in section.inputs)
        grads = {section.inputs.get("grad", -1)}
        for call in section.calls:
            if "view_as" in _base(call.op) and grads.intersection(_values(call)):
                grads.add(call.out)
        written = any(c.out in grads and _mutates(c.op) for c in section.calls)
        return cls(section, names, tuple(_number_names(section, used)), written)


def _mutates(op: Any) -> bool:
    return bool(schema_of(op).is_mutable)


def _fresh(name: str, used: set[str]) -> str:
    """`name` as an identifier that is not used yet."""
    name = re.sub(r"\W", "_", name)
    name = f"_{name}" if not name or name[0].isdigit() or keyword.iskeyword(name) else name
    new, k = name, 1
    while new in used:
        new, k = f"{name}_{k}", k + 1
    used.add(new)
    return new


def _base(op: Any) -> str:
    """'aten::add_' -> 'add'."""
    return str(schema_of(op).name.partition("::")[2].strip("_"))


def _number_names(section: Section, used: set[str]) -> list[str]:
    """Numbers are named after the argument they are given as: `addcdiv_value`."""
    names = [""] * len(section.numbers)
    for call in section.calls:
        schema = schema_of(call.op).arguments
        named = [(schema[i].name, a) for i, a in enumerate(call.args)]
        for name, arg in [*named, *call.kwargs]:
            for a in arg if isinstance(arg, tuple) else (arg,):
                if isinstance(a, Arg) and a.kind == "number":
                    names[a.index] = _fresh(f"{_base(call.op)}_{name}", used)
    return names


# --- as a graph --------------------------------------------------------------------------------


def as_graph(updates: Sequence[tuple[str, Update, Moves | None]]) -> fx.GraphModule:
    """One graph of all updates: each for one parameter of a kind, titled by its prefix.

    Numbers are inputs: what the optimizer makes of learning rate, betas and step count. Where
    something moves, the gradient comes in before it is reduced, and the parameter goes out as it
    rests and whole.

    Before:
        mul_ = aten.mul_(param, mul_other); ...; return (param, grad, exp_avg, exp_avg_sq)
    After:
        grad = autopar.reduce_scatter(partial_grad, "dp", 0, 1, [4, 4], 4)
        mul_ = aten.mul_(param, mul_other); ...
        whole = autopar.all_gather(param, "dp", 0, 1, [4, 4])
        return (param, grad, exp_avg, exp_avg_sq, whole)
    """
    graph = fx.Graph()
    alone = len(updates) == 1
    sections = [_Placed(graph, update, m, "" if alone else f"{p}_") for p, update, m in updates]
    graph.output(tuple(v for s in sections for v in s.calls()))
    return fx.GraphModule(torch.nn.Module(), graph)


class _Placed:
    """An update whose inputs stand in a graph."""

    def __init__(
        self, graph: fx.Graph, update: Update, moves: Moves | None, prefix: str
    ) -> None:  # fmt: skip
        self.graph, self.section, self.prefix = graph, update.section, prefix
        self.moves = moves
        self.values: dict[int, fx.Node] = {}
        self.numbers = [graph.placeholder(prefix + n) for n in update.number_names]
        self.tensors = [
            graph.placeholder(f"{prefix}scalar_{i}") for i in range(len(self.section.tensors))
        ]
        names = dict(zip(self.section.inputs, update.names, strict=True))
        for kind, index in self.section.inputs.items():
            if kind == "grad" and moves is not None:
                used = {*update.names, *update.number_names} - {names[kind]}
                self.parts = moves.placed(graph, prefix, used)
                continue
            node = self.values[index] = graph.placeholder(prefix + names[kind])
            node.meta["val"] = self.section.values[index]

    def calls(self) -> list[fx.Node]:
        """Write the calls; the inputs as they are after the update, then what is gathered."""
        moves, inputs = self.moves, self.section.inputs
        if "grad" in inputs and moves is not None:
            name = f"{self.prefix}grad"
            self.values[inputs["grad"]] = moves.reduced(self.graph, name, self.parts)
        for step in self.section.calls:
            kwargs = {k: self.placed(v) for k, v in step.kwargs}
            args = tuple(self.placed(a) for a in step.args)
            node = self.graph.call_function(step.op, args, kwargs)
            node.meta["val"] = self.section.values[step.out]
            set_info(node, NodeInfo(source=STEPPED))
            self.values[step.out] = node
        after = [self.values[i] for i in inputs.values()]
        if moves is not None:
            after += moves.gathered(self.graph, f"{self.prefix}whole", after[0])
        return after

    def placed(self, arg: Any) -> Any:
        """An argument with nodes."""
        if isinstance(arg, tuple):
            return [self.placed(a) for a in arg]
        if not isinstance(arg, Arg):
            return arg
        if arg.kind == "value":
            return self.values[arg.index]
        return (self.numbers if arg.kind == "number" else self.tensors)[arg.index]


# --- as Python ---------------------------------------------------------------------------------

_PREAMBLE = '''\
"""{title}

Generated by autopar. Each function updates a list of pieces of parameters in place, chunk by chunk;
`numbers` is what the optimizer makes of learning rate, step count and the like at this step.
{more}"""

import torch
from torch import inf, nan

from autopar.runtime import foreach

aten = torch.ops.aten
'''

_AROUND = """\
A step runs the functions `update_...`. Those named `step_...` do for one parameter of each kind
all of what forward, backward and step do for all, and can be run on ranks that pass the unreduced
gradients.
"""


def as_source(
    title: str,
    updates: Sequence[tuple[str, str, Update]],
    around: Sequence[tuple[str, str, str, Update, Moves]] = (),
) -> str:
    """The generated module.

    Args:
        updates: of each update its function's name, a remark and what it does.
        around: of each parameter to show with what moves around its update, the name of a function
            and a remark, then the update and the name of its function.
    """
    text = _PREAMBLE.format(title=title, more=_AROUND if around else "")
    for name, remark, update in updates:
        text += "\n\n" + _Function(update).written(name, remark)
    for name, remark, inner, update, moves in around:
        text += "\n\n" + _around(name, remark, inner, update, moves)
    return text


def _around(name: str, remark: str, inner: str, update: Update, moves: Moves) -> str:
    """A function for one parameter: its gradient's reduction, its update, its gathers."""
    names = dict(zip(update.section.inputs, update.names, strict=True))
    graph = fx.Graph()
    takes: list[fx.Node] = []
    before: list[str] = []
    if "grad" in names:
        takes = moves.placed(graph, "", {*names.values()} - {names["grad"]})
        last = moves.reduced(graph, names["grad"], takes)
        before = _lines([n for n in graph.nodes if n.op == "call_function"])
        before += [] if last.name == names["grad"] else [f"{names['grad']} = {last.name}"]
    known = set(graph.nodes)
    wholes = moves.gathered(graph, "whole", graph.placeholder(names["param"]))
    after = _lines([n for n in graph.nodes if n.op == "call_function" and n not in known])
    given = [n for kind, n in names.items() if kind != "grad"]
    given[1:1] = [n.name for n in takes]
    lists = ", ".join(f"[{n}]" for n in names.values())
    lines = [
        f'"""{remark}"""', *before, f"# {STEPPED}", f"{inner}(numbers, tensors, {lists})", *after,
        *([f"return {', '.join(n.name for n in wholes)}"] if wholes else []),
    ]  # fmt: skip
    body = "".join(f"    {line}\n" for line in lines)
    return f"def {name}(comm, numbers, tensors, {', '.join(given)}):\n{body}"


def _lines(nodes: Sequence[fx.Node]) -> list[str]:
    """Calls as lines, each under a comment where it does not run where the one before does."""
    lines, place = [], ""
    for node in nodes:
        lines += [f"# {info(node).source}"] if info(node).source != place else []
        lines.append(_text(node))
        place = info(node).source
    return lines


def _text(node: fx.Node) -> str:
    """A call as a line."""
    refs: Any = lambda n: Ref(n.name)  # noqa: E731
    args, kwargs = fx.map_arg((node.args, node.kwargs), refs)
    return f"{node.name} = {written_call(node, args, kwargs, {})}"


def load_update(source: str) -> dict[str, Any]:
    """The functions of a generated module; tracebacks show its lines."""
    return executed(source, f"<autopar {hashlib.sha1(source.encode()).hexdigest()[:12]}>")


_ONE = ("abs", "exp", "log", "neg", "reciprocal", "rsqrt", "sign", "sqrt", "tanh", "zero")
_TWO = ("add", "sub", "mul", "div", "maximum", "minimum", "pow")
_THREE = ("addcmul", "addcdiv")


class _Function:
    """One function under construction."""

    def __init__(self, update: Update) -> None:
        self.update, section = update, update.section
        self.used = {*update.names, *update.number_names, "numbers", "tensors", *_RESERVED}
        self.names = dict(zip(section.inputs.values(), update.names, strict=True))
        self.viewed = {
            a for c in section.calls if "view_as" in _base(c.op) for a in (*_values(c), c.out)
        }
        self.last = {a: i for i, c in enumerate(section.calls) for a in [*_values(c), c.out]}

    def written(self, name: str, remark: str) -> str:
        """The source of the function."""
        section, lines = self.update.section, []
        lines.append(f"def {name}(numbers, tensors, {', '.join(self.update.names)}):")
        lines.append(f'    """{remark}"""')
        if section.numbers:
            lines.append(f"    ({', '.join(self.update.number_names)},) = numbers")
        held = set(section.inputs.values())
        if not section.calls:
            lines.append("    return")
        for i, call in enumerate(section.calls):
            dead = {a for a in _values(call) if self.last[a] == i} - held
            lines.append(f"    {self.line(call, dead)}")
            gone = {self.names[a] for a in dead} - {self.names[call.out]}
            if gone:
                lines.append(f"    del {', '.join(sorted(gone))}")
        return "\n".join(lines) + "\n"

    def line(self, call: Call, dead: set[int]) -> str:
        """A call on lists, by one operator for all pieces where torch has one."""
        if _mutates(call.op):
            return self.foreach(call, True) or self.each(call)
        over = self.reused(call, dead)
        text = self.foreach(call, True) if over is not None else None
        if text and over is not None:
            self.names[call.out] = self.names[over]
            return text
        text = self.foreach(call, False) or self.each(call)
        self.names[call.out] = _fresh(_base(call.op), self.used)
        return f"{self.names[call.out]} = {text}"

    def reused(self, call: Call, dead: set[int]) -> int | None:
        """A temporary that the result may be written over: it is not used after the call."""
        first = call.args[0]
        if not isinstance(first, Arg) or first.index not in dead or first.index in self.viewed:
            return None
        values = self.update.section.values
        return first.index if values[first.index].dtype == values[call.out].dtype else None

    def foreach(self, call: Call, in_place: bool) -> str | None:
        """The call as one operator on lists."""
        base, kwargs = _base(call.op), dict(call.kwargs)
        if call.op.__name__.endswith(".out"):
            return None
        lists = [isinstance(a, Arg) and a.kind == "value" for a in call.args]
        if base in _ONE:
            fine = len(lists) == 1 and not kwargs
        elif base in _TWO:
            fine = (
                len(lists) == 2 and lists[0] and set(kwargs) <= ({"alpha"} if lists[1] else set())
            )
            fine = fine and (lists[1] or _is_number(call.args[1]))
        elif base in _THREE:
            fine = all(lists) and set(kwargs) <= {"value"}
        elif base == "lerp":
            fine = lists[:2] == [True, True] and not kwargs
        else:
            fine = base == "copy" and lists == [True, True] and not kwargs
        if not fine or not hasattr(foreach, f"{base}{'_' if in_place else ''}"):
            return None
        values = [self.text(a) for a in call.args]
        values += [f"{k}={self.text(v)}" for k, v in kwargs.items()]
        return f"foreach.{base}{'_' if in_place else ''}({', '.join(values)})"

    def each(self, call: Call) -> str:
        """The call on the pieces one after the other."""
        lists = list(dict.fromkeys(_values(call)))
        turn = {a: f"{self.names[a]}_i" for a in lists}
        args = [self.text(a, turn) for a in call.args]
        args += [f"{k}={self.text(v, turn)}" for k, v in call.kwargs]
        heads = ", ".join(turn.values())
        source = ", ".join(self.names[a] for a in lists)
        over = f"zip({source}, strict=True)" if len(lists) > 1 else source
        text = f"{call.op}({', '.join(args)})"
        if _mutates(call.op):
            return f"for {heads} in {over}:\n        {text}"
        return f"[{text} for {heads} in {over}]"

    def text(self, arg: Any, turn: dict[int, str] | None = None) -> str:
        """An argument as source."""
        if isinstance(arg, tuple):
            return f"[{', '.join(self.text(a, turn) for a in arg)}]"
        if not isinstance(arg, Arg):
            return str(arg) if isinstance(arg, torch.memory_format) else repr(arg)
        if arg.kind == "number":
            return self.update.number_names[arg.index]
        if arg.kind == "tensor":
            return f"tensors[{arg.index}]"
        return (turn or self.names)[arg.index]


def _is_number(arg: Any) -> bool:
    return not isinstance(arg, Arg) or arg.kind == "number"


def _values(call: Call) -> list[int]:
    found: list[int] = []
    for arg in (*call.args, *(v for _, v in call.kwargs)):
        for a in arg if isinstance(arg, tuple) else (arg,):
            if isinstance(a, Arg) and a.kind == "value":
                found.append(a.index)
    return found
