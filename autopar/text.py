"""The text form of a program: valid Python that parses back to the same program.

    # level spmd on dp=2, tp=2
    def program(
        w: "f32[256{tp}, 64]",  # parameter grad mlp.up.weight
        x: "f32[8{dp}, 64]",  # input x
    ):
        y: "f32[8{dp}, 256{tp}]" = aten.linear.default(x, w)  # dp=b0 tp=o · mlp.up · model.py:31
        return (y,)

An annotation is the dtype and the layout: sizes are global, `{axis}` cuts, `+axis` marks a partial
sum, `~axis` a varying copy. After `#` stand the choice per axis, the module and the source line.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from autopar.compat import pytree
from autopar.errors import AutoparError
from autopar.layout import Layout, replicated
from autopar.layout import mesh as make_mesh
from autopar.program import (
    Input,
    NodeInfo,
    Output,
    Program,
    State,
    graph_module,
    info,
    set_info,
)

__all__ = ["parse", "show", "written", "written_call"]

_DTYPES = {
    "f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16,
    "i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "i8": torch.int8,
    "u8": torch.uint8, "b8": torch.bool, "c64": torch.complex64, "c128": torch.complex128,
}  # fmt: skip
_SHORT = {v: k for k, v in _DTYPES.items()}


# --- printing ----------------------------------------------------------------------------------


def show(program: Program, coordinate: Mapping[str, int] | None = None) -> str:
    """The text of `program`; `coordinate` is the place whose local sizes an SPMD graph holds."""
    where = f" at {dict(coordinate)}" if coordinate is not None else ""
    lines = [f"# level {program.level} on {program.mesh}{where}", "def program("]
    nodes = program.placeholders()
    for s in program.states:
        words = [
            "parameter" if s.is_parameter else "buffer",
            *(["grad"] if s.requires_grad else []),
        ]
        names = " = ".join((s.name, *s.aliases))
        node = nodes[s.node]
        lines.append(f"    {s.node}: {_kind(node)},  # {' '.join(words)} {names}{_choice(node)}")
    for i in program.inputs:
        lines.append(
            f"    {i.node}: {_kind(nodes[i.node])},  # input {i.name}{_choice(nodes[i.node])}"
        )
    lines.append("):")
    for node in program.graph.graph.nodes:
        if node.op != "call_function":
            continue
        record = info(node)
        notes = [
            " ".join(f"{a}={o}" for a, o in record.choice.items()),
            record.module,
            record.source,
            "again" if record.again else "",
            f"stage {record.stage}" if record.stage >= 0 else "",
        ]
        if record.site >= 0:
            notes.append(f"site {record.site}")
        remark = " · ".join(n for n in notes if n)
        line = f"    {node.name}: {_kind(node)} = {_call(node)}"
        lines.append(f"{line}  # {remark}" if remark else line)
    results = program.graph.graph.output_node().args[0]
    lines.append(f"    return ({', '.join(_value(r) for r in results)},)")  # type: ignore[union-attr]
    outputs = [
        f"loss {o.index}"
        if o.is_loss
        else str(o.index)
        if o.index >= 0
        else f"constant {o.constant!r}"
        for o in program.outputs
    ]
    lines.append(f"# outputs {', '.join(outputs)}")
    lines += [f"# {name} becomes {index}" for name, index in program.mutated]
    return "\n".join(lines) + "\n"


def _choice(node: fx.Node) -> str:
    record = info(node)
    text = " ".join(f"{a}={o}" for a, o in record.choice.items())
    rest = f"at rest {record.rest}" if record.rest is not None else ""
    stage = f"zero {record.zero}" if record.zero else ""
    return "".join(f" · {t}" for t in (text, rest, stage) if t)


def _kind(node: fx.Node) -> str:
    val = node.meta["val"]
    if isinstance(val, Tensor):
        return f'"{_tensor(val, (*info(node).layouts, None)[0])}"'
    layouts = info(node).layouts or (None,) * len(val)
    parts = [
        _tensor(v, layout) if isinstance(v, Tensor) else "none"
        for v, layout in zip(val, layouts, strict=True)
    ]
    return f'"({"; ".join(parts)})"'


def _tensor(val: Tensor, layout: Layout | None) -> str:
    shown = layout if layout is not None else replicated(tuple(val.shape))
    return f"{_SHORT[val.dtype]}{shown}"


def _call(node: fx.Node) -> str:
    name = str(node.target).replace("torch.ops.", "")
    return written_call(name, node.target, node.args, node.kwargs, _own)


def _value(value: Any) -> str:
    return written(value, _own)


def _own(value: Any) -> str | None:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, torch.device):
        return f'device("{value}")'
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):
        return f'float("{value}")'
    return None


# --- printing of arguments, here and in generated code ------------------------------------------


def written(value: Any, own: Callable[[Any], str | None]) -> str:
    """`value` as an argument in Python; `own` says what a caller writes in its own way."""
    text = own(value)
    if text is not None:
        return text
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(written(v, own) for v in value)}]"
    if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
        return str(value)
    return repr(value)


def written_call(
    name: str, target: Any, args: Any, kwargs: Mapping[str, Any], own: Callable[[Any], str | None]
) -> str:
    """A call of `target` under `name` in Python."""
    if target is operator.getitem:
        return f"{written(args[0], own)}[{args[1]}]"
    words = [written(a, own) for a in args]
    words += [f"{k}={written(v, own)}" for k, v in kwargs.items()]
    return f"{name}({', '.join(words)})"


# --- parsing -----------------------------------------------------------------------------------


def parse(text: str) -> Program:
    """Inverse of `show`; the structure of the user's result is not part of the text.

    Raises:
        AutoparError: the text is not a program, with the line.
    """
    try:
        return _Parser(text).run()
    except (SyntaxError, ValueError, KeyError, AttributeError, StopIteration) as error:
        raise AutoparError(
            f"The text is not a program: {type(error).__name__}: {error}",
            expected="what autopar.text.show prints",
        ) from error


class _Parser:
    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()
        self.tree: Any = next(n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef))
        head = re.fullmatch(r"# level (\w+) on (.*?)(?: at (\{.*\}))?", self.lines[0])
        if head is None:
            raise ValueError(f"line 1: {self.lines[0]!r}")
        self.level, self.mesh = head[1], make_mesh(head[2])
        self.coordinate = ast.literal_eval(head[3]) if head[3] else None
        self.graph = fx.Graph()
        self.names: dict[str, fx.Node] = {}

    def remark(self, line: int) -> list[str]:
        """What stands after the last two spaces and # of a line, split at the dots."""
        _, _, note = self.lines[line - 1].partition("  # ")
        return note.split(" · ") if note else []

    def run(self) -> Program:
        states: list[State] = []
        inputs: list[Input] = []
        for arg in self.tree.args.args:
            node = self.graph.placeholder(arg.arg)
            self.names[arg.arg] = node
            dtype, layout = self.annotate(node, arg.annotation.value)[0]
            what, *notes = self.remark(arg.end_lineno)
            kept = [Layout.parse(n[8:]) for n in notes if n.startswith("at rest ")]
            choice = dict(w.split("=") for n in notes if "=" in n for w in n.split())
            rest = kept[0] if kept else None
            stage = next((int(n[5:]) for n in notes if n.startswith("zero ")), 0)
            set_info(node, NodeInfo((layout,), choice, rest=rest, zero=stage))
            words = what.split()
            shape = layout.shape
            if words[0] == "input":
                inputs.append(Input(words[1], arg.arg, shape, dtype, layout))
                continue
            grad = words[1] == "grad"
            names = " ".join(words[2 if grad else 1 :]).split(" = ")
            states.append(
                State(names[0], arg.arg, shape, dtype, words[0] == "parameter", grad,
                      tuple(names[1:]), layout)
            )  # fmt: skip
        for statement in self.tree.body:
            if isinstance(statement, ast.AnnAssign):
                self.call(statement)
            elif isinstance(statement, ast.Return):
                results = tuple(self.value(e) for e in statement.value.elts)  # type: ignore
                self.graph.output(results)
        outputs, mutated = self.tables()
        return Program(
            graph_module(self.graph), self.mesh, self.level, tuple(states),
            tuple(inputs), outputs, pytree.tree_structure(None), mutated,
        )  # fmt: skip

    def annotate(self, node: fx.Node, text: str) -> list[tuple[torch.dtype, Layout]]:
        """Give `node` its value from an annotation; returns (dtype, layout) of each result."""
        many = text.startswith("(")
        found: list[tuple[torch.dtype, Layout]] = []
        values: list[Tensor | None] = []
        for part in text.strip("()").split("; ") if many else [text]:
            match = re.fullmatch(r"(\w+?)(\[.*)", part)
            if match is None:
                values.append(None)
                continue
            dtype, layout = _DTYPES[match[1]], Layout.parse(match[2])
            shape = (
                layout.local_shape(self.mesh, self.coordinate)
                if self.level == "spmd" and self.coordinate is not None
                else layout.shape
            )
            values.append(torch.empty(shape, dtype=dtype, device="meta"))
            found.append((dtype, layout))
        node.meta["val"] = tuple(values) if many else values[0]
        return found

    def call(self, statement: ast.AnnAssign) -> None:
        name = statement.target.id  # type: ignore[union-attr]
        value = statement.value
        if isinstance(value, ast.Subscript):
            args: Any = (self.value(value.value), ast.literal_eval(value.slice))
            node = self.graph.create_node("call_function", operator.getitem, args, {}, name)
        else:
            assert isinstance(value, ast.Call), "a statement is a call or takes a result"
            target: Any = torch.ops
            for part in ast.unparse(value.func).split("."):
                target = getattr(target, part)
            args = tuple(self.value(a) for a in value.args)
            kwargs = {str(k.arg): self.value(k.value) for k in value.keywords}
            node = self.graph.create_node("call_function", target, args, kwargs, name)
        self.names[name] = node
        layouts = [x for _, x in self.annotate(node, statement.annotation.value)]  # type: ignore
        choice: dict[str, str] = {}
        module, source, site, again, stage = "", "", -1, False, -1
        for note in self.remark(statement.end_lineno or 0):
            if "=" in note:
                choice = dict(w.split("=") for w in note.split())
            elif note == "again":
                again = True
            elif note.startswith("site "):
                site = int(note[5:])
            elif note.startswith("stage "):
                stage = int(note[6:])
            elif re.search(r"\.py:\d+$", note):
                source = note
            else:
                module = note
        record = NodeInfo(tuple(layouts), choice, source, module, site, again=again, stage=stage)
        set_info(node, record)

    def value(self, e: ast.expr) -> Any:
        if isinstance(e, ast.Name):
            return self.names[e.id]
        if isinstance(e, (ast.List, ast.Tuple)):
            return [self.value(x) for x in e.elts]
        if isinstance(e, ast.Call):
            kind, text = ast.unparse(e.func), ast.literal_eval(e.args[0])
            return torch.device(text) if kind == "device" else float(text)
        if isinstance(e, ast.Attribute):
            return getattr(torch, e.attr)
        return ast.literal_eval(e)

    def tables(self) -> tuple[tuple[Output, ...], tuple[tuple[str, int], ...]]:
        outputs: list[Output] = []
        mutated: list[tuple[str, int]] = []
        for line in self.lines:
            if line.startswith("# outputs "):
                for word in filter(None, line[10:].split(", ")):
                    if word.startswith("constant "):
                        outputs.append(Output(-1, constant=ast.literal_eval(word[9:])))
                    else:
                        is_loss = word.startswith("loss ")
                        outputs.append(Output(int(word.removeprefix("loss ")), is_loss))
            match = re.fullmatch(r"# (\S+) becomes (\d+)", line)
            if match is not None:
                mutated.append((match[1], int(match[2])))
        return tuple(outputs), tuple(mutated)
