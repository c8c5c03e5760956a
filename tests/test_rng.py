"""Random numbers depend on seed, step, site and global index, and look random."""

from __future__ import annotations

import itertools
import math
import time

import pytest
import torch
from torch import Tensor

from autopar.layout import Layout, Mesh, chunk_sizes, mesh, replicated
from autopar.runtime import Communicator, VirtualWorld, rng

CPU = torch.device("cpu")
ONE = mesh("dp=1")
LAYOUTS = [
    ("dp=2", "[8{dp}, 600]"),
    ("dp=3", "[8{dp}, 600]"),
    ("tp=3", "[7, 600{tp}]"),
    ("tp=4", "[3*13{tp}*20]"),
    ("tp=4", "[2, 3*2{tp}*64, 3]"),
    ("dp=2, tp=3", "[5{dp}, 7, 700{tp}]"),
    ("dp=2, tp=3", "[11{dp,tp}, 40]"),
    ("dp=2, tp=3", "[11{tp,dp}, 40]"),
    ("dp=2, tp=2", "[6{dp}, 3*10{tp}, 9]"),
    ("dp=2, tp=2, cp=2", "[6{dp}, 16{cp}, 4{tp}, 16, 16]"),
    ("tp=4", "[2{tp}, 1, 5]"),
    ("tp=2", "[40] ~tp"),
    ("tp=2", "[] +tp"),
]


def _uniform(shape: tuple[int, ...], seed: int = 1, step: int = 2, site: int = 3) -> Tensor:
    at = rng.Positions(replicated(shape), ONE, {"dp": 0})
    return rng.uniform_at(at, seed=seed, step=step, site=site, dtype=torch.float64, device=CPU)


def _cut(whole: Tensor, layout: Layout, grid: Mesh, coordinate: dict[str, int]) -> Tensor:
    """The piece of `whole` at `coordinate`, atom by atom."""
    shape = layout.shape
    atoms = [atom for dim in layout.dims for atom in dim]
    piece = whole.reshape([a.size for a in atoms])
    for i, atom in enumerate(atoms):
        for axis in atom.axes:
            sizes = chunk_sizes(piece.shape[i], grid.sizes[axis])
            start = sum(sizes[: coordinate[axis]])
            piece = piece.narrow(i, start, sizes[coordinate[axis]])
    assert whole.shape == shape
    return piece.reshape(layout.local_shape(grid, coordinate))


@pytest.mark.parametrize(("text", "layout_text"), LAYOUTS)
def test_pieces_equal_the_whole_of_one_rank(text: str, layout_text: str) -> None:
    layout, grid = Layout.parse(layout_text), mesh(text)
    whole = _uniform(layout.shape, 5, 6, 7)

    def body(comm: Communicator) -> None:
        comm.seed, comm.step = 5, 6
        want = _cut(whole, layout, grid, comm.coordinate)
        shape = list(want.shape)
        for _ in range(2):
            got = comm.uniform(shape, layout_text, 7, dtype=torch.float64)
            assert torch.equal(got, want)
        single = comm.uniform(shape, layout_text, 7, dtype=torch.float32, device="cpu")
        assert torch.equal(single.double(), want)
        for p in (0.0, 0.1, 0.5, 1 / 3, 1.0):
            mask = comm.keep_mask(shape, layout_text, 7, p)
            assert mask.dtype == torch.bool
            assert torch.equal(mask, want >= p)

    VirtualWorld(grid).run(body)


def test_keys_change_everything() -> None:
    base = _uniform((64, 64))
    others = [
        _uniform((64, 64), *key)
        for key in ((2, 2, 3), (1, 3, 3), (1, 2, 4), (2, 1, 3), (1, 3, 2), (-1, 2, 3), (0, 0, 0))
    ]
    for one, two in itertools.combinations([base, *others], 2):
        assert (one == two).double().mean() < 1e-3
    assert torch.equal(base, _uniform((64, 64)))
    assert torch.equal(_uniform((9, 9), 2**64 + 1), _uniform((9, 9), 1))


@pytest.mark.parametrize("shape", [(1 << 20,), (1024, 1024), (1 << 18, 4), (16, 1 << 16)])
def test_numbers_are_uniform(shape: tuple[int, ...]) -> None:
    x = _uniform(shape).flatten()
    n = x.numel()
    assert x.min() >= 0
    assert x.max() < 1
    assert abs(x.mean() - 0.5) < 4 * math.sqrt(1 / 12 / n)
    assert abs(x.var() - 1 / 12) < 4 * math.sqrt(1 / 180 / n)
    words = (x * 2**24).long()
    for shift in (16, 8, 0):  # each byte of the number
        counts = torch.bincount(words >> shift & 255, minlength=256).double()
        assert _chi2(counts, n / 256) < 4.5
    pairs = (words >> 20)[:-1] * 16 + (words >> 20)[1:]
    assert _chi2(torch.bincount(pairs, minlength=256).double(), (n - 1) / 256) < 4.5


def _chi2(counts: Tensor, expected: float) -> float:
    """Standard deviations by which chi squared departs from its mean."""
    freedom = counts.numel() - 1
    statistic = ((counts - expected) ** 2).sum().item() / expected
    return abs(statistic - freedom) / math.sqrt(2 * freedom)


def _correlation(x: Tensor, y: Tensor) -> float:
    """Correlation in units of its standard deviation for independent values."""
    x, y = x.flatten() - 0.5, y.flatten() - 0.5
    return abs((x * y).mean().item()) * 12 * math.sqrt(x.numel())


def test_neighbours_are_uncorrelated() -> None:
    x = _uniform((1024, 1024))
    for lag in (1, 2, 3, 4, 16, 64, 255, 256, 512):
        assert _correlation(x[:, lag:], x[:, :-lag]) < 4.5
        assert _correlation(x[lag:], x[:-lag]) < 4.5
        assert _correlation(x[lag:, lag:], x[:-lag, :-lag]) < 4.5
    square = x[:-1, :-1] - 0.5
    for a, b in ((1, 0), (0, 1), (1, 1)):  # products of four at the corners of rectangles
        square = square * (x[a : 1023 + a, b : 1023 + b] - 0.5)
    assert abs(square.mean()) < 4.5 / 144 / 1023
    mean_of_rows, mean_of_columns = x.mean(1), x.mean(0)
    for means in (mean_of_rows, mean_of_columns):
        assert abs(means.var() * 12 * 1024 - 1) < 4.5 * math.sqrt(2 / 1024)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_neighbouring_keys_are_uncorrelated(place: int) -> None:
    draws = []
    for value in (0, 1, 2, 3, 1 << 20, (1 << 20) + 1):
        key = [10, 20, 30]
        key[place] = value
        draws.append(_uniform((256, 1024), *key))
    for one, two in itertools.combinations(draws, 2):
        assert _correlation(one, two) < 4.5
        assert _correlation(one[:, 1:], two[:, :-1]) < 4.5
        assert _correlation(one[1:], two[:-1]) < 4.5


def test_words_of_a_row_do_not_repeat() -> None:
    at = rng.Positions(replicated((2, 1 << 17)), ONE, {"dp": 0})
    rows: dict[int, list[Tensor]] = {0: [], 1: []}
    for row, _, x in rng._words(at, 1, 2, 3, CPU):
        for i, words in enumerate(x):
            rows[row.start + i].append(words.clone())
    for parts in rows.values():
        assert torch.cat(parts).unique().numel() == 1 << 17


def test_each_input_bit_flips_half_of_the_output_bits() -> None:
    n = 1 << 17
    at = rng.Positions(replicated((n,)), ONE, {"dp": 0})
    words = torch.cat([x.flatten().clone() for _, _, x in rng._words(at, 1, 2, 3, CPU)]).long()
    index = torch.arange(n)
    for bit in range(17):
        flips = words ^ words[index ^ (1 << bit)]
        for out in range(8, 32, 3):  # bits that are used
            rate = (flips >> out & 1).double().mean().item()
            assert abs(rate - 0.5) < 0.02, (bit, out, rate)


@pytest.mark.parametrize("shape", [(1 << 36,), (1 << 36, 8), (8, 1 << 36), (3, 5 << 33, 2)])
def test_more_than_32_bits_of_index(shape: tuple[int, ...]) -> None:
    k = 1 << 13
    grid = mesh(f"tp={k}, cp={k}")
    dim = max(range(len(shape)), key=lambda d: shape[d])
    dims = [str(n) if n > 1 else "1" for n in shape]
    dims[dim] += "{tp,cp}"
    layout = Layout.parse(f"[{', '.join(dims)}]")
    near, far, same = [
        rng.uniform_at(
            rng.Positions(layout, grid, {"tp": c, "cp": 5}),
            seed=1,
            step=2,
            site=3,
            dtype=torch.float64,
            device=CPU,
        )
        for c in (0, k // 2, 0)
    ]
    assert torch.equal(near, same)
    assert (near == far).double().mean() < 0.01
    assert _correlation(near, far) < 4.5


def test_pieces_across_the_32_bit_edge_equal_the_whole() -> None:
    n = 3 << 31
    whole_grid, grid = mesh(f"tp={n >> 16}"), mesh(f"tp={n >> 14}")
    layout = Layout.parse(f"[2, {n}{{tp}}]")
    edge = 1 << 32

    def draw(g: Mesh, c: int) -> Tensor:
        at = rng.Positions(layout, g, {"tp": c})
        return rng.uniform_at(at, seed=1, step=2, site=3, dtype=torch.float32, device=CPU)

    for start in (edge - (1 << 16), edge):
        whole = draw(whole_grid, start >> 16)
        pieces = [draw(grid, (start >> 14) + i) for i in range(4)]
        assert torch.equal(torch.cat(pieces, 1), whole)
    columns = torch.arange(edge - 5, edge + 5)
    runs = list(rng._column_runs(columns, 2))
    assert [(b, s, e) for b, s, e, _ in runs] == [(0, 0, 5), (1, 5, 10)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_numbers_stay_below_one_in_every_dtype(dtype: torch.dtype) -> None:
    at = rng.Positions(replicated((512, 1024)), ONE, {"dp": 0})
    x = rng.uniform_at(at, seed=1, step=2, site=3, dtype=dtype, device=CPU)
    assert x.dtype == dtype
    assert x.min() >= 0
    assert x.max() < 1
    assert abs(x.double().mean() - 0.5) < 0.005


def test_wrong_shape_is_refused() -> None:
    comm = VirtualWorld(mesh("dp=2")).communicators[0]
    with pytest.raises(AssertionError, match=r"is \(2, 3\) here"):
        comm.uniform([4, 3], "[4{dp}, 3]", 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_equals_cpu() -> None:
    for shape in ((1 << 17,), (777, 1001), (3, 5, 7, 11)):
        at = rng.Positions(replicated(shape), ONE, {"dp": 0})
        key = {"seed": 1, "step": 2, "site": 3}
        here, there = [
            rng.uniform_at(at, **key, dtype=torch.float32, device=torch.device(d))  # type: ignore
            for d in ("cpu", "cuda")
        ]
        assert torch.equal(here, there.cpu())
        masks = [rng.keep_mask_at(at, 0.1, **key, device=torch.device(d)) for d in ("cpu", "cuda")]
        assert torch.equal(masks[0], masks[1].cpu())


def test_mask_costs_less_than_twice_the_native_one() -> None:
    at = rng.Positions(replicated((1024, 4096)), ONE, {"dp": 0})
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        native, ours = [], []
        for _ in range(7):  # interleaved: other programs may run on this machine
            start = time.perf_counter()
            torch.empty(1024, 4096, dtype=torch.bool).bernoulli_(0.9)
            native.append(time.perf_counter() - start)
            start = time.perf_counter()
            rng.keep_mask_at(at, 0.1, seed=1, step=2, site=3, device=CPU)
            ours.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    assert min(ours) < 2 * min(native)
