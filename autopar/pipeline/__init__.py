"""Pipeline schedules as data: written, read, checked, simulated and drawn."""

from __future__ import annotations

from autopar.pipeline.instructions import Instruction, Schedule, chain, parse
from autopar.pipeline.messages import communicate
from autopar.pipeline.orders import ORDERS, order
from autopar.pipeline.picture import html, svg
from autopar.pipeline.protocol import Problem, check_schedule, problems
from autopar.pipeline.simulate import Costs, Span, Timeline, simulate

__all__ = [
    "ORDERS",
    "Costs",
    "Instruction",
    "Problem",
    "Schedule",
    "Span",
    "Timeline",
    "chain",
    "check_schedule",
    "communicate",
    "html",
    "order",
    "parse",
    "problems",
    "simulate",
    "svg",
]
