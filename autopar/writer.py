"""One function of a generated module: its calls and loops, and when it releases what."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import fx

from autopar.collectives import ops
from autopar.expression import AHEAD, Ref, call, listed, numbered, spliced
from autopar.loop import Family, Loop
from autopar.overlap import ahead, late
from autopar.program import info
from autopar.roll import leaves, runs
from autopar.sizes import Size

__all__ = ["Writer"]


def _sizes(node: fx.Node) -> list[Size]:
    """The sizes that a call is written with."""
    record = info(node)
    guard = [record.unless, *leaves(record.shapes)] if record.unless is not None else []
    return [v for v in (*leaves((node.args, node.kwargs)), *guard) if isinstance(v, Size)]


_TAKEN = {"comm", "device", "inputs", "aten", "torch", AHEAD}
_REDUCTIONS = (ops.all_reduce_bucket.default, ops.reduce_scatter_bucket.default)


def _is_bucket(node: Any) -> bool:
    return getattr(node, "target", None) in _REDUCTIONS


class Writer:
    """One function under construction.

    Args:
        held: so many of the first inputs the caller holds anyway: they need not be released.
    """

    def __init__(self, graph: fx.Graph, held: int, rolled: bool) -> None:
        self.inputs = [n for n in graph.nodes if n.op == "placeholder"]
        self.outputs: list[Any] = list(graph.output_node().args[0])  # type: ignore[arg-type]
        self.held = set(self.inputs[:held])
        calls = [n for n in graph.nodes if n.op == "call_function"]
        self.late, self.ahead = late(graph), ahead(graph)
        self.bound = list(dict.fromkeys(size for n in calls for size in _sizes(n)))
        self.names = {n.name for n in graph.nodes} | _TAKEN
        self.turn = self.fresh("i")
        self.home = {n: Ref(n.name) for n in self.inputs}
        self.final: dict[fx.Node, Ref] = {}  # variables of values that are in a list too
        self.sizes = {"inputs": len(self.inputs)}
        self.last: dict[Ref, int] = {}  # the item that uses a value last
        self.kept: set[Ref] = set()  # inputs in lists that are not released
        self.items: list[fx.Node | Loop] = []
        apart = {*self.late, *self.ahead}
        found = {r.start: r for r in (runs(graph, apart) if rolled else ())}
        at = 0
        while at < len(calls):
            if at in found:
                self.add_loop(Loop(found[at], self.turn, self.fresh, self.late, self.ahead))
                at = found[at].stop
            else:
                self.add_call(calls[at])
                at += 1
        self.name_inputs()

    def fresh(self, name: str) -> str:
        """`name`, or a name like it where that is taken."""
        new, k = name, 1
        while new in self.names:
            new, k = f"{name}_{k}", k + 1
        self.names.add(new)
        return new

    def add_call(self, node: fx.Node) -> None:
        """Append a call."""
        self.items.append(node)
        self.home[node] = Ref(node.name)
        source: Any = node.args[0] if node.args else None
        if _is_bucket(node):
            self.sizes[node.name] = len(source)
        elif self.member(node):
            self.home[node] = Ref(source.name, int(node.args[1]))  # type: ignore[arg-type]

    def add_loop(self, loop: Loop) -> None:
        """Append a loop; values used after it are in lists or in the variables it ends with."""
        self.items.append(loop)
        for j in loop.run.first:
            last = loop.run.blocks[-1][j]
            self.home[last] = self.final[last] = Ref(loop.heads[j].name)
        for j, name in loop.lists.items():
            self.sizes[name] = loop.run.count
            self.home.update((b[j], Ref(name, t)) for t, b in enumerate(loop.run.blocks))

    def wanted(self, count: int) -> list[int]:
        """An order of the first `count` inputs: side by side what a loop takes turn by turn."""
        index = {n: k for k, n in enumerate(self.inputs[:count])}
        families = [f for loop in self.loops() for f in self.given(loop)]
        nodes = [n for f in families for n in f.stored if n in index]
        return list(dict.fromkeys([*(index[n] for n in nodes), *range(count)]))

    def together(self, values: list[fx.Node], order: list[int]) -> list[int]:
        """The order with elements of a list moved to the first of them."""
        lists: dict[str, list[int]] = {}
        for k in order:
            lists.setdefault(self.home[values[k]].name, []).append(k)
        members = (sorted(m, key=lambda k: self.home[values[k]].index or 0) for m in lists.values())
        return [k for m in members for k in m]

    def loops(self) -> list[Loop]:
        """The loops in order."""
        return [item for item in self.items if isinstance(item, Loop)]

    def given(self, loop: Loop) -> list[Family]:
        """Families of a loop that are inputs, so that a list is unpacked for them."""
        nodes = [f for f in loop.families.values() if isinstance(f.nodes[0], fx.Node)]
        return [f for f in nodes if all(n.op == "placeholder" for n in f.nodes)]

    def gathered(self, loop: Loop) -> list[Family]:
        """The other families of a loop: at least one value is computed."""
        nodes = [f for f in loop.families.values() if isinstance(f.nodes[0], fx.Node)]
        return [f for f in nodes if any(n.op != "placeholder" for n in f.nodes)]

    # --- what uses what ------------------------------------------------------------------------

    def at(self, node: fx.Node) -> Ref:
        """Where a value is: in a variable rather than in a list."""
        return self.final.get(node, self.home[node])

    def arguments(self, value: Any, inside: bool = False) -> Any:
        """Arguments with `Ref` for nodes; in lists, elements of lists, which can be spliced."""
        if isinstance(value, fx.Node):
            return self.home[value] if inside else self.at(value)
        if isinstance(value, (list, tuple)):
            return [self.arguments(v, True) for v in value]
        return value

    def of_call(self, node: fx.Node) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments of a call outside loops."""
        kwargs = {k: self.arguments(v) for k, v in node.kwargs.items()}
        return [self.arguments(a) for a in node.args], kwargs

    def member(self, node: fx.Node) -> bool:
        """Whether a call outside loops takes a member of a joined reduction."""
        return node.target is operator.getitem and _is_bucket(node.args[0])

    def used(self, item: fx.Node | Loop) -> list[Ref]:
        """What an item uses, repeated uses of a loop's families repeated."""
        if isinstance(item, Loop):
            members = [self.home[n] for f in self.gathered(item) for n in f.nodes]
            alone = [*item.run.first.values(), *item.fixed()]
            return [*(self.at(n) for n in alone), *members]
        if self.member(item):
            return []
        return [r for r in leaves(self.of_call(item)) if isinstance(r, Ref)]

    def count_uses(self) -> None:
        """Find the last use of every value."""
        for e, item in enumerate(self.items):
            self.last.update(dict.fromkeys(self.used(item), e))
        out = [self.home[v] for v in self.outputs if isinstance(v, fx.Node)]
        self.last.update(dict.fromkeys(out, len(self.items)))

    def elements(self, name: str) -> list[Ref]:
        """The elements of a list."""
        return [Ref(name, k) for k in range(self.sizes[name])]

    def deaths(self, e: int, used: Iterable[Ref]) -> str:
        """Statements that release what item `e` uses last."""
        names: dict[str, None] = {}
        others = []
        for ref in dict.fromkeys(used):
            if self.last[ref] != e or ref in self.kept:
                continue
            if ref.index is None or all(self.last.get(r, -1) <= e for r in self.elements(ref.name)):
                names[ref.name] = None
            else:
                others.append(f"{ref} = None")
        return "; ".join([*([f"del {', '.join(names)}"] if names else []), *others])

    # --- lines ---------------------------------------------------------------------------------

    def written(self, name: str, labels: list[str], n_results: int) -> str:
        """The source of the function.

        Args:
            labels: names of the inputs, for comments; without, placements are not written either.
            n_results: outputs that are results, before the saved ones; -1: one list of all.
        """
        self.count_uses()
        for e, loop in enumerate(self.items):
            if isinstance(loop, Loop):
                self.settle(e, loop)
        lines = [f"def {name}(comm, device, inputs):", *self.binding(), *self.unpacked(labels)]
        lines += [f"    {AHEAD} = {self.begun(node)}" for node in list(self.ahead)[:1]]
        place = ""
        for e, item in enumerate(self.items):
            if isinstance(item, Loop):
                lines += self.loop_lines(e, item, bool(labels))
                place = ""
                continue
            record = info(item)
            here = f"{record.module} {f'({record.source})' if record.source else ''}".strip()
            text = self.call_lines(e, item, bool(labels))
            if text and here and here != place:
                lines.append(f"    # {here}")
                place = here
            lines += text
        lines += self.waits()
        values = [self.home[v] if isinstance(v, fx.Node) else v for v in self.outputs]
        results = spliced(values[: max(n_results, 0)], self.sizes)
        saved = spliced(values[max(n_results, 0) :], self.sizes)
        lines.append(f"    return [{', '.join(results)}], [" if n_results >= 0 else "    return [")
        return "\n".join([*lines, *(f"        {v}," for v in saved), "    ]"]) + "\n"

    def binding(self) -> list[str]:
        """The lines that bind the sizes that differ between ranks."""
        lines = []
        for size in self.bound:
            values = sorted(set(size.values), reverse=True)
            lines.append(f"    {size} = {size.text}  # {' or '.join(map(str, values))}")
        return lines

    def call_lines(self, e: int, node: fx.Node, remarks: bool) -> list[str]:
        """The lines of a call outside loops."""
        if self.member(node):
            return []
        early = node in self.ahead
        text = call(node, *self.of_call(node), self.sizes, node in self.late)
        text = f"{AHEAD}.wait()" if early else text
        dead = self.deaths(e, self.used(node))
        layouts = info(node).layouts
        remark = f"  # {layouts[0]}" if layouts and remarks else ""
        lines = [f"    {node.name} = {text}{f'; {dead}' if dead else ''}{remark}"]
        if not node.users:
            lines.append(f"    del {node.name}")
        following = self.ahead[node] if early else None
        if following is not None:
            lines.append(f"    {AHEAD} = {self.begun(following)}")
        return lines

    def begun(self, node: fx.Node) -> str:
        """The expression that starts a gather before its place."""
        for loop in self.loops():
            if node in loop.heads:
                return loop.begun(loop.heads.index(node), self.at, self.sizes, loop.first)
        return call(node, *self.of_call(node), self.sizes, True)

    def settle(self, e: int, loop: Loop) -> None:
        """Decide where the turns of a loop take their values from."""
        for j, name in loop.lists.items():
            if self.elements(name)[-1] not in self.last and loop.heads[j] not in self.late:
                loop.after.append(f"del {name}[-1]")  # the variable that the loop ends with remains
                self.sizes[name] -= 1
        gone = [self.final[loop.run.blocks[-1][j]] for j in loop.run.first]
        loop.after += [f"del {ref}" for ref in gone if ref not in self.last]
        counts = Counter(self.used(loop))
        for family in self.gathered(loop):
            refs = [self.home[n] for n in family.nodes]
            name = refs[0].name
            whole = self.elements(name) if refs[0].index is not None else []
            rising = refs == whole
            if rising or refs == whole[::-1]:
                ends = {self.last[r] == e for r in refs}
                if ends == {False} or (ends == {True} and all(counts[r] == 1 for r in refs)):
                    family.take(name, self.turn, ends == {True}, rising, loop.forwards)
                    continue
            name = self.fresh(f"{family.stored[0].name}_each")
            stored = [self.home[n] for n in family.stored]
            loop.before.append(f"{name} = {listed(stored, self.sizes)}")
            loop.copied += stored
            family.take(name, self.turn, True, loop.forwards, loop.forwards)
        taken: set[fx.Node] = set()
        for family in loop.families.values():
            if family.pops and len(family.uses) > 1:
                node = family.stored[0]
                own = node.op == "placeholder" and self.home[node] not in self.last
                own = own and node not in taken
                taken.add(node)
                family.variable = node.name if own else self.fresh(f"{node.name}_{self.turn}")

    def name_inputs(self) -> None:
        """Name the lists of inputs; what the caller holds anyway is found there by all."""
        for loop in self.loops():
            for family in self.given(loop):
                name = self.family_name(family)
                early = any(loop.heads[j] in self.ahead for j in family.uses)
                pops = not self.held.issuperset(family.nodes)
                pops = pops and not (early and len(family.uses) > 1)  # one turn's two uses part
                family.take(name, self.turn, pops, loop.forwards, loop.forwards)
                self.sizes[name] = len(family.stored)
                for k, node in enumerate(family.stored):
                    if not pops and self.home[node].index is None:
                        self.home[node] = Ref(name, k)
                        self.kept.add(Ref(name, k))

    def family_name(self, family: Family) -> str:
        """The common part of the names of inputs, if only a number within differs."""
        first, *rest = (n.name.split("_") for n in family.stored)
        same = [all(k < len(r) and r[k] == word for r in rest) for k, word in enumerate(first)]
        numbers = all(same[k] or word.isdigit() for k, word in enumerate(first))
        if same[-1] and numbers and {len(r) for r in rest} == {len(first)}:
            return self.fresh("_".join(w for w, s in zip(first, same, strict=True) if s))
        return self.fresh(f"{family.stored[0].name}_each")

    def loop_lines(self, e: int, loop: Loop, remarks: bool) -> list[str]:
        """The lines of a loop, with what goes before and after it."""
        lists = [n for j, n in loop.lists.items() if not loop.awaited(j)]
        lines = [f"{', '.join(part)} = {', '.join(['[]'] * len(part))}" for part in _parts(lists)]
        lines += loop.before
        lines += [f"{loop.heads[j].name} = {self.at(n)}" for j, n in loop.run.first.items()]
        throughout = [self.at(n) for n in loop.fixed()]
        begun = [*(self.at(n) for n in loop.run.first.values()), *loop.copied]
        dead = self.deaths(e, (r for r in begun if r not in set(throughout)))
        lines += [*([dead] if dead else []), loop.head()]
        last = [n for n in loop.run.blocks[-1] if n in self.ahead][-1:]
        following = self.ahead[last[0]] if last else None
        then = self.begun(following) if following is not None else ""
        lines += [f"    {line}" for line in loop.body(self.at, self.sizes, remarks, then)]
        dead = self.deaths(e, throughout)
        lines += [*([dead] if dead else []), *loop.after]
        return [f"    {line}" for line in lines]

    def unpacked(self, labels: list[str]) -> list[str]:
        """The lines that take the inputs apart."""
        families = [f for loop in self.loops() for f in self.given(loop)]
        index = {n: k for k, n in enumerate(self.inputs)}

        def remark(nodes: tuple[fx.Node, ...]) -> str:
            if not labels:
                return ""
            names = [labels[index[n]] for n in nodes]
            label = numbered(names, lambda a, step: f"{a}..{a + step * (len(names) - 1)}")
            layouts = info(nodes[0]).layouts
            words = [label] if label.replace(".", "_") != nodes[0].name else []
            return f"  # {' '.join([*words, *map(str, layouts[:1])])}"

        if not families:
            names = [f"        {n.name},{remark((n,))}" for n in self.inputs]
            return ["    (", *names, "    ) = inputs", "    inputs.clear()"]
        rows = [
            (index[n], f"{n.name} = inputs[{index[n]}]{remark((n,))}")
            for n in self.inputs
            if self.home[n] == Ref(n.name) and self.home[n] in self.last
        ]
        for f in families:
            refs = [Ref("inputs", index[n]) for n in f.stored]
            line = f"{f.name} = {listed(refs, self.sizes)}{remark(f.stored)}"
            rows.append((min(index[n] for n in f.stored), line))
        return [f"    {line}" for _, line in sorted(rows)] + ["    inputs.clear()"]

    def waits(self) -> list[str]:
        """The lines that await reductions, in the order in which they were started."""
        lines = [f"{n.name} = {n.name}.wait()" for n in self.late if n in self.items]
        for loop in self.loops():
            for j, node in enumerate(loop.heads):
                if node in self.late:
                    lines.append(f"{loop.lists[j]} = [each.wait() for each in {loop.lists[j]}]")
                elif loop.awaited(j):
                    source = loop.lists[loop.heads.index(node.args[0])]
                    text = f"[each[{node.args[1]}] for each in {source}]"
                    lines.append(f"{loop.lists[j]} = {text}")
        return [f"    {line}" for line in lines]


def _parts(names: list[str]) -> list[list[str]]:
    """Names in groups that fit in a line."""
    parts: list[list[str]] = []
    for name in names:
        if not parts or sum(len(n) + 6 for n in [*parts[-1], name]) > 90:
            parts.append([])
        parts[-1].append(name)
    return parts
