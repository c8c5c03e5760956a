"""Real gloo processes for the tests, started once a session.

`pool.run(n, fn, *args)` calls the module-level `fn(rank, n, *args)` in n processes with
`torch.distributed` initialised to a world of n, and returns the results in rank order. Workers are
forked from one that has imported all; each call makes a fresh world.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import forks

__all__ = ["Pool", "WorkerError"]


class WorkerError(AssertionError):
    """A rank raised, died or took too long; the text holds its traceback."""


def _work(pipe: Connection, stack: str) -> None:
    faulthandler.register(signal.SIGUSR1, open(stack, "w"))  # noqa: SIM115
    import captures
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    torch.set_num_threads(1)
    captures.keep()
    captures.keep_compiled()
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        fn, rank, n, args, path = job
        try:
            store = dist.FileStore(path, n)
            timeout = timedelta(seconds=180)  # a busy machine
            dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=timeout)
            dist.barrier()  # a rank that leaves early would break the others' connecting
            answer = (True, fn(rank, n, *args))
            with contextlib.suppress(RuntimeError):  # a rank that failed has left
                dist.barrier()
        except BaseException:
            answer = (False, traceback.format_exc())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            # it keeps meshes of this world, which equal those of the next, and their dead groups
            _clear_sharding_prop_cache()
            # Groups end here, on all ranks at once. One with a collective that was given up waits
            # for its peers' to end too, which in the middle of a later test may be never.
            gc.collect()
            gc.freeze()  # what torch is made of need not be looked through each time
        try:
            pipe.send(answer)
        except Exception:
            pipe.send((False, traceback.format_exc()))


class Pool:
    """Worker processes that outlive a test.

    Args:
        size: processes started at once on first use; grows up to `largest`.
        largest: most ranks a test may ask for.
    """

    def __init__(self, size: int = 4, largest: int = 8) -> None:
        self._size, self._largest = size, largest
        self._context = forks.context()
        self._workers: list[tuple[Any, Connection]] = []
        self._started = 0
        self._stacks = tempfile.TemporaryDirectory()

    def run(
        self,
        n: int,
        fn: Callable[..., Any],
        *args: Any,
        timeout_s: float = 300.0,
        dead: tuple[int, ...] = (),
    ) -> list[Any]:
        """Call `fn(rank, n, *args)` in a world of n processes.

        Args:
            dead: ranks that are expected to die; their result is None.

        Raises:
            WorkerError: a rank raised, died unexpectedly or took longer than `timeout_s`.
        """
        assert n <= self._largest, f"{n} ranks asked for, at most {self._largest}"
        self._grow(n)
        workers = self._workers[:n]
        with tempfile.TemporaryDirectory() as folder:
            for rank, (_, pipe) in enumerate(workers):
                pipe.send((fn, rank, n, args, os.path.join(folder, "store")))
            results, errors = self._collect(workers, timeout_s, dead)
        if errors:
            text = "\n".join(f"--- rank {r} of {n}\n{e}" for r, e in sorted(errors.items()))
            raise WorkerError(f"{fn.__name__} failed\n{text}")
        return [results.get(r) for r in range(n)]

    def _collect(
        self, workers: list[tuple[Any, Connection]], timeout_s: float, dead: tuple[int, ...]
    ) -> tuple[dict[int, Any], dict[int, str]]:
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        open_pipes = {pipe: rank for rank, (_, pipe) in enumerate(workers)}
        deadline = time.monotonic() + timeout_s
        while open_pipes:
            ready = wait(list(open_pipes), max(0.0, deadline - time.monotonic()))
            if not ready:
                for rank in open_pipes.values():
                    stack = self._stack(workers[rank][0])
                    errors[rank] = f"no answer in {timeout_s:g} s, it is here:\n{stack}"
                self._drop([workers[r] for r in open_pipes.values()])
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = open_pipes.pop(pipe)
                try:
                    fine, value = pipe.recv()
                except (EOFError, ConnectionError):
                    self._drop([workers[rank]])
                    if rank not in dead:
                        errors[rank] = f"died with exit code {workers[rank][0].exitcode}"
                    continue
                (results if fine else errors)[rank] = value
            if errors:  # the others often wait for the one that failed
                deadline = min(deadline, time.monotonic() + 20)
        return results, errors

    def _stack(self, process: Any) -> str:
        """Where a worker that gives no answer is."""
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1)
        with open(process.name) as file:
            return file.read()

    def _grow(self, n: int) -> None:
        while len(self._workers) < max(n, self._size):
            ours, theirs = self._context.Pipe()
            self._started += 1
            stack = os.path.join(self._stacks.name, f"{self._started}")
            process = self._context.Process(
                target=_work, args=(theirs, stack), name=stack, daemon=True
            )
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def _drop(self, workers: list[tuple[Any, Connection]]) -> None:
        for process, _ in workers:
            process.kill()
        for worker in workers:
            worker[0].join()
            worker[1].close()
            self._workers.remove(worker)

    def close(self) -> None:
        """End all workers; they keep nothing worth a goodbye."""
        self._drop(list(self._workers))
        self._stacks.cleanup()
