"""Runs a generated program inside autograd: forward now, backward when the user asks for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.communicator import Communicator

__all__ = ["Executor"]


class Executor:
    """The functions of one generated program, bound to a rank.

    Args:
        forward: states and inputs -> (results, saved values).
        backward: saved values and gradients of the roots -> gradients, or None for inference.
        roots: results that gradients come from.
        wrap: makes the gradient of the i-th differentiated state from its local piece.
        comm: the collectives of this rank.
        device: where the tensors live.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        backward: Callable[..., Any] | None,
        roots: Sequence[int],
        wrap: Callable[[int, Tensor], Tensor],
        comm: Communicator,
        device: torch.device,
    ) -> None:
        self.forward, self.backward = forward, backward
        self.roots, self.wrap = tuple(roots), wrap
        self.comm, self.device = comm, device

    def run(self, values: list[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
        """Results of one call; those in `roots` carry gradients to `leaves`.

        Args:
            values: local states, then local inputs.
            leaves: the differentiated parameters, in the order `backward` returns gradients.
        """
        values = [v.contiguous() for v in values]  # graphs are traced for contiguous operands
        if self.backward is None or not torch.is_grad_enabled():
            with torch.no_grad():
                results, _ = self.forward(self.comm, self.device, values)
            return list(results)
        apply: Any = _Step.apply
        return list(apply(self, values, *leaves))


class _Step(torch.autograd.Function):
    """One call of a program as one node of the autograd graph."""

    @staticmethod
    def forward(ctx: Any, executor: Executor, values: list[Tensor], *leaves: Tensor) -> Any:
        results, saved = executor.forward(executor.comm, executor.device, values)
        ctx.executor, ctx.saved = executor, saved
        ctx.like = [results[i] for i in executor.roots]
        ctx.step = executor.comm.step
        others = [
            r for i, r in enumerate(results) if i not in executor.roots and isinstance(r, Tensor)
        ]
        ctx.mark_non_differentiable(*others)
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        executor: Executor = ctx.executor
        if ctx.saved is None:
            raise RuntimeError(
                "backward was called twice on the same step; its saved values are freed after the "
                "first call. Run the model again, or add the losses before calling backward."
            )
        saved, ctx.saved = ctx.saved, None
        tangents = [
            torch.zeros_like(like) if (g := grads[i]) is None else g.contiguous()
            for i, like in zip(executor.roots, ctx.like, strict=True)
        ]
        assert executor.backward is not None, "only training programs are differentiated"
        local = executor.backward(executor.comm, executor.device, [*saved, *tangents])
        wrapped = (None if g is None else executor.wrap(i, g) for i, g in enumerate(local))
        return (None, None, *wrapped)
