"""Every collective against its definition on whole tensors, with threads and with processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
from pool import Pool, WorkerError
from torch import Tensor

from autopar.errors import MeshError, RankError
from autopar.layout import chunk_sizes, mesh
from autopar.runtime import Communicator, VirtualWorld, connect
from autopar.runtime.buffers import Buffers
from autopar.runtime.heartbeat import Timing
from autopar.runtime.processes import share

MESHES = ["dp=2", "dp=2, tp=2", "tp=3", "tp=4"]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]


def _value(rank: int, shape: list[int], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank + 1)
    return torch.randint(-9, 9, shape, generator=generator).to(dtype)


def _piece(whole: Tensor, dim: int, outer: int, sizes: list[int], c: int) -> Tensor:
    pieces = whole.unflatten(dim, (outer, sum(sizes))).split(sizes, dim + 1)
    return pieces[c].flatten(dim, dim + 1).contiguous()


def _sizes(k: int) -> list[list[int]]:
    even, uneven, empty = [2] * k, [k - i for i in range(k)], list(chunk_sizes(k - 1, k))
    return [even, uneven, empty, [0] * (k - 1) + [3]]


def _equal(got: Tensor, want: Tensor) -> None:
    assert got.is_contiguous()
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def check_gathers(comm: Communicator) -> None:
    """Gather, scatter, slice and pad each cut of each dim."""
    for axis, k in comm.mesh.axes:
        c, line = comm.coordinate[axis], comm.mesh.group(axis, comm.rank)
        for i, sizes in enumerate(_sizes(k)):
            for dim in range(3):
                outer, dtype = 1 + (i + dim) % 3, DTYPES[(i + dim) % 4]
                shape = [2, 3, 2]
                shape[dim] = outer * sum(sizes)
                cut = (axis, dim, outer, sizes)
                whole = _value(1000 + line[0], shape, dtype)  # the same on the line
                piece = _piece(whole, dim, outer, sizes, c)
                _equal(comm.all_gather(piece, *cut), whole)
                _equal(comm.all_gather_replicated(piece.bool(), *cut), whole.bool())
                _equal(comm.all_gather(piece.mT.contiguous().mT, *cut), whole)
                _equal(comm.shard(whole, *cut, sizes[c]), piece)
                _equal(comm.cut(whole.mT.contiguous().mT, *cut, sizes[c]), piece)
                padded = comm.pad(piece, *cut)
                _equal(comm.all_reduce(padded, axis, "sum"), whole)
                _equal(_piece(padded, dim, outer, sizes, c), piece)
                assert padded.count_nonzero() == piece.count_nonzero()
                values = torch.stack([_value(r, shape, dtype) for r in line])
                reduced = comm.reduce_scatter(values[c], *cut, sizes[c])
                _equal(reduced, _piece(values.sum(0).to(dtype), dim, outer, sizes, c))


def check_all_to_all(comm: Communicator) -> None:
    """Exchange between each two dims, and between atoms of one dim."""
    for axis, k in comm.mesh.axes:
        c = comm.coordinate[axis]
        for i, sizes in enumerate(_sizes(k)):
            to_sizes = _sizes(k)[i - 1]
            for dim, to_dim in ((0, 1), (1, 0), (2, 0), (0, 2)):
                outer, to_outer = 1 + i % 2, 1 + dim % 2
                shape = [3, 3, 3]
                shape[dim], shape[to_dim] = outer * sum(sizes), to_outer * sum(to_sizes)
                whole = _value(7, shape, DTYPES[i])
                start = (dim, outer, sizes)
                end = (to_dim, to_outer, to_sizes)
                x, want = _piece(whole, *start, c), _piece(whole, *end, c)
                got = comm.all_to_all(x, axis, *start, sizes[c], *end, to_sizes[c])
                _equal(got, want)
                _equal(comm.all_to_all(got, axis, *end, to_sizes[c], *start, sizes[c]), x)
        whole = _value(8, [2 * k * 3 * k, 2], torch.float32)  # (2k{axis}, 3k) to (2k, 3k{axis})
        major, minor = (0, 1, [2 * 3 * k] * k), (0, 2 * k, [3] * k)
        got = comm.all_to_all(_piece(whole, *major, c), axis, *major, 6 * k, *minor, 3)
        _equal(got, _piece(whole, *minor, c))


def check_reductions(comm: Communicator) -> None:
    """Sum, maximum, minimum and buckets, small and large."""
    for axis, _ in comm.mesh.axes:
        line, c = comm.mesh.group(axis, comm.rank), comm.coordinate[axis]
        for dtype in [*DTYPES, torch.int16, torch.int32, torch.uint8, torch.float16]:
            for shape in ([], [3, 0], [5, 3], [70, 300]):
                values = torch.stack([_value(r, shape, dtype) for r in line])
                before = values[c].clone()
                for op in ("sum", "max", "min"):
                    want = {"sum": values.sum, "max": values.amax, "min": values.amin}[op](0)
                    _equal(comm.all_reduce(values[c], axis, op), want.to(dtype))
                _equal(values[c], before)
        flags = torch.stack([_value(r, [9], torch.int64) > 0 for r in line])
        _equal(comm.all_reduce(flags[c], axis, "sum"), flags.any(0))
        _equal(comm.all_reduce(flags[c], axis, "max"), flags.any(0))
        _equal(comm.all_reduce(flags[c], axis, "min"), flags.all(0))
        shapes = [[3, 2], [], [0, 4], [20_000], [5]]
        xs = [[_value(r, s, DTYPES[i % 2]) for i, s in enumerate(shapes)] for r in line]
        pending = comm.all_reduce_bucket_start(xs[c], axis)
        again = comm.all_reduce_bucket(xs[c], axis)
        for i, (one, two) in enumerate(zip(pending.wait(), again, strict=True)):
            _equal(one, torch.stack([x[i] for x in xs]).sum(0))
            _equal(two, one)


def check_buckets(comm: Communicator) -> None:
    """Gathers and scatters in one message equal those one by one, along several dims, uneven."""
    for axis, k in comm.mesh.axes:
        c, whole = comm.coordinate[axis], []
        cuts = [(d, outer, s) for s in _sizes(k) for d, outer in ((0, 1), (1, 1), (1, 3))]
        for i, (dim, outer, sizes) in enumerate(cuts):
            shape = [4, 5]
            shape[dim] = outer * sum(sizes)
            whole.append(_value(i, shape, torch.float32))
        pieces = [_piece(x, *cut, c) for x, cut in zip(whole, cuts, strict=True)]
        dims, outers = [d for d, _, _ in cuts], [o for _, o, _ in cuts]
        flat = [n for _, _, sizes in cuts for n in sizes]
        for got, x in zip(
            comm.all_gather_bucket(pieces, axis, dims, outers, flat), whole, strict=True
        ):
            _equal(got, x)
        mine = [x * (c + 1) for x in whole]
        locals_ = [sizes[c] for _, _, sizes in cuts]
        got = comm.reduce_scatter_bucket(mine, axis, dims, outers, flat, locals_)
        started = [  # awaited in another order than begun
            comm.all_gather_bucket_start(pieces, axis, dims, outers, flat),
            comm.reduce_scatter_bucket_start(mine, axis, dims, outers, flat, locals_),
            comm.all_gather_replicated_bucket_start(pieces, axis, dims, outers, flat),
            comm.reduce_scatter_bucket_start(mine, axis, dims, outers, flat, locals_),
        ]
        for one, want in zip(started[::-1], [got, whole, got, whole], strict=True):
            for x, y in zip(one.wait(), want, strict=True):
                _equal(x, y)
        for part, x, cut in zip(got, whole, cuts, strict=True):
            _equal(part, _piece(x * (k * (k + 1) // 2), *cut, c))


def check_wires(comm: Communicator) -> None:
    """Sent in bfloat16, the sums of small integers are exact, and come in the operand's dtype."""
    for axis, k in comm.mesh.axes:
        c, sizes = comm.coordinate[axis], _sizes(k)[1]
        whole, total = torch.arange(3.0 * sum(sizes)).view(sum(sizes), 3), k * (k + 1) // 2
        mine, want = whole * (c + 1), _piece(whole * total, 0, 1, sizes, c)
        cut = (0, 1, sizes, sizes[c])
        wire = {"wire": torch.bfloat16}
        _equal(comm.all_reduce(mine, axis, "sum", **wire), whole * total)
        _equal(comm.all_reduce_bucket([mine], axis, **wire)[0], whole * total)
        _equal(comm.reduce_scatter(mine, axis, *cut, **wire), want)
        bucket = ([mine], axis, [0], [1], sizes, [sizes[c]])
        _equal(comm.reduce_scatter_bucket(*bucket, **wire)[0], want)
        rounded = comm.all_reduce(mine + 1 / 512, axis, "sum", **wire)
        assert torch.equal(rounded, rounded.bfloat16().float())


def check_rest(comm: Communicator) -> None:
    """What moves no tensor, or any object."""
    n = comm.mesh.size
    assert comm.exchange({"rank": comm.rank, "text": "x" * comm.rank}) == [
        {"rank": r, "text": "x" * r} for r in range(n)
    ]
    comm.barrier()
    x = torch.arange(6.0)
    for axis, k in comm.mesh.axes:
        assert comm.vary(x, axis) is x
        sizes = _sizes(k)[1]
        _equal(comm.shift(x, axis, sizes), x - sum(sizes[: comm.coordinate[axis]]))


CHECKS = [check_gathers, check_all_to_all, check_reductions, check_buckets, check_wires, check_rest]


def _check_processes(rank: int, n: int, text: str) -> str:
    comm = connect(mesh(text))
    assert comm.rank == rank
    for check in CHECKS:
        check(comm)
    return "ok"


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("text", MESHES)
def test_virtual_collectives_equal_their_definition(text: str, check: object) -> None:
    VirtualWorld(mesh(text)).run(check)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", MESHES)
def test_process_collectives_equal_their_definition(pool: Pool, text: str) -> None:
    n = mesh(text).size
    assert pool.run(n, _check_processes, text) == ["ok"] * n


def test_axis_of_size_one_is_free() -> None:
    comm = connect(mesh("dp=1"))
    x = torch.ones(2, 2)
    assert comm.all_reduce(x, "dp", "sum") is x
    assert comm.all_gather(x, "dp", 0, 1, [2]) is x
    assert comm.reduce_scatter(x, "dp", 1, 1, [2], 2) is x
    assert comm.all_reduce_bucket([x], "dp")[0] is x
    assert comm.exchange(5) == [5]
    comm.barrier()


def test_operand_that_does_not_fit_is_refused() -> None:
    comm = VirtualWorld(mesh("tp=2")).communicators[1]
    with pytest.raises(RankError, match=r"Rank 1 calls all_gather on axis 'tp'"):
        comm.all_gather(torch.ones(3), "tp", 0, 1, [2, 2])


# ---- virtual worlds that fail


def test_many_virtual_ranks_are_quick() -> None:
    world = VirtualWorld(mesh("dp=8, tp=8"))
    threads = torch.get_num_threads()

    def body(comm: Communicator) -> float:
        x = torch.full((10,), float(comm.rank))
        for _ in range(20):
            x = comm.all_reduce(comm.all_reduce(x, "tp", "max"), "dp", "min")
        return x[0].item()

    start = time.perf_counter()
    assert world.run(body) == [7.0] * 64
    assert time.perf_counter() - start < 10
    assert torch.get_num_threads() == threads


def test_float_sums_are_repeatable() -> None:
    world = VirtualWorld(mesh("dp=5"))

    def body(comm: Communicator) -> Tensor:
        return comm.all_reduce(torch.randn(99, dtype=torch.float64), "dp", "sum")

    values = [torch.randn(99, dtype=torch.float64) for _ in range(5)]
    runs = [world.run(lambda c: c.all_reduce(values[c.rank], "dp", "sum")) for _ in range(5)]
    want = (((values[0] + values[1]) + values[2]) + values[3]) + values[4]
    assert all(torch.equal(x, want) for run in runs for x in run)


def test_mismatched_collectives_are_named() -> None:
    def body(comm: Communicator) -> None:
        x = torch.ones(4)
        if comm.rank == 2:
            comm.all_reduce(x, "tp", "max")
        else:
            comm.all_reduce(x, "tp", "sum")

    with pytest.raises(RankError) as info:
        VirtualWorld(mesh("tp=3")).run(body)
    assert "all_reduce(float32[4], max) on axis 'tp'" in str(info.value)
    assert "all_reduce(float32[4], sum) on axis 'tp'" in str(info.value)
    assert "Rank 2:" in str(info.value)


def test_mismatched_shape_and_dtype_are_named() -> None:
    def body(comm: Communicator) -> None:
        comm.all_reduce(torch.ones(3 + comm.rank), "tp", "sum")

    with pytest.raises(RankError, match=r"float32\[4\]"):
        VirtualWorld(mesh("tp=2")).run(body)
    with pytest.raises(RankError, match=r"float64\[3\]"):
        VirtualWorld(mesh("tp=2")).run(
            lambda c: c.all_reduce(torch.ones(3, dtype=DTYPES[c.rank]), "tp", "sum")
        )


def test_deadlock_is_found_at_once() -> None:
    def body(comm: Communicator) -> None:
        axes = ("dp", "tp") if comm.rank in (0, 3) else ("tp", "dp")
        for axis in axes:
            comm.all_reduce(torch.ones(3), axis, "sum")

    start = time.perf_counter()
    with pytest.raises(RankError, match="No rank can go on") as info:
        VirtualWorld(mesh("dp=2, tp=2")).run(body)
    assert "Ranks 0, 3: all_reduce(float32[3], sum) on axis 'dp'" in str(info.value)
    assert time.perf_counter() - start < 5


def test_rank_that_ends_early_is_named() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank != 1:
            comm.barrier()

    with pytest.raises(RankError, match="Rank 1: has ended its program"):
        VirtualWorld(mesh("dp=3")).run(body)


def test_error_of_one_rank_is_raised_and_wakes_the_others() -> None:
    woken: list[str] = []

    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            time.sleep(0.1)
            raise ValueError("broken")
        try:
            comm.all_reduce(torch.ones(3), "dp", "sum")
        except RankError as error:
            woken.append(str(error))
            raise

    start = time.perf_counter()
    world = VirtualWorld(mesh("dp=3"))
    with pytest.raises(ValueError, match="broken") as info:
        world.run(body)
    assert time.perf_counter() - start < 5
    assert info.value.__notes__ == ["(Rank 1 raised ValueError in a virtual world of dp=3)"]
    assert len(woken) == 2
    assert all("Rank 1 raised ValueError: broken" in text for text in woken)
    assert world.run(lambda c: c.exchange(c.rank)) == [[0, 1, 2]] * 3  # usable again


def test_rank_that_does_not_come_is_named() -> None:
    stop = threading.Event()

    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            stop.wait(5)
        else:
            try:
                comm.all_reduce(torch.ones(3), "dp", "sum")
            finally:
                stop.set()

    with pytest.raises(RankError, match=r"Rank 1 did not come to all_reduce.* within 0.3 s"):
        VirtualWorld(mesh("dp=2"), timeout_s=0.3).run(body)


# ---- processes that fail


def _wrong_size(rank: int, n: int) -> str:
    with pytest.raises(MeshError) as info:
        connect(mesh("dp=2, tp=2"))
    return str(info.value)


def test_wrong_number_of_processes_is_refused(pool: Pool) -> None:
    text = pool.run(2, _wrong_size)[0]
    assert "has 4 ranks, but torch.distributed runs 2 processes" in text
    assert "torchrun --nproc-per-node 4" in text
    with pytest.raises(MeshError, match="is not initialised"):
        connect(mesh("dp=2"))


def _lose(rank: int, n: int, victim: int, how: int, sharing: bool) -> tuple[str, float]:
    comm = connect(mesh("dp=2, tp=2"), timing=Timing(beat_s=0.3, silent_s=2.0, doubt_s=1.2))
    pids = comm.exchange(os.getpid())
    x = torch.ones(100_000)
    for axis in ("dp", "tp"):
        comm.all_reduce(x, axis, "sum")
    if rank == victim:
        os.kill(os.getpid(), how)
    start = time.monotonic()
    try:
        if sharing:
            share(comm, x)
            time.sleep(3.0)  # those below rank 0 in its tree may have got theirs
        for axis in ("tp", "dp"):
            comm.all_reduce(x, axis, "sum")
    except RankError as error:
        time.sleep(1.0)  # the others may still need the store
        if how == signal.SIGSTOP and rank == (0 if victim else 1):
            os.kill(pids[victim], signal.SIGKILL)
        return str(error), time.monotonic() - start
    return "", 0.0


@pytest.mark.parametrize("victim", [2, 0])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_lost_process_is_named_by_all_others(pool: Pool, victim: int, how: int) -> None:
    results = pool.run(4, _lose, victim, how, False, dead=(victim,))
    for rank, result in enumerate(results):
        if rank != victim:
            text, wait_s = result
            assert f"Rank {victim} (" in text
            assert "stopped responding" in text
            assert f"rank {rank} was in all_reduce(float32[100000], sum) on axis" in text
            assert wait_s < 20


def test_process_lost_before_parameters_are_shared_is_named(pool: Pool) -> None:
    texts = [r[0] for r in pool.run(4, _lose, 0, signal.SIGKILL, True, dead=(0,)) if r]
    assert len(texts) == 3
    assert all("Rank 0 (" in t and "stopped responding" in t for t in texts), texts
    assert "was in share" in texts[0]


def _slow(rank: int, n: int) -> float:
    comm = connect(mesh("dp=2"), timing=Timing(beat_s=0.1, silent_s=0.8))
    if rank == 1:
        time.sleep(2.5)
    return comm.all_reduce(torch.ones(()), "dp", "sum").item()


def test_slow_process_is_waited_for(pool: Pool) -> None:
    assert pool.run(2, _slow) == [2.0, 2.0]


def test_error_of_one_process_is_told_to_the_others(tmp_path: object) -> None:
    script = textwrap.dedent("""
        import sys, torch, torch.distributed as dist
        from autopar.layout import mesh
        from autopar.runtime import connect
        rank = int(sys.argv[1])
        store = dist.FileStore(sys.argv[2], 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        comm = connect(mesh("dp=2"))
        if rank == 1:
            raise ValueError("boom")
        comm.barrier()
    """)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(r), f"{tmp_path}/store"],
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(2)
    ]
    text = processes[0].communicate(timeout=60)[1]
    processes[1].communicate(timeout=60)
    assert "Rank 1 (" in text
    assert "raised ValueError: boom" in text
    assert "rank 0 was in barrier" in text


# ---- the pool itself


def _rank_and_fail(rank: int, n: int, bad: int) -> int:
    if rank == bad:
        raise KeyError("lost key")
    return rank * n


def _die(rank: int, n: int) -> None:
    if rank == 1:
        os._exit(3)


def test_pool_reports_errors_and_recovers(pool: Pool) -> None:
    with pytest.raises(WorkerError, match="(?s)rank 1 of 2.*Traceback.*lost key"):
        pool.run(2, _rank_and_fail, 1)
    with pytest.raises(WorkerError, match="(?s)rank 1 of 2.*died with exit code 3"):
        pool.run(2, _die)
    assert pool.run(3, _rank_and_fail, -1) == [0, 3, 6]


# --- memory of messages ------------------------------------------------------------------------


def test_one_message_of_scatters_is_held() -> None:
    """The next one finishes the one before, however late that is waited for."""

    def body(comm: Communicator) -> list[int]:
        held = []
        started = []
        for _ in range(3):
            x = torch.ones(1 << 18)
            args = ("dp", [0], [1], [1 << 17, 1 << 17], [1 << 17])
            started.append(comm.reduce_scatter_bucket_start([x], *args))
            held.append(sum(s._finish is not None for s in started))
        assert all((s.wait()[0] == 2).all() for s in started)
        return held

    assert VirtualWorld(mesh("dp=2")).run(body) == [[1, 1, 1]] * 2


def test_memory_is_used_again_only_once_no_tensor_lies_in_it() -> None:
    buffers = Buffers()
    cpu = torch.device("cpu")
    first = buffers.empty(1 << 18, torch.float64, cpu)
    part, place = first[5:9].fill_(3.0).view(2, 2), first.data_ptr()
    del first
    second = buffers.empty(1 << 18, torch.float64, cpu).zero_()
    assert second.data_ptr() != place and (part == 3).all()
    del part
    third = buffers.empty(1 << 18, torch.float64, cpu)
    assert third.data_ptr() == place
    del second, third
    assert buffers.empty(1 << 20, torch.bfloat16, cpu).data_ptr() % 8 == 0
    assert buffers.empty(3, torch.float32, cpu).numel() == 3


def test_gradients_that_stay_are_not_written_over() -> None:
    """Three backward passes before a step: the gradients lie in memory of the messages."""

    def body(comm: Communicator) -> list[torch.Tensor]:
        kept = []
        for step in range(4):
            x = torch.full((1 << 18,), float(step + comm.rank))
            kept += comm.all_reduce_bucket_start([x], "dp").wait()
        return kept

    for kept in VirtualWorld(mesh("dp=2")).run(body):
        assert [float(g[0]) for g in kept] == [1.0, 3.0, 5.0, 7.0]
        assert all((g == g[0]).all() for g in kept)
