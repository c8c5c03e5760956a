"""Who is alive: a thread on each rank that beats in a shared store and watches its peers.

Collectives have no short timeout, since a rank may compute for minutes between two of them. A rank
counts as lost when its beats stop, which happens when its process dies or stalls, however long its
own computation takes. The first rank that finds the culprit writes it down, so the others name the
same rank and not the one that failed because of it.

Beats also tell with what the model was called, so that ranks that call it with different shapes are
found, though they may meet in collectives that fit by accident.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not re-exported

__all__ = ["DIFFER", "Heartbeat", "Timing"]

DIFFER = "differ: "  # begins a fault that is a disagreement about a call of the model
_END, _FAULT, _RAISED = "end ", "fault", "raised"
_HURRY_S = 0.2  # between two looks while a culprit is sought
_MEET_S = 0.002  # between two looks while others are awaited in a call of another shape
_KEPT = 32  # changes of shape that are told


@dataclass(frozen=True, slots=True)
class Calls:
    """How often the model was called and with what.

    Args:
        count: calls so far.
        changes: (number of a call, what it was called with) where that changed, the latest last.
    """

    count: int = 0
    changes: tuple[tuple[int, str], ...] = ()

    def called(self, text: str) -> Calls:
        """One call more."""
        count = self.count + 1
        if self.changes and self.changes[-1][1] == text:
            return Calls(count, self.changes)
        return Calls(count, (*self.changes[1 - _KEPT :], (count, text)))

    @property
    def often(self) -> bool:
        """Whether half of the latest calls changed."""
        return len(self.changes) > 8 and self.count - self.changes[-9][0] < 16

    def at(self, number: int) -> str | None:
        """What call `number` was made with, None where that is not known (any more)."""
        if number > self.count:
            return None
        return next((text for start, text in reversed(self.changes) if start <= number), None)

    def difference(self, other: Calls) -> tuple[int, str, str] | None:
        """The first call that both know and made differently."""
        numbers = sorted({start for start, _ in (*self.changes, *other.changes)})
        for number in numbers:
            mine, theirs = self.at(number), other.at(number)
            if mine is not None and theirs is not None and mine != theirs:
                return number, mine, theirs
        return None


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
        self._calls = Calls()
        self._awaited = 0  # number of the call that the peers shall come to
        self._met = threading.Event()
        self._stop, self._wake = threading.Event(), threading.Event()
        self._beat()
        if rank == 0:
            store.set(_FAULT, "")
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Begin to beat; every rank must have been constructed."""
        self._thread.start()

    def note(self, text: str) -> bool:
        """Count a call of the model with `text`; whether the one before was with another."""
        before = self._calls
        self._calls = before.called(text)
        changed = self._calls.changes is not before.changes
        if changed:
            self._wake.set()
        return changed

    @property
    def often(self) -> bool:
        """Whether the calls change all the time: half of the latest ones did."""
        return self._calls.often

    def meet(self) -> str:
        """Wait until all peers have come to this call; the fault where one called differently."""
        self._met.clear()
        self._awaited = self._calls.count
        self._wake.set()
        while not self._met.wait(1.0) and not self.glance():
            pass
        self._awaited = 0
        if self.fault:  # the others shall read it before this rank disturbs them by leaving
            self._stop.wait(2 * self._timing.beat_s)
        return self.fault

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
            self._wake.wait(self._pause_s())
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

    def _pause_s(self) -> float:
        if self._awaited and not self._met.is_set():
            return _MEET_S
        return _HURRY_S if self._suspects else self._timing.beat_s

    def _look(self) -> None:
        """Read the beats and declare a fault where a rank is silent or has left others waiting."""
        awaited, here = self._awaited, self._calls
        met = awaited > 0
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
                met = False
                continue
            calls = _calls_in(value)
            self._compare(rank, here, calls)
            met = met and calls.at(awaited) is not None
            before, since = self._seen.get(rank, ("", now))
            if value != before:
                self._seen[rank] = (value, now)
            elif now - since >= (self._timing.doubt_s if suspect else self._timing.silent_s):
                silence_s = max(now - since, time.time() - float(value.split()[1]))
                self._declare(f"{self._names[rank]} stopped responding {silence_s:.0f} s ago")
        if met and not self.fault:
            self._met.set()

    def _compare(self, rank: int, here: Calls, there: Calls) -> None:
        """Declare a fault where this rank and another have called the model differently."""
        found = here.difference(there)
        if found is not None:
            number, mine, theirs = found
            texts = {self._rank: mine, rank: theirs}
            said = " and ".join(f"{self._names[r]} with {texts[r]}" for r in sorted(texts))
            self._declare(f"{DIFFER}call {number} of the model was made by {said}")

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
        told = json.dumps([self._calls.count, self._calls.changes])
        self._store.set(self._key(self._rank), f"{self._turns} {time.time():.1f} {told}")

    @staticmethod
    def _key(rank: int) -> str:
        return f"beat/{rank}"


def _calls_in(beat: str) -> Calls:
    """What a beat tells about the calls of its rank."""
    count, changes = json.loads(beat.split(" ", 2)[2])
    return Calls(count, tuple((number, text) for number, text in changes))


def open_store(host: str, port: int, timing: Timing, *, server: bool) -> TCPStore:
    """A store on `host`; the server listens everywhere, on a free port when `port` is 0."""
    store = TCPStore(
        host, port, is_master=server, wait_for_workers=False, timeout=timedelta(seconds=30)
    )
    store.set_timeout(timedelta(seconds=timing.silent_s))
    return store
