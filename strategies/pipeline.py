"""Pipeline parallelism: which stage computes each call, by its cost and what crosses the cuts.

The calls stay in their order and are cut into runs. What depends on inputs alone (masks, positions,
rotary tables) belongs to no stage: each computes what it uses of it.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass

import numpy as np
from torch import Tensor, fx

from autopar.errors import PlanError
from autopar.program import Program, info, outputs_of, tensor_inputs, update_info
from autopar.rules.factors import specs
from autopar.rules.spec import Spec

__all__ = ["Pipeline"]

_MANY = 1500  # cuts that are looked at; beyond, those that fewest bytes cross


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Cut the calls of a program into stages.

    The most that a stage takes is made as small as it can be, where a call takes three times its
    multiplications (forward, gradient of its input, gradient of its weights) and a byte that goes
    from stage to stage as much as `byte_flop` of them: little, as messages run beside the
    computation of other microbatches. An optimum over all cuts, by dynamic programming over their
    places.

    Args:
        stages: their number.
        byte_flop: multiplications that a byte between stages costs beside them.
        at: names of the modules that stages after the first begin with; without, stages are chosen.
    """

    stages: int
    byte_flop: float = 10.0
    at: tuple[str, ...] = ()

    def annotate(self, program: Program) -> None:
        """Give the calls that depend on parameters and inputs a stage.

        Raises:
            PlanError: there are fewer calls than stages, or a name is that of no module.
        """
        calls = anchored(program)
        if len(calls) < self.stages:
            raise PlanError(
                f"The model has {len(calls)} calls that depend on parameters, fewer than "
                f"{self.stages} stages.",
                expected="a smaller axis pp, or fewer stages on a rank",
            )
        ends = self.named(calls) if self.at else self.chosen(program, calls)
        for stage, (a, b) in enumerate(zip((0, *ends), (*ends, len(calls)), strict=True)):
            for node in calls[a:b]:
                update_info(node, stage=stage)

    def named(self, calls: list[fx.Node]) -> tuple[int, ...]:
        """Where the stages end that begin at named modules."""
        if len(self.at) != self.stages - 1:
            raise PlanError(
                f"stages names {len(self.at)} modules, for {self.stages} stages.",
                expected=f"{self.stages - 1}: those that the stages after the first begin with",
            )
        ends: list[int] = []
        for name in self.at:
            places = (i for i, n in enumerate(calls) if _inside(n, name))
            first = next(places, None)
            if first is None or first <= (ends[-1] if ends else 0):
                raise PlanError(
                    f"No stage can begin at {name!r}.",
                    where=f"stages={list(self.at)}",
                    expected="names of sub-modules with calls, in the order in which they run, "
                    "none of them the first",
                )
            ends.append(first)
        return tuple(ends)

    def chosen(self, program: Program, calls: list[fx.Node]) -> tuple[int, ...]:
        """Where the stages end so that the longest of them is as short as can be."""
        if self.stages == 1:
            return ()
        table, order = specs(program), {n: i for i, n in enumerate(calls)}
        n = len(calls)
        work = np.zeros(n + 1)
        crossing = np.zeros(n + 1)
        for i, node in enumerate(calls):
            if node in table:
                work[i + 1] = 3.0 * _work(node, table[node])
            last = max((order[u] for u in node.users if u in order), default=i)
            size = sum(v.numel() * v.itemsize for v in outputs_of(node) if isinstance(v, Tensor))
            crossing[i + 1 : last + 1] += size  # a cut after i, up to one before its last user
        done = np.cumsum(work)
        places = _places(crossing, n, self.stages)
        price = 2 * crossing * self.byte_flop  # values, and their gradients
        price[0] = price[n] = 0.0
        # best[j]: least cost of the dearest of the first stages, if they end at place j
        best = done[places] + price[places]
        came: list[np.ndarray] = []
        for _ in range(self.stages - 1):
            spans = done[places][None, :] - done[places][:, None]  # from, to
            cost = spans + price[places][:, None] + price[places][None, :]
            cost[spans < 0] = np.inf
            cost[np.tril_indices(len(places))] = np.inf  # no stage is empty
            reached = np.maximum(best[:, None], cost)
            came.append(reached.argmin(axis=0))
            best = reached.min(axis=0)
        at, ends = len(places) - 1, []
        for back in reversed(came):
            at = int(back[at])
            ends.append(int(places[at]))
        return tuple(reversed(ends))


def anchored(program: Program) -> list[fx.Node]:
    """The calls that depend on a parameter and on an input, and so belong to a stage, in order."""
    parameters = {s.node for s in program.states if s.is_parameter}
    given = {i.node for i in program.inputs}
    of_states: set[fx.Node] = set()
    of_inputs: set[fx.Node] = set()
    found = []
    for node in program.graph.graph.nodes:
        if node.op == "placeholder":
            of_states.update([node] if node.name in parameters else [])
            of_inputs.update([node] if node.name in given else [])
        elif node.op == "call_function":
            operands = node.all_input_nodes
            states, inputs = (not s.isdisjoint(operands) for s in (of_states, of_inputs))
            of_states.update([node] if states else [])
            of_inputs.update([node] if inputs else [])
            if states and inputs:
                found.append(node)
    return found


def _work(node: fx.Node, spec: Spec) -> int:
    """Multiplications of a call: the sizes of its factors, but for what it only looks up in.

    Attention is two products, with the sum of the widths of keys and values.
    """
    if "scaled_dot_product" in str(node.target):
        query, key, value = (n.meta["val"].shape for n in tensor_inputs(node)[:3])
        return int(math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1]))
    return math.prod(n for factor, n in spec.sizes.items() if factor not in spec.lookup)


def _places(crossing: np.ndarray, n: int, stages: int) -> np.ndarray:
    """Where stages may end: where more bytes cross before and after, and at the end."""
    starts = np.flatnonzero(np.diff(crossing, prepend=-1.0))  # of runs that as many bytes cross
    value = np.append(crossing[starts], 0.0)
    ends = np.append(starts[1:], n + 1)
    low: list[int] = []
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        inner = start > 0 and end <= n
        if inner and value[i] < value[i - 1] and value[i] < value[i + 1]:
            low.extend(range(start, end))
    found = np.array(low, dtype=np.int64)
    if len(found) < 2 * stages:  # too few to choose from
        found = np.arange(1, n)
    if len(found) > _MANY:
        found = np.sort(found[np.argsort(crossing[found], kind="stable")[:_MANY]])
    return np.append(found, n)


def _inside(node: fx.Node, name: str) -> bool:
    module = info(node).module
    return node.target is not operator.getitem and (module == name or module.startswith(f"{name}."))
