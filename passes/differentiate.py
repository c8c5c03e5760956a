"""Trace an SPMD program together with its gradient and part it into forward and backward."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar.compat import FakeTensorMode, get_proxy_mode, make_fx
from autopar.errors import AutoparError
from autopar.program import Phases, Program, call_text, info, set_info

__all__ = ["Differentiate"]

aten = torch.ops.aten
_TRANSPARENT = (aten.detach.default, aten.alias.default, torch.ops.autopar.vary.default)


class _Replay(fx.Interpreter):
    """Runs the SPMD graph under tracing and hands each node's record to what it becomes."""

    current: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        self.current = n
        if n.op != "call_function":
            return super().run_node(n)
        graph: fx.Graph = get_proxy_mode().tracer.graph
        before = len(graph.nodes)
        result = super().run_node(n)
        record = dataclasses.replace(info(n), origin=n.name)
        fresh = itertools.islice(reversed(graph.nodes), len(graph.nodes) - before)
        for i, node in enumerate(fresh):
            set_info(node, record if i == 0 else dataclasses.replace(record, layouts=()))
        return result


@dataclass(frozen=True, slots=True)
class Differentiate:
    """Make the forward graph (results, saved values) and the backward graph (gradients).

    Every typed collective has its adjoint as autograd formula, so backward communication comes out
    as ordinary nodes.

    Before:
        y = autopar.all_reduce(aten.linear(x, w), "tp", "sum")
    After:
        forward:  m = aten.mm(x, t(w)); y = autopar.all_reduce(m, "tp", "sum"); return y, x, w
        backward: dx = aten.mm(dy, w); dw = aten.mm(t(dy), x)

    Args:
        device: device of the tensors at run time.
        gradients: false for a forward-only program.
    """

    device: str = "cpu"
    gradients: bool = True
    name: str = "differentiate"

    def run(self, program: Program) -> Phases:
        """Differentiate an SPMD program with respect to all states that require a gradient."""
        gm = program.graph
        placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        wanted = [i for i, s in enumerate(program.states) if s.requires_grad and self.gradients]
        roots = _roots(program) if wanted else []
        replay = _Replay(gm)

        def joint(values: list[Tensor], tangents: list[Tensor]) -> tuple[list[Any], list[Any]]:
            values = [v.detach() for v in values]
            for i in wanted:
                values[i].requires_grad_(True)
            results = replay.run(*values)
            tops = [results[i] for i in roots]
            live = [(r, t) for r, t in zip(tops, tangents, strict=True) if r.requires_grad]
            if not live:
                return list(results), [None] * len(wanted)
            grads = torch.autograd.grad(
                [r for r, _ in live],
                [values[i] for i in wanted],
                [t for _, t in live],
                allow_unused=True,
            )
            return list(results), list(grads)

        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            fakes = [_fake(n, self.device) for n in placeholders]
            out = gm.graph.output_node().args[0]
            tangents = [_fake(out[i], self.device) for i in roots]  # type: ignore[index]
        try:
            with mode:
                graph = make_fx(joint)(fakes, tangents).graph
        except AutoparError:
            raise
        except Exception as error:
            raise _trace_error(replay, error) from error
        _clean(graph)
        return _part(program, graph, len(placeholders), tuple(roots), wanted)


def _fake(node: fx.Node, device: str) -> Tensor:
    val = node.meta["val"]
    return torch.empty(val.shape, dtype=val.dtype, device=device)


def _roots(program: Program) -> list[int]:
    """Graph outputs that a gradient can come from: the loss, or every float output without one."""
    losses = [o.index for o in program.outputs if o.is_loss]
    if losses:
        return losses
    out = program.graph.graph.output_node().args[0]
    return sorted(
        {
            o.index
            for o in program.outputs
            if o.index >= 0 and out[o.index].meta.get("requires_grad")  # type: ignore
        }
    )


def _trace_error(replay: _Replay, error: Exception) -> AutoparError:
    return AutoparError(
        f"The local program could not be traced: {type(error).__name__}: "
        f"{str(error).splitlines()[0] if str(error) else ''}",
        where=call_text(replay.current) if replay.current else "",
        hint="the rule of this operation may be wrong for these shapes; please report it",
    )


def _clean(graph: fx.Graph) -> None:
    """Drop what does nothing at run time."""
    for node in list(graph.nodes):
        if node.target in _TRANSPARENT:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _part(
    program: Program, graph: fx.Graph, n_inputs: int, roots: tuple[int, ...], wanted: list[int]
) -> Phases:
    nodes = list(graph.nodes)
    placeholders = [n for n in nodes if n.op == "placeholder"]
    flat = list(graph.output_node().args[0])  # type: ignore[arg-type]
    results, grads = _unnest(flat, len(wanted))
    names = [s.node for s in program.states] + [i.node for i in program.inputs]
    for node, name in zip(placeholders, names, strict=False):
        node._rename(name)
    tangents = placeholders[n_inputs:]
    forward: set[fx.Node] = set()
    stack = [r for r in results if isinstance(r, fx.Node)]
    while stack:
        node = stack.pop()
        if node not in forward:
            forward.add(node)
            stack.extend(node.all_input_nodes)
    forward |= set(placeholders[:n_inputs])
    forward |= {n for n in nodes if n.target is operator.getitem and n.args[0] in forward}
    rest = [n for n in nodes if n.op == "call_function" and n not in forward]
    saved: dict[fx.Node, None] = {}
    for node in [*rest, *(g for g in grads if isinstance(g, fx.Node))]:
        operands = node.all_input_nodes if node in rest else [node]
        for operand in operands:
            if operand in forward:
                saved[operand] = None
    saved_list = list(saved)
    fw = _extract(nodes, forward, placeholders[:n_inputs], [*results, *saved_list])
    bw = _extract(nodes, set(rest), [*saved_list, *tangents], grads)
    return Phases(
        program,
        fw,
        bw,
        n_results=len(results),
        roots=roots,
        gradients=tuple(program.states[i].name for i in wanted),
    )


def _unnest(flat: Any, n_grads: int) -> tuple[list[Any], list[Any]]:
    if len(flat) == 2 and isinstance(flat[0], (list, tuple)):
        return list(flat[0]), list(flat[1])
    n = len(flat) - n_grads
    return list(flat[:n]), list(flat[n:])


def _extract(
    nodes: list[fx.Node], keep: set[fx.Node], inputs: list[fx.Node], outputs: list[Any]
) -> fx.GraphModule:
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        new = graph.placeholder(node.name)
        new.meta = dict(node.meta)
        mapping[node] = new
    for node in nodes:
        if node in keep and node.op == "call_function":
            mapping[node] = graph.node_copy(node, lambda n: mapping[n])
            mapping[node].meta = dict(node.meta)
    graph.output(tuple(mapping[o] if isinstance(o, fx.Node) else None for o in outputs))
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
    return fx.GraphModule(nn.Module(), graph)


