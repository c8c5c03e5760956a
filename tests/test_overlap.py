"""Gathers are under way while the calls before them compute, and scatters while those after do."""

from __future__ import annotations

import functools
import re
from operator import getitem
from typing import Any

import pytest
import torch
from models import make
from pool import Pool
from test_codegen import Block, Comm, Graph, Started, history
from test_equality import equal, one_thread
from test_processes import agree, loss_of, report, sgd, train
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar import memory
from autopar.codegen import load
from autopar.memory import peak_bytes
from autopar.overlap import ahead, entered, late, under_way
from autopar.passes.bucket import Bucket
from autopar.program import Phases
from autopar.roll import runs
from autopar.static import check_ranks
from autopar.testing import Golden
from autopar.writer import Writer

__all__ = ["one_thread"]  # the fixture
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")

CAP_BYTES = 110_000  # a layer of the small GPT


def small_buckets(cap_bytes: int = CAP_BYTES) -> pytest.MonkeyPatch:
    """Let a layer of a small model fill a bucket."""
    patch = pytest.MonkeyPatch()
    for user in ("api", "passes.accumulate", "mutation"):
        made = functools.partial(Bucket, cut_cap_bytes=cap_bytes)
        patch.setattr(f"autopar.{user}.Bucket", made)
    return patch


@pytest.fixture(autouse=True)
def small() -> Any:
    patch = small_buckets()
    yield
    patch.undo()


def phases(mesh: str = "fsdp=2", layers: int = 5, **options: Any) -> Phases:
    model, inputs = make("gpt", 12, layers=layers)
    return autopar.compile(model, mesh, inputs, **options).of(0)


# --- in generated code -------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """What runs, in order: ("start" or "wait", number of the bucket), ("call", its operands)."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "autopar" not in str(func):
            flat, _ = torch.utils._pytree.tree_flatten((args, kwargs or {}))
            self.events.append(("call", [t for t in flat if isinstance(t, torch.Tensor)]))
        return func(*args, **(kwargs or {}))


class Noting(Comm):
    """Collectives that note their starts and waits; what gathers give is kept."""

    def __init__(self, mode: Recorder, kind: str) -> None:
        super().__init__()
        self.mode, self.kind, self.count = mode, kind, 0
        self.gathered: list[list[torch.Tensor]] = []

    def __getattr__(self, name: str) -> Any:
        run = super().__getattr__(name)
        if not (name.endswith("_start") and self.kind in name):
            return run

        def start(*args: Any, **kwargs: Any) -> Any:
            number, self.count = self.count, self.count + 1
            self.mode.events.append(("start", number))
            made = run(*args, **kwargs)
            return Waited(self, number, made)

        return start


class Waited(Started):
    """A started collective that notes when it is waited for."""

    def __init__(self, comm: Noting, number: int, made: Started) -> None:
        super().__init__(made.wait())
        self.comm, self.number = comm, number

    def wait(self) -> Any:
        out = super().wait()
        self.comm.mode.events.append(("wait", self.number))
        self.comm.gathered.append(out)
        return out


def events(found: Phases, kind: str) -> list[tuple[list[tuple[str, Any]], Any]]:
    """What forward and backward do, and what they gather."""
    code = load(autopar.codegen.generate(found, ""), "<recorded>")

    def new(node: fx.Node) -> torch.Tensor:
        val = node.meta["val"]
        return torch.zeros(val.shape, dtype=val.dtype, device="meta")

    given = [new(n) for n in found.forward.graph.nodes if n.op == "placeholder"]
    out = []
    for phase in ("forward", "backward"):
        with torch.no_grad(), Recorder() as mode:
            comm = Noting(mode, kind)
            result = getattr(code, phase)(comm, torch.device("meta"), given)
        if phase == "forward":
            results, saved = result
            given = [*saved, *(torch.ones_like(results[r]) for r in found.roots)]
        out.append((mode.events, comm.gathered))
    return out


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("mesh", ["fsdp=2", "dp=2, fsdp=2, tp=2"])
def test_gather_starts_before_the_bucket_before_it_is_used(mesh: str, remat: str) -> None:
    for found, gathered in events(phases(mesh, remat=remat), "gather"):
        steps = [e for e in found if e[0] != "call"]
        count = len(steps) // 2
        assert count >= 4 and steps[0] == ("start", 0)
        for k in range(count):
            at = found.index(("wait", k))
            if k + 1 < count:
                assert found[at + 1] == ("start", k + 1), "one ahead, once the last has come"
                at += 1
            _, used = found[at + 1]
            assert any(t is g for t in used for g in gathered[k]), "the wait is at the first use"
        assert [s for s in steps if s[0] == "wait"] == [("wait", k) for k in range(count)]


@pytest.mark.parametrize("used_twice", [False, True])
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("down", [False, True])
@pytest.mark.parametrize("more", [False, True])
def test_loops_gather_for_the_next_turn(
    more: bool, down: bool, held: bool, used_twice: bool
) -> None:
    """Two gathers a turn, from lists that are used up or not, up or down, with one after or none.

    Args: `held`: the caller holds the weights; `used_twice`: a turn takes one without a gather too.
    """
    g = Graph()
    names = [f"{kind}_{i}_w" for i in range(4) for kind in "ab"]
    *weights, last, x = g.new(*names, "last", "x")

    def gather(value: fx.Node) -> fx.Node:
        args = ([value], "fsdp", [0], [1], [8])
        bucket = g.graph.call_function(torch.ops.autopar.all_gather_bucket.default, args)
        bucket.meta["val"] = [value.meta["val"]]
        taken = g.graph.call_function(getitem, (bucket, 0))
        taken.meta["val"] = value.meta["val"]
        return taken

    for i in reversed(range(4)) if down else range(4):
        g.module = f"layers.{i}"
        for k, weight in enumerate(weights[2 * i : 2 * i + 2]):
            x = g.call(torch.ops.aten.add.Tensor, g.pad(x, 5 + k), gather(weight))
        x = g.call(torch.ops.aten.mul.Tensor, x, weights[2 * i]) if used_twice else x
    g.module = ""
    graph = g.end(g.call(torch.ops.aten.add.Tensor, x, gather(last)) if more else x)
    assert [run.count for run in runs(graph)] == [4]
    torch.manual_seed(0)
    inputs = [torch.randn(8, 8, dtype=torch.float64) for _ in range(len(weights) + 2)]
    found = []
    for rolled in (True, False):
        text = Writer(graph, len(weights) if held else 0, rolled).written("forward", [], -1)
        code = load(f"import torch\naten = torch.ops.aten\n{text}", "<ahead>")
        comm = Tripling()
        found += code.forward(comm, torch.device("cpu"), list(inputs))
        assert comm.under_way == 0 and comm.most == 1 and comm.count == 8 + more
    assert torch.equal(*found)


class Tripling:
    """Gathers that triple, and how many are under way."""

    def __init__(self) -> None:
        self.under_way = self.most = self.count = 0

    def all_gather_bucket_start(self, xs: list[torch.Tensor], *cuts: Any) -> Any:
        self.under_way += 1
        self.most, self.count = max(self.most, self.under_way), self.count + 1
        return Tripled(self, [3 * x for x in xs])


class Tripled(Started):
    """A gather under way."""

    def __init__(self, comm: Tripling, out: list[torch.Tensor]) -> None:
        super().__init__(out)
        self.comm = comm

    def wait(self) -> Any:
        self.comm.under_way -= 1
        return super().wait()


def test_scatter_is_awaited_after_all_calls() -> None:
    found, _ = events(phases(), "scatter")[1]
    kinds = [kind for kind, _ in found]
    assert kinds.count("start") == kinds.count("wait") > 4
    assert set(kinds[kinds.index("wait") :]) == {"wait"}
    assert "call" in kinds[kinds.index("start") :], "the backward pass goes on meanwhile"


def test_loops_stay_loops() -> None:
    lines = {}
    for layers in (6, 12):
        model, inputs = make("gpt", 4, layers=layers)
        code = autopar.compile(model, "fsdp=2", inputs).code()
        assert code.count("    for i in ") == 2
        lines[layers] = len(code.splitlines())
    assert lines[12] - lines[6] <= 8


def test_code_of_blocks(golden: Golden) -> None:
    patch = small_buckets(500)
    model = nn.Sequential(nn.Linear(8, 8), *(Block() for _ in range(6)))
    found = autopar.compile(model, "fsdp=2", torch.empty(4, 8))
    patch.undo()
    forward, backward = re.sub(r"(\.py):\d+", r"\1", found.code()).split("\n\n\n")
    golden(forward.partition("aten = torch.ops.aten\n\n")[2], name="forward")
    loop = re.search(r"    for i in reversed.*?\n(?=    \S)", backward, re.DOTALL)
    assert loop is not None
    golden(loop[0], name="backward")


# --- the same numbers --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("gpt", "fsdp=3", {}),
        ("gpt", "fsdp=2, tp=2", {"remat": "full"}),
        ("gpt", "dp=2, fsdp=2", {"zero": 2}),
        ("gpt", "fsdp=2", {"accumulate": 2}),
        ("llama", "fsdp=2, tp=2", {}),
        ("t5", "fsdp=2", {}),
    ],
)
def test_model_equals_one_device(name: str, mesh: str, options: dict[str, Any]) -> None:
    changes = {"gpt": {"layers": 4}, "llama": {"num_hidden_layers": 4}, "t5": {"num_layers": 3}}
    equal(*make(name, 5, **changes[name]), mesh, **options)


def trains(rank: int, n: int, mesh: str) -> Any:
    patch = small_buckets()
    model, inputs = make("gpt", 8, layers=4)
    parallel = autopar.parallelize(model, mesh)
    found = report(rank, train(parallel, lambda m: loss_of(m(**inputs)), sgd))
    patch.undo()
    return found


@pytest.mark.parametrize("mesh", ["fsdp=3", "dp=2, fsdp=2"])
def test_processes_equal_one_device(mesh: str, pool: Pool) -> None:
    """Three ranks hold uneven pieces, which other messages carry."""
    ranks = pool.run(autopar.mesh(mesh).size, trains, mesh)
    model, inputs = make("gpt", 8, layers=4)
    want = train(make("gpt", 8, layers=4)[0], lambda m: loss_of(m(**inputs)), sgd)
    agree(ranks, want, model, 1e-10)


# --- memory and order --------------------------------------------------------------------------


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("mesh", ["fsdp=2", "dp=2, fsdp=2"])
def test_predicted_peak_is_the_measured_one(mesh: str, remat: str) -> None:
    found = phases(mesh, remat=remat)
    given = [n.meta["val"] for n in found.forward.graph.nodes if n.op == "placeholder"]
    held = sum(v.numel() * v.itemsize for v in given)
    for rolled in (True, False):
        measured = max(size for _, size in history(found, rolled, keep=True)) - held
        assert 0.98 * measured < peak_bytes(found) < 1.02 * measured


@pytest.mark.parametrize("remat", ["none", "full"])
def test_one_bucket_more_is_held(remat: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is gathered ahead, one that is scattered: far less than what rests cut."""
    found = phases(layers=8, remat=remat)
    peak = peak_bytes(found)
    messages: dict[str, int] = {"gather": 0, "scatter": 0}
    for gm in (found.forward, found.backward):
        for bucket, _, _ in under_way(gm.graph):
            kind = str(bucket.target).split("_")[1]
            messages[kind] = max(messages[kind], memory._message_bytes(bucket))
    monkeypatch.setattr(memory, "under_way", lambda graph: [])
    assert peak_bytes(found) < peak <= peak_bytes(found) + sum(messages.values())
    whole = 8 * sum(p.numel() for p in make("gpt", layers=8)[0].parameters())
    assert sum(messages.values()) < whole / 2


def test_parameters_alone_are_gathered_ahead() -> None:
    """What the forward pass has left is gathered where it is used, one layer's at a time."""
    found = phases("fsdp=2, tp=2", remat="full")
    states = {s.node for s in found.program.states}
    for gm in (found.forward, found.backward):
        early = list(ahead(gm.graph))
        assert early and {n.name for g in early for n in g.all_input_nodes} <= states
        assert [n for n in entered(gm.graph) if n in early] == early
        assert sorted(n.name for n in entered(gm.graph)) == sorted(n.name for n in gm.graph.nodes)


def test_reduction_that_is_used_is_not_late() -> None:
    """With copies beside the shards, a scatter is reduced further; that is awaited at the end."""
    graph = phases("dp=2, fsdp=2").backward.graph
    scatters = [
        n for n in graph.nodes if n.target is torch.ops.autopar.reduce_scatter_bucket.default
    ]
    users = {u for n in scatters for taken in n.users for u in taken.users}
    assert users & set(late(graph)) and not set(scatters) & set(late(graph))


def test_gathers_in_another_order_are_found() -> None:
    """Of ranks that start gathers ahead, one takes the second before the first."""
    right, wrong = phases(), phases()
    graph = wrong.forward.graph
    one, two = list(ahead(graph))[:2]
    first = next(n for n in graph.nodes if n.op == "call_function")
    first.prepend(two)
    graph.lint()
    assert list(ahead(graph))[:2] == [two, one]
    mesh = right.program.mesh
    problems = check_ranks({0: right, 1: wrong}, mesh, lambda c: c["fsdp"])
    assert problems and "rank 1" in problems[0]


def test_gather_that_one_rank_cannot_start_ahead_is_found() -> None:
    """Both graphs have the same collectives in the same order, which they enter in another."""
    right, wrong = phases(), phases()
    graph = wrong.forward.graph
    second = list(ahead(graph))[1]
    operand: Any = second.args[0][0]  # type: ignore[index]
    with graph.inserting_before(second):
        made = graph.call_function(torch.ops.aten.clone.default, (operand,))
        made.meta = dict(operand.meta)
    second.replace_input_with(operand, made)
    graph.lint()
    assert second not in ahead(graph)
    problems = check_ranks({0: right, 1: wrong}, right.program.mesh, lambda c: c["fsdp"])
    assert problems and "rank 1" in problems[0]
