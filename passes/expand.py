"""Replace calls whose choice cuts a factor that can be cut only in their expansion."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.passes.normalize import mark_gradients
from autopar.passes.splice import Splicer
from autopar.program import Program, info
from autopar.rules import find
from autopar.rules.factors import specs

__all__ = ["Expand"]


@dataclass(frozen=True, slots=True)
class Expand:
    """Write norms, softmax and losses in simple operations where a reduced dim is cut.

    Before:
        y = aten.softmax(x, -1)                       # tp: cut v
    After:
        m = aten.amax(x, [-1], True); e = aten.exp(x - m); y = e / aten.sum(e, [-1], True)
    """

    name: str = "expand"

    def run(self, program: Program) -> Program:
        """Rewrite an annotated program; new nodes have no choice yet."""
        table = specs(program)
        names = set()
        for node, spec in table.items():
            cut = {f for option in info(node).choice.values() for f in option.split("+")}
            if cut & spec.expand:
                names.add(node.name)
        if not names:
            return program
        program = program.copy()
        splicer = Splicer(program.graph.graph)
        for node in list(program.graph.graph.nodes):
            if node.name in names:
                rule = find(node.target)
                assert rule is not None and rule.expansion is not None, "expand needs an expansion"
                splicer.replace(node, rule.expansion, *node.args, **node.kwargs)
        splicer.flush()
        program.graph.graph.eliminate_dead_code()
        mark_gradients(program)
        return program
