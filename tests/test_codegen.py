"""Generated code with loops computes what straight code does, in the same memory and few lines."""

from __future__ import annotations

import functools
import operator
import random
import re
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from models import make
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar import roll
from autopar.codegen import generate, load
from autopar.expression import Ref, affine, numbered, spliced
from autopar.program import NodeInfo, Phases, set_info
from autopar.roll import Carried, Each, Fixed, Run, Same, runs
from autopar.runtime import VirtualWorld
from autopar.runtime.pieces import piece
from autopar.testing import Golden
from autopar.writer import Writer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")

aten = torch.ops.aten

DROP = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
BERT_DROP = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("tp=2", {"n_layer": 4, **DROP}),
    "llama": ("dp=2, tp=2", {"num_hidden_layers": 4}),
    "t5": ("tp=2", {"num_layers": 4, "dropout_rate": 0.1}),
    "resnet": ("dp=2", {"depths": [1, 4]}),
    "bert": ("dp=2", {"num_hidden_layers": 4, **BERT_DROP}),
}


# --- whole models ------------------------------------------------------------------------------


@functools.cache
def compiled(name: str) -> tuple[Any, nn.Module, Any]:
    mesh, changes = MODELS[name]
    model, inputs = make(name, 4, **changes)
    return autopar.compile(model, mesh, inputs, strict=True), model, inputs


def run_all(found: Any, model: nn.Module, inputs: Any, rolled: bool) -> list[list[Any]]:
    """Results, saved values as a bag, and gradients of each rank."""
    mesh = found.annotated.mesh
    code = load(generate(found.shared, found.title, rolled=rolled), f"<test {rolled}>")
    whole = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
        **found.annotated.constants,
    }

    def body(comm: Any) -> list[Any]:
        comm.seed, comm.step = 0, 1
        phases = found.phases[found.signature(comm.coordinate)]
        values = [
            piece(whole[s.name].detach(), s.layout, mesh, comm.coordinate)
            for s in phases.program.states
        ]
        values += [
            piece(inputs[i.name], i.layout, mesh, comm.coordinate) for i in phases.program.inputs
        ]
        values = [v.contiguous() for v in values]
        with torch.no_grad():
            results, saved = code.forward(comm, torch.device("cpu"), values)
            tangents = [torch.ones_like(results[r]) for r in phases.roots]
            given = [*saved, *tangents]
            assert code.backward is not None
            gradients = code.backward(comm, torch.device("cpu"), given)
        assert not values and not given, "what a function takes it may release"
        return [*results, *gradients]

    return VirtualWorld(mesh, timeout_s=60.0).run(body)


@pytest.mark.parametrize("name", MODELS)
def test_loops_compute_the_same(name: str) -> None:
    found, model, inputs = compiled(name)
    assert found.code().count("    for i in ") >= 2
    straight, loops = (run_all(found, model, inputs, rolled) for rolled in (False, True))
    for one, two in zip(straight, loops, strict=True):
        for a, b in zip(one, two, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)


class Meter(TorchDispatchMode):
    """The bytes that tensors hold after each operation; collectives are operators without data."""

    def __init__(self) -> None:
        super().__init__()
        self.owners: Counter[int] = Counter()  # live tensors of each storage
        self.held = 0
        self.history: list[tuple[str, int]] = []

    def watch(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        self.held += size if not self.owners[key] else 0
        self.owners[key] += 1
        weakref.finalize(tensor, self.release, key, size)

    def release(self, key: int, size: int) -> None:
        self.owners[key] -= 1
        self.held -= size if not self.owners[key] else 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(value, Tensor):
                self.watch(value)
        self.history.append((str(func), self.held))
        return out


class Started:
    """A collective that has been started."""

    def __init__(self, out: Any) -> None:
        self.out = out

    def wait(self) -> Any:
        out, self.out = self.out, None
        return out


class Comm:
    """The collectives as operators on tensors without data."""

    def __init__(self) -> None:
        self.message: list[Tensor] = []  # of the scatter under way: a copy of its operands

    def __getattr__(self, name: str) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            if name in ("uniform", "keep_mask"):
                return torch.empty(args[0], **kwargs)
            if name == "reduce_scatter_bucket_start":
                self.message.clear()
                self.message += [torch.empty_like(x) for x in args[0]]
            out = getattr(torch.ops.autopar, name.removesuffix("_start"))(*args, **kwargs)
            return Started(out) if name.endswith("_start") else out

        return run


def history(
    phases: Phases, rolled: bool, place: str = "meta", keep: bool = False
) -> list[tuple[str, int]]:
    """Each operation of forward and backward with the bytes held after it.

    Args:
        keep: whether the caller holds the inputs too, not the parameters alone.
    """
    code = load(generate(phases, "", rolled=rolled), f"<meter {rolled}>")
    device = torch.device(place)

    def new(node: fx.Node) -> Tensor:
        val = node.meta["val"]
        return torch.zeros(val.shape, dtype=val.dtype, device=device)

    values = [new(n) for n in phases.forward.graph.nodes if n.op == "placeholder"]
    params = values[: None if keep else len(phases.program.states)]  # the caller holds them
    meter = Meter()
    for tensor in values:
        meter.watch(tensor)
    del tensor
    with torch.no_grad(), meter:
        results, saved = code.forward(Comm(), device, values)
        given = [*saved, *(torch.ones_like(results[r]) for r in phases.roots)]
        del saved
        assert code.backward is not None
        code.backward(Comm(), device, given)
    assert params
    return meter.history


@pytest.mark.parametrize("name", MODELS)
def test_loops_hold_no_more_memory(name: str) -> None:
    phases = compiled(name)[0].of_any()
    straight, loops = history(phases, False), history(phases, True)
    assert [name for name, _ in straight] == [name for name, _ in loops]
    peak = max(held for _, held in straight)
    assert max(held for _, held in loops) == peak
    more = [b - a for (_, a), (_, b) in zip(straight, loops, strict=True)]
    assert more[-1] == 0
    assert max(more) <= peak / 100  # what all turns use goes after the last, not within it


def test_lines_do_not_grow_with_depth() -> None:
    lines = {}
    for layers in (4, 8, 16):
        model, inputs = make("llama", 4, num_hidden_layers=layers)
        code = autopar.compile(model, "dp=2, tp=2", inputs, strict=True).code()
        lines[layers] = len(code.splitlines())
    assert max(lines.values()) - min(lines.values()) <= 8, lines


class Block(nn.Module):
    """A residual perceptron with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.linear(self.norm(x)))
        return x + nn.functional.dropout(y, 0.5, self.training)


def test_code_of_blocks(golden: Golden) -> None:
    model = nn.Sequential(nn.Linear(8, 8), *(Block() for _ in range(6)))
    found = autopar.compile(model, "dp=2", torch.empty(4, 8))
    forward, backward = re.sub(r"(\.py):\d+", r"\1", found.code()).split("\n\n\n")
    golden(forward, name="forward")
    golden(backward, name="backward")


# --- graphs by hand ----------------------------------------------------------------------------


class Graph:
    """A graph of element-wise calls on matrices, with fake values."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.module = ""

    def new(self, *names: str) -> list[fx.Node]:
        """Inputs."""
        nodes = [self.graph.placeholder(name) for name in names]
        for node in nodes:
            node.meta["val"] = torch.empty(8, 8, dtype=torch.float64, device="meta")
        return nodes

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call."""
        node = self.graph.call_function(target, args, kwargs)
        values = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        node.meta["val"] = target(*values[0], **values[1])
        set_info(node, NodeInfo(module=self.module))
        return node

    def pad(self, x: fx.Node, count: int = 7) -> fx.Node:
        """`count` calls in a row."""
        for _ in range(count):
            x = self.call(aten.sin.default, x)
        return x

    def end(self, *outputs: fx.Node) -> fx.Graph:
        """The graph with its outputs."""
        self.graph.output(outputs)
        return self.graph


class Doubling:
    """A communicator whose reductions double."""

    def all_reduce_bucket(self, xs: list[Tensor], axis: str) -> list[Tensor]:
        return [2 * x for x in xs]

    def all_reduce_bucket_start(self, xs: list[Tensor], axis: str) -> Started:
        return Started([2 * x for x in xs])


def source(graph: fx.Graph, rolled: bool = True) -> str:
    head = "import torch\naten = torch.ops.aten\n\n"
    return head + Writer(graph, 0, rolled).written("forward", [], -1)


def held_after(graph: fx.Graph, rolled: bool) -> list[tuple[str, int]]:
    """Each operation with the bytes held after it."""
    code = load(source(graph, rolled), f"<meter {rolled}>")
    inputs = [n.meta["val"].clone() for n in graph.nodes if n.op == "placeholder"]
    meter = Meter()
    for tensor in inputs:
        meter.watch(tensor)
    del tensor
    with meter:
        code.forward(Doubling(), torch.device("meta"), inputs)
    return meter.history


def held_in_vain(run: Run) -> int:
    """How many values a loop may hold to its end, and not to their last use in the last turn."""
    fixed = {o.value for row in run.operands for o in row if isinstance(o, Fixed)}
    return len([v for v in fixed if isinstance(v, fx.Node)]) + len(run.first)


def agree(graph: fx.Graph) -> str:
    """The code, which computes with loops what it computes without and what the graph means.

    Memory is the same too but for the last turns of loops.
    """
    torch.manual_seed(0)
    inputs = [torch.randn(8, 8, dtype=torch.float64) for n in graph.nodes if n.op == "placeholder"]
    comm, device = Doubling(), torch.device("cpu")
    code = source(graph)
    have = load(code, "<rolled>").forward(comm, device, list(inputs))
    want = load(source(graph, False), "<straight>").forward(comm, device, list(inputs))
    for a, b in zip(have, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    after = [held_after(graph, rolled) for rolled in (False, True)]
    assert [name for name, _ in after[0]] == [name for name, _ in after[1]]
    more = [b - a for (_, a), (_, b) in zip(*after, strict=True)]
    if "comm." not in code:
        spare = dict.fromkeys(range(len(more)), 0)
        for run in runs(graph):
            turn = range(run.stop - len(run.operands), run.stop)
            spare.update(dict.fromkeys(turn, 8 * 8 * 8 * held_in_vain(run)))
        assert all(m <= spare[k] for k, m in enumerate(more)), more
        module = fx.GraphModule(nn.Module(), graph)
        for a, b in zip(have, module(*inputs), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    return code


def only(graph: fx.Graph) -> Run:
    (run,) = runs(graph)
    return run


def test_operands_of_each_kind_are_found() -> None:
    g = Graph()
    x, fixed, *each = g.new("x", "fixed", "w0", "w1", "w2", "w3")
    for w in each:
        y = g.call(aten.mul.Tensor, x, fixed)
        y = g.pad(g.call(aten.add.Tensor, y, w))
        x = g.call(aten.sub.Tensor, x, y)
    graph = g.end(x)
    run = only(graph)
    assert run.count == 4 and len(run.operands) == 10
    assert run.operands[0] == (Carried(9), Fixed(fixed))
    assert run.operands[1] == (Same(0), Each(tuple(each)))
    assert run.operands[9] == (Carried(9), Same(8))
    assert run.first[9].name == "x" and not run.kept
    code = agree(graph)
    assert "w0_each = inputs[2:]" in code and "w0_each.pop(0)" in code
    assert len(code.splitlines()) < 26 < len(source(graph, False).splitlines())


@pytest.mark.parametrize(
    ("starts", "text"), [((0, 1, 2, 3), "1, i, "), ((3, 0, 2, 5), "= [3, 0, 2, 5]")]
)
def test_counts_that_differ_are_computed_or_listed(starts: tuple[int, ...], text: str) -> None:
    g = Graph()
    x, table = g.new("x", "table")
    for start in starts:
        row = g.pad(g.call(aten.slice.Tensor, table, 1, start, start + 1))
        x = g.call(aten.add.Tensor, x, row)
    graph = g.end(x)
    assert only(graph).operands[0] == (
        Fixed(table), Fixed(1), Each(starts), Each(tuple(s + 1 for s in starts))
    )  # fmt: skip
    assert text in agree(graph)


def test_collected_values_are_taken_back_in_reverse() -> None:
    g = Graph()
    (x,) = g.new("x")
    kept, first = [], []
    for i in range(5):
        g.module = f"layers.{i}"
        first.append(x)
        kept.append(g.pad(x, 8))
        x = g.call(aten.add.Tensor, x, kept[-1])
    x = g.call(aten.exp.default, x)
    for i in reversed(range(5)):
        g.module = f"layers.{i}"
        x = g.pad(g.call(aten.mul.Tensor, g.call(aten.mul.Tensor, x, kept[i]), first[i]), 8)
    one, two = runs(graph := g.end(x))
    assert one.count == two.count == 5
    assert Each(tuple(kept[::-1])) in two.operands[0]
    assert Each(tuple(first[::-1])) in two.operands[1]
    code = agree(graph)
    assert "for i in range(5):" in code and "for i in reversed(range(5)):" in code
    assert "# layers.{i}" in code
    assert "= [x, *" in code  # what came in, then what was left by each turn but the last
    assert code.count(".pop()") == 2


def test_old_value_that_is_used_after_the_new_one_is_kept_apart() -> None:
    g = Graph()
    (x,) = g.new("x")
    for _ in range(4):
        old, x = x, g.pad(x, 6)
        y = g.call(aten.add.Tensor, x, old)
        x = g.call(aten.cos.default, x)
        y = g.call(aten.mul.Tensor, y, old)
        x, spare = g.call(aten.add.Tensor, x, y), x
        y = g.call(aten.add.Tensor, old, spare)
        y = g.call(aten.sin.default, y)
    graph = g.end(x, y)
    agree(graph)


@pytest.mark.parametrize(("early", "count"), [(False, 4), (True, 3)])
def test_carried_value_that_nothing_uses_later_is_released(early: bool, count: int) -> None:
    """A loop would hold it to its end: it is used near that, or the last block is not in."""
    g = Graph()
    a, b = g.new("a", "b")
    for _ in range(4):
        a = g.call(aten.add.Tensor, b if early else g.pad(b), a)
        b = g.pad(a, 8 if early else 1)
    graph = g.end(g.call(aten.exp.default, b))
    assert only(graph).count == count
    agree(graph)


@pytest.mark.parametrize(
    ("inputs", "name"),
    [
        ("w_0_b w_1_b w_2_b", "w_b"),
        ("w_0 w_1 w_2", "w_0_each"),
        ("add_2 mul_2 sub_2", "add_2_each"),
        ("a_0_b a_1_b a_2_x_b", "a_0_b_each"),
        ("w_0_i w_1_i w_2_i", "w_i"),
    ],
)
def test_list_of_inputs_has_their_common_name(inputs: str, name: str) -> None:
    g = Graph()
    x, *each = g.new("i", *inputs.split())
    for value in each:
        x = g.pad(g.call(aten.sub.Tensor, x, value), 9)
    assert f"    {name} = inputs[1:]" in agree(g.end(x))


def test_two_lists_that_begin_alike_are_two() -> None:
    g = Graph()
    x, w, *each = g.new("x", "w", "w1", "w2", "v1", "v2")
    for one, two in [(w, w), *zip(each[:2], each[2:], strict=True)]:
        for value in (one, two, one, two):
            x = g.call(aten.sub.Tensor, x, value)
        x = g.pad(x, 4)
    graph = g.end(x)
    assert only(graph).count == 3
    agree(graph)


def test_first_values_of_a_carried_one_must_agree() -> None:
    g = Graph()
    x, other = g.new("x", "other")
    for _ in range(4):
        x, other = (y := g.pad(g.call(aten.add.Tensor, x, other), 9)), y
    graph = g.end(x)
    run = only(graph)
    assert run.count == 3  # the first block takes two values
    agree(graph)


@pytest.mark.parametrize("members", [1, 3])
def test_reductions_in_a_loop_are_awaited_at_the_end(members: int) -> None:
    g = Graph()
    (x,) = g.new("x")
    taken = []
    for _ in range(3):
        parts = [x := g.pad(x, 4) for _ in range(members)]
        x = g.pad(x, 4)
        bucket = g.graph.call_function(torch.ops.autopar.all_reduce_bucket.default, (parts, "dp"))
        bucket.meta["val"] = [p.meta["val"] for p in parts]
        for k in range(members):
            taken.append(g.graph.call_function(operator.getitem, (bucket, k)))
            taken[-1].meta["val"] = parts[k].meta["val"]
    graph = g.end(x, *taken)
    code = agree(graph)
    assert code.count("all_reduce_bucket_start") == 1
    loop, _, rest = code.partition(" = [each.wait() for each in ")
    assert "for i in range(3):" in loop and "wait()" not in loop and "getitem" in rest


# near misses: no run, or a shorter one


def test_other_shape_is_no_repetition() -> None:
    g = Graph()
    (x,) = g.new("x")
    for width in (8, 16, 8, 32):
        x = g.call(aten.reshape.default, x, [64 // width, width])
        x = g.call(aten.reshape.default, g.pad(x), [8, 8])
    graph = g.end(x)
    assert runs(graph) == ()
    agree(graph)


def test_other_constant_is_no_repetition() -> None:
    g = Graph()
    (x,) = g.new("x")
    for factor in (1, 1.0, True, 2):
        x = g.pad(g.call(aten.mul.Tensor, x, factor))
    graph = g.end(x)
    assert runs(graph) == ()
    agree(graph)


def test_value_from_two_blocks_before_is_no_operand() -> None:
    g = Graph()
    before, x = g.new("before", "x")
    for _ in range(5):
        y = g.call(aten.add.Tensor, g.pad(x), before)
        before, x = x, y
    graph = g.end(x)
    agree(graph)
    g = Graph()
    last = g.new("a", "b")
    for _ in range(5):  # without the value in between as an operand
        last = [last[1], g.call(aten.exp.default, g.pad(last[0]))]
    graph = g.end(*last)
    assert all(run.count == 2 and len(run.operands) in (8, 16) for run in runs(graph))
    agree(graph)


@pytest.mark.parametrize("used", range(5))
def test_value_of_one_block_used_later_is_in_no_loop(used: int) -> None:
    g = Graph()
    (x,) = g.new("x")
    inner = []
    for _ in range(5):
        inner.append(g.pad(x, 4))
        x = g.pad(inner[-1], 5)
    graph = g.end(g.call(aten.add.Tensor, x, inner[used]))
    for run in runs(graph):
        assert inner[used] not in {n for block in run.blocks for n in block} or not run.kept
    assert sum(run.count for run in runs(graph)) < 5
    agree(graph)


def test_short_blocks_stay_in_a_row() -> None:
    g = Graph()
    (x,) = g.new("x")
    for _ in range(9):
        x = g.call(aten.cos.default, g.pad(x, 3))
    graph = g.end(x)
    assert runs(graph) == ()
    agree(graph)


def wired(seed: int) -> fx.Graph:
    """A graph of repeated blocks with operands of all kinds, made at random."""
    rng = random.Random(seed)
    g = Graph()
    inputs = g.new(*(f"x{k}" for k in range(30)))
    outputs: list[fx.Node] = []
    pool: list[list[fx.Node]] = [inputs[k::6] for k in range(6)]  # values for turns
    for stage in range(3):
        period, count = rng.randint(8, 14), rng.randint(2, 5)
        plan = []
        for j in range(period):
            kinds = ["same"] * 4 * (j > 0) + ["carried"] * 2 + ["fixed"] + ["each"] * 2
            plan.append([(rng.choice(kinds), rng.random()) for _ in range(2)])
        plan[0][0] = ("carried", 0.999)
        targets = [
            rng.choice((aten.add.Tensor, aten.mul.Tensor, aten.maximum.default)) for _ in plan
        ]
        before = rng.sample(inputs, 2)
        lists = [
            row[:count] if rng.random() < 0.5 else row[:count][::-1]
            for row in rng.choices([r for r in pool if len(r) >= count][-4:], k=3)
        ]
        blocks = []
        down = rng.random() < 0.5
        for t in range(count):
            g.module = f"stage{stage}.{count - t if down else t}"
            now: list[fx.Node] = []
            for target, row in zip(targets, plan, strict=True):
                sources = {"same": now, "carried": before[-2:], "fixed": inputs[:5]}
                sources["each"] = [values[t] for values in lists]
                now.append(g.call(target, *(_part(sources[kind], at) for kind, at in row)))
            blocks.append(now)
            before = now
        for j in range(period):
            if rng.random() < 0.15:
                pool.append([block[j] for block in blocks])
            if rng.random() < 0.15:
                outputs += [block[j] for block in blocks]
        if rng.random() < 0.2:
            outputs.append(rng.choice(rng.choice(blocks)))
        outputs += rng.sample(blocks[-1][-2:], rng.randint(1, 2))
    return g.end(*outputs)


def _part(values: list[fx.Node], at: float) -> fx.Node:
    return values[int(at * len(values))]


def test_graphs_wired_at_random_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MIN_PERIOD", 4), ("MIN_SAVED", 4), ("LIST_LINES", 0)):
        monkeypatch.setattr(roll, name, value)  # loops however little they save
    found: Counter[type] = Counter()
    for seed in range(100):
        graph = wired(seed)
        graph.eliminate_dead_code()
        for run in runs(graph):
            found.update(type(o) for row in run.operands for o in row)
        agree(graph)
    assert all(found[kind] > 100 for kind in (Same, Carried, Fixed, Each)), found


# --- expressions -------------------------------------------------------------------------------


def test_lists_are_written_short() -> None:
    a, b = ([Ref(name, k) for k in range(6)] for name in "ab")
    sizes = {"a": 6, "b": 6}
    x = Ref("x")
    rows = [v for pair in zip(a, b[::-1], strict=True) for v in pair]
    for values, text in [
        (a, "*a"),
        (a[::-1], "*a[::-1]"),
        ([x, *a[2:], x], "x, *a[2:], x"),
        (a[1:5:3], "*a[1:5:3]"),
        ([*a[:2], *b], "*a[:2], *b"),
        (rows, "*(v for row in zip(a, b[::-1]) for v in row)"),
        ([a[0], a[3], a[1]], "*a[:4:3], a[1]"),
        ([a[0], b[0], None, 3], "a[0], b[0], None, 3"),
        ([a[2], a[2]], "a[2], a[2]"),
    ]:
        assert ", ".join(spliced(values, sizes)) == text
        scope = {"a": list(range(6)), "b": list(range(10, 16)), "x": -1}
        want = [eval(str(v), scope) for v in values]
        assert eval(f"[{', '.join(spliced(values, sizes))}]", scope) == want


@pytest.mark.parametrize(("first", "step"), [(0, 1), (3, 1), (-2, 1), (5, -1), (1, 4), (9, -3)])
def test_affine_counts(first: int, step: int) -> None:
    assert [eval(affine(first, step, "i")) for i in range(4)] == [
        first + step * i for i in range(4)
    ]


def test_names_are_numbered() -> None:
    def show(first: int, step: int) -> str:
        return f"{first}+{step}"

    assert numbered(["a.0.b1", "a.1.b3", "a.2.b5"], show) == "a.{0+1}.b{1+2}"
    assert numbered(["a.0", "a.1", "a.3"], show) == "a.0"
    assert numbered(["a.0", "b.1"], show) == "a.0"
