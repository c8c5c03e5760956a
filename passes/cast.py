"""Compute in a narrow dtype what is kept in a wide one."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar.arguments import Arguments
from autopar.program import NodeInfo, Program, info, set_info

__all__ = ["Cast", "is_cast_state", "narrowed"]

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Cast:
    """Give states and inputs the dtypes they are kept and passed in, cast where they are used.

    Before:
        program(w: "bf16[64, 64]"): y = aten.linear(x, w)
    After:
        program(w: "f32[64, 64]"):  c = aten._to_copy(w, dtype=bf16); y = aten.linear(x, c)

    Args:
        dtypes: of states and inputs by name; others stay.
    """

    dtypes: Mapping[str, torch.dtype]
    name: str = "cast"

    def run(self, program: Program) -> Program:
        """Rewrite a global program."""
        program = program.copy()
        nodes = program.placeholders()
        last = list(nodes.values())[-1]
        for table in (program.states, program.inputs):
            for row in table:
                dtype = self.dtypes.get(row.name, row.dtype)
                if dtype != row.dtype:
                    last = _cast(program.graph.graph, nodes[row.node], dtype, last)
        states, inputs = (
            tuple(dataclasses.replace(r, dtype=self.dtypes.get(r.name, r.dtype)) for r in table)
            for table in (program.states, program.inputs)
        )
        return program.replace(states=states, inputs=inputs)


def narrowed(
    model: nn.Module, arguments: Arguments, dtype: torch.dtype
) -> tuple[nn.Module, Arguments, dict[str, torch.dtype]]:
    """The model and its arguments in a narrow dtype, and the dtypes that were theirs.

    Floating parameters and arguments are narrowed; buffers, and what the loss takes beside the
    outputs (`targets`), stay.
    """
    memo: dict[int, Any] = {}
    kept: dict[str, torch.dtype] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if p.is_floating_point():
            kept[name] = p.dtype
            if id(p) not in memo:
                memo[id(p)] = nn.Parameter(_as(p, dtype), requires_grad=p.requires_grad)
    memo.update({id(b): b for b in model.buffers()})
    tensors = []
    for name, t in zip(arguments.names, arguments.tensors, strict=True):
        narrow = t.is_floating_point() and name.partition(".")[0] != "targets"
        tensors.append(_as(t, dtype) if narrow else t)
        if narrow:
            kept[name] = t.dtype
    given = Arguments(arguments.names, tuple(tensors), arguments.leaves, arguments.spec)
    return copy.deepcopy(model, memo), given, kept


def _as(fake: Any, dtype: torch.dtype) -> Tensor:
    with fake.fake_mode:
        return torch.empty(fake.shape, dtype=dtype, device=fake.device)


def _cast(graph: fx.Graph, node: fx.Node, dtype: torch.dtype, after: fx.Node) -> fx.Node:
    val = node.meta["val"]
    with graph.inserting_after(after):
        new = graph.call_function(aten._to_copy.default, (node,), {"dtype": val.dtype})
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    new.meta = dict(node.meta)
    set_info(new, NodeInfo(source=info(node).source, module=info(node).module))
    node.meta["val"] = _as(val, dtype)
    return new


def is_cast_state(node: fx.Node) -> bool:
    """Whether a call casts a state that needs a gradient, and does nothing else."""
    if node.target is not aten._to_copy.default or set(node.kwargs) != {"dtype"}:
        return False
    source: Any = node.args[0]
    return source.op == "placeholder" and bool(source.meta.get("requires_grad"))
