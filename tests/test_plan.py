"""A plan comes back to the same program; an edited one is honoured or refused by entry."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import make
from pool import Pool
from torch import Tensor, nn

import autopar
from autopar.errors import InputError, PlanError
from autopar.program import info

MESH = "dp=2, tp=2"


class Net(nn.Module):
    """A perceptron whose loss may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 6)
        self.register_buffer("scale", torch.full((6,), 0.5))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        out = self.down(F.gelu(self.up(x))) * self.scale
        return out if y is None else (F.cross_entropy(out, y), out)


def net() -> tuple[Net, dict[str, Tensor]]:
    torch.manual_seed(0)
    x, y = torch.randn(6, 8, dtype=torch.float64), torch.arange(6) % 5
    return Net().double(), {"x": x, "y": y}


def planned(**edits: Any) -> dict[str, Any]:
    """The plan of `net` on the mesh, with some entries replaced: `part={name: entry}`."""
    plan = copy.deepcopy(autopar.compile(*with_mesh()).plan)
    for part, entries in edits.items():
        plan[part].update(entries)
    return plan


def with_mesh(mesh: str = MESH) -> tuple[nn.Module, str, dict[str, Tensor]]:
    model, inputs = net()
    return model, mesh, inputs


# --- there and back ----------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", [MESH, "fsdp=2, tp=2"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "resnet"])
def test_a_plan_comes_back_to_the_same_program(name: str, mesh: str) -> None:
    model, inputs = make(name)
    found = autopar.compile(model, mesh, inputs)
    again = autopar.compile(model, mesh, inputs, plan=found.plan)
    assert again.code() == found.code()
    assert again.text("annotated") == found.text("annotated")
    assert again.plan == found.plan


def test_a_plan_with_expanded_calls_comes_back() -> None:
    """Uneven ranks, and norms and softmaxes written out because their reduced dim is cut."""
    from autopar.strategies.data import Data
    from autopar.strategies.tensor import Tensors

    model, inputs = make("gpt", 5, layers=1)
    strategy = [Data("dp"), Tensors("tp", latency_bytes=0.0)]
    found = autopar.compile(model, "dp=3, tp=2", inputs, strategy=strategy)
    nodes = found.annotated.graph.graph.nodes
    final = {n.name for n in nodes if info(n).choice and n.op == "call_function"}
    assert set(found.plan["calls"]) - final, "nothing was expanded"
    assert set(found.plan["inserted"]) == final - set(found.plan["calls"])
    again = autopar.compile(model, "dp=3, tp=2", inputs, plan=found.plan)
    assert [again.code(r) for r in range(6)] == [found.code(r) for r in range(6)]


def inserting() -> tuple[nn.Module, Tensor, dict[str, Any]]:
    """A model whose softmax is written out, as its width is cut, with that plan."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 6), nn.Softmax(-1)).double(), torch.randn(4, 8).double()
    plan = autopar.compile(model, "tp=2", x).plan
    plan["states"] = {"0.weight": "[6{tp}, 8]", "0.bias": "[6{tp}]"}
    linear, add, softmax = plan["calls"]
    plan["calls"] = {linear: {"tp": "o"}, add: {"tp": "d1"}, softmax: {"tp": "d1"}}
    return model, x, autopar.compile(model, "tp=2", x, plan={**plan, "inserted": {}}).plan


def test_inserted_calls_are_as_the_plan_says() -> None:
    model, x, plan = inserting()
    assert len(plan["inserted"]) > 2
    code = autopar.compile(model, "tp=2", x, plan=plan).code()
    name = next(n for n, choice in plan["inserted"].items() if choice["tp"] == "d1")
    plan["inserted"][name] = {"tp": "d0"}
    edited = autopar.compile(model, "tp=2", x, plan=plan)
    assert edited.plan == plan and edited.code() != code
    autopar.verify(model, "tp=2", x, plan=plan).raise_if_failed()
    plan["inserted"][name] = {"tp": "q"}
    with pytest.raises(PlanError) as error:
        autopar.compile(model, "tp=2", x, plan=plan)
    assert f"inserted[{name!r}]['tp']" in str(error.value) and "'q'" in str(error.value)


def test_inserted_calls_follow_where_others_are_inserted() -> None:
    model, x, plan = inserting()
    softmax = list(plan["calls"])[-1]
    plan["calls"][softmax] = {"tp": "d0"}  # nothing to write out
    compiled = autopar.compile(model, "tp=2", x, plan=plan)
    assert compiled.plan["inserted"] == {} and compiled.plan["calls"] == plan["calls"]
    autopar.verify(model, "tp=2", x, plan=plan).raise_if_failed()


def test_a_plan_is_taken_as_dict_text_or_file(tmp_path: Any) -> None:
    found = autopar.compile(*with_mesh())
    path = tmp_path / "plan.json"
    path.write_text(found.plan_json())
    assert json.loads(found.plan_json()) == found.plan
    for plan in (found.plan, found.plan_json(), path, str(path)):
        assert autopar.compile(*with_mesh(), plan=plan).code() == found.code()


def test_a_plan_is_not_solved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from autopar.strategies import tensor

    plan = planned()
    monkeypatch.setattr(tensor, "milp", None)
    autopar.compile(*with_mesh(), plan=plan)
    with pytest.raises(TypeError):
        autopar.compile(*with_mesh())


@pytest.mark.parametrize("mesh", ["dp=1, tp=2", "dp=3, tp=1", "dp=2, tp=4"])
def test_a_plan_holds_for_other_sizes_of_its_axes(mesh: str) -> None:
    model, inputs = net()
    plan = planned()
    compiled = autopar.compile(model, mesh, inputs, plan=plan)
    assert compiled.plan["calls"] == plan["calls"]
    autopar.verify(model, mesh, inputs, plan=plan).raise_if_failed()


def test_a_plan_holds_for_other_batch_sizes() -> None:
    model, inputs = net()
    more = {k: torch.cat([v, v]) for k, v in inputs.items()}
    found = autopar.compile(model, MESH, more)
    assert autopar.compile(model, MESH, more, plan=planned()).code() == found.code()


def test_later_programs_of_the_model_keep_the_states() -> None:
    """Evaluation without labels has other calls than the plan: only its own are chosen."""
    model, inputs = net()
    module = autopar.parallelize(model, "dp=1, tp=1", plan=planned(), example_inputs=inputs)
    loss, _ = module(**inputs)
    out = module(inputs["x"])
    assert torch.allclose(F.cross_entropy(out, inputs["y"]), loss)
    with pytest.raises(PlanError, match="'y'"):
        autopar.parallelize(net()[0], "dp=1, tp=1", plan=planned())(inputs["x"])


# --- edits -------------------------------------------------------------------------------------

WHOLE = {"up.weight": "[16, 8]", "up.bias": "[16]", "down.weight": "[6, 16]", "down.bias": "[6]"}


def collectives(plan: Any) -> list[tuple[str, str]]:
    return [row[1:3] for row in autopar.compile(*with_mesh(), plan=plan).traffic()]


def test_a_perceptron_made_whole_is_equal() -> None:
    """Split by the solver, replicated by hand: no traffic of it is left on tp."""
    plan = planned()
    assert plan["states"]["up.weight"] == "[16{tp}, 8]"
    for name, choice in plan["calls"].items():
        choice["tp"] = "R"
        assert set(choice) == {"dp", "tp"}, name
    plan["states"].update(WHOLE)
    assert not [row for row in collectives(plan) if row[0] == "tp"]
    autopar.verify(*with_mesh(), plan=plan).raise_if_failed()


EDITS: dict[str, dict[str, Any]] = {
    "a parameter at rest over dp": {"states": {"up.weight": "[16{dp}, 8]"}},
    "over both axes": {"states": {"up.weight": "[16{dp,tp}, 8]", "down.bias": "[6{dp}]"}},
    "over dp inside the cut over tp": {"states": {"up.weight": "[16{tp,dp}, 8]"}},
    "over both axes in two dims": {"states": {"down.weight": "[6{dp}, 16{tp}]"}},
    "a whole parameter of a split call": {"states": {"down.weight": "[6, 16]"}},
    "a split parameter of a whole call": {"calls": {"linear_2": {"dp": "R", "tp": "R"}}},
    "another factor": {"calls": {"linear_3": {"dp": "b0", "tp": "o"}}},
    "contraction over dp": {"calls": {"linear_3": {"dp": "b1", "tp": "b0"}}},
    "the batch over tp": {"inputs": {"x": "[6{tp}, 8]", "y": "[6]"}},
    "an input cut in width": {"inputs": {"x": "[6, 8{tp}]"}},
    "an input cut in width over dp": {"inputs": {"x": "[6, 8{dp}]"}},
    "an input cut over both axes": {"inputs": {"x": "[6{dp}, 8{tp}]"}},
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_is_honoured_and_equal(edit: str) -> None:
    plan = planned(**EDITS[edit])
    compiled = autopar.compile(*with_mesh(), plan=plan)
    stages = compiled.plan["zero"]
    assert compiled.plan == {**plan, "zero": stages}
    assert set(stages.values()) <= {3}, "the stage where nothing else is said"
    assert compiled.code() != autopar.compile(*with_mesh()).code()
    autopar.verify(*with_mesh(), plan=plan).raise_if_failed()


def test_a_call_left_out_follows_its_operands() -> None:
    plan = planned()
    full = autopar.compile(*with_mesh(), plan=plan).code()
    for name in ("add", "gelu", "linear_3"):
        del plan["calls"][name]
    assert autopar.compile(*with_mesh(), plan=plan).code() == full
    autopar.verify(*with_mesh(), plan=plan).raise_if_failed()


# --- refusals ----------------------------------------------------------------------------------


def refused(plan: Any, *words: str, mesh: str = MESH) -> None:
    with pytest.raises(PlanError) as error:
        autopar.compile(*with_mesh(mesh), plan=plan)
    missing = [w for w in words if w not in str(error.value)]
    assert not missing, f"{missing} not in:\n{error.value}"


def test_unknown_names_are_named() -> None:
    refused(planned(calls={"linaer": {"tp": "o"}}), "'linaer'", "linear_2", "calls['linaer']")
    refused(planned(states={"up.wieght": "[16, 8]"}), "'up.wieght'", "up.weight", "states[")
    refused(planned(inputs={"z": "[6]"}), "'z'", "inputs")
    refused({**planned(), "gathers": {}}, "no part 'gathers'", "zero")
    refused({**planned(), "zero": {"up.wieght": 1}}, "'up.wieght'", "a name in states")
    refused({**planned(), "zero": {"up.weight": 4}}, "stage 4", "zero['up.weight']")


def test_a_state_left_out_is_named() -> None:
    plan = planned()
    del plan["states"]["down.bias"]
    refused(plan, "no entry for 'down.bias'", "states")


@pytest.mark.parametrize("option", ["q", "o+q", "P7", "", None])
def test_an_unknown_factor_lists_those_of_the_call(option: Any) -> None:
    plan = planned(calls={"linear_2": {"dp": "b0", "tp": option}})
    refused(plan, repr(option), "calls['linear_2']['tp']", "R, V, P0", "o (size 16)", "b1 (size 8)")


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"dp": "o+b0", "tp": "R"}, ("'o+b0'", "dp=2")),  # no run of neighbours
        ({"tq": "o"}, ("'tq'", "dp, tp")),
        ("o", ("'o' is no choice", "a dict")),
    ],
)
def test_a_choice_that_cannot_be_is_refused(choice: Any, words: tuple[str, ...]) -> None:
    refused(planned(calls={"linear_2": choice}), "linear_2", *words)


def test_a_factor_that_must_stay_whole_is_refused() -> None:
    class Sort(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.cumsum(1)

    x = torch.randn(4, 6)
    plan = autopar.compile(Sort(), "tp=2", x).plan
    (name,) = plan["calls"]
    spec = {"tp": "a1"}
    with pytest.raises(PlanError) as error:
        autopar.compile(Sort(), "tp=2", x, plan={**plan, "calls": {name: spec}})
    assert re.search(rf"{name}", str(error.value))


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("[16{tp}, 4]", ("[16, 8]", "shape")),
        ("[16{tp}, 8", ("not a layout", "[64, 16{tp}]")),
        ("[16{ep}, 8]", ("'ep'", "dp, tp")),
        ("[16, 8] +tp", ("whole or cut",)),
        ("[16, 8] ~tp", ("whole or cut",)),
        ("[4*4{tp}, 8]", ("no factor",)),
        (7, ("7 is not a layout",)),
    ],
)
def test_a_layout_that_cannot_be_is_refused(entry: Any, words: tuple[str, ...]) -> None:
    refused(planned(states={"up.weight": entry}), "states['up.weight']", *words)


def test_a_buffer_stays_whole() -> None:
    refused(planned(states={"scale": "[6{tp}]"}), "states['scale']", "buffers", "[6]")


def test_calls_that_contradict_each_other_are_refused() -> None:
    """A varying copy cannot become a replicated value: nothing says who sums its gradient."""
    calls = {name: {"dp": "d0", "tp": "V"} for name in ("add", "gelu")}
    calls["linear_2"] = {"dp": "b0", "tp": "V"}
    calls["linear_3"] = {"dp": "b0", "tp": "R"}
    refused(planned(calls=calls), "~tp cannot become", "linear_3")


def test_a_result_cannot_leave_as_a_varying_copy() -> None:
    """Each rank would count the whole gradient of the loss: twice too much on tp=2."""
    plan = planned()
    name = list(plan["calls"])[-1]
    refused(planned(calls={name: {"dp": "R", "tp": "V"}}), f"calls['{name}']", "varying copy")


def test_axes_must_be_those_of_the_mesh() -> None:
    refused(planned(), "dp, tp", "'dp=4'", "axis tp", "size 1", mesh="dp=4")
    refused(planned(), "same order", mesh="tp=2, dp=2")
    with pytest.raises(PlanError):
        autopar.parallelize(net()[0], "dp=1", plan=planned())


def test_a_size_that_cannot_be_cut_so_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(3, 8), nn.Linear(8, 4)).double()
    tokens = torch.zeros(8, 2, dtype=torch.long)
    plan = autopar.compile(model, "tp=2", tokens).plan
    plan["calls"]["embedding"] = {"tp": next(iter(_lookup(model, tokens)))}
    autopar.verify(model, "tp=2", tokens, plan=plan).raise_if_failed()
    with pytest.raises(PlanError) as error:
        autopar.compile(model, "tp=4", tokens, plan=plan)
    assert "tp=4" in str(error.value) and "calls['embedding']" in str(error.value)


def _lookup(model: nn.Module, tokens: Tensor) -> Any:
    """The factor of the rows of an embedding."""
    from autopar.rules.factors import specs

    annotated = autopar.compile(model, "tp=2", tokens).annotated
    return next(s.lookup for n, s in specs(annotated).items() if "embedding" in n.name)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("nowhere.json", ("cannot be read", "nowhere.json")),
        ('{"mesh": ', ("not JSON", "line 1")),
        ("{}", ("not a plan", "mesh, states, inputs, calls")),
        ([1], ("not a plan",)),
        ({"mesh": {}, "states": [], "inputs": {}, "calls": {}}, ("not a plan",)),
    ],
)
def test_what_is_no_plan_is_refused_at_once(plan: Any, words: tuple[str, ...]) -> None:
    refused(plan, *words)
    with pytest.raises(PlanError):
        autopar.parallelize(net()[0], "dp=1", plan=plan)


def test_a_plan_beside_pins_or_a_strategy_is_refused() -> None:
    for option in ({"pins": {"up.weight": "R"}}, {"strategy": []}):
        with pytest.raises(InputError, match=f"plan=.*{next(iter(option))}="):
            autopar.compile(*with_mesh(), plan=planned(), **option)


# --- several processes -------------------------------------------------------------------------


def _trains(rank: int, n: int, plan: Any, options: Any) -> Any:
    model, inputs = net()
    module = autopar.parallelize(model, MESH, plan=plan, **options)
    if options.get("batch") == "local":
        at = autopar.mesh(MESH).coordinate(rank)["dp"]
        inputs = {k: v[3 * at : 3 * at + 3] for k, v in inputs.items()}
    loss, _ = module(**inputs)
    loss.backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    with torch.no_grad():
        module(inputs["x"])  # another program, the same parameters
    return {k: v.numpy() for k, v in module.full_state_dict().items()}


@pytest.mark.parametrize("batch", ["global", "local"])
@pytest.mark.parametrize("edit", list(EDITS))
def test_an_edited_plan_trains_in_processes(edit: str, batch: str, pool: Pool) -> None:
    plan = planned(**EDITS[edit])
    found = pool.run(4, _trains, plan, {"batch": batch})
    model, inputs = net()
    model(**inputs)[0].backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for state in found:
        for name, want in model.state_dict().items():
            np.testing.assert_allclose(state[name], want.numpy(), rtol=1e-10, atol=1e-13)
