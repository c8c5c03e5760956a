"""All ranks of a mesh as threads of one process, with collectives in memory.

A collective is a meeting of the threads of one line of the mesh: the last to come computes every
member's result while the others wait, so no operand can change under a reader and reductions run
in rank order. A program that would hang on real processes fails here at once: when every thread
waits or has ended, nobody can come any more.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from autopar.errors import RankError
from autopar.layout import Mesh
from autopar.runtime.communicator import Communicator
from autopar.runtime.transport import Call, reduce_in_order

__all__ = ["VirtualWorld"]

T = TypeVar("T")
Combine = Callable[[list[Any]], list[Any]]


class _Meeting:
    """One collective of one group, until its last member has come."""

    __slots__ = ("calls", "condition", "done", "results", "values")

    def __init__(self, lock: threading.Lock) -> None:
        self.calls: dict[int, Call] = {}
        self.values: dict[int, Any] = {}
        self.results: dict[int, Any] = {}
        self.done = False
        self.condition = threading.Condition(lock)


class VirtualWorld:
    """N communicators for N threads.

    Args:
        mesh: grid of virtual ranks.
        timeout_s: longest wait for the other members of a collective.
    """

    def __init__(self, mesh: Mesh, *, timeout_s: float = 60.0) -> None:
        self.mesh, self.timeout_s = mesh, timeout_s
        self._lock = threading.Lock()
        self._reset()
        ranks = range(mesh.size)
        self._groups = {(axis, r): mesh.group(axis, r) for axis in mesh.names for r in ranks}
        self._groups.update({("", r): tuple(ranks) for r in ranks})
        self.communicators = [Communicator(mesh, r, _Threads(self, r)) for r in ranks]

    def _reset(self) -> None:
        self._meetings: dict[tuple[str, tuple[int, ...]], _Meeting] = {}
        self._waiting: dict[int, Call] = {}
        self._mail: dict[tuple[int, int, Call], Tensor] = {}
        self._post = threading.Condition(self._lock)
        self._ended: set[int] = set()
        self._fault: BaseException | None = None
        self._culprit = ""

    def run(self, fn: Callable[[Communicator], T]) -> list[T]:
        """Call `fn` once per rank, each in its own thread; the results in rank order.

        Raises:
            Exception: the first error of any rank, with a note that names the rank.
            RankError: the ranks disagree about a collective, or one of them never comes.
        """
        self._reset()
        results: dict[int, T] = {}
        grad = torch.is_grad_enabled()

        def body(comm: Communicator) -> None:
            try:
                with torch.set_grad_enabled(grad):
                    results[comm.rank] = fn(comm)
            except BaseException as error:
                with self._lock:
                    self._fail(error, f"Rank {comm.rank} raised {type(error).__name__}: {error}")
            finally:
                with self._lock:
                    self._ended.add(comm.rank)
                    self._look_for_deadlock()

        intra = torch.get_num_threads()
        torch.set_num_threads(1)  # the ranks are the parallelism
        threads = [
            threading.Thread(target=body, args=(comm,), name=f"rank {comm.rank}", daemon=True)
            for comm in self.communicators
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException as error:  # an interrupt: wake the threads before leaving
            with self._lock:
                self._fail(error, "The run was interrupted")
            raise
        finally:
            torch.set_num_threads(intra)
        if self._fault is not None:
            raise self._fault
        return [results[r] for r in range(self.mesh.size)]

    def meet(self, rank: int, call: Call, value: Any, combine: Combine) -> Any:
        """Wait for the group; `combine` maps its values to its results, both in axis order."""
        group = self._groups[call.axis, rank]
        key = (call.axis, group)
        with self._lock:
            self._raise_if_failed(rank, call)
            meeting = self._meetings.setdefault(key, _Meeting(self._lock))
            meeting.calls[rank], meeting.values[rank] = call, value
            self._check_agreement(meeting, call)
            self._raise_if_failed(rank, call)
            last = len(meeting.calls) == len(group)
            if last:
                del self._meetings[key]
            else:
                return self._wait(rank, call, meeting, group)
        results = combine([meeting.values[r] for r in group])
        with self._lock:
            meeting.results = dict(zip(group, results, strict=True))
            meeting.done = True
            for r in group:
                self._waiting.pop(r, None)
            meeting.condition.notify_all()
        return meeting.results[rank]

    def send(self, rank: int, to: int, call: Call, value: Tensor) -> None:
        """Leave a value for another rank."""
        with self._lock:
            self._raise_if_failed(rank, call)
            self._mail[rank, to, call] = value
            if to in self._waiting and self._waiting[to].name == _RECEIVE:
                del self._waiting[to]  # it looks whether this is what it waits for
            self._post.notify_all()

    def receive(self, rank: int, source: int, call: Call) -> Tensor:
        """The value that another rank has left next for this one."""
        with self._lock:
            while (source, rank, call) not in self._mail:
                self._raise_if_failed(rank, call)
                self._waiting[rank] = Call(_RECEIVE, "", detail=(f"from rank {source}", str(call)))
                self._look_for_deadlock()
                if self._fault is None and not self._post.wait(self.timeout_s):
                    self._fail_with(f"Rank {source} sent nothing.", [(rank, call)], [source])
            self._waiting.pop(rank, None)
            return self._mail.pop((source, rank, call))

    # ---- all below hold the lock

    def _wait(self, rank: int, call: Call, meeting: _Meeting, group: tuple[int, ...]) -> Any:
        self._waiting[rank] = call
        self._look_for_deadlock()
        deadline = time.monotonic() + self.timeout_s
        while not meeting.done and self._fault is None:
            if meeting.condition.wait(max(0.0, deadline - time.monotonic())):
                continue
            if meeting.done or self._fault is not None:
                break
            if len(meeting.calls) == len(group):  # the last one has come and is computing
                deadline += 1.0
                continue
            missing = [r for r in group if r not in meeting.calls]
            self._fail_with(
                f"{_ranks(missing)} did not come to {call} within {self.timeout_s:g} s.",
                sorted(meeting.calls.items()),
                missing,
            )
        if meeting.done:
            return meeting.results[rank]
        self._waiting.pop(rank, None)
        raise self._secondary(rank, call)

    def _check_agreement(self, meeting: _Meeting, call: Call) -> None:
        if any(other != call for other in meeting.calls.values()):
            self._fail_with(
                "The ranks of one group do not enter the same collective.",
                sorted(meeting.calls.items()),
            )

    def _look_for_deadlock(self) -> None:
        if (
            self._fault is None
            and self._waiting
            and len(self._waiting) + len(self._ended) == self.mesh.size
        ):
            self._fail_with(
                "No rank can go on: each waits for a collective that the others do not enter.",
                sorted(self._waiting.items()),
                sorted(self._ended),
            )

    def _fail_with(
        self, what: str, calls: Sequence[tuple[int, Call]], absent: Sequence[int] = ()
    ) -> None:
        """Fail with a list of what each rank called; equal calls share a line."""
        by_call: dict[str, list[int]] = {}
        for rank, call in calls:
            by_call.setdefault(str(call), []).append(rank)
        for rank in absent:
            if rank in self._ended:
                text = "has ended its program"
            else:
                text = f"is in {self._waiting[rank]}" if rank in self._waiting else "is computing"
            by_call.setdefault(text, []).append(rank)
        lines = [f"{_ranks(ranks)}: {text}" for text, ranks in by_call.items()]
        self._fail(RankError(what, where="; ".join(lines)), what)

    def _fail(self, error: BaseException, culprit: str) -> None:
        if self._fault is None:
            self._fault, self._culprit = error, culprit
            if not isinstance(error, RankError) and sys.version_info >= (3, 11):
                error.add_note(f"({culprit.split(':')[0]} in a virtual world of {self.mesh})")
        for meeting in self._meetings.values():
            meeting.condition.notify_all()
        self._post.notify_all()

    def _raise_if_failed(self, rank: int, call: Call) -> None:
        if self._fault is not None:
            raise self._secondary(rank, call)

    def _secondary(self, rank: int, call: Call) -> RankError:
        return RankError(f"{self._culprit}; rank {rank} stopped in {call}.")


def _ranks(ranks: Sequence[int]) -> str:
    return ("Rank " if len(ranks) == 1 else "Ranks ") + ", ".join(map(str, ranks))


class _Done:
    """A message that has come when it is started."""

    __slots__ = ("_result",)

    def __init__(self, result: Tensor) -> None:
        self._result = result

    def wait(self) -> Tensor:
        """The result, without waiting."""
        return self._result


class _Later:
    """A message that is fetched when it is waited for."""

    __slots__ = ("_fetch",)

    def __init__(self, fetch: Callable[[], Tensor]) -> None:
        self._fetch = fetch

    def wait(self) -> Tensor:
        """Block until it has come."""
        return self._fetch()


_RECEIVE = "receive"


class _Threads:
    """The transport of one virtual rank."""

    def __init__(self, world: VirtualWorld, rank: int) -> None:
        self._world, self._rank = world, rank

    def _meet(self, call: Call, value: Any, combine: Combine) -> _Done:
        return _Done(self._world.meet(self._rank, call, value, combine))

    def start_reduce(self, buffer: Tensor, op: str, call: Call) -> _Done:
        def combine(buffers: list[Tensor]) -> list[Tensor]:
            total = reduce_in_order(buffers, op)
            for each in buffers:
                each.copy_(total)
            return buffers

        return self._meet(call, buffer, combine)

    def start_gather(self, parts: Sequence[Tensor], counts: Sequence[int], call: Call) -> _Done:
        flat = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        return self._meet(call, flat, lambda xs: [torch.cat(xs) for _ in xs])

    def start_scatter(self, flat: Tensor, counts: Sequence[int], call: Call) -> _Done:
        def combine(flats: list[Tensor]) -> list[Tensor]:
            runs = zip(*(torch.split(x, list(counts)) for x in flats), strict=True)
            return [reduce_in_order(run, "sum") for run in runs]

        return self._meet(call, flat, combine)

    def start_swap(
        self, flat: Tensor, give: Sequence[int], take: Sequence[int], call: Call
    ) -> _Done:
        def combine(pieces: list[tuple[Tensor, ...]]) -> list[Tensor]:
            return [torch.cat(came) for came in zip(*pieces, strict=True)]

        return self._meet(call, torch.split(flat, list(give)), combine)

    def link(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Nothing to prepare."""

    def start_send(self, value: Tensor, rank: int, call: Call) -> _Done:
        self._world.send(self._rank, rank, call, value)
        return _Done(value)

    def start_receive(self, like: Tensor, rank: int, call: Call) -> _Later:
        return _Later(lambda: self._world.receive(self._rank, rank, call))

    def exchange(self, value: Any, call: Call) -> list[Any]:
        found: list[Any] = self._world.meet(
            self._rank, call, value, lambda values: [list(values) for _ in values]
        )
        return found
