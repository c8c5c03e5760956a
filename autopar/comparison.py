"""What a run gave beside what it should have given: traces, errors and the report of both."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autopar.errors import VerificationError

__all__ = ["Report", "Row", "Trace", "compare"]


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison: largest relative error of a kind of tensor at a step.

    Args:
        lost: the single device itself has a NaN there, so nothing can be compared.
    """

    step: int
    what: str
    name: str
    error: float
    limit: float
    lost: bool = False

    @property
    def ok(self) -> bool:
        """Whether the error is within the limit (a NaN is not)."""
        return self.error <= self.limit


@dataclass(slots=True)
class Report:
    """What `verify` found.

    Args:
        rows: numeric comparisons with the single device.
        problems: findings of the static check.
        checked: what the static check looked at.
        stepped: which code made the optimizer's steps.
    """

    title: str
    rows: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    checked: str = ""
    stepped: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.problems and all(r.ok for r in self.rows)

    def raise_if_failed(self) -> None:
        """Raise VerificationError with the table where something was found."""
        if not self.ok:
            verdict = "could not be compared with" if self.lost else "differs from"
            raise VerificationError(f"The parallel program {verdict} one device.\n{self}")

    @property
    def lost(self) -> bool:
        """Whether nothing is wrong but that the model gives NaN on one device, too."""
        return not self.problems and all(r.ok or r.lost for r in self.rows) and not self.ok

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        verdict = "equal" if self.ok else "NOT COMPARED" if self.lost else "DIFFERENT"
        table = Table(title=f"{self.title}: {verdict}")
        for column in ("step", "compared", "worst", "relative error", "limit", ""):
            table.add_column(column)
        for r in self.rows:
            table.add_row(
                str(r.step), r.what, r.name, f"{r.error:.1e}", f"{r.limit:.0e}",
                "ok" if r.ok else "both NaN" if r.lost else "FAIL",
            )  # fmt: skip
        console = Console(file=io.StringIO(), width=100)
        console.print(table)
        if any(r.lost for r in self.rows):
            text = "the model itself gives NaN on one device; so do the ranks"
            console.print(f"NaN: {text}", markup=False, highlight=False)
        if self.stepped:
            console.print(f"optimizer: {self.stepped}", markup=False, highlight=False)
        if self.checked:
            verdict = f"{len(self.problems)} problem(s)" if self.problems else "no problem"
            console.print(f"static: {self.checked}: {verdict}", markup=False, highlight=False)
        for problem in self.problems:
            console.print(f"static: {problem}", markup=False, highlight=False)
        return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


@dataclass(slots=True)
class Trace:
    """Whole tensors of a run, step by step."""

    losses: list[Tensor] = field(default_factory=list)
    grads: list[dict[str, Tensor | None]] = field(default_factory=list)
    params: list[dict[str, Tensor]] = field(default_factory=list)
    buffers: list[dict[str, Tensor]] = field(default_factory=list)


def compare(
    have: Trace, want: Trace, limit: float, exact: Callable[[], Trace] | None = None
) -> list[Row]:
    """Largest relative error of each kind of tensor at each step, in units of its limit.

    Errors are relative to the tensor's norm, but not below 1e-3 of the largest norm of its kind:
    a gradient that is exactly zero on paper (a key bias under softmax) holds only rounding.

    Args:
        exact: gives the single device's run in float64, where `want` is narrower. An error above
            the limit may then be 8 times that of the single device: what rounds a tensor away
            there, such as a bias before a norm, does so on ranks as well.
    """
    rows = []
    for step, (a, b) in enumerate(zip(have.losses, want.losses, strict=True)):
        rows.append(Row(step, "loss", "", _error(a, b, 0.0), limit, _both_nan(a, b)))
        for what in ("grads", "params", "buffers"):
            one, two = getattr(have, what)[step], getattr(want, what)[step]
            floor = 1e-3 * max((_norm(t) for t in two.values() if t is not None), default=0.0)
            worst, name, allowed = 0.0, "", limit
            missing = {k: None for k, t in two.items() if k not in one and what == "grads"}
            for key, t in (one | missing).items():
                error, bound = _pair_error(t, two.get(key), floor), limit
                if limit < error < math.inf and exact is not None:
                    truth = getattr(exact(), what)[step].get(key)
                    bound = max(limit, 8 * _pair_error(two.get(key), truth, floor))
                if not error / bound <= worst / allowed:
                    worst, name, allowed = error, key, bound
                if math.isnan(error):  # nothing compares above it
                    break
            lost = math.isnan(worst) and _both_nan(one[name], two.get(name))
            rows.append(Row(step, what, name, worst, allowed, lost))
    return rows


def _both_nan(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether both have a NaN."""
    return all(t is not None and bool(torch.isnan(t).any()) for t in (a, b))


def _norm(t: Tensor) -> float:
    return float(t.double().norm()) if t.numel() else 0.0


def _pair_error(a: Tensor | None, b: Tensor | None, floor: float) -> float:
    if a is None or b is None:
        present = a if a is not None else b
        return 0.0 if present is None or not bool(present.any()) else float("inf")
    return _error(a, b, floor)


def _error(a: Tensor, b: Tensor, floor: float) -> float:
    if a.shape != b.shape:
        return float("inf")
    return _norm(a.double() - b.double()) / max(_norm(b), floor, 1e-300) if a.numel() else 0.0
