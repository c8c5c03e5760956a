"""Every error a user can meet, with the place it happened and what to try."""

from __future__ import annotations

__all__ = [
    "AutoparError",
    "BatchError",
    "CaptureError",
    "CheckpointError",
    "InputError",
    "MeshError",
    "PlanError",
    "RankError",
    "RuleError",
    "ScheduleError",
    "VerificationError",
]


class AutoparError(Exception):
    """Base of all errors raised by autopar.

    Args:
        what: what failed, one sentence.
        where: the culprit: a printed node with a caret, a source line, a parameter name.
        expected: what would have been right.
        hint: what to try.
    """

    def __init__(self, what: str, *, where: str = "", expected: str = "", hint: str = "") -> None:
        parts = [what]
        if where:
            parts.append(f"  where:    {where}")
        if expected:
            parts.append(f"  expected: {expected}")
        if hint:
            parts.append(f"  try:      {hint}")
        super().__init__("\n".join(parts))
        self.what, self.where, self.expected, self.hint = what, where, expected, hint


class MeshError(AutoparError):
    """The mesh text, its axes or its size do not fit."""


class CaptureError(AutoparError):
    """The model could not be traced to a graph."""


class RuleError(AutoparError):
    """An operation has no rule, or a rule is malformed."""


class PlanError(AutoparError):
    """A plan, pin or strategy cannot be applied to this program."""


class ScheduleError(AutoparError):
    """A pipeline schedule is malformed, or could stall or give a wrong result."""


class InputError(AutoparError):
    """The arguments of a call do not fit the compiled program."""


class BatchError(InputError):
    """The ranks were given batches that do not agree with the batch mode."""


class CheckpointError(AutoparError):
    """A checkpoint could not be saved, or does not fit what it is loaded into."""


class RankError(AutoparError):
    """A rank died, stalled or left the collective order."""


class VerificationError(AutoparError):
    """A program broke an invariant of its level or differs from the single device."""
