"""A program: one FX graph at some level, its tables, and typed records on its nodes.

Levels, in the order they arise: `global` (whole shapes), `annotated` (each node has a choice per
mesh axis), `spmd` (local shapes and typed collectives), `joint` (forward and backward graph).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.compat import LazyGraphModule, pytree, schema_of
from autopar.layout import DATA_AXES, Layout, Mesh
from autopar.sizes import Size

__all__ = [
    "Choice",
    "Input",
    "Joint",
    "NodeInfo",
    "Output",
    "Phases",
    "Program",
    "State",
    "ancestors",
    "call_text",
    "copied",
    "differentiable",
    "graph_module",
    "info",
    "nodes_in",
    "set_info",
    "shares_memory",
    "tensor_inputs",
    "update_info",
]

Choice = Mapping[str, str]
"""Per mesh axis: 'R' compute replicated, 'V' replicated on varying copies, 'P' pass a partial sum
through, or the name of the factor of the operation's rule that the axis cuts."""


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """Everything the compiler knows about one node.

    Args:
        rest: of a state, the layout it is kept in where that is not the one it is used in.
        origin: in a forward graph, the node of the SPMD graph that it computes (part of).
        zero: of a state that ZeRO cuts at rest, its stage: 1, 2 or 3.
        stage: of a pipeline, the stage that computes a call; -1: any that uses it.
        again: computed once more in the backward graph rather than saved for it.
        shapes: local shape of each result, where it differs between places.
        unless: where this is zero the result holds nothing and the call is not made: many kernels
            refuse empty operands.
    """

    layouts: tuple[Layout, ...] = ()
    choice: Choice = field(default_factory=dict)
    source: str = ""
    module: str = ""
    site: int = -1
    origin: str = ""
    rest: Layout | None = None
    zero: int = 0
    stage: int = -1
    again: bool = False
    shapes: tuple[tuple[int | Size, ...], ...] = ()
    unless: Size | None = None


def info(node: fx.Node) -> NodeInfo:
    """The record of `node`."""
    record = node.meta.get("autopar")
    return record if record is not None else NodeInfo()


def set_info(node: fx.Node, record: NodeInfo) -> None:
    """Replace the record of `node`."""
    node.meta["autopar"] = record


def update_info(node: fx.Node, **changes: Any) -> None:
    """Replace fields of the record of `node`."""
    node.meta["autopar"] = dataclasses.replace(info(node), **changes)


@dataclass(frozen=True, slots=True)
class State:
    """A parameter or buffer: one storage, however many names.

    Args:
        name: canonical fully-qualified name.
        node: name of its placeholder.
        aliases: the other names of the same tensor (tied weights).
        layout: placement at rest, once a strategy chose it.
    """

    name: str
    node: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_parameter: bool
    requires_grad: bool
    aliases: tuple[str, ...] = ()
    layout: Layout | None = None

    @property
    def used(self) -> Layout | None:
        """Placement where it is used: data axes cut a parameter only at rest."""
        found = self.layout
        for axis in DATA_AXES if self.is_parameter else ():
            found = None if found is None else found.without(axis)
        return found


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor argument of a call, by its path in the arguments."""

    name: str
    node: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """One leaf of the result: an output of the graph, or a constant (index -1)."""

    index: int
    is_loss: bool = False
    constant: Any = None
    layout: Layout | None = None


@dataclass(frozen=True, slots=True)
class Program:
    """A graph with its tables.

    Args:
        graph: the graph; placeholders are states then inputs, outputs are results then new values
            of mutated buffers.
        mutated: for each mutated buffer, its name and the index of the graph output with its value.
    """

    graph: fx.GraphModule
    mesh: Mesh
    level: str
    states: tuple[State, ...]
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    out_spec: pytree.TreeSpec
    mutated: tuple[tuple[str, int], ...] = ()
    training: bool = True
    batch_size: int = 0
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def replace(self, **changes: Any) -> Program:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def placeholders(self) -> dict[str, fx.Node]:
        """Placeholder nodes by name."""
        return {n.name: n for n in self.graph.graph.nodes if n.op == "placeholder"}

    def states_of(self, results: Iterable[int]) -> set[str]:
        """Names of the states on which these graph outputs depend."""
        out: Any = self.graph.graph.output_node().args[0]
        seen: set[fx.Node] = set()
        stack = [out[i] for i in results]
        while stack:
            node = stack.pop()
            if node not in seen:
                seen.add(node)
                stack.extend(node.all_input_nodes)
        nodes = {node.name for node in seen}
        return {s.name for s in self.states if s.node in nodes}

    def copy(self) -> Program:
        """A program with its own graph, so a pass can rewrite it."""
        graph, _ = copied(self.graph.graph)
        return self.replace(graph=graph_module(graph, self.graph))


def graph_module(graph: fx.Graph, root: fx.GraphModule | None = None) -> fx.GraphModule:
    """A module of a graph, with the attributes of `root` that it reads.

    Python is written for it at its first run, or when `code` is read: most graphs are only steps
    from pass to pass.
    """
    return LazyGraphModule(torch.nn.Module() if root is None else root, graph)


@dataclass(frozen=True, slots=True)
class Phases:
    """A differentiated program: forward and backward graphs of one place on the mesh.

    Args:
        program: the SPMD program they come from.
        forward: states and inputs -> results then saved values.
        backward: saved values then gradients of the roots -> gradients of the states.
        roots: graph outputs whose gradients the backward graph takes.
        gradients: names of the states whose gradients it returns.
    """

    program: Program
    forward: fx.GraphModule
    backward: fx.GraphModule
    n_results: int
    roots: tuple[int, ...]
    gradients: tuple[str, ...]

    def replace(self, **changes: Any) -> Phases:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True, slots=True)
class Joint:
    """Forward and backward calls in one graph, before they are parted.

    Args:
        forward: placeholders but the tangents, and the calls that the results need.
        backward: the other calls that the gradients need, in order.
        gradients: the nodes of the gradients.
    """

    graph: fx.Graph
    forward: set[fx.Node]
    backward: Sequence[fx.Node]
    gradients: Sequence[fx.Node]


def shares_memory(node: fx.Node) -> bool:
    """Whether the result of a call shares memory with an operand."""
    schema = schema_of(node.target)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


def copied(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy of `graph` with its records, and the copy of each node."""
    new = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    out = new.graph_copy(graph, mapping)
    for before, after in mapping.items():
        after.meta = dict(before.meta)
    new.output(out)
    new.output_node().meta = dict(graph.output_node().meta)
    return new, mapping


def differentiable(program: Program) -> frozenset[int]:
    """The graph outputs among the results of the model through which a gradient can come."""
    out: Any = program.graph.graph.output_node().args[0]
    results = {o.index for o in program.outputs if o.index >= 0}
    return frozenset(i for i in results if out[i].meta.get("requires_grad", False))


def nodes_in(value: Any) -> list[fx.Node]:
    """Nodes in nested arguments, in order, repeated ones repeated."""
    found: list[fx.Node] = []

    def note(node: fx.Node) -> fx.Node:
        found.append(node)
        return node

    fx.map_arg(value, note)
    return found


def ancestors(nodes: Iterable[fx.Node], stops: Iterable[fx.Node] = ()) -> set[fx.Node]:
    """`nodes` and everything they are computed from, up to `stops`, which belong to it."""
    ends, seen = set(stops), set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            if node not in ends:
                stack.extend(node.all_input_nodes)
    return seen


def tensor_inputs(node: fx.Node) -> list[fx.Node]:
    """Tensor operands of `node`, in argument order, repeated operands repeated."""
    found = nodes_in((node.args, node.kwargs))
    return [n for n in found if isinstance(n.meta.get("val"), torch.Tensor)]


def outputs_of(node: fx.Node) -> list[torch.Tensor]:
    """The tensors that `node` yields."""
    val = node.meta["val"]
    return [val] if isinstance(val, torch.Tensor) else list(val)


def call_text(node: fx.Node) -> str:
    """`node` as one line of text, with its source line, for messages."""
    target = str(node.target).replace("torch.ops.", "")

    def text(a: Any) -> str:
        if isinstance(a, fx.Node):
            return a.name
        if isinstance(a, (list, tuple)):
            return "[" + ", ".join(map(text, a)) + "]"
        return str(a)

    args = ", ".join([*map(text, node.args), *(f"{k}={text(v)}" for k, v in node.kwargs.items())])
    line = f"{node.name} = {target}({args})"
    record = info(node)
    where = [w for w in (record.module, record.source) if w]
    return f"{line}  # {' · '.join(where)}" if where else line


def users_in_order(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """`nodes` without repeats, first occurrence kept."""
    return list(dict.fromkeys(nodes))
