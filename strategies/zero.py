"""ZeRO: keep each parameter cut over a data axis, and gather it where it is used.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
section 5. A parameter is cut beyond what the other strategies cut, so the gather goes first and
the gradient is reduced and scattered last; nothing else of the program changes. In stages 1 and 2
what was gathered stays until the backward pass has used it; in stage 3 it is freed after use and
gathered again. Of several microbatches, stage 1 sums the whole gradients and scatters the sum;
from stage 2 on each is scattered as it arises. Between steps a rank holds the shards alone, in all
stages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.layout import Atom, Layout, Mesh
from autopar.program import Program, info, update_info

__all__ = ["Zero"]


@dataclass(frozen=True, slots=True)
class Zero:
    """Cut parameters at rest over `axis`.

    Args:
        axis: mesh axis that cuts the batch.
        stage: 1, 2 or 3.
    """

    axis: str = "fsdp"
    stage: int = 3

    def annotate(self, program: Program) -> None:
        """Give every parameter a layout at rest; the other strategies must have placed it."""
        if program.mesh.sizes[self.axis] == 1:
            return
        nodes = program.placeholders()
        for state in program.states:
            node = nodes[state.node]
            record = info(node)
            if not state.is_parameter or record.rest is not None:
                continue
            if state.layout is None:
                rest = cut(record.layouts[0], self.axis, program.mesh)
                update_info(node, rest=rest, zero=self.stage if rest is not None else 0)
            elif state.layout != state.used:  # it stays as an earlier program placed it
                update_info(node, rest=state.layout, zero=self.stage)


def cut(layout: Layout, axis: str, mesh: Mesh) -> Layout | None:
    """`layout` cut over `axis` inside its other cuts; None where no DTensor can hold that.

    The first dim that divides evenly is taken, as gathers along leading dims copy least; else the
    longest that nothing cuts, in uneven pieces. A DTensor cuts a dim over two axes only where both
    cut its outermost atom.
    """
    layout, k = layout.normal(mesh), mesh.sizes[axis]
    whole: list[tuple[int, int]] = []
    for d, dim in enumerate(layout.dims):
        if not dim or any(atom.axes for atom in dim[1:]):
            continue
        if dim[0].size % (k * math.prod(mesh.sizes[a] for a in dim[0].axes)) == 0:
            return _inside(layout, d, axis)
        if len(dim) == 1 and not dim[0].axes:
            whole.append((dim[0].size, -d))
    return _inside(layout, -max(whole)[1], axis) if whole else None


def _inside(layout: Layout, d: int, axis: str) -> Layout:
    first, *rest = layout.dims[d]
    dims = list(layout.dims)
    dims[d] = (Atom(first.size, (*first.axes, axis)), *rest)
    return Layout(tuple(dims), layout.partial, layout.varying)
