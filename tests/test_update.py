"""`model.optimizer`: steps generated from any optimizer class equal that class on one device."""

from __future__ import annotations

import copy
import functools
import pickle
import warnings
from typing import Any

import pytest
import torch
from models import make
from pool import Pool
from test_optimizers import Lion, moments
from test_processes import Arrays, agree, loss_of, report, train, whole
from torch import Tensor, nn

import autopar
from autopar.errors import InputError
from autopar.optimizers import Generated
from autopar.tracing import generated, stepper_of
from autopar.verification import compare, run_eager, run_virtual, tolerance

Params = Any


class Lamb(torch.optim.Optimizer):
    """You et al. 2020, algorithm 2, as many write it: on `.data`, with a Python step count."""

    def __init__(self, params: Params, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                g, s = p.grad.data, self.state[p]
                if not s:
                    s["step"], s["m"], s["v"] = 0, torch.zeros_like(p), torch.zeros_like(p)
                s["step"] += 1
                s["m"].mul_(0.9).add_(g, alpha=0.1)
                s["v"].mul_(0.99).addcmul_(g, g, value=0.01)
                m, v = s["m"] / (1 - 0.9 ** s["step"]), s["v"] / (1 - 0.99 ** s["step"])
                r = m / (v.sqrt() + 1e-6) + 0.01 * p.data
                p.data.add_(r, alpha=-group["lr"] * float(p.data.norm() / r.norm()))


class Shampoo(torch.optim.Optimizer):
    """Gupta et al. 2018, algorithm 1 for matrices; vectors take a plain step."""

    def __init__(self, params: Params, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                g = p.grad
                if g is None:
                    continue
                if g.dim() == 2:
                    s = self.state[p]
                    for name, square in (("left", g @ g.T), ("right", g.T @ g)):
                        s[name] = s.get(name, torch.eye(len(square), dtype=g.dtype)) + square
                    g = _root(s["left"]) @ g @ _root(s["right"])
                p.sub_(g, alpha=group["lr"])


def _root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values**-0.25) @ vectors.T


class Rebinding(torch.optim.Optimizer):
    """Old style: binds new tensors to names and data, counts in the group and in itself, and takes
    the lr by the shape."""

    def __init__(self, params: Params, lr: float) -> None:
        super().__init__(params, {"lr": lr, "count": 0})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["old"], state["m"] = state.get("m", p.grad), 0.9 * state.get("m", 0) + p.grad
                p.grad = p.grad * 2
                scale = group["lr"] / (1 + sum(p.shape)) / (group["count"] + self.calls)
                p.data = p.data - scale * (state["m"] - 0.5 * state["old"] + p.grad)


def mixed(p: Params) -> list[dict[str, Any]]:
    """Three groups, one with another lr and weight decay, one frozen later on."""
    ps = list(p)
    return [
        {"params": ps[::3]},
        {"params": ps[1::3], "lr": 0.003, "weight_decay": 0.2},
        {"params": ps[2::3], "weight_decay": 0.0},
    ]


MORE: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "sgd maximize": (torch.optim.SGD, {"lr": 0.001, "maximize": True, "weight_decay": 0.1}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "adamw tensor lr": (torch.optim.AdamW, {"lr": torch.tensor(0.01), "foreach": False}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.01, "lr_decay": 0.1}),
    "adadelta": (torch.optim.Adadelta, {"lr": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.5}),
    "adamax": (torch.optim.Adamax, {"lr": 0.01, "maximize": True}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01, "weight_decay": 0.1}),
    "radam": (torch.optim.RAdam, {"lr": 0.01}),
    "asgd": (torch.optim.ASGD, {"lr": 0.01, "t0": 2}),
    "rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "lion": (Lion, {"lr": 0.01}),
    "rebinding": (Rebinding, {"lr": 0.01}),
}
MIXING: dict[str, tuple[Any, dict[str, Any]]] = {
    "adafactor": (torch.optim.Adafactor, {"lr": 0.05}),
    "lamb": (Lamb, {"lr": 0.01}),
    "shampoo": (Shampoo, {"lr": 0.01}),
}


# --- on virtual ranks --------------------------------------------------------------------------


@functools.cache
def mixer_on(mesh: str) -> Any:
    """The program that all optimizers step."""
    model, inputs = make("mixer")
    return autopar.compile(model, mesh, inputs)


@pytest.mark.parametrize("mesh", ["dp=2", "fsdp=2", "dp=2, tp=2"])
@pytest.mark.parametrize("name", [n for n in MORE if n != "rebinding"])
def test_step_equals_one_device(name: str, mesh: str) -> None:
    """Virtual ranks have plain pieces, so optimizers that ask for shapes are tried on real ones."""
    cls, options = MORE[name]
    model, inputs = make("mixer")
    compiled = mixer_on(mesh)
    want = run_eager(model, inputs, 3, lambda p: cls(mixed(p), **options))
    have = run_virtual(compiled, model, inputs, 3, lambda p: generated(cls)(mixed(p), **options))
    rows = compare(have, want, tolerance(compiled))
    assert all(r.ok for r in rows), rows


# --- real processes ----------------------------------------------------------------------------


def loop(model: Any, inputs: Any, cls: Any, options: Any) -> tuple[list[Arrays], Any, Any]:
    """A loop with the class itself on a plain model, or made by the parallel one."""
    made: list[Any] = []

    def make_optimizer(parameters: Any) -> Any:
        plain = not hasattr(model, "optimizer")
        made.append(cls(parameters, **options) if plain else model.optimizer(cls, **options))
        return made[0]

    rows = train(model, lambda m: loss_of(m(**inputs)), make_optimizer)
    return rows, moments(made[0]), made[0]


def trains(rank: int, n: int, name: str, mesh: str, how: str) -> Any:
    cls, options = (MORE | MIXING)[name]
    model, inputs = make("mixer")
    parallel = autopar.parallelize(model, mesh)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if how == "plain":
            optimizers: list[Any] = []

            def make_optimizer(p: Any) -> Any:
                optimizers.append(cls(p, **options))
                return optimizers[0]

            rows = train(parallel, lambda m: loss_of(m(**inputs)), make_optimizer)
            state = moments(optimizers[0])
        else:
            rows, state, _ = loop(parallel, inputs, cls, options)
    told = [str(w.message) for w in caught if "steps whole tensors" in str(w.message)]
    return report(rank, rows), state, told


def equal_states(have: Any, want: Any) -> None:
    assert len(have) == len(want)
    for a, b in zip(have, want, strict=True):
        assert list(a) == list(b)
        for key in a:
            one, two = torch.as_tensor(a[key]), torch.as_tensor(b[key])
            torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("mesh", ["fsdp=2", "dp=2, tp=2"])
@pytest.mark.parametrize("name", ["sgd", "adamw", "nadam", "rprop", "rebinding"])
def test_processes_step_as_one_device(name: str, mesh: str, pool: Pool) -> None:
    found = pool.run(autopar.mesh(mesh).size, trains, name, mesh, "made")
    cls, options = MORE[name]
    model, inputs = make("mixer")
    rows, want, _ = loop(copy.deepcopy(model), inputs, cls, options)
    agree([ranks for ranks, _, _ in found], rows, model)
    for _, have, told in found:
        equal_states(have, want)
        assert not told


@pytest.mark.parametrize("how", ["made", "plain"])
@pytest.mark.parametrize("mesh", ["fsdp=2", "dp=2, tp=2"])
@pytest.mark.parametrize("name", list(MIXING))
def test_optimizer_that_mixes_elements_is_exact_and_says_so(
    name: str, mesh: str, how: str, pool: Pool
) -> None:
    found = pool.run(autopar.mesh(mesh).size, trains, name, mesh, how)
    cls, options = MIXING[name]
    model, inputs = make("mixer")
    rows, want, _ = loop(copy.deepcopy(model), inputs, cls, options)
    agree([ranks for ranks, _, _ in found], rows, model)
    for _, have, told in found:
        equal_states(have, want)
        assert len(told) == 1, told
        assert f"{cls.__name__} steps whole tensors: " in told[0]
        assert "gathers" in told[0]


def matrices(p: Params) -> list[Tensor]:
    return [t for t in p if t.dim() == 2]


def muon(rank: int, n: int, mesh: str) -> Any:
    """Matrices by Muon, the rest by an elementwise optimizer, as Muon wants it."""
    model, inputs = make("mixer")
    going: Any = autopar.parallelize(model, mesh, example_inputs=inputs) if n > 1 else model
    rest = [t for t in going.parameters() if t.dim() != 2]
    for _ in range(2):
        loss_of(going(**inputs)).backward()
        if n == 1:
            one = torch.optim.Muon(matrices(going.parameters()), lr=0.1)
            two: Any = torch.optim.SGD(rest, lr=0.1)
        else:
            one = going.optimizer(torch.optim.Muon, matrices(going.parameters()), lr=0.1)
            two = going.optimizer(torch.optim.SGD, rest, lr=0.1)
        one.step()
        two.step()
        going.zero_grad()
    state = going.full_state_dict() if n > 1 else going.state_dict()
    return {name: whole(t) for name, t in state.items()}


@pytest.mark.filterwarnings("ignore:Muon steps whole tensors")
def test_muon_beside_another_optimizer_is_exact(pool: Pool) -> None:
    want = muon(0, 1, "")
    for have in pool.run(2, muon, "fsdp=2"):
        for name in want:  # it computes in bfloat16 inside
            torch.testing.assert_close(have[name], want[name], rtol=1e-9, atol=1e-12)


def scheduled(model: Any, inputs: Any, made: bool) -> tuple[Any, Any]:
    """Groups with their own options, a schedule, clipping, frozen and unused parameters."""
    for p in list(model.parameters())[3:5]:
        p.requires_grad_(False)
    groups = mixed(model.parameters())
    options = {"lr": 0.01, "betas": (0.8, 0.95)}
    make_one = model.optimizer if made else lambda cls, p, **kw: cls(p, **kw)
    opt = make_one(torch.optim.AdamW, groups, **options)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: 1 / (1 + t))
    for t in range(6):
        opt.zero_grad(set_to_none=t % 2 == 0)
        loss_of(model(**inputs)).backward()
        if t == 2:  # as where a layer was not used
            list(model.parameters())[0].grad = None
        if t == 3:
            opt.param_groups[1]["weight_decay"] = 0.05
            opt.param_groups[2]["betas"] = (0.5, 0.9)
        if made:
            model.clip_grad_norm_(0.3)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        opt.step()
        schedule.step()
    return opt, [whole(p) for p in model.parameters()]


def schedules(rank: int, n: int, mesh: str) -> Any:
    model, inputs = make("mixer")
    parallel = autopar.parallelize(model, mesh)
    opt, params = scheduled(parallel, inputs, True)
    stepper = stepper_of(opt)
    return params, moments(opt), len(stepper.updates), type(opt).__mro__[2].__name__


@pytest.mark.parametrize("mesh", ["fsdp=2", "dp=2, tp=2"])
def test_groups_and_schedules_need_no_new_program(mesh: str, pool: Pool) -> None:
    model, inputs = make("mixer")
    opt, want = scheduled(model, inputs, False)
    for have, state, programs, name in pool.run(autopar.mesh(mesh).size, schedules, mesh):
        for a, b in zip(have, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)
        equal_states(state, moments(opt))
        assert programs == 6  # state is new or not; without decay; without gradient
        assert name == "AdamW"


def saves(rank: int, n: int) -> Any:
    """State goes to a plain optimizer and comes back, whole, into a parallel one."""
    model, inputs = make("mixer")
    parallel = autopar.parallelize(copy.deepcopy(model), "dp=2, tp=2", example_inputs=inputs)
    opt = parallel.optimizer(torch.optim.AdamW, lr=0.01)

    def step(m: Any, o: Any) -> None:
        o.zero_grad()
        loss_of(m(**inputs)).backward()
        o.step()

    step(parallel, opt)
    saved = opt.state_dict()
    saved["state"] = {
        i: {k: torch.from_numpy(whole(v)) for k, v in s.items()} for i, s in saved["state"].items()
    }
    plain = model
    plain.load_state_dict(parallel.full_state_dict())
    other = torch.optim.AdamW(plain.parameters(), lr=0.3)
    other.load_state_dict(copy.deepcopy(saved))
    again = parallel.optimizer(torch.optim.AdamW, lr=0.3)
    again.load_state_dict(copy.deepcopy(saved))
    for _ in range(2):
        step(plain, other)
        step(parallel, again)
    pairs = zip(parallel.parameters(), plain.parameters(), strict=True)
    same = [bool(abs(whole(a) - whole(b)).max() < 1e-12) for a, b in pairs]
    placed = all(hasattr(s["exp_avg"], "full_tensor") for s in again.state.values())
    return all(same), placed, moments(again), moments(other)


def test_state_goes_to_a_plain_optimizer_and_back(pool: Pool) -> None:
    for same, placed, have, want in pool.run(4, saves):
        assert same
        assert placed
        equal_states(have, want)


# --- the program -------------------------------------------------------------------------------


class Tower(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return (self.scale * x).square().mean()


def stepped(cls: Any, layers: int = 2, steps: int = 2, **options: Any) -> Any:
    torch.manual_seed(0)
    model: Any = autopar.parallelize(Tower(layers), "dp=1")
    opt = model.optimizer(cls, **options)
    for _ in range(steps):
        opt.zero_grad()
        model(torch.ones(2, 8)).backward()
        opt.step()
    return model, opt


def test_graph_and_code_show_the_update(golden: Any) -> None:
    model, _ = stepped(torch.optim.AdamW, lr=0.1)
    graph = model.graph(phase="optimizer")
    ops = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
    assert "aten.lerp_.Scalar" in ops
    assert "aten.addcdiv_.default" in ops
    golden(model.code(phase="optimizer"))


def test_graph_runs_as_the_step_does() -> None:
    """On one parameter, with the numbers of the step."""
    model, opt = stepped(torch.optim.Adam, lr=0.1)
    kind, update = stepper_of(opt).latest[0]
    torch.manual_seed(0)
    values = [torch.rand(3) for _ in update.names]
    want = [[v.clone()] for v in values]
    graph = model.graph(phase="optimizer")
    _, function = stepper_of(opt).updates[kind.section.key()]
    function(kind.section.numbers, [], *want)
    for a, b in zip(graph(*kind.section.numbers, *values), want, strict=True):
        assert torch.equal(a, b[0])


def test_graph_of_several_kinds_runs() -> None:
    model, opt = stepped(torch.optim.SGD, lr=0.1)
    opt.add_param_group({"params": [opt.param_groups[0]["params"].pop()], "lr": 0.5})
    opt.add_param_group({"params": [opt.param_groups[0]["params"].pop()], "lr": 0.01})
    opt.step()
    given, want = [], []
    for kind, _ in stepper_of(opt).latest:
        values = [torch.rand(3), torch.rand(3)]
        given += [*kind.section.numbers, *values]
        want += [values[0] - opt.param_groups[kind.group]["lr"] * values[1], values[1]]
    assert len(want) > 2
    for a, b in zip(model.graph(phase="optimizer")(*given), want, strict=True):
        torch.testing.assert_close(a, b)


def test_programs_and_standins_do_not_grow_with_depth() -> None:
    for layers in (1, 12):
        stepper = stepper_of(stepped(torch.optim.AdamW, layers, lr=0.1)[1])
        assert len(stepper.updates) == 2  # the first step makes state
        assert len(stepper.latest) == 1


def test_numbers_that_change_need_no_new_program() -> None:
    model, opt = stepped(torch.optim.AdamW, lr=0.1)
    before = dict(stepper_of(opt).updates)
    group = opt.param_groups[0]
    for group["lr"], group["eps"], group["weight_decay"] in ((0.2, 1e-6, 0.3), (0.1, 1e-7, 0.1)):
        opt.step()
    assert stepper_of(opt).updates == before
    group["weight_decay"] = 0.0
    opt.step()
    assert len(stepper_of(opt).updates) == 3


def test_branch_on_the_step_count_is_taken() -> None:
    """RAdam's sixth step has another formula than its fifth."""
    _, opt = stepped(torch.optim.RAdam, steps=8, lr=0.1)
    assert len(stepper_of(opt).updates) == 3


def test_optimizer_has_no_graph_before_its_step_or_where_it_mixes() -> None:
    model, _ = stepped(torch.optim.AdamW, steps=0, lr=0.1)
    with pytest.raises(InputError, match="has not stepped"):
        model.graph(phase="optimizer")
    model, opt = stepped(Lamb, lr=0.1)
    with pytest.raises(
        InputError, match="Lamb is not elementwise: aten.linalg_vector_norm.default mixes"
    ):
        model.code(phase="optimizer")
    plain = autopar.parallelize(Tower(1), "dp=1")
    with pytest.raises(InputError, match="No optimizer was made"):
        plain.graph(phase="optimizer")


def test_optimizer_that_evaluates_the_model_is_refused() -> None:
    model = autopar.parallelize(Tower(1), "dp=1")
    with pytest.raises(InputError, match="LBFGS evaluates the model"):
        model.optimizer(torch.optim.LBFGS)


class Langevin(torch.optim.Optimizer):
    def __init__(self, params: Params, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad + torch.randn_like(p), alpha=-group["lr"])


def draws(rank: int, n: int, made: bool, mesh: str) -> str:
    model, inputs = make("mixer")
    parallel = autopar.parallelize(model, mesh, example_inputs=inputs)
    make_one = parallel.optimizer if made else lambda cls, lr: cls(parallel.parameters(), lr)
    opt = make_one(Langevin, lr=0.1)
    loss_of(parallel(**inputs)).backward()
    with pytest.raises(InputError, match="Langevin cannot step on several ranks") as caught:
        opt.step()
    return str(caught.value)


@pytest.mark.parametrize("mesh", ["fsdp=2", "dp=2"])
@pytest.mark.parametrize("made", [True, False])
def test_optimizer_that_draws_is_refused(made: bool, mesh: str, pool: Pool) -> None:
    for text in pool.run(2, draws, made, mesh):
        assert "draws random numbers" in text


class Placed(torch.optim.Optimizer):
    """Its rate falls with the place of a parameter, or with the number of them."""

    def __init__(self, params: Params, lr: float, count: bool) -> None:
        super().__init__(params, {"lr": lr, "count": count})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            n = len(group["params"]) if group["count"] else 1
            for i, p in enumerate(group["params"]):
                p.sub_(p.grad, alpha=group["lr"] * 0.9**i / n)


class Swapping(torch.optim.Optimizer):
    """Its two states change places at each step."""

    def __init__(self, params: Params, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                s = self.state[p]
                if not s:
                    s["a"], s["b"] = torch.zeros_like(p), torch.ones_like(p)
                s["a"].add_(p.grad)
                s["a"], s["b"] = s["b"], s["a"]
                p.add_(s["a"], alpha=-group["lr"])


class Listed(torch.optim.Optimizer):
    """Written with operators on lists."""

    def __init__(self, params: Params, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            grads = [p.grad for p in params]
            for p in params:
                self.state[p].setdefault("most", torch.zeros_like(p))
            most = [self.state[p]["most"] for p in params]
            torch._foreach_maximum_(most, torch._foreach_abs(grads))
            torch._foreach_addcdiv_(params, grads, torch._foreach_add(most, 0.1), -group["lr"])


SHAPES = ((3, 2), (), (4,), (3, 2))
"""The first and the last are alike, what stands between is not."""


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (Placed, {"count": True}),
        (Placed, {"count": False}),
        (Rebinding, {}),
        (Swapping, {}),
        (Listed, {}),
    ],
)
def test_step_is_bit_by_bit_that_of_the_class(cls: Any, options: dict[str, Any]) -> None:
    def run(cls: Any) -> list[Tensor]:
        torch.manual_seed(0)
        p = [nn.Parameter(torch.randn(s)) for s in SHAPES]
        opt = cls(p, lr=0.1, **options)
        for _ in range(4):
            for q in p:
                q.grad = torch.randn(q.shape)
            opt.step()
        assert not isinstance(opt, Generated) or not stepper_of(opt).reason
        return p

    for a, b in zip(run(generated(cls)), run(cls), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda opt: pickle.loads(pickle.dumps(opt))])
def test_copies_and_pickles_step_on_their_own(again: Any) -> None:
    p = [nn.Parameter(torch.randn(3))]
    opt = generated(torch.optim.AdamW)(p, lr=0.1, fused=True)
    p[0].grad = torch.randn(3)
    opt.step()
    other = again(opt)
    q = other.param_groups[0]["params"][0]
    before = p[0].detach().clone()
    q.grad = p[0].grad.clone()
    other.step()
    assert torch.equal(p[0], before)
    opt.step()
    assert torch.equal(p[0], q)


def test_error_of_the_step_leaves_the_optimizer_as_it_was() -> None:
    model, opt = stepped(Rebinding, lr=0.1)
    before = [p.detach().clone() for p in opt.param_groups[0]["params"]]
    opt.param_groups[0]["lr"] = "no number"
    with pytest.raises(TypeError):
        opt.step()
    for p, q in zip(opt.param_groups[0]["params"], model.parameters(), strict=True):
        assert p is q
    opt.param_groups[0]["lr"] = 0.1
    opt.step()
    assert stepper_of(opt).latest
    assert any((p != q).any() for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.filterwarnings("ignore:Sparse invariant")
def test_sparse_gradients_are_left_to_the_class() -> None:
    def run(cls: Any) -> Tensor:
        p = nn.Parameter(torch.ones(4, 2))
        opt = cls([p], lr=0.1)
        for _ in range(2):
            p.grad = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 2), (4, 2))
            opt.step()
        return p

    assert torch.equal(run(generated(torch.optim.SparseAdam)), run(torch.optim.SparseAdam))


def test_closure_is_called_once_with_gradients() -> None:
    model, opt = stepped(torch.optim.SGD, lr=0.1)
    calls = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        opt.zero_grad()
        loss: Tensor = model(torch.ones(2, 8))
        loss.backward()
        return loss.detach()

    before = float(opt.step(closure))
    assert calls == [True]
    assert float(opt.step(closure)) < before


def test_large_parameters_are_stepped_in_parts(monkeypatch: Any) -> None:
    """Also where gradients are not contiguous and the optimizer writes them."""
    monkeypatch.setattr("autopar.tracing._CHUNK", {"cpu": 7, "cuda": 7})

    def run(cls: Any) -> list[Tensor]:
        torch.manual_seed(0)
        p = [nn.Parameter(torch.randn(s)) for s in ((5, 9), (3,), (4, 2), (1, 30))]
        opt = cls(p, lr=0.1)
        for _ in range(3):
            for q in p:
                q.grad = torch.randn(q.shape[::-1]).T if q.dim() == 2 else torch.randn(q.shape)
            opt.step()
        return [*p, *(q.grad for q in p)]

    for cls in (torch.optim.AdamW, Rebinding):
        for a, b in zip(run(generated(cls)), run(cls), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
