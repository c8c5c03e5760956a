"""Cut a step over microbatches into pipeline stages, with what goes from one to another.

The body of the step, forward and backward of one microbatch, is one graph, in which each call
belongs to the stage of the call that it came from. What a stage takes of another is received, what
others take of it is sent. A sum over the stages, such as the gradient of a weight that two of them
use, is taken of their sums over all microbatches.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar.errors import PlanError
from autopar.passes.accumulate import Part, Parts, join_of
from autopar.pipeline import Schedule, check_schedule, communicate
from autopar.program import Phases, ancestors, call_text, differentiable, info
from autopar.schedule import Stages, Step

__all__ = ["Staging", "split", "staging_problems"]

aten = torch.ops.aten


class _Home(NamedTuple):
    """Where a call of the body runs: forward ("F") or backward ("B") of a stage."""

    kind: str
    stage: int


@dataclass(frozen=True, slots=True)
class Staging:
    """The stages of a step, and the graph of each function of each rank of the pipeline."""

    ranks: tuple[Stages, ...]
    graphs: tuple[Mapping[str, fx.GraphModule], ...]

    @property
    def schedule(self) -> Schedule:
        """The instructions of all ranks."""
        return self.ranks[0].schedule


def split(phases: Phases, schedule: Schedule) -> Staging:
    """Take a differentiated program over microbatches apart into the stages of a pipeline.

    Args:
        schedule: what is computed where and when; its edges are found here.

    Raises:
        PlanError: rows of different microbatches are mixed, or there is no loss.
        ScheduleError: the schedule is wrong for these stages.
    """
    if len(phases.roots) != 1 or not any(o.is_loss for o in phases.program.outputs):
        raise PlanError(
            "Training in pipeline stages needs the loss inside the program.",
            hint="pass loss=fn to parallelize and call model(x, targets=y)",
        )
    return _Stages(phases, schedule).staged()


def staging_problems(staging: Staging) -> list[str]:
    """What a rank would not have when it needs it, found by reading its instructions.

    Each function must find what it takes: it came with the call, is counted or made before the
    schedule, was computed by this rank for the same microbatch, or received. What is summed over
    microbatches must be given once for each; and what ranks wait for after the schedule is sent.
    """
    found: list[str] = []
    for stages in staging.ranks:
        found += _Reading(staging, stages).problems()
    for names in zip(*(s.messages.items() for s in staging.ranks), strict=True):
        if len({tuple(map(str, n)) for n in names}) > 1:
            found.append(f"the ranks send other values: {names[0][0]}")
    if len({tuple(s.moves) for s in staging.ranks}) > 1:
        found.append("the ranks exchange other sums")
    return found


class _Reading:
    """The instructions of a rank, read without running them."""

    def __init__(self, staging: Staging, stages: Stages) -> None:
        self.staging, self.stages = staging, stages
        step = stages.step
        self.common = {*step.placed, step.tangent[0], *(j.result for j in step.counted)}
        self.values: dict[int, set[str]] = {}
        self.given: dict[tuple[str, int], int] = {}
        self.found: list[str] = []

    def problems(self) -> list[str]:
        """What is missing, and what is there too often."""
        stages, step = self.stages, self.stages.step
        self.common |= self.run("start", "start", set())
        for i in stages.schedule.ranks[stages.rank]:
            own = self.values.setdefault(i.microbatch, set())
            if i.moves:
                names = set(stages.messages.get(i.message[:3], ()))
                if i.sends and not names <= own:
                    self.found.append(f"rank {stages.rank} sends {names - own} before it is there")
                own |= set() if i.sends else names
            elif f"{i.kind}{i.stage}" in step.takes:
                for name in self.run(str(i), f"{i.kind}{i.stage}", own):
                    own.add(name)
                    self.given[name, i.microbatch] = self.given.get((name, i.microbatch), 0) + 1
        numbers = range(stages.schedule.microbatches)
        for name in (*(j.operand for j in step.summed), *step.cut):
            counts = [self.given.get((name, k), 0) for k in numbers]
            if name not in self.common and counts != [1] * len(counts):
                self.found.append(f"rank {stages.rank} adds {name} up {counts} times")
        sums = {j.result for j in step.summed}
        moved = {n: a for n, a, b in stages.moves if b == stages.rank}
        for name, source in moved.items():
            there = {j.result for j in self.staging.ranks[source].step.summed}
            if name not in there:
                self.found.append(f"rank {source} has no {name} for rank {stages.rank}")
        self.common |= sums | set(moved)
        for name in ("end", "finish"):
            self.run(name, name, set())
        return self.found

    def run(self, where: str, name: str, own: set[str]) -> set[str]:
        """What a function gives; a problem where it does not find what it takes."""
        step = self.stages.step
        missing = set(step.takes.get(name, ())) - own - self.common
        if missing:
            self.found.append(
                f"rank {self.stages.rank} lacks {', '.join(sorted(missing))} for {where}"
            )
        return set(step.gives.get(name, ())) - {""}


class _Stages(Parts):
    def __init__(self, phases: Phases, schedule: Schedule) -> None:
        super().__init__(phases)
        self.schedule = schedule
        self.known: dict[fx.Node, int | None] = {}
        self.fixed: dict[fx.Node, int] = {}  # sums within a stage
        self.edges = self.forward_edges()
        self.differing = {info(n).origin for n in self.varying if n not in self.late}
        self.regroup()
        self.survey()
        self.keep_twins()
        self.known.clear()

    # --- sums over stages ------------------------------------------------------------------------

    def stage(self, node: fx.Node) -> int | None:
        """The stage of a call of the body, by its origin or else by its operands; or None."""
        if node not in self.varying or node.op != "call_function":
            return None
        if node in self.fixed:
            return self.fixed[node]
        if node not in self.known:
            found: int | None = info(node).stage if info(node).stage >= 0 else None
            if found is None or self.sums(node):
                own = {s for n in node.all_input_nodes if (s := self.stage(n)) is not None}
                late = node in self.late
                if len(own) == 1 or found is None:
                    found = (min(own) if late else max(own)) if own else None
            self.known[node] = found
        return self.known[node]

    def regroup(self) -> None:
        """Sum gradients of a value within each stage first, and over stages as late as can be."""
        for node in list(self.graph.nodes):
            if not self.sums(node) or (len(node.users) == 1 and any(map(self.sums, node.users))):
                continue
            groups: dict[int, list[fx.Node]] = {}
            for leaf in self.leaves(node):
                stage = self.stage(leaf)
                if stage is None:
                    break
                groups.setdefault(self.path(info(node).stage, stage)[0], []).append(leaf)
            else:
                if len(groups) > 1:
                    self.apart(node, [(s, groups[s]) for s in sorted(groups, reverse=True)])
                else:
                    self.fix(node, *groups)

    def fix(self, node: fx.Node, stage: int) -> None:
        """Let a stage compute a sum and those that only it uses."""
        self.fixed[node] = stage
        for n in node.all_input_nodes:
            if self.sums(n) and set(n.users) == {node}:
                self.fix(n, stage)

    def forward_edges(self) -> set[tuple[int, int]]:
        """(from, to) stages of the values that the calls of one take of another."""
        found = set()
        for node in self.graph.nodes:
            for operand in node.all_input_nodes:
                a, b = (None if n is None else self.stage(n) for n in (operand, node))
                if operand not in self.late and a is not None and b is not None and a < b:
                    found.add((a, b))
        self.known.clear()
        return found

    def path(self, source: int, target: int) -> list[int]:
        """The stages after `source` by which values reach `target`; gradients return by them."""
        came: dict[int, int] = {}
        queue = [source] if source >= 0 else []
        for at in queue:
            for a, b in sorted(self.edges):
                if a == at and b not in came:
                    came[b] = a
                    queue.append(b)
        found = [target]
        while found[0] in came and came[found[0]] != source:
            found.insert(0, came[found[0]])
        return found

    def sums(self, node: fx.Node) -> bool:
        """Whether a call adds gradients that differ between microbatches."""
        operands = node.all_input_nodes
        plain = node.target is aten.add.Tensor and len(node.args) == 2 and not node.kwargs
        return (
            plain and len(operands) == 2 and node in self.varying
            and self.linear.issuperset(operands)
        )  # fmt: skip

    def leaves(self, node: fx.Node) -> list[fx.Node]:
        """What a sum adds up, sums that only it uses taken apart."""
        found = []
        for n in node.all_input_nodes:
            own = self.sums(n) and set(n.users) == {node}
            found.extend(self.leaves(n) if own else [n])
        return found

    def apart(self, node: fx.Node, groups: Sequence[tuple[int, Sequence[fx.Node]]]) -> None:
        """Replace a sum by that of the sums of groups, each reduced over microbatches before."""
        tail = self.tail(node)
        last = tail[-1] if tail else node
        totals = []
        with self.graph.inserting_before(last):
            for stage, group in groups:
                total = self.added(group, node, stage)
                for before, link in zip((node, *tail), tail, strict=False):
                    total = self.graph.node_copy(link, _swap(before, total))
                    total.meta = dict(link.meta)
                    self.late[total] = None
                    self.fixed[total] = stage
                totals.append(total)
            whole = self.added(totals, last)
        last.replace_all_uses_with(whole)
        self.gradients = [whole if g is last else g for g in self.gradients]
        for dead in reversed([node, *tail] if tail else [node]):
            if not dead.users:
                self.graph.erase_node(dead)

    def added(self, values: Sequence[fx.Node], like: fx.Node, stage: int | None = None) -> fx.Node:
        """The sum of values, as the call `like` gives it, made by a stage."""
        total = values[0]
        for value in values[1:]:
            total = self.graph.call_function(aten.add.Tensor, (total, value))
            total.meta = dict(like.meta)
            self.late[total] = None
            if stage is not None:
                self.fixed[total] = stage
        return total

    def tail(self, node: fx.Node) -> list[fx.Node]:
        """The calls from a sum to its reduction over microbatches, if nothing else uses them."""
        chain: list[fx.Node] = []
        at = node
        while len(at.users) == 1:
            user = next(iter(at.users))
            if user.op != "call_function" or len(self.linear & set(user.all_input_nodes)) != 1:
                return []
            chain.append(user)
            if user in self.joins:
                return chain
            if info(user).origin in self.differing or self.sums(user):
                return []
            at = user
        return []

    # --- where calls run -------------------------------------------------------------------------

    def keep_twins(self) -> None:
        """What a stage computes again is taken by no other: they have received it in forward."""
        for node in list(self.late):
            for operand in node.all_input_nodes if node.users else ():
                twin = self.late.get(operand)
                other = self.stage(operand) not in (None, self.stage(node))
                if twin is not None and other:
                    node.replace_input_with(operand, twin)

    def placed(self, body: Iterable[Any]) -> dict[fx.Node, _Home]:
        """The home of each call of the body that a stage computes; others are made where used."""
        needed = ancestors((n for n in body if n is not None), self.joins)
        found: dict[fx.Node, _Home] = {}
        for node in self.graph.nodes:
            if node not in needed or node.op != "call_function" or node in self.joins:
                continue
            stage = self.stage(node)
            if stage is not None:  # else it is made of inputs alone
                found[node] = _Home("B" if node in self.late else "F", stage)
        return found

    def halves(self, homes: Mapping[fx.Node, _Home], stage: int) -> set[fx.Node]:
        """The backward calls of a stage that what it returns to others needs."""
        mine = [n for n, h in homes.items() if h == ("B", stage)]
        returned = [n for n in mine if any(u in homes and homes[u].stage != stage for u in n.users)]
        found = ancestors(returned).intersection(mine)
        found |= {n for n in mine if n.target is operator.getitem and n.args[0] in found}
        return found

    # --- the functions ---------------------------------------------------------------------------

    def staged(self) -> Staging:
        """The stages of the step."""
        needed = ancestors(n for n in (*self.results, *self.gradients) if n is not None)
        used: set[fx.Node] = set().union(*(self.sources[n] for n in self.varying & needed))
        counted = [s for s in self.joins if s in used]
        summed = [s for s in self.joins if s in needed and s not in used]
        inner = [n for n in self.results if n in self.varying]
        body = [*(s.args[0] for s in summed), *inner]
        homes = self.placed(body)
        for join in counted:
            if self.sources[join]:
                raise self.mixed(join)
            if ancestors([join], self.joins) & set(self.of_parameters()) - {join}:
                raise self.batch_wide(join)
        once = self.once(body, counted)
        messages = self.messages(homes)
        schedule = self.scheduled(messages)
        functions = self.functions(homes, body, once)
        ends = [n for n in self.results if n not in self.varying]
        looks = {n: _look(n) for names in messages.values() for n in names}
        return self.by_rank(
            schedule, functions, counted, summed, once, ends, inner,
            {key: tuple(n.name for n in names) for key, names in messages.items()},
            {n.name: look for n, look in looks.items()}, homes,
        )  # fmt: skip

    def of_parameters(self) -> list[fx.Node]:
        """Placeholders of parameters."""
        names = {s.node for s in self.phases.program.states if s.is_parameter}
        return [n for n in self.inputs if n.name in names]

    def batch_wide(self, node: fx.Node) -> PlanError:
        """A count over the batch that needs the model."""
        return PlanError(
            "A value of the whole batch is needed within the model, before any microbatch is done.",
            where=call_text(node),
            expected="a loss that is a sum over rows, divided by counts",
            hint="leave out the axis pp, or take batch norm in training out of the model",
        )

    def messages(self, homes: Mapping[fx.Node, _Home]) -> dict[tuple[str, int, int], list[fx.Node]]:
        """The values that go from stage to stage, by (direction, from, to)."""
        found: dict[tuple[str, int, int], dict[fx.Node, None]] = {}
        for node, home in homes.items():
            for operand in node.all_input_nodes:
                source = homes.get(operand)
                if source is None or source.stage == home.stage:
                    continue
                forwards = source.kind == "F"
                assert (source.stage < home.stage) == forwards, (
                    f"{operand} of {source} cannot be used by {node} of {home}"
                )
                hops = [source.stage, home.stage]
                if not forwards:  # back by the stages by which values came
                    hops = [home.stage, *self.path(home.stage, source.stage)][::-1]
                for a, b in itertools.pairwise(hops):
                    found.setdefault((source.kind, a, b), {})[operand] = None
        order = {n: i for i, n in enumerate(self.graph.nodes)}
        return {k: sorted(v, key=order.__getitem__) for k, v in sorted(found.items())}

    def scheduled(self, messages: Iterable[tuple[str, int, int]]) -> Schedule:
        """The schedule with the edges of these messages, its sends and receives, checked."""
        edges = sorted({(a, b) for kind, a, b in messages if kind == "F"})
        back = sorted({(b, a) for kind, a, b in messages if kind == "B"})
        assert set(back) <= set(edges), "gradients return where values went"
        bare = dataclasses.replace(
            self.schedule.computed, edges=tuple(edges), returning=tuple(back)
        )
        schedule = communicate(bare)
        check_schedule(schedule)
        return schedule

    def functions(
        self, homes: Mapping[fx.Node, _Home], body: Sequence[Any], once: Sequence[fx.Node]
    ) -> dict[str, tuple[int, Part]]:
        """(stage, part) of each function of each stage."""
        found: dict[str, tuple[int, Part]] = {}
        wanted = set(body)
        for stage in range(len(self.schedule.owners)):
            first = self.halves(homes, stage)
            backward = {n for n, h in homes.items() if h == ("B", stage)}
            groups = {
                "F": {n for n, h in homes.items() if h == ("F", stage)},
                "B": backward,
                "I": first,
                "W": backward - first,
            }
            for kind, group in groups.items():
                gives = [
                    n for n in self.graph.nodes
                    if n in group and (
                        n in wanted or any(u in homes and u not in group for u in n.users)
                    )
                ]  # fmt: skip
                known = [*self.inputs, *self.joins, *(n for n in homes if n not in group)]
                found[f"{kind}{stage}"] = (stage, self.part(gives, [*known, *once]))
        return found

    def by_rank(
        self, schedule: Schedule, functions: Mapping[str, tuple[int, Part]],
        counted: Sequence[fx.Node], summed: Sequence[fx.Node], once: Sequence[fx.Node],
        ends: Sequence[fx.Node], inner: Sequence[fx.Node],
        messages: Mapping[tuple[str, int, int], tuple[str, ...]],
        looks: dict[str, Any], homes: Mapping[fx.Node, _Home],
    ) -> Staging:  # fmt: skip
        """The functions of each rank, and the sums that others need of it."""
        by_name = {n.name: n for n in self.graph.nodes}
        owners = schedule.owners
        owner = {
            s.name: owners[homes[_operand(s)].stage] if _operand(s) in homes else 0 for s in summed
        }
        count = self.part([s.args[0] for s in counted], self.inputs)
        end = self.part(ends, [*self.inputs, *self.joins])
        states = {s.node: s for s in self.phases.program.states}
        gradients = dict(zip(self.phases.gradients, self.gradients, strict=True))
        nodes = {s.name: s.node for s in self.phases.program.states}
        parts: list[dict[str, Part]] = []
        held: list[set[str]] = []
        for rank in range(len(schedule.ranks)):
            own = {k: p for k, (s, p) in functions.items() if owners[s] == rank}
            taken = {n for p in own.values() for n in p.takes}
            start = self.part([n for n in once if n.name in taken], [*self.inputs, *counted])
            found = {"count": count, "start": start, **own, "end": end}
            need = {n for p in found.values() for n in p.takes if n in states}
            while True:  # the gradient of a state may take another
                wanted = [g if nodes[name] in need else None for name, g in gradients.items()]
                found["finish"] = self.part(wanted, [*self.inputs, *self.joins], reductions=True)
                more = {n for n in found["finish"].takes if n in states} - need
                if not more:
                    break
                need |= more
            parts.append(found)
            held.append(need)
        held[0] |= set(states).difference(*held)  # what no stage uses
        ranks, graphs, moves = [], [], []
        names = {s.name for s in summed}
        for rank, found in enumerate(parts):
            foreign = {n for k in ("end", "finish") for n in found[k].takes if n in names}
            moves += [(n, owner[n], rank) for n in sorted(foreign) if owner[n] != rank]
        looks.update((n, _look(by_name[n])) for n, _, _ in moves)
        for rank, made in enumerate(parts):
            names_held = frozenset(states[n].name for n in held[rank])
            sums = [s for s in summed if owner[s.name] == rank]
            cut = {n.name: self.dim(n) for n in inner if owners[homes[n].stage] == rank}
            step = Step(
                takes={k: p.takes for k, p in made.items()},
                gives={k: p.gives for k, p in made.items()},
                counted=tuple(map(join_of, counted)),
                summed=tuple(map(join_of, sums)),
                placed=tuple(n.name for n in self.inputs if n not in self.tangents),
                results=tuple(n.name for n in self.results),
                cut=cut,
                tangent=(self.tangents[0].name, self.tangents[0].meta["val"].dtype),
                loss=self.phases.roots[0],
                carrying=differentiable(self.phases.program),
                scaling=frozenset(s.name for s in self.joins if s in self.linear),
            )
            ranks.append(Stages(step, schedule, rank, messages, looks, tuple(moves), names_held))
            graphs.append({k: p.graph for k, p in made.items()})
        return Staging(tuple(ranks), tuple(graphs))


def _look(node: fx.Node) -> tuple[tuple[Any, ...], torch.dtype]:
    """Local shape, with sizes where places differ, and dtype of a value."""
    shapes = info(node).shapes
    val = node.meta["val"]
    return (tuple(shapes[0]) if shapes else tuple(val.shape)), val.dtype


def _operand(join: fx.Node) -> fx.Node:
    """What a join takes."""
    return join.all_input_nodes[0]


def _swap(before: fx.Node, after: fx.Node) -> Callable[[fx.Node], fx.Node]:
    """Puts one operand in place of another."""
    return lambda n: after if n is before else n
