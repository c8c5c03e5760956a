"""Data parallelism: cut the batch dim of the inputs over an axis; everything else follows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.errors import BatchError, PlanError
from autopar.layout import DATA_AXES, MICRO
from autopar.program import Program, info, update_info
from autopar.rules.factors import specs
from autopar.strategies.follow import Follow

__all__ = ["Data"]


@dataclass(frozen=True, slots=True)
class Data:
    """Cut the batch over `axis`; parameters are replicated and their gradients reduced.

    Args:
        axis: mesh axis.
        batch_dims: dim to cut of each input by name, None for an input every rank needs whole;
            inputs that are not named are cut in dim 0 where it has the batch size.
    """

    axis: str = "dp"
    batch_dims: Mapping[str, int | None] = field(default_factory=dict)

    def annotate(self, program: Program) -> None:
        """Annotate every node on the axis.

        Raises:
            BatchError: the batch has fewer rows than the axis has ranks.
            PlanError: `batch_dims` names no input, or a dim that it does not have.
        """
        self.check_dims(program)
        sizes = program.mesh.axes
        data = [(a, n) for a, n in sizes if a == self.axis or (a in DATA_AXES and n > 1)]
        ranks = math.prod(n for _, n in data)
        if 0 < program.batch_size < ranks:
            over = " x ".join(f"{'accumulate' if a == MICRO else a}={n}" for a, n in data)
            raise BatchError(
                f"A batch of {program.batch_size} rows cannot be spread over {over}.",
                expected=f"at least {ranks} rows",
                hint="use a larger batch or a smaller mesh axis"
                + (", or fewer microbatches" if MICRO in program.mesh.names else ""),
            )
        table = specs(program)
        nodes = program.placeholders()
        for given in program.inputs:
            dim = self.batch_dims.get(given.name, 0)
            if dim is None or len(given.shape) <= dim:
                continue
            if given.name not in self.batch_dims and given.shape[dim] != program.batch_size:
                continue
            node = nodes[given.node]
            factors = table[node].outputs[0][dim]
            if factors:
                choice = {**info(node).choice, self.axis: factors[0]}
                update_info(node, choice=choice)
        Follow(self.axis).annotate(program)

    def check_dims(self, program: Program) -> None:
        """Every name of `batch_dims` must be an input with that dim."""
        shapes = {i.name: i.shape for i in program.inputs}
        for name, dim in self.batch_dims.items():
            if name not in shapes:
                raise PlanError(
                    f"batch_dims names {name!r}, which is no tensor argument of the call.",
                    expected=f"one of {', '.join(shapes)}",
                )
            if dim is not None and not 0 <= dim < len(shapes[name]):
                raise PlanError(
                    f"batch_dims[{name!r}] is {dim}, but {name} has shape {list(shapes[name])}.",
                    expected=f"a dim from 0 to {len(shapes[name]) - 1}, or None",
                )
