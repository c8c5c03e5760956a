"""Timelines of a pipeline, drawn: ranks down, time to the right, what is idle left bare."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from autopar.pipeline.simulate import Span, Timeline

__all__ = ["html", "svg"]

_COLOURS = {"F": "#8fb8de", "B": "#f0b36a", "I": "#f0b36a", "W": "#a5cf9b"}
_NAMES = {"F": "forward", "B": "backward", "I": "gradient of the input", "W": "of the weights"}
_ROW, _GAP, _LEFT, _TOP = 26, 4, 62, 30  # pixels
_WIDTH = 1200


def svg(timeline: Timeline, title: str = "") -> str:
    """The timeline as an SVG picture, 1200 pixels wide.

    Each instruction is a box with the number of its microbatch; darker ones belong to later stages
    of a rank, and what is bare is idle. A box tells its name and time under the mouse.
    """
    end = timeline.end_s or 1.0
    scale = (_WIDTH - _LEFT - 10) / end
    height = _TOP + timeline.ranks * (_ROW + _GAP) + 30
    kinds = [k for k in _COLOURS if any(s.instruction.kind == k for s in timeline.spans)]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="18" font-size="13">{escape(_heading(timeline, title))}</text>',
    ]
    for rank, own in enumerate(timeline.by_rank()):
        y = _TOP + rank * (_ROW + _GAP)
        stages = sorted({s.instruction.stage for s in own})
        width = round(end * scale, 2)
        parts.append(f'<text x="8" y="{y + 17}">rank {rank}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{y}" width="{width}" height="{_ROW}" fill="#f1f1f1"/>')
        parts += [_box(s, scale, y, stages.index(s.instruction.stage)) for s in own]
    for i, kind in enumerate(kinds):
        x, y = _LEFT + 170 * i, height - 22
        parts.append(f'<rect x="{x}" y="{y}" width="14" height="14" fill="{_COLOURS[kind]}"/>')
        parts.append(f'<text x="{x + 20}" y="{y + 11}">{kind}: {_NAMES[kind]}</text>')
    return "\n".join([*parts, "</svg>"])


def html(timelines: Mapping[str, Timeline]) -> str:
    """A page of pictures, by their titles, such as "simulated" and "measured"; it loads nothing."""
    pictures = "\n".join(f"<figure>{svg(t, title)}</figure>" for title, t in timelines.items())
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>Pipeline</title></head>\n<body>\n{pictures}\n</body></html>\n"
    )


def _heading(timeline: Timeline, title: str) -> str:
    rate = f"{100 * timeline.bubble_rate:.1f} % idle"
    return " · ".join(p for p in (title, f"{timeline.step_s:.4g} s", rate) if p)


def _box(span: Span, scale: float, y: int, turn: int) -> str:
    """One instruction; `turn` is which of the stages of its rank it belongs to."""
    i = span.instruction
    x, width = _LEFT + span.start_s * scale, (span.end_s - span.start_s) * scale
    shade = max(0.55, 1 - 0.2 * turn)
    label = ""
    if width > 7 * len(str(i.microbatch)) + 2:
        label = (
            f'<text x="{x + width / 2:.2f}" y="{y + 17}" text-anchor="middle">{i.microbatch}</text>'
        )
    return (
        f"<g><title>{i}: {span.start_s:.6g} s to {span.end_s:.6g} s</title>"
        f'<rect x="{x:.2f}" y="{y}" width="{max(width, 0.5):.2f}" height="{_ROW}" stroke="white" '
        f'stroke-width="0.6" fill="{_COLOURS[i.kind]}" style="filter:brightness({shade:.2f})"/>'
        f"{label}</g>"
    )
