"""Bad input gets an error that says what, where and what to try, and nothing is lost."""

from __future__ import annotations

import re
import types
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pool import Pool
from torch import Tensor, nn

import autopar
from autopar.errors import (
    AutoparError,
    BatchError,
    CaptureError,
    InputError,
    MeshError,
    PlanError,
    RuleError,
)
from autopar.rules import registry
from autopar.strategies.data import Data


class Net(nn.Module):
    def __init__(self, width: int = 6):
        super().__init__()
        self.one, self.two = nn.Linear(4, width), nn.Linear(width, 3)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        out = self.two(F.relu(self.one(x)))
        return out if y is None else F.cross_entropy(out, y)


def net(**changes: Any) -> Net:
    torch.manual_seed(0)
    return Net(**changes).double()


def batch(rows: int = 4) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(rows, 4, dtype=torch.float64), "y": torch.randint(0, 3, (rows,))}


def says(error: pytest.ExceptionInfo[BaseException], *words: str) -> None:
    """All words stand in the message."""
    missing = [w for w in words if w not in str(error.value)]
    assert not missing, f"{missing} not in:\n{error.value}"


# --- the model ---------------------------------------------------------------------------------


class Branch(Net):
    def forward(self, x, y=None):
        if x.sum() > 0:  # depends on values
            x = x * 2
        return super().forward(x, y)


class Picks(Net):
    def forward(self, x, y=None):
        rows = x[:, 0].nonzero()
        return self.one(x)[rows.squeeze(-1)].sum() * rows.shape[0]


def test_data_dependent_control_flow_names_the_line():
    with pytest.raises(CaptureError) as error:
        autopar.compile(Branch().double(), "dp=2", batch())
    says(error, "test_errors.py", "decision from tensor values", "torch.where")


def test_data_dependent_sizes_name_the_line():
    with pytest.raises(CaptureError) as error:
        autopar.compile(Picks().double(), "dp=2", batch())
    says(error, "nonzero", "test_errors.py", "depends on the values", "torch.where")


def test_a_model_that_fails_by_itself_names_the_line():
    with pytest.raises(CaptureError) as error:
        autopar.compile(net(), "dp=2", {"x": torch.randn(4, 5).double()})
    says(error, "could not be traced", "test_errors.py", "runs on these inputs by itself")


def test_a_change_of_an_argument_is_named():
    class Writes(Net):
        def forward(self, x, y=None):
            x.mul_(2)
            return super().forward(x, y)

    with pytest.raises(CaptureError) as error:
        autopar.compile(Writes().double(), "dp=2", batch())
    says(error, "argument x", "test_errors.py", "clone")


def test_loss_without_targets_is_explained():
    with pytest.raises(InputError) as error:
        autopar.compile(net(), "dp=2", {"x": batch()["x"]}, loss=F.cross_entropy)
    says(error, "targets=")


@pytest.fixture
def odd_op():
    """An operation that nobody has written a rule for."""
    with torch.library._scoped_library("oddlib", "DEF") as library:
        library.define("cumulate(Tensor x, Tensor y) -> Tensor")
        library.impl("cumulate", lambda x, y: x.cumsum(0) * y.abs(), "CompositeExplicitAutograd")
        like = torch.empty_like
        torch.library.register_fake("oddlib::cumulate", lambda x, y: like(x), lib=library)
        torch.library.register_autograd(
            "oddlib::cumulate",
            lambda ctx, g: (
                (g * ctx.saved_tensors[1].abs()).flip(0).cumsum(0).flip(0),
                g * ctx.saved_tensors[0].cumsum(0) * ctx.saved_tensors[1].sign(),
            ),
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
            lib=library,
        )
        yield torch.ops.oddlib.cumulate
    registry.table.pop("oddlib.cumulate.default", None)


class Odd(Net):
    def forward(self, x, y=None):
        out = self.two(torch.ops.oddlib.cumulate(self.one(x), self.one(-x)))
        return F.cross_entropy(out, y)


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2", "dp=2, tp=2"])
def test_an_operation_without_a_rule_is_named_and_exact(odd_op, mesh):
    with pytest.warns(UserWarning) as caught:
        report = autopar.verify(Odd().double(), mesh, batch(), steps=2)
    report.raise_if_failed()
    text = "\n".join(str(w.message) for w in caught)
    assert "no rule for oddlib.cumulate.default" in text and "test_errors.py" in text, text


def test_strict_gives_a_row_that_works_when_pasted(odd_op):
    with pytest.raises(RuleError) as error:
        autopar.compile(Odd().double(), "dp=2", batch(), strict=True)
    says(error, "oddlib.cumulate.default", "test_errors.py")
    row = re.search(r"autopar\.rules\.register\(.*?\)", str(error.value))
    assert row is not None, error.value
    exec(row[0], {"autopar": autopar})
    autopar.verify(Odd().double(), "dp=2", batch(), steps=1, strict=True).raise_if_failed()
    eval(row[0].replace("!b", "b"), {"autopar": autopar})  # as the hint says: columns are apart
    autopar.verify(Odd().double(), "tp=2", batch(), steps=1, strict=True).raise_if_failed()


def test_a_bad_row_says_so():
    with pytest.raises(RuleError) as error:
        autopar.rules.register("oddlib.bad.default", "a b")
    says(error, "oddlib.bad.default", "->")


# --- mesh and options --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ("dp", ["'dp'", "axis=size"]),
        ("dp=2 tp=2", ["axis=size"]),
        ("dp=two", ["dp=two"]),
        ("dp=0", ["dp=0", "at least 1"]),
        ("dp=2, dp=2", ["twice"]),
        ("", ["no axis"]),
        (object(), ["object", "DeviceMesh"]),
    ],
)
def test_malformed_mesh_is_explained(mesh, words):
    with pytest.raises(MeshError) as error:
        autopar.mesh(mesh)
    says(error, *words)


def test_more_ranks_than_processes_says_how_to_start(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(MeshError) as error:
        autopar.parallelize(net(), "dp=2, tp=2")
    says(error, "4 processes", "torchrun --nproc-per-node 4")


def test_unknown_axis_is_refused_at_once():
    with pytest.raises(PlanError) as error:
        autopar.parallelize(net(), "dp=1, xx=1")
    says(error, "'xx'", "tp (tensor) and pp (pipeline)")
    with pytest.raises(PlanError) as error:
        autopar.parallelize(net(), "dp=1", strategy=Data("rows"))
    says(error, "'rows'", "dp=1")
    with pytest.raises(PlanError) as error:
        autopar.parallelize(net(), "dp=1", strategy="tensor")
    says(error, "strategy='tensor'")


@pytest.mark.parametrize("call", [autopar.parallelize, None])
def test_unknown_option_names_the_closest(call):
    with pytest.raises(TypeError) as error:
        if call is None:
            autopar.compile(net(), "dp=1", batch(), sequnce=False)
        else:
            call(net(), "dp=1", sequnce=False)
    says(error, "'sequnce'", "Did you mean 'sequence'?")


@pytest.mark.parametrize("option", [{"batch": "locl"}, {"backend": "cuda"}])
def test_unknown_value_of_an_option_lists_the_known(option):
    (name, value), *_ = option.items()
    for call in (
        lambda: autopar.parallelize(net(), "dp=1", **option),
        lambda: autopar.compile(net(), "dp=1", batch(), **option),
    ):
        with pytest.raises(InputError) as error:
            call()
        says(error, name, value, " or ")


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        ({"one.wieght": "R"}, ["'one.wieght'", "no parameter", "one.weight"]),
        ({"one.weight": "S0"}, ["'S0'", "'S(dim)'"]),
        ({"one.weight": "S(2)"}, ["one.weight", "S(2)", "[6, 4]"]),
        ({"two.bias": "S(0)"}, ["two.bias", "[3]", "tp=4"]),
    ],
)
def test_wrong_pins_name_the_parameter(pins, words):
    with pytest.raises(PlanError) as error:
        autopar.compile(net(), "tp=4", batch(), pins=pins)
    says(error, *words)


def test_a_pin_holds_for_one_of_equal_layers():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(4)]
    model, x = nn.Sequential(*layers).double(), torch.randn(4, 8).double()
    for pin in ("R", "S(0)", "S(1)"):
        pins = {"2.0.weight": pin}
        plan = autopar.compile(model, "tp=2", x, pins=pins).plan["states"]
        want = {"R": "[16, 8]", "S(0)": "[16{tp}, 8]", "S(1)": "[16, 8{tp}]"}[pin]
        assert plan["2.0.weight"] == want
        assert len({plan[f"{i}.0.weight"] for i in (0, 1, 3)}) == 1
        autopar.verify(model, "tp=2", x, steps=1, pins=pins).raise_if_failed()


def test_wrong_batch_dims_are_named():
    with pytest.raises(PlanError) as error:
        autopar.compile(net(), "dp=2", batch(), batch_dims={"z": 1})
    says(error, "'z'", "x, y")
    with pytest.raises(PlanError) as error:
        autopar.compile(net(), "dp=2", batch(), batch_dims={"y": 1})
    says(error, "'y'", "[4]")


# --- the arguments of a call -------------------------------------------------------------------


def test_a_batch_smaller_than_the_axis_is_refused():
    with pytest.raises(BatchError) as error:
        autopar.compile(net(), "dp=4", batch(3))
    says(error, "3 rows", "dp=4", "at least 4 rows")


def test_a_call_without_tensors_is_refused():
    module = autopar.parallelize(net(), "dp=1")
    with pytest.raises(InputError) as error:
        module(3)
    says(error, "tensor")


def test_inputs_on_another_device_are_named():
    module = autopar.parallelize(net(), "dp=1")
    given = batch()
    with pytest.raises(InputError) as error:
        module(given["x"].to("meta"), y=given["y"])
    says(error, "x is on meta", "on cpu", ".to('cpu')")
    module(**given).backward()  # nothing is lost


def test_parameters_without_values_are_refused():
    with torch.device("meta"):
        model = Net().double()
    module = autopar.parallelize(model, "dp=1")
    with pytest.raises(InputError) as error:
        module(**batch())
    says(error, "meta device", "one.weight", "to_empty", "autopar.compile")
    autopar.compile(model, "dp=2, tp=2", batch())  # planning needs no values
    model.to_empty(device="cpu")
    for p in model.parameters():
        nn.init.normal_(p)
    module(**batch()).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_nothing_differentiable_is_as_on_one_device():
    class Counts(Net):
        def forward(self, x, y=None):
            return (self.one(x) > 0).sum()

    model = Counts().double()
    module = autopar.parallelize(model, "dp=1")
    out = module(batch()["x"])
    assert out == model(batch()["x"]) and not out.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        out.float().backward()


def test_backward_twice_is_explained():
    module = autopar.parallelize(net(), "dp=1")
    loss = module(**batch())
    loss.backward()
    with pytest.raises(RuntimeError, match="twice.*Run the model again"):
        loss.backward()
    module(**batch()).backward()


def test_keywords_and_positions_may_be_mixed():
    module, given = autopar.parallelize(net(), "dp=1"), batch()
    losses = [module(**given), module(given["x"], given["y"]), module(given["x"], y=given["y"])]
    assert len({loss.item() for loss in losses}) == 1
    with pytest.raises(CaptureError) as error:
        module(given["x"], z=given["y"])
    says(error, "unexpected keyword argument 'z'")


def test_frozen_and_integer_parameters_stay():
    class Table(Net):
        def __init__(self):
            super().__init__()
            self.order = nn.Parameter(torch.tensor([2, 0, 1]), requires_grad=False)

        def forward(self, x, y=None):
            return F.cross_entropy(super().forward(x)[:, self.order], y)

    model = Table().double()
    model.one.weight.requires_grad_(False)
    report = autopar.verify(model, "dp=2, tp=2", batch(), steps=2)
    report.raise_if_failed()
    phases = autopar.compile(model, "dp=2", batch()).of_any()
    assert {"one.weight", "order"}.isdisjoint(phases.gradients) and "one.bias" in phases.gradients
    (bucket,) = (n for n in phases.backward.graph.nodes if "bucket" in str(n.target))
    assert len(bucket.args[0]) == len(phases.gradients) == 3


# --- what a cached program may be used for -----------------------------------------------------


def entries(module: Any) -> int:
    return len(module._entries)


def test_a_new_shape_compiles_once():
    module = autopar.parallelize(net(), "dp=1")
    for rows in (4, 2, 4, 2):
        module(**batch(rows)).backward()
    assert entries(module) == 2


def equal_to_model(module: Any, model: nn.Module) -> bool:
    """The program does what the live model does now."""
    given = batch()
    return bool(torch.allclose(module(**given), model(**given)))


def doubled(self: Net, x: Tensor, y: Tensor | None = None) -> Any:
    return 2 * Net.forward(self, x, y)


def test_a_replaced_forward_is_compiled_anew(monkeypatch):
    class Mine(Net):
        pass

    torch.manual_seed(0)
    model = Mine().double()
    module = autopar.parallelize(model, "dp=1")
    assert equal_to_model(module, model)
    monkeypatch.setattr(Mine, "forward", doubled)
    assert equal_to_model(module, model)
    monkeypatch.undo()
    assert equal_to_model(module, model)
    assert entries(module) == 2  # the first program still served
    model.forward = types.MethodType(doubled, model)
    assert equal_to_model(module, model)


def test_a_replaced_submodule_is_compiled_anew():
    model = net()
    module = autopar.parallelize(model, "dp=1")
    before = module(**batch())
    model.one = nn.Sequential(nn.Linear(4, 6), nn.Tanh()).double()
    assert equal_to_model(module, model)
    assert module(**batch()) != before
    module(**batch()).backward()
    assert model.one[0].weight.grad is not None


def test_a_parameter_of_another_shape_is_named():
    model = net()
    module = autopar.parallelize(model, "dp=1")
    module(**batch())
    model.one.weight = nn.Parameter(torch.randn(6, 4).double())
    assert equal_to_model(module, model)
    model.one.weight = nn.Parameter(torch.randn(7, 4).double())
    with pytest.raises(InputError) as error:
        module(**batch())
    says(error, "one.weight", "[7, 4]", "[6, 4]")


def test_a_changed_setting_of_a_layer_is_compiled_anew():
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6, eps=1e-5)).double()
    module = autopar.parallelize(model, "dp=1")
    x = batch()["x"]
    module(x)
    model[1].eps = 10.0
    assert torch.allclose(module(x), model(x))


def test_train_and_eval_have_their_own_programs():
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5)).double()
    module = autopar.parallelize(model, "dp=1")
    x = batch()["x"]
    assert (module(x) == 0).any()
    module.eval()
    assert torch.allclose(module(x), model.eval()(x))


# --- several processes -------------------------------------------------------------------------


def _bind(rank: int, n: int, mesh: str, rows: list[int], **options: Any) -> str:
    """Call a module with the rows of one rank's seed; the error that it raises."""
    torch.manual_seed(0)
    module = autopar.parallelize(Net().double(), mesh, **options)
    torch.manual_seed(rows[rank])
    x, y = torch.randn(4, 4, dtype=torch.float64), torch.arange(4) % 3
    try:
        module(x, y=y).backward()
    except AutoparError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_different_global_batches_are_named_on_all_ranks(pool: Pool):
    for text in pool.run(2, _bind_global, "dp=2", [1, 2]):
        assert text.startswith("BatchError: Ranks 0 and 1"), text
        assert "argument x" in text and "argument x, y" not in text and "batch='local'" in text


def _bind_global(rank, n, mesh, rows):
    return _bind(rank, n, mesh, rows)


def _bind_local(rank, n, mesh, rows):
    return _bind(rank, n, mesh, rows, batch="local")


def test_different_local_batches_are_named_on_all_ranks(pool: Pool):
    """Ranks 2 and 3 share rows, ranks 0 and 1 should but do not: all four stop."""
    for text in pool.run(4, _bind_local, "dp=2, tp=2", [1, 2, 3, 3]):
        assert text.startswith("BatchError: Ranks 0 and 1"), text
        assert "argument x" in text and "dp the same rows" in text
    assert pool.run(4, _bind_local, "dp=2, tp=2", [1, 1, 2, 2]) == [""] * 4


def _wrong_size(rank, n):
    try:
        autopar.parallelize(net(), "dp=2, tp=2")
    except MeshError as error:
        return str(error)
    return ""


def test_mesh_and_world_must_agree(pool: Pool):
    for text in pool.run(2, _wrong_size):
        assert "4 ranks" in text and "2 processes" in text and "torchrun --nproc-per-node 4" in text


def _swap(rank, n, mesh):
    model = net()
    module = autopar.parallelize(model, mesh)
    module(**batch()).backward()
    torch.manual_seed(rank)  # rank 0's values are taken, as for the first parameters
    model.one = nn.Linear(4, 6).double()
    loss = module(**batch())
    loss.backward()
    want = net()
    torch.manual_seed(0)
    want.one = nn.Linear(4, 6).double()
    return float(loss), float(want(**batch())), tuple(model.one.weight.grad.shape)


def test_a_replaced_submodule_is_placed_too(pool: Pool):
    for loss, want, shape in pool.run(2, _swap, "tp=2"):
        assert loss == pytest.approx(want, rel=1e-12) and shape == (6, 4)


def _resized(rank, n, mesh):
    """Another batch size and evaluation, which by themselves might choose other placements."""
    torch.manual_seed(0)
    sizes = [(8, 64), (64, 64), (64, 8)]
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in sizes)).double()
    want = nn.Sequential(*(nn.Linear(a, b) for a, b in sizes)).double()
    want.load_state_dict(model.state_dict())
    module = autopar.parallelize(model, mesh)
    placements, equal = [], []
    for rows in (1, 512, 7):
        x = torch.randn(rows, 8, dtype=torch.float64)
        module.zero_grad()
        want.zero_grad()
        out = module(x)
        out.square().sum().backward()
        want(x).square().sum().backward()
        pairs = zip(module.parameters(), want.parameters(), strict=True)
        equal += [torch.allclose(a.grad.full_tensor(), b.grad) for a, b in pairs]
        with torch.no_grad():
            equal.append(torch.allclose(module(x), want(x)))
        placements.append([p.placements for p in module.parameters()])
    return all(equal), placements[0] == placements[1] == placements[2]


def test_parameters_stay_where_they_are_for_every_shape(pool: Pool):
    assert pool.run(2, _resized, "tp=2") == [(True, True)] * 2


def test_messages_have_all_parts():
    error = AutoparError("It failed.", where="here", expected="that", hint="this")
    assert str(error) == ("It failed.\n  where:    here\n  expected: that\n  try:      this")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        autopar.compile(net(), "dp=2", batch())  # a plain model warns of nothing


# --- what tracing would lose -------------------------------------------------------------------


class Straight(torch.autograd.Function):
    """A gradient of its own."""

    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Estimator(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x):
        return Straight.apply(self.line(x)).sum()


def test_a_function_with_its_own_backward_is_refused():
    with pytest.raises(CaptureError, match="Straight is an autograd.Function") as error:
        autopar.compile(Estimator(), 1, torch.randn(2, 4))
    assert "test_errors.py" in str(error.value) and "custom_op" in str(error.value)
    assert Straight.apply(torch.tensor(3.0)) == 1.0  # as before


def test_an_embedding_that_changes_its_weight_is_refused():
    with pytest.raises(CaptureError, match="max_norm"):
        autopar.compile(nn.Embedding(9, 4, max_norm=1.0), 1, torch.tensor([[1, 2]]))


def test_a_model_that_cannot_be_copied_says_what_to_use():
    model = torch.nn.utils.weight_norm(nn.Linear(4, 4))
    with pytest.raises(CaptureError, match=r"parametrizations\.weight_norm"):
        autopar.compile(model, 1, torch.randn(2, 4))


def _splits(rank, n):
    """Losses of local batches whose split over the ranks changes while the total does not."""
    model = nn.Linear(4, 1).double()
    nn.init.constant_(model.weight, 0.5)
    parallel = autopar.parallelize(model, "dp=3", batch="local", loss=lambda out, t: out.mean())
    x = torch.arange(24.0, dtype=torch.double).view(6, 4)
    found = []
    for rows in ((2, 2, 2), (3, 1, 2), (2, 2, 2), (1, 4, 1)):
        start = sum(rows[:rank])
        mine = x[start : start + rows[rank]]
        loss = parallel(mine, targets=mine[:, 0])
        loss.backward()
        found.append(float(loss.detach()) - float(parallel.full_state_dict()["bias"]))
    return found


def test_local_batches_may_be_split_anew_at_every_step(pool: Pool):
    mean = float(torch.arange(24.0).view(6, 4).sum(1).mean() * 0.5)
    for losses in pool.run(3, _splits):
        assert losses == pytest.approx([mean] * 4, rel=1e-12)


def test_gradient_of_an_input_is_refused_and_not_lost():
    model, x = nn.Linear(4, 2), torch.randn(3, 4, requires_grad=True)
    parallel = autopar.parallelize(model, "dp=1")
    with pytest.raises(InputError) as error:
        parallel(x)
    says(error, "argument input requires a gradient", "input.detach()")
    with torch.no_grad():
        parallel(x)
    parallel(x.detach()).sum().backward()
