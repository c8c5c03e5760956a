"""Each level refuses a broken program and says which node broke it, after which pass."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import autopar
from autopar.check import check_annotated, check_global, check_spmd, spmd_problems
from autopar.collectives import collective_of, ops
from autopar.errors import VerificationError
from autopar.layout import Layout
from autopar.program import Program, info, update_info
from autopar.static import check_phases, check_ranks, count_collectives
from autopar.strategies.data import Data
from autopar.strategies.tensor import Tensors


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.log1p(F.mse_loss(self.two(F.gelu(self.one(x))), y))


def made(rows: int = 4, **options: Any) -> Any:
    torch.manual_seed(0)
    inputs = {"x": torch.randn(rows, 6).double(), "y": torch.randn(rows, 4).double()}
    return autopar.compile(Net().double(), "dp=2, tp=2", inputs, **options)


@pytest.fixture(scope="module")
def compiled() -> Any:
    """With many small collectives of every kind."""
    return made(strategy=[Data("dp"), Tensors("tp", latency_bytes=0.0)])


HERE = {"dp": 0, "tp": 0}


def first(program: Program, *names: str) -> fx.Node:
    """The first call of one of the operations."""
    return next(
        n
        for n in program.graph.graph.nodes
        if n.op == "call_function" and any(f".{w}." in str(n.target) for w in names)
    )


def refused(check: Any, program: Program, *words: str) -> None:
    with pytest.raises(VerificationError) as error:
        check(program, "rewrite", *([HERE] if check is check_spmd else []))
    missing = [w for w in ("After the pass 'rewrite'", *words) if w not in str(error.value)]
    assert not missing, f"{missing} not in:\n{error.value}"


# --- global and annotated ----------------------------------------------------------------------


def test_tables_must_name_the_placeholders(compiled):
    program = compiled.annotated.copy()
    refused(check_global, program.replace(inputs=program.inputs[:1]), "states and inputs")


def test_every_call_needs_a_value(compiled):
    program = compiled.annotated.copy()
    del first(program, "gelu").meta["val"]
    refused(check_global, program, "no value", "aten.gelu", "test_check.py")


def test_every_output_of_the_table_must_exist(compiled):
    program = compiled.annotated.copy()
    outputs = (dataclasses.replace(program.outputs[0], index=3),)
    refused(check_global, program.replace(outputs=outputs), "an output of the table is missing")


def test_every_call_needs_a_choice_on_every_axis(compiled):
    program = compiled.annotated.copy()
    update_info(first(program, "gelu"), choice={"dp": "R"})
    refused(check_annotated, program, "no choice on axis tp", "aten.gelu", "test_check.py")


def test_a_layout_must_have_the_shape_of_its_value(compiled):
    program = compiled.annotated.copy()
    update_info(first(program, "gelu"), layouts=(Layout.parse("[4{dp}, 5]"),))
    refused(check_annotated, program, "[4{dp}, 5]", "[4, 8]", "aten.gelu")


# --- lowered -----------------------------------------------------------------------------------


def lowered(compiled: Any) -> Program:
    return compiled.of(0).program.copy()


def test_the_lowered_program_is_right(compiled):
    program = lowered(compiled)
    mesh = program.mesh
    check_spmd(program, "shard", HERE)
    assert spmd_problems(program, [mesh.coordinate(r) for r in range(mesh.size)]) == []


def drop(node: fx.Node) -> None:
    node.replace_all_uses_with(node.args[0])
    node.graph.erase_node(node)


def test_a_missing_vary_is_named(compiled):
    program = lowered(compiled)
    drop(first(program, "vary"))
    refused(check_spmd, program, "is replicated", "its gradient is partial", "test_check.py")


def test_a_vary_too_many_is_named(compiled):
    program = lowered(compiled)
    node = first(program, "log1p")  # of the mean: the same on all ranks
    with node.graph.inserting_before(node):
        new = node.graph.call_function(ops.vary.default, (node.args[0], "dp"))
    new.meta = dict(node.args[0].meta)
    have = info(node.args[0]).layouts[0]
    update_info(new, layouts=(Layout(have.dims, have.partial, (*have.varying, "dp")),))
    node.replace_input_with(node.args[0], new)
    refused(check_spmd, program, "the call is the same on all ranks", "aten.log1p")


def test_a_missing_reduction_is_named(compiled):
    program = lowered(compiled)
    for node in list(program.graph.graph.nodes):
        if node.target is ops.all_reduce.default:
            drop(node)
            break
    refused(check_spmd, program, "test_check.py")


@pytest.mark.parametrize(
    ("at", "value", "words"),
    [(1, "pp", "no axis 'pp'"), (2, 1, "expected"), (3, 7, "expected"), (4, [1, 3], "expected")],
)
def test_wrong_arguments_of_a_collective_are_named(compiled, at, value, words):
    program = lowered(compiled)
    node = first(program, "all_gather", "all_gather_replicated", "reduce_scatter", "shard", "cut")
    value = 1 - node.args[2] if at == 2 else value
    node.args = (*node.args[:at], value, *node.args[at + 1 :])
    problems = spmd_problems(program, [HERE])
    assert len(problems) >= 1 and any(node.name in p for p in problems), problems


def test_a_wrong_local_shape_is_named(compiled):
    program = lowered(compiled)
    node = first(program, "gelu")
    node.meta["val"] = torch.empty(3, 3, device="meta")
    refused(check_spmd, program, "[3, 3]", "aten.gelu", "test_check.py")


def test_a_partial_loss_is_named(compiled):
    program = lowered(compiled)
    result = program.graph.graph.output_node().args[0][0]
    update_info(result, layouts=(Layout.parse("[] +dp"),))
    assert any("result 0 leaves as [] +dp" in p for p in spmd_problems(program, [HERE]))


# --- phases and ranks --------------------------------------------------------------------------


def test_collectives_are_counted(compiled):
    phases = compiled.of(0)
    calls = [
        n
        for gm in (phases.forward, phases.backward)
        for n in gm.graph.nodes
        if (row := collective_of(n)) is not None and row.factor
    ]
    joined = sum(len(n.args[0]) - 1 for n in calls if "bucket" in str(n.target))
    assert count_collectives(phases) == len(calls) + joined > 4


def test_phases_of_another_program_are_refused(compiled):
    other = made()
    mixed = compiled.of(0).replace(program=other.of(0).program)
    assert check_phases(compiled.of(0)) == check_phases(other.of(0)) == []
    problems = check_phases(compiled.of(0).replace(backward=other.of(0).backward))
    problems += check_phases(mixed)
    assert any(p.startswith(("forward", "backward")) for p in problems)


def test_ranks_that_disagree_are_named(compiled):
    uneven = made(5)
    mesh = uneven.annotated.mesh
    assert len(uneven.phases) > 1
    assert check_ranks(uneven.phases, mesh, uneven.signature) == []
    (key, phases), *_ = uneven.phases.items()
    last = list(uneven.phases)[-1]
    wrong = {**uneven.phases, last: phases.replace(backward=phases.forward)}
    problems = check_ranks(wrong, mesh, uneven.signature)
    assert len(problems) == 1 and "rank 0 enters" in problems[0], problems
