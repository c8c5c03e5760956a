"""Mesh and layout: text form, local pieces, equality of cuts."""

import itertools
import math
import random

import pytest
import torch

from autopar.errors import MeshError
from autopar.layout import Atom, Layout, Mesh, chunk_sizes, mesh, replicated

MESHES = ["dp=2", "dp=2, tp=3", "dp=2, tp=2, pp=2", "a=4, b=1, c=3"]


def random_layout(rng, mesh, dims=3, partial=True):
    """A layout with uneven, empty and fused pieces; every axis is used at most once."""
    axes = list(mesh.names)
    rng.shuffle(axes)
    result = []
    for _ in range(rng.randint(0, dims)):
        atoms = []
        for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
            cut = tuple(axes.pop() for _ in range(min(len(axes), rng.choice([0, 0, 1, 1, 2]))))
            atoms.append(Atom(rng.choice([1, 2, 3, 4, 5, 7, 8, 12]), cut))
        result.append(() if [str(a) for a in atoms] == ["1"] else tuple(atoms))
    partials, varying = [], []
    for axis in axes if partial else ():
        kind = rng.choice("RPMV")
        if kind in "PM":
            partials.append((axis, {"P": "sum", "M": rng.choice(["max", "min"])}[kind]))
        elif kind == "V":
            varying.append(axis)
    return Layout(tuple(result), tuple(partials), tuple(varying))


def pieces(layout, mesh, coordinate):
    """Global flat indices of each dim that lie at `coordinate`, by cutting with torch.chunk."""
    found = []
    for dim in layout.dims:
        index = torch.arange(math.prod(a.size for a in dim)).view([a.size for a in dim] or [1])
        for i, atom in enumerate(dim):
            for axis in atom.axes:
                parts = torch.chunk(index, mesh.sizes[axis], dim=i)
                at = coordinate[axis]
                index = parts[at] if at < len(parts) else index.narrow(i, 0, 0)
        found.append(index.flatten())
    return found


def cases(count, **options):
    rng = random.Random(0)
    for text in MESHES:
        m = mesh(text)
        for _ in range(count):
            yield m, random_layout(rng, m, **options)


def coordinates(m):
    return [m.coordinate(rank) for rank in range(m.size)]


def test_layout_text_round_trips():
    for _, layout in cases(300):
        assert Layout.parse(str(layout)) == layout, str(layout)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "[1]",
        "[64{dp}, 256] +tp",
        "[64{dp,cp}, 1, 3*12{tp}*64] max:ep ~pp",
        "[2*1{dp}] min:a +b ~c ~d",
    ],
)
def test_layout_parse_then_print_is_identity(text):
    assert str(Layout.parse(text)) == text


@pytest.mark.parametrize("text", ["", "64", "[64{dp]", "[a]", "[64] tp", "[64] +tp +", "[4{}]"])
def test_layout_parse_rejects(text):
    with pytest.raises(ValueError, match="not a"):
        Layout.parse(text)


def test_layout_local_shapes_equal_torch_chunk():
    for m, layout in cases(150):
        for at in coordinates(m):
            shape = tuple(len(index) for index in pieces(layout, m, at))
            assert layout.local_shape(m, at) == shape, (str(layout), at)


def test_layout_pieces_cover_the_whole_once():
    for m, layout in cases(150):
        used = [a for a in m.names if a in layout.sharded]
        total = 0
        for values in itertools.product(*(range(m.sizes[a]) for a in used)):
            at = {**dict.fromkeys(m.names, 0), **dict(zip(used, values, strict=True))}
            total += math.prod(layout.local_shape(m, at))
        assert total == math.prod(layout.shape), str(layout)


def test_layout_normal_keeps_pieces_and_is_stable():
    for m, layout in cases(150):
        normal = layout.normal(m)
        assert normal.normal(m) == normal, str(layout)
        assert normal.shape == layout.shape
        for at in coordinates(m):
            before, after = pieces(layout, m, at), pieces(normal, m, at)
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), str(layout)


def test_layout_normal_equal_for_equal_placements():
    m = mesh("dp=2, tp=4")
    for one, two in [
        ("[8{tp}*3]", "[24{tp}]"),
        ("[3*8{tp}*1*5]", "[3*40{tp}]"),
        ("[1]", "[1*1]"),
        ("[2*3, 4]", "[6, 4]"),
    ]:
        assert Layout.parse(one).normal(m) == Layout.parse(two).normal(m)
    assert Layout.parse("[6{tp}*3]").normal(m) != Layout.parse("[18{tp}]").normal(m)


def test_layout_key_equal_means_same_pieces():
    """Over every way to cut 24 rows on one axis; even cuts into the same pieces have one key."""
    m = mesh("dp=2, tp=3")
    texts = ["[24{tp}]", "[12{tp}*2]", "[6{tp}*4]", "[4{tp}*6]", "[8{tp}*3]", "[3{tp}*8]"]
    texts += ["[2*12{tp}]", "[2*6{tp}*2]", "[2*4{tp}*3]", "[4*6{tp}]", "[6*4{tp}]", "[6*2{tp}*2]"]
    layouts = [Layout.parse(t) for t in texts]
    for one, two in itertools.product(layouts, layouts):
        same = all(
            torch.equal(a, b)
            for at in coordinates(m)
            for a, b in zip(pieces(one, m, at), pieces(two, m, at), strict=True)
        )
        even = all(atom.size % 3 == 0 for x in (one, two) for atom in x.dims[0] if atom.axes)
        if one.key("tp", m) == two.key("tp", m):
            assert same, (str(one), str(two))
        elif even:
            assert not same, (str(one), str(two))


def test_layout_key_tells_dims_apart():
    m = mesh("dp=2")
    assert Layout.parse("[4{dp}, 4]").key("dp", m) != Layout.parse("[4, 4{dp}]").key("dp", m)


def test_layout_kind_and_without():
    layout = Layout.parse("[8{dp,tp}, 3] max:cp +ep ~pp")
    kinds = {a: layout.kind(a) for a in ("dp", "tp", "cp", "ep", "pp", "zz")}
    assert kinds == {"dp": "S", "tp": "S", "cp": "P", "ep": "P", "pp": "V", "zz": "R"}
    assert layout.reduction("cp") == "max"
    assert layout.reduction("ep") == "sum"
    for axis in kinds:
        assert layout.without(axis).kind(axis) == "R"
    assert str(layout.without("dp").without("pp")) == "[8{tp}, 3] max:cp +ep"


def test_replicated_is_whole_on_every_rank():
    m = mesh("dp=2, tp=3")
    layout = replicated((5, 1, 0, 7))
    assert layout.shape == (5, 1, 0, 7)
    assert all(layout.local_shape(m, at) == (5, 1, 0, 7) for at in coordinates(m))
    assert Layout.parse(str(layout)) == layout


def test_chunk_sizes_equal_torch_chunk():
    for n, k in itertools.product(range(30), range(1, 12)):
        sizes = [len(part) for part in torch.arange(n).chunk(k)]
        assert chunk_sizes(n, k) == tuple(sizes + [0] * (k - len(sizes)))


def test_mesh_ranks_and_coordinates_are_inverse():
    for text in MESHES:
        m = mesh(text)
        assert mesh(str(m)) == m
        assert [m.rank(m.coordinate(r)) for r in range(m.size)] == list(range(m.size))
    m = mesh("dp=2, tp=3")
    assert m.coordinate(4) == {"dp": 1, "tp": 1}
    assert m.group("tp", 4) == (3, 4, 5)
    assert m.group("dp", 4) == (1, 4)


def test_mesh_groups_partition_the_ranks():
    for text in MESHES:
        m = mesh(text)
        for axis in m.names:
            groups = {m.group(axis, r) for r in range(m.size)}
            assert sorted(itertools.chain(*groups)) == list(range(m.size))
            assert {len(g) for g in groups} == {m.sizes[axis]}


def test_mesh_accepts_every_form():
    expected = Mesh((("dp", 2), ("tp", 4)))
    assert mesh("dp=2, tp=4") == mesh(" dp = 2,tp=4 ,") == mesh({"dp": 2, "tp": 4}) == expected
    assert mesh(expected) is expected
    assert mesh(8) == Mesh((("dp", 8),))

    class FakeDeviceMesh:
        mesh_dim_names = ("dp", "tp")
        mesh = torch.arange(8).view(2, 4)

    assert mesh(FakeDeviceMesh()) == expected


@pytest.mark.parametrize(
    "spec",
    ["dp", "dp=", "dp=x", "dp=2 tp=2", "dp=-1", "dp=0", "DP=2", "2=2", "dp=2, dp=2", 0, object()],
)
def test_mesh_rejects(spec):
    with pytest.raises(MeshError):
        mesh(spec)
