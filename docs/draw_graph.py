"""Draws docs/graph.svg: a small model after `autopar.compile`, as it runs on each rank.

    python docs/draw_graph.py

Boxes in the middle are the calls in order, with the layout of their result; on the left stand the
parameters with what happens to them before use; orange boxes communicate.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import autopar
from autopar.program import info

WIDTH, HEIGHT, GAP = 330, 40, 18  # of a box, and between rows
LEFT, MIDDLE, TOP = 20, 420, 64
FILL = {"state": "#dbe7f5", "input": "#e3f1dd", "call": "#f6f6f6", "collective": "#ffd8a8"}
MOVES_NOTHING = {"vary", "shard", "cut"}


class Layer(nn.Module):
    """The feed-forward half of a transformer layer, with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """Mean squared error of (8, 16, 64)."""
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return (x - target).square().mean()


def label(node: fx.Node) -> str:
    """`linear`, or `all_reduce tp`."""
    namespace, name = str(node.target).split(".")[:2]
    return f"{name} {node.args[1]}" if namespace == "autopar" else name


def kind(node: fx.Node) -> str:
    """The colour of a call."""
    namespace, name = str(node.target).split(".")[:2]
    moves = namespace == "autopar" and name not in MOVES_NOTHING
    return "collective" if moves else "call"


def box(x: float, y: float, title: str, detail: str, colour: str) -> str:
    """A box with two lines of text."""
    return (
        f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="5" fill="{FILL[colour]}" '
        f'stroke="#888"/><text x="{x + 10}" y="{y + 17}" font-weight="bold">{escape(title)}</text>'
        f'<text x="{x + 10}" y="{y + 33}" fill="#444">{escape(detail)}</text>'
    )


def draw(compiled: autopar.Compiled, title: str) -> str:
    """The SVG text of the forward graph with its collectives."""
    graph = compiled.graph("spmd").graph
    program = compiled.of().program
    names = {s.node: s.name for s in program.states} | {i.node: i.name for i in program.inputs}
    own = {s.node for s in program.states}  # states and what is made of one state alone
    chains: dict[str, list[str]] = {}  # last node of such a chain -> words
    rows: list[fx.Node] = []
    for node in graph.nodes:
        operands = [n.name for n in node.all_input_nodes]
        if node.name in own:
            chains[node.name] = [f"{names[node.name]}  {info(node).layouts[0]}"]
        elif len(operands) == 1 and operands[0] in own:
            own.add(node.name)
            chains[node.name] = [*chains[operands[0]], label(node)]
        elif node.op != "output":
            rows.append(node)
    y = {n.name: TOP + i * (HEIGHT + GAP) for i, n in enumerate(rows)}
    boxes, lines = [], []
    side: dict[str, int] = {}
    free = TOP  # next free height on the left
    for i, node in enumerate(rows):
        here = y[node.name]
        layout = str(info(node).layouts[0])
        if node.op == "placeholder":
            boxes.append(box(MIDDLE, here, f"input {names[node.name]}", layout, "input"))
            continue
        boxes.append(box(MIDDLE, here, label(node), layout, kind(node)))
        used = [n for n in node.all_input_nodes if n.name in own]
        for k, operand in enumerate(used):
            top = max(free, here - (len(used) - 1 - k) * (HEIGHT + GAP))
            free = top + HEIGHT + GAP
            first, *rest = chains[operand.name]
            colour = (
                "collective" if any(w.split()[0] not in MOVES_NOTHING for w in rest) else "state"
            )
            boxes.append(box(LEFT, top, first, " → ".join(rest) or "as it is", colour))
            lines.append(f"M{LEFT + WIDTH},{top + 20} L{MIDDLE},{here + 20}")
        for operand in node.all_input_nodes:
            if operand.name in own:
                continue
            if i and operand is rows[i - 1]:
                lines.append(f"M{MIDDLE + 165},{here - GAP} L{MIDDLE + 165},{here}")
            else:
                depth = 30 + 22 * side.setdefault(operand.name, len(side))
                right = MIDDLE + WIDTH
                lines.append(
                    f"M{right},{y[operand.name] + 20} C{right + depth},{y[operand.name] + 20} "
                    f"{right + depth},{here + 20} {right},{here + 20}"
                )
    width, height = MIDDLE + WIDTH + 110, TOP + len(rows) * (HEIGHT + GAP)
    paths = "".join(
        f'<path d="{d}" fill="none" stroke="#555" marker-end="url(#tip)"/>' for d in lines
    )
    note = "{axis} cut over the axis    +axis partial sum    ~axis copy whose gradient is partial"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="DejaVu Sans Mono, Menlo, monospace" font-size="12">'
        '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="3" orient="auto">'
        '<path d="M0,0 L7,3 L0,6 z" fill="#555"/></marker></defs>'
        '<rect width="100%" height="100%" fill="white"/>'
        f'<text x="{LEFT}" y="26" font-size="15" font-weight="bold">{escape(title)}</text>'
        f'<text x="{LEFT}" y="46" fill="#444">{escape(note)}</text>{paths}{"".join(boxes)}</svg>\n'
    )


def main() -> None:
    """Write the picture beside this file."""
    mesh = "dp=2, tp=2"
    x = torch.zeros(8, 16, 64)
    compiled = autopar.compile(Layer(), mesh, {"x": x, "target": x.clone()})
    path = Path(__file__).with_name("graph.svg")
    path.write_text(draw(compiled, f"forward of a feed-forward layer on {mesh}"), encoding="utf-8")
    print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
