"""Who is alive: a thread on each rank that beats in a shared store and watches its peers.

Collectives have no short timeout, since a rank may compute for minutes between two of them. A rank
counts as lost when its beats stop, which happens when its process dies or stalls, however long its
own computation takes. The first rank that finds the culprit writes it down, so the others name the
same rank and not the one that failed because of it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not re-exported

__all__ = ["Heartbeat", "Timing"]

_END, _FAULT, _RAISED = "end ", "fault", "raised"
_HURRY_S = 0.2  # between two looks while a culprit is sought


@dataclass(frozen=True, slots=True)
class Timing:
    """How fast ranks beat and when they count as lost.

    Args:
        beat_s: time between two beats.
        silent_s: silence after which a rank counts as lost while all connections stand.
        doubt_s: silence that suffices once a connection has closed.
        patience_s: longest search for the culprit after a connection has closed.
    """

    beat_s: float = 1.0
    silent_s: float = 30.0
    doubt_s: float = 3.0
    patience_s: float = 15.0


class Heartbeat:
    """Beats of this rank and a watch over `peers`.

    One thread alone talks to the store, because a call to a store whose server has stalled may
    never return; whoever waits for a collective sees by `glance` that the thread makes no turns.

    Args:
        store: shared store; rank 0 is its server.
        rank: this rank.
        names: what to call each rank in messages.
        peers: ranks that this rank meets in collectives.
        timing: intervals.
        on_fault: called once, by the thread, when a fault becomes known.
    """

    def __init__(
        self,
        store: TCPStore,
        rank: int,
        names: Sequence[str],
        peers: Sequence[int],
        timing: Timing,
        on_fault: Callable[[], None] | None = None,
    ) -> None:
        self.fault = ""
        self._store, self._rank, self._names, self._timing = store, rank, names, timing
        self._peers = sorted({*peers, 0} - {rank})
        self._suspects: frozenset[int] = frozenset()
        self._seen: dict[int, tuple[str, float]] = {}
        self._ended: set[int] = set()
        self._on_fault = on_fault
        self._lost_store = False
        self._turns = self._known_turns = self._glances = 0
        self._stop, self._wake = threading.Event(), threading.Event()
        self._beat()
        if rank == 0:
            store.set(_FAULT, "")
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Begin to beat; every rank must have been constructed."""
        self._thread.start()

    def close(self) -> None:
        """Say goodbye, so that others who still wait for this rank learn why it has gone."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._wake.set()
        self._thread.join(timeout=1.0)
        if self._lost_store or self._thread.is_alive():
            return
        error = getattr(sys, "last_value", None)  # set where the interpreter printed a traceback
        reason = f"{_RAISED} {type(error).__name__}: {error}" if error else "has ended its program"
        try:
            self._store.set(self._key(self._rank), _END + reason.splitlines()[0])
            if self._rank == 0:
                self._linger()
        except RuntimeError:
            pass  # the server has gone before us

    def glance(self) -> str:
        """The fault, if one is known; to be called about once a second by a waiting thread."""
        if self._turns != self._known_turns:
            self._known_turns, self._glances = self._turns, 0
        self._glances += 1
        if self._glances > 2 + self._timing.silent_s:
            self.fault = self.fault or f"{self._names[0]} stopped responding"
        return self.fault

    def blame(self, suspects: Sequence[int]) -> str:
        """Find out which of `suspects` made a collective fail; '' where all seem alive."""
        turns, deadline = self._turns, time.monotonic() + self._timing.patience_s
        self._suspects = frozenset(suspects) - {self._rank}
        self._wake.set()
        while not self.fault and time.monotonic() < deadline:
            time.sleep(0.05)
        self._suspects = frozenset()
        if self._turns <= turns + 1:  # stuck in a call to the server
            self.fault = self.fault or f"{self._names[0]} stopped responding"
        return self.fault

    def _run(self) -> None:
        told = False
        while not self._stop.is_set() and not self._lost_store:
            self._wake.wait(_HURRY_S if self._suspects else self._timing.beat_s)
            self._wake.clear()
            try:
                self._beat()
                if not self.fault:  # otherwise beat on: this rank is not the culprit
                    self._look()
            except RuntimeError:
                self._lose_store()
            self._turns += 1
            if self.fault and not told and self._on_fault is not None:
                self._on_fault()
            told = bool(self.fault)

    def _look(self) -> None:
        """Read the beats and declare a fault where a rank is silent or has left others waiting."""
        ranks = sorted(self._suspects.union(self._peers))
        keys = [_FAULT, *map(self._key, ranks)]
        fault, *values = (value.decode() for value in self._store.multi_get(keys))
        self.fault = fault
        now = time.monotonic()
        for rank, value in zip(ranks, values, strict=True):
            suspect = rank in self._suspects
            if value.startswith(_END):
                self._ended.add(rank)
                reason = value.removeprefix(_END)
                if suspect or reason.startswith(_RAISED):
                    self._declare(f"{self._names[rank]} {reason}")
                continue
            before, since = self._seen.get(rank, ("", now))
            if value != before:
                self._seen[rank] = (value, now)
            elif now - since >= (self._timing.doubt_s if suspect else self._timing.silent_s):
                silence_s = max(now - since, time.time() - float(value.split()[1]))
                self._declare(f"{self._names[rank]} stopped responding {silence_s:.0f} s ago")

    def _lose_store(self) -> None:
        """The server is rank 0: without its goodbye, it is the one that is lost."""
        self._lost_store = True
        if 0 not in self._ended and not self._stop.is_set():
            self.fault = self.fault or f"{self._names[0]} stopped responding"

    def _declare(self, fault: str) -> None:
        """Record the first fault that any rank has found."""
        if not self.fault:
            self.fault = self._store.compare_set(_FAULT, "", fault).decode() or fault

    def _linger(self) -> None:
        """Keep the store up while the others read the fault or say goodbye."""
        others = [r for r in range(len(self._names)) if r != self._rank]
        beats = 6.0 if self.fault else 2.5
        deadline = time.monotonic() + beats * self._timing.beat_s
        while others and time.monotonic() < deadline:
            values = self._store.multi_get([self._key(r) for r in others])
            others = [
                r for r, v in zip(others, values, strict=True) if not v.startswith(_END.encode())
            ]
            time.sleep(0.02)

    def _beat(self) -> None:
        self._store.set(self._key(self._rank), f"{self._turns} {time.time():.1f}")

    @staticmethod
    def _key(rank: int) -> str:
        return f"beat/{rank}"


def open_store(host: str, port: int, timing: Timing, *, server: bool) -> TCPStore:
    """A store on `host`; the server listens everywhere, on a free port when `port` is 0."""
    store = TCPStore(
        host, port, is_master=server, wait_for_workers=False, timeout=timedelta(seconds=30)
    )
    store.set_timeout(timedelta(seconds=timing.silent_s))
    return store
