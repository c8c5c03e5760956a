"""Expressions of generated code: where values are, lists written short, calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autopar.program import info
from autopar.text import written, written_call

__all__ = ["AHEAD", "Ref", "affine", "call", "listed", "numbered", "spliced"]

AHEAD = "ahead"
"""The variable of the one gather that is under way."""


@dataclass(frozen=True, slots=True)
class Ref:
    """Where a value is: a variable or other expression, or an element of a list."""

    name: str
    index: int | None = None

    def __str__(self) -> str:
        return self.name if self.index is None else f"{self.name}[{self.index}]"


def call(
    node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any], sizes: Mapping[str, int],
    starts: bool = False,
) -> str:  # fmt: skip
    """The call of `node` on arguments with a `Ref` for every node.

    Args:
        sizes: lengths of the lists that a `Ref` may name.
        starts: whether it only starts a collective.
    """
    target = str(node.target)
    record = info(node)
    if target.startswith("autopar."):
        target = f"comm.{target.split('.')[1]}{'_start' if starts else ''}"
    elif not target.startswith("aten."):
        target = f"torch.ops.{target}"

    def own(value: Any) -> str | None:
        if isinstance(value, Ref):
            return str(value)
        if isinstance(value, list) and any(isinstance(v, Ref) for v in value):
            return f"[{', '.join(spliced(value, sizes))}]"
        return "device" if isinstance(value, torch.device) else None

    text = written_call(target, node.target, args, kwargs, own)
    if record.unless is None:
        return text
    val = node.meta["val"]
    if not isinstance(val, Tensor):
        return f"{text} if {record.unless} else None"
    shape = list(record.shapes[0] if record.shapes else val.shape)
    zeros = f"torch.zeros({shape}, dtype={val.dtype}, device=device)"
    return f"{text} if {record.unless} else {zeros}"


def listed(values: Sequence[Any], sizes: Mapping[str, int]) -> str:
    """A new list of values."""
    parts = spliced(values, sizes)
    slice_alone = len(parts) == 1 and parts[0].startswith("*") and parts[0].endswith("]")
    return parts[0][1:] if slice_alone else f"[{', '.join(parts)}]"


def spliced(values: Sequence[Any], sizes: Mapping[str, int]) -> list[str]:
    """Values as parts of a list; elements of lists in regular order are spliced together."""
    parts: list[str] = []
    at = 0
    while at < len(values):
        width, rows = _pattern(values, at)
        if rows < 2:
            value = values[at]
            parts.append(str(value) if isinstance(value, Ref) else written(value, lambda _: None))
            at += 1
            continue
        columns = []
        for k in range(at, at + width):
            one, two = values[k], values[k + width]
            columns.append(_slice(one.name, one.index, two.index - one.index, rows, sizes))
        if width == 1:
            parts.append(f"*{columns[0]}")
        else:
            parts.append(f"*(v for row in zip({', '.join(columns)}) for v in row)")
        at += width * rows
    return parts


def _pattern(values: Sequence[Any], at: int, limit: int = 64) -> tuple[int, int]:
    """(columns, rows) of the elements from `at` on that run through lists in step.

    The one that writes most elements in fewest columns.
    """
    best, most = (1, 1), 0
    first = values[at]
    for width in range(1, min(limit, len(values) - at - 1) + 1):
        value = values[at + width - 1]
        if not isinstance(value, Ref) or value.index is None:
            break
        other = values[at + width]
        if isinstance(other, Ref) and other.index is not None and other.name == first.name:
            rows = _rows(values, at, width)
            if width * (rows - 1) > most:
                best, most = (width, rows), width * (rows - 1)
    return best


def _rows(values: Sequence[Any], at: int, width: int) -> int:
    """How many rows of `width` elements from `at` on are evenly spaced in each column."""
    k = at + width
    while k < len(values):
        here, before = values[k], values[k - width]
        if not isinstance(here, Ref) or here.index is None or here.name != before.name:
            break
        step = here.index - before.index
        earlier = values[k - 2 * width] if k >= at + 2 * width else None
        if not step or (earlier is not None and before.index - earlier.index != step):
            break
        k += 1
    return (k - at) // width


def _slice(name: str, first: int, step: int, count: int, sizes: Mapping[str, int]) -> str:
    last = first + step * (count - 1)
    if count == sizes[name] and abs(step) == 1:
        return name if step == 1 else f"{name}[::-1]"
    end = last + 1 if step > 0 else last - 1
    stop = "" if end in (-1, sizes[name]) else str(end)
    start = "" if first == (0 if step > 0 else sizes[name] - 1) else str(first)
    return f"{name}[{start}:{stop}{f':{step}' if step != 1 else ''}]"


def affine(first: int, step: int, variable: str) -> str:
    """`first + step * variable`, written short."""
    if step == 0:
        return str(first)
    if step < 0:
        return f"{first} - {variable if step == -1 else f'{-step} * {variable}'}"
    product = variable if step == 1 else f"{step} * {variable}"
    if first == 0:
        return product
    return f"{product} + {first}" if first > 0 else f"{product} - {-first}"


def numbered(names: Sequence[str], show: Callable[[int, int], str]) -> str:
    """One name for names that differ in evenly spaced numbers, shown by `show(first, step)`."""
    rows = [re.split(r"(\d+)", name) for name in names]
    if len({tuple(row[::2]) for row in rows}) > 1:
        return names[0]
    parts = []
    for column in zip(*rows, strict=True):
        if len(set(column)) == 1:
            parts.append(column[0])
            continue
        first, step = int(column[0]), int(column[1]) - int(column[0])
        if any(int(part) != first + step * k for k, part in enumerate(column)):
            return names[0]
        parts.append(f"{{{show(first, step)}}}")
    return "".join(parts)
