"""Sizes that differ between ranks, and the one program that binds them."""

from __future__ import annotations

import re

import pytest
from models import make

import autopar
from autopar.errors import AutoparError
from autopar.layout import Atom, Layout, mesh
from autopar.program import info
from autopar.runtime import VirtualWorld
from autopar.sizes import Size, Sizes, at_place, at_probe, has_sizes


def sizes(text: str, *atoms: Atom) -> Sizes:
    """The sizes of cuts on a mesh; every coordinate is a place."""
    grid = mesh(text)
    return Sizes(grid, [grid.coordinate(r) for r in range(grid.size)], atoms)


def bound(found: Size, text: str) -> tuple[int, ...]:
    """What the text of a size gives on every rank."""
    return tuple(VirtualWorld(mesh(text)).run(lambda comm: eval(found.text, {"comm": comm})))


@pytest.mark.parametrize(
    ("grid", "atoms", "values"),
    [
        ("tp=2", [Atom(5, ("tp",))], (3, 2)),
        ("tp=2", [Atom(5, ("tp",))], (192, 128)),
        ("tp=3", [Atom(10, ("tp",))], (2, 2, 1)),  # halves of 4, 4, 2
        ("tp=2", [Atom(5, ("tp",)), Atom(7, ("tp",))], (12, 6)),
        ("dp=2, tp=2", [Atom(5, ("dp",)), Atom(7, ("tp",))], (24, 18, 16, 12)),
        ("dp=2, tp=2", [Atom(7, ("dp", "tp"))], (2, 2, 2, 1)),
        ("dp=2, tp=2", [Atom(5, ("dp",))], (7, 7, 1, 1)),  # no product of pieces
        ("dp=4", [Atom(5, ("dp",))], (2, 2, 1, 0)),
    ],
)
def test_text_of_a_size_gives_its_values(grid, atoms, values):
    found = sizes(grid, *atoms).of(values)
    assert isinstance(found, Size) and found.values == values
    assert bound(found, grid) == values
    assert (found.probe is None) == ("pick" in found.text)


def test_equal_values_are_no_size_and_equal_sizes_are_one():
    table = sizes("tp=2", Atom(5, ("tp",)))
    assert table.of((4, 4)) == 4
    assert table.of((3, 2)) is table.of([3, 2])
    layout = Layout.parse("[4, 3*5{tp}]")
    assert table.shape(layout) == (4, table.of((9, 6)))
    assert has_sizes({"a": [1, (table.of((3, 2)),)]}) and not has_sizes([1, (2,)])


def test_product_of_pieces_is_found_again_from_its_probe():
    table = sizes("dp=2, tp=2", Atom(5, ("dp",)), Atom(10, ("tp",)), Atom(7, ("tp",)))
    for values in ((3, 3, 2, 2), (12, 9, 12, 9), (36, 27, 24, 18)):
        found = table.of(values)
        assert table.between(values[0], at_probe(found)) is found
    assert table.between(8, 8) == 8
    with pytest.raises(AutoparError, match="no product"):
        table.between(3, 4)  # no prime in it: it depends on the pieces in another way
    with pytest.raises(AutoparError, match="by rank"):
        at_probe(table.of((7, 1, 1, 1)))


def test_list_of_pieces_counts_by_its_sum():
    table = sizes("dp=2, tp=2", Atom(7, ("dp", "tp")), Atom(7, ("dp",)))
    pieces = [table.of(row) for row in ((2, 2, 2, 2), (2, 2, 1, 1))]
    assert at_place(pieces, 0) == [2, 2] and at_place(pieces, 3) == [2, 1]
    assert sum(table.probed(pieces, pieces=True)) == at_probe(table.of((4, 4, 3, 3)))
    mixed = [table.of((4, 4, 3, 3)), 2]  # one that differs beside one that does not
    with pytest.raises(AutoparError, match="by rank"):
        table.probed(mixed, pieces=True)
    assert table.probed(mixed) == [at_probe(mixed[0]), 2]


def test_ranks_with_different_pieces_run_one_program():
    model, inputs = make("gpt", 5)
    found = autopar.compile(model, "dp=2, tp=2", inputs)
    assert len(found.phases) == 2
    code = found.code()
    assert all(found.code(rank) == code for rank in range(4))
    assert re.search(r'n\d+ = comm\.piece\(5, "dp"\)  # 3 or 2\n', code)
    assert not re.search(r"\[3, 16", code), "a size of the first rank stands in the code"
    autopar.verify(model, "dp=2, tp=2", inputs).raise_if_failed()


def test_calls_on_empty_pieces_are_not_made():
    model, inputs = make("regression", 5)
    found = autopar.compile(model, "dp=4", inputs)
    assert set(found.places()) == {(2,), (1,), (0,)}
    assert " if n0 else torch.zeros([n0, " in found.code()
    last = found.phases[(0,)]
    names = [str(n.target) for n in last.forward.graph.nodes]
    assert "autopar.nothing.default" in names
    for a, b in zip(found.of(0).forward.graph.nodes, last.forward.graph.nodes, strict=True):
        assert a.name == b.name and not info(b).shapes
    # what only has weights in it is computed everywhere
    assert " t = aten.t.default(p_model_net_0_weight); " in found.code().replace("\n", "; ")
