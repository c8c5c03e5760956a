"""Runs a generated program inside autograd: forward now, backward when the user asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.compat import versions_of
from autopar.errors import AutoparError
from autopar.runtime.communicator import Communicator
from autopar.runtime.ledger import Ledger
from autopar.schedule import Split

__all__ = ["Code", "Executor", "More"]


@dataclass(frozen=True, slots=True)
class Code:
    """The functions of one generated program.

    Args:
        forward: states and inputs -> (results, saved values).
        backward: saved values and gradients of the roots -> gradients, or None for inference.
        roots: results that gradients come from.
        split: makes `backward` in two, for gradients that are reduced later.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any] | None
    roots: tuple[int, ...]
    split: Callable[[], Split] | None = None


@dataclass(frozen=True, slots=True)
class More:
    """What it takes to differentiate results that are no roots.

    Args:
        carrying: all results through which a gradient can come.
        compile: makes the code with given roots.
        names: what each value is called in messages.
        written: values that the call writes, so that they may differ later.
        read: those of `written` on which a result of `carrying` may depend.
    """

    carrying: frozenset[int]
    compile: Callable[[tuple[int, ...]], Code]
    names: Sequence[str]
    written: frozenset[int] = frozenset()
    read: frozenset[int] = frozenset()


class Executor:
    """A generated program, bound to a rank.

    The code is made for the gradient of its roots, usually the loss. Where a gradient arrives at
    another result, code with this root too is made, forward runs once more on the same values, and
    later calls use the new code.

    Args:
        code: the functions.
        wrap: makes the gradient of the i-th differentiated state from its local piece.
        comm: the collectives of this rank.
        device: where the tensors live.
        more: how to differentiate other results; without it they carry no gradient.
        ledger: of gradients that are reduced later, if there can be any.
    """

    def __init__(
        self,
        code: Code,
        wrap: Callable[[int, Tensor], Tensor],
        comm: Communicator,
        device: torch.device,
        more: More | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.code, self.wrap = code, wrap
        self.comm, self.device, self.more = comm, device, more
        self.ledger = ledger

    @property
    def carrying(self) -> frozenset[int]:
        """Results through which a gradient can come."""
        return frozenset(self.code.roots) if self.more is None else self.more.carrying

    def run(self, values: list[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
        """Results of one call; gradients go from them to `leaves`.

        Args:
            values: local states, then local inputs.
            leaves: the differentiated parameters, in the order `backward` returns gradients.
        """
        values = [v.contiguous() for v in values]  # graphs are traced for contiguous operands
        if self.code.backward is None or not torch.is_grad_enabled():
            with torch.no_grad():
                results, _ = self.code.forward(self.comm, self.device, values)
            return list(results)
        apply: Any = _Step.apply
        return list(apply(self, values, *leaves))

    def at_step(self, step: int, function: Callable[..., Any], values: list[Any]) -> Any:
        """Run generated code with the random numbers of a step, perhaps an earlier one."""
        now, self.comm.step = self.comm.step, step
        try:
            return function(self.comm, self.device, values)
        finally:
            self.comm.step = now

    def gradients(self, code: Code, step: int, values: list[Any]) -> Sequence[Tensor | None] | None:
        """Local gradients of a call at a step; None where they wait in the ledger."""
        assert code.backward is not None, "only training programs are differentiated"
        if self.ledger is None or not self.ledger.busy:
            found: Sequence[Tensor | None] = self.at_step(step, code.backward, values)
            return found
        assert code.split is not None, "given with the ledger"
        return self.ledger.gradients(
            code.split, lambda partial: self.at_step(step, partial, values), self.comm, self.device
        )

    def grown(self, roots: Iterable[int]) -> Code:
        """Code for the present roots and these too."""
        wanted = tuple(sorted({*self.code.roots, *roots}))
        if wanted != self.code.roots:
            assert self.more is not None, "only results that carry gradients are differentiable"
            self.code = self.more.compile(wanted)
        return self.code


class _Again:
    """The values of a call, kept to run it once more."""

    __slots__ = ("_more", "_step", "_values", "_versions")

    def __init__(self, more: More, step: int, values: Sequence[Tensor]) -> None:
        self._more, self._step = more, step
        self._values = list(values)
        for i in more.read:
            self._values[i] = values[i].clone()
        self._versions = versions_of(self._values)

    def run(self, code: Code, executor: Executor) -> Any:
        """(results, saved values) of the same call by other code.

        Raises:
            AutoparError: a value has been changed since.
        """
        versions = zip(self._versions, versions_of(self._values), strict=True)
        for i, (then, now) in enumerate(versions):
            if then != now and i not in self._more.written:
                raise AutoparError(
                    "A gradient arrives at an output beside the loss for the first time, and "
                    f"{self._more.names[i]} was changed since the call, so it cannot be repeated.",
                    where=self._more.names[i],
                    expected="the parameters and inputs of the call, as they were",
                    hint="call backward before optimizer.step()",
                )
        return executor.at_step(self._step, code.forward, list(self._values))


class _Step(torch.autograd.Function):
    """One call of a program as one node of the autograd graph."""

    @staticmethod
    def forward(ctx: Any, executor: Executor, values: list[Tensor], *leaves: Tensor) -> Any:
        ctx.executor, ctx.code, ctx.again = executor, executor.code, None
        ctx.step, ctx.n_leaves = executor.comm.step, len(leaves)
        more = executor.more
        if more is not None and not more.carrying <= set(executor.code.roots):
            ctx.again = _Again(more, executor.comm.step, values)
        results, ctx.saved = executor.code.forward(executor.comm, executor.device, values)
        # new tensors: a saved value that is a result would get this node as history, a circle
        results = [r.detach() for r in results]
        ctx.like = [(r.shape, r.dtype, r.device) for r in results]
        carrying = executor.carrying
        ctx.mark_non_differentiable(*(r for i, r in enumerate(results) if i not in carrying))
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        executor: Executor = ctx.executor
        code: Code = ctx.code
        if ctx.saved is None:
            raise RuntimeError(
                "backward was called twice on the same step; its saved values are freed after the "
                "first call. Run the model again, or add the losses before calling backward."
            )
        saved, ctx.saved = ctx.saved, None
        arrived = [i for i, g in enumerate(grads) if g is not None]
        if not set(arrived) <= set(code.roots):
            del saved
            code = executor.grown([*code.roots, *arrived])
            _, saved = ctx.again.run(code, executor)
        ctx.again = None
        tangents = []
        for i in code.roots:
            g, (shape, dtype, device) = grads[i], ctx.like[i]
            if g is None:
                g = torch.zeros(shape, dtype=dtype, device=device)
            tangents.append(g.contiguous())
        given = [*saved, *tangents]
        del saved, tangents
        local = executor.gradients(code, ctx.step, given)
        if local is None:
            return (None,) * (2 + ctx.n_leaves)
        wrapped = (None if g is None else executor.wrap(i, g) for i, g in enumerate(local))
        return (None, None, *wrapped)
