"""Collectives between processes, by torch process groups (gloo or NCCL)."""

from __future__ import annotations

import os
import pickle
import socket
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from autopar.errors import BatchError, MeshError, RankError
from autopar.layout import Mesh
from autopar.runtime.communicator import Communicator
from autopar.runtime.heartbeat import DIFFER, Heartbeat, Timing, open_store
from autopar.runtime.transport import Call, Pending, reduce_in_order
from autopar.runtime.virtual import VirtualWorld

__all__ = ["announce", "connect", "join", "share"]

_SMALL_BYTES = 1 << 15  # up to here every rank sends its whole value to the few others
_FEW_RANKS = 8
_POLL = timedelta(seconds=1)
_PEER_WORDS = ("connection", "peer", "pipe", "remote", "timed out")  # not this rank's own mistake

# renamed in torch 2.13
_gather_equal = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_equal = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def join(backend: str) -> None:
    """Start `torch.distributed` as torchrun's environment says.

    torchrun keeps one store over all restarts, in which a restarted rank would find the addresses
    of the dead; so each attempt has names of its own.
    """
    store, rank, size = next(rendezvous("env://"))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"autopar/{attempt}/{size}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)


def connect(mesh: Mesh, *, timing: Timing | None = None) -> Communicator:
    """Bind this process to its rank of `mesh`; every process must call it.

    Args:
        mesh: grid whose size is the number of processes of `torch.distributed`.
        timing: how soon a lost rank is noticed.

    Raises:
        MeshError: the processes do not make up the mesh.
    """
    started = dist.is_available() and dist.is_initialized()
    processes = dist.get_world_size() if started else 1
    if processes != mesh.size:
        raise MeshError(
            f"The mesh '{mesh}' has {mesh.size} ranks, but torch.distributed runs {processes} "
            f"process{'es' if processes > 1 else ''}.",
            where="" if started else "torch.distributed is not initialised in this process",
            hint=f"start with 'torchrun --nproc-per-node {mesh.size} script.py' and call "
            f"torch.distributed.init_process_group(), or choose a mesh of {processes}",
        )
    if mesh.size == 1:
        return VirtualWorld(mesh).communicators[0]
    return Communicator(
        mesh, dist.get_rank(), _Processes(mesh, dist.get_rank(), timing or Timing())
    )


def announce(comm: Communicator, text: str, *, wait: bool) -> None:
    """Tell the other processes with what the model is called now.

    It costs nothing while that is the same. After a change the others are awaited, so that none
    meets them in another program's collectives; where changes are frequent that would cost every
    step, and the beats find a difference within seconds.

    Args:
        text: equal on all ranks that call it rightly.
        wait: await the others after this change, frequent or not.

    Raises:
        BatchError: another rank has called it with something else.
        RankError: a rank died or stalled.
    """
    if isinstance(comm.transport, _Processes):
        comm.transport.announce(text, wait)


def share(comm: Communicator, tensor: Tensor) -> None:
    """Replace the values of `tensor` by those of rank 0, on every process of the mesh.

    Raises:
        RankError: a rank died or stalled, while compiling for instance.
    """
    if isinstance(comm.transport, _Processes):
        comm.transport.share(tensor)


class _Work:
    """Torch operations under way, and how to make the result of what comes."""

    __slots__ = ("_call", "_owner", "_result", "_works")

    def __init__(
        self, owner: _Processes, works: Sequence[Any], call: Call, result: Callable[[], Tensor]
    ) -> None:
        self._owner, self._works, self._call, self._result = owner, works, call, result

    def wait(self) -> Tensor:
        """Block until done.

        Raises:
            RankError: a rank of the group died or stalled.
        """
        for work in self._works:
            self._owner.finish(work, self._call)
        return self._result()


class _Processes:
    """The transport of one process: a process group for each line of the mesh through it."""

    def __init__(self, mesh: Mesh, rank: int, timing: Timing) -> None:
        self._rank = rank
        self._lines = {axis: mesh.group(axis, rank) for axis, size in mesh.axes if size > 1}
        self._lines[""] = tuple(range(mesh.size))
        # axis by axis: a rank waits only for ranks that are at the same or an earlier axis
        self._groups: dict[str, Any] = {
            axis: dist.group.WORLD
            if len(line) == mesh.size
            else dist.new_group(list(line), use_local_synchronization=True)
            for axis, line in self._lines.items()
        }
        self._links: dict[tuple[int, int], Any] = {}
        self._cuda = dist.get_backend() == "nccl"
        self._heart: Heartbeat | None = None
        store = open_store("127.0.0.1", 0, timing, server=True) if rank == 0 else None
        here = (socket.gethostname(), os.getpid(), store.port if store is not None else 0)
        hosts = self.exchange(here, Call("connect", ""))
        if store is None:
            (first, _, port), alone = hosts[0], len({host for host, _, _ in hosts}) == 1
            host = "127.0.0.1" if alone else os.environ.get("MASTER_ADDR", first)
            store = open_store(host, port, timing, server=False)
        names = [f"Rank {r} ({host}, pid {pid})" for r, (host, pid, _) in enumerate(hosts)]
        peers = [r for axis, line in self._lines.items() if axis for r in line]
        heart = Heartbeat(store, rank, names, peers, timing, self._aborter())
        self.exchange(None, Call("connect", ""))  # every rank has beaten once
        heart.start()
        self._heart = heart
        weakref.finalize(self, heart.close)

    def announce(self, text: str, wait: bool) -> None:
        """See the function of this name."""
        assert self._heart is not None, "a transport beats once it is made"
        if self._heart.note(text) and (wait or not self._heart.often):
            fault = self._heart.meet()
            if fault:
                raise self._error(fault, Call("forward", ""))

    def _aborter(self) -> Callable[[], None] | None:
        """How to free a thread that waits inside a CUDA kernel; gloo waits are polled instead."""
        if not self._cuda:
            return None
        groups = list(self._groups.values())

        def abort() -> None:
            for group in groups:
                group.abort()

        return abort

    def finish(self, work: Any, call: Call) -> None:
        """Wait for `work` while the group is alive."""
        try:
            if self._cuda:
                work.wait()  # orders the stream; does not block
                return
            while not self._poll(work):
                fault = self._heart.glance() if self._heart is not None else ""
                if fault:
                    raise self._error(fault, call)
        except RuntimeError as error:
            raise self._diagnose(error, call) from error

    @staticmethod
    def _poll(work: Any) -> bool:
        try:
            work.wait(_POLL)
        except RuntimeError:
            if work.is_completed():
                work.wait()  # finished just now, or raises the true error
                return True
            return False
        return True

    def _begin(self, start: Callable[[], Any], call: Call) -> Any:
        if self._heart is not None and self._heart.fault:
            raise self._error(self._heart.fault, call)
        try:
            return start()
        except RuntimeError as error:
            raise self._diagnose(error, call) from error

    def _diagnose(self, error: RuntimeError, call: Call) -> Exception:
        if self._heart is None:
            return error
        if any(word in str(error).lower() for word in _PEER_WORDS):
            fault = self._heart.blame(self._lines[call.axis])
            if fault:
                return self._error(fault, call)
        return RankError(f"Rank {self._rank} failed in {call}: {error}")

    def _error(self, fault: str, call: Call) -> RankError | BatchError:
        if fault.startswith(DIFFER):
            return BatchError(
                f"The ranks call the model differently: {fault.removeprefix(DIFFER)}.",
                where=f"rank {self._rank} was in {call}",
                expected="the same shapes and settings on all ranks in every call",
                hint="let all loaders give the same batches (seed, drop_last), or pass "
                "batch='local' if every data-parallel rank loads its own rows",
            )
        return RankError(
            f"{fault}.",
            where=f"rank {self._rank} was in {call}",
            hint="look at the output of that rank: its own error or the out-of-memory killer "
            "stands there",
        )

    def share(self, tensor: Tensor) -> None:
        """See the function of this name."""
        call = Call("share", "")
        self.finish(self._begin(lambda: dist.broadcast(tensor, 0, async_op=True), call), call)

    # ---- Transport

    def start_reduce(self, buffer: Tensor, op: str, call: Call) -> Pending:
        """Replace the contiguous `buffer` by its reduction over the axis once waited for."""
        group, k = self._groups[call.axis], len(self._lines[call.axis])
        if not buffer.is_cuda and k <= _FEW_RANKS and buffer.nbytes <= _SMALL_BYTES:
            came, sent = buffer.new_empty(k * buffer.numel()), buffer.repeat(k)
            work = self._begin(
                lambda: dist.all_to_all_single(
                    _bytes(came), _bytes(sent), group=group, async_op=True
                ),
                call,
            )
            rows = came.view(k, -1)
            return _Work(
                self, [work], call, lambda: buffer.copy_(reduce_in_order(rows.unbind(), op))
            )
        wide = buffer.int() if buffer.dtype == torch.int16 else buffer  # gloo has no int16
        kind = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[op]
        work = self._begin(lambda: dist.all_reduce(wide, kind, group=group, async_op=True), call)
        return _Work(self, [work], call, lambda: buffer if wide is buffer else buffer.copy_(wide))

    def start_gather(self, parts: Sequence[Tensor], counts: Sequence[int], call: Call) -> Pending:
        """Concatenate the 1-D `parts` of all ranks, rank after rank; they are read at once."""
        group, out, k = self._groups[call.axis], parts[0].new_empty(sum(counts)), len(counts)
        if not out.is_cuda:  # gloo's gather holds the message twice and takes half as long again
            runs = torch.split(out, list(counts))
            torch.cat(list(parts), out=runs[self._lines[call.axis].index(self._rank)])
            sends = [
                partial(dist.broadcast, _bytes(run), group=group, group_src=i, async_op=True)
                for i, run in enumerate(runs)
                if run.numel()
            ]
            return _Work(self, [self._begin(s, call) for s in sends], call, lambda: out)
        flat = torch.cat(list(parts))
        if min(counts) < max(counts):
            return self.start_swap(flat.repeat(k), [flat.numel()] * k, counts, call)
        work = self._begin(
            lambda: _gather_equal(_bytes(out), _bytes(flat), group=group, async_op=True), call
        )
        return _Work(self, [work], call, lambda: out)

    def start_scatter(self, flat: Tensor, counts: Sequence[int], call: Call) -> Pending:
        """Sum the 1-D `flat` over the axis and keep this rank's run of `counts`."""
        line, group = self._lines[call.axis], self._groups[call.axis]
        mine = counts[line.index(self._rank)]
        if flat.is_cuda and min(counts) == max(counts):
            out, flat = flat.new_empty(mine), flat.contiguous()
            work = self._begin(lambda: _scatter_equal(out, flat, group=group, async_op=True), call)
            return _Work(self, [work], call, lambda: out)
        # as fast as gloo's own, takes uneven pieces, and sums in rank order
        rows = (len(line), mine)
        return self._swapped(
            flat, counts, [mine] * len(line), call,
            lambda came: reduce_in_order(came.view(rows).unbind(), "sum"),
        )  # fmt: skip

    def start_swap(
        self, flat: Tensor, give: Sequence[int], take: Sequence[int], call: Call
    ) -> Pending:
        """Send run j of `flat` to rank j; concatenate what comes, in rank order."""
        return self._swapped(flat, give, take, call, lambda came: came)

    def _swapped(
        self,
        flat: Tensor,
        give: Sequence[int],
        take: Sequence[int],
        call: Call,
        result: Callable[[Tensor], Tensor],
    ) -> Pending:
        """A swap, and what is made of the values that come."""
        group, out, flat = self._groups[call.axis], flat.new_empty(sum(take)), flat.contiguous()
        sends = [n * flat.itemsize for n in give]
        receives = [n * flat.itemsize for n in take]
        work = self._begin(
            lambda: dist.all_to_all_single(
                _bytes(out), _bytes(flat), receives, sends, group=group, async_op=True
            ),
            call,
        )
        return _Work(self, [work], call, lambda: result(out))

    def link(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Prepare for messages from the first rank of each pair to the second."""
        for pair in sorted(set(pairs) - self._links.keys()):
            # all ranks make all groups: names of those made by their members alone count on all
            # members having made as many before
            self._links[pair] = dist.new_group(list(pair))

    def start_send(self, value: Tensor, rank: int, call: Call) -> Pending:
        """Send `value` to a rank of the mesh; it must stay as it is until waited for."""
        return self._message(value.contiguous(), (self._rank, rank), call)

    def start_receive(self, like: Tensor, rank: int, call: Call) -> Pending:
        """What that rank sends next to this one, of the shape and dtype of the buffer `like`."""
        return self._message(like, (rank, self._rank), call)

    def _message(self, value: Tensor, pair: tuple[int, int], call: Call) -> Pending:
        """A broadcast to one: a wait for it may end early, which one for a send may not on gloo."""
        run = partial(
            dist.broadcast, _bytes(value.view(-1)), group=self._links[pair],
            group_src=int(pair[0] > pair[1]), async_op=True,
        )  # fmt: skip
        works = [self._begin(run, call)] if value.numel() else []
        return _Work(self, works, call, lambda: value)

    def exchange(self, value: Any, call: Call) -> list[Any]:
        """Collect one picklable object from every rank of the mesh."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        data = data.cuda() if self._cuda else data
        k = len(self._lines[""])
        length = torch.tensor([data.numel()], device=data.device)
        lengths = self.start_gather([length], [1] * k, call).wait().tolist()
        padded = data.new_zeros(max(lengths))
        padded[: data.numel()] = data
        rows = self.start_gather([padded], [max(lengths)] * k, call).wait().cpu().view(k, -1)
        return [pickle.loads(r[:n].numpy().tobytes()) for r, n in zip(rows, lengths, strict=True)]


def _bytes(flat: Tensor) -> Tensor:
    """The bytes of a contiguous 1-D tensor: gloo moves only some dtypes."""
    return flat.view(torch.uint8)
