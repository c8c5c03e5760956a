"""What a training loop asks of a parallel module beside calling it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from autopar.batch import Batch
from autopar.clipping import clip_by_norm
from autopar.errors import InputError
from autopar.layout import Layout, Mesh
from autopar.optimizers import guard
from autopar.parameters import Placer, is_whole, state
from autopar.pretrained import save_whole
from autopar.runtime import Communicator, announce
from autopar.runtime.ledger import Ledger
from autopar.runtime.pieces import piece
from autopar.tracing import Stepper, generated, stepper_of

__all__ = ["Trained"]


class Trained(nn.Module):
    """The part of a parallel module that does not run it."""

    _mesh: Mesh
    _comm: Communicator
    _batch: Batch
    _placer: Placer
    _ledger: Ledger
    _held: dict[str, Layout]
    _steps: int
    _optimizer: ref[torch.optim.Optimizer] | None = None

    def stepper(self) -> Stepper:
        """The generated step of the optimizer made last.

        Raises:
            InputError: there is none.
        """
        found = None if self._optimizer is None else self._optimizer()
        if found is None:
            raise InputError(
                "No optimizer was made by this module.",
                hint="opt = model.optimizer(torch.optim.AdamW, lr=3e-4), then opt.step()",
            )
        return stepper_of(found)

    def optimizer(
        self, cls: type[torch.optim.Optimizer], params: Any = None, **options: Any
    ) -> torch.optim.Optimizer:
        """An optimizer whose step is a generated program over this rank's pieces.

        It is an instance of `cls`, with its groups, state and hyperparameters, and steps as `cls`
        does on one device. An optimizer that is not elementwise steps whole tensors, with a
        warning that says why.

        Args:
            cls: an optimizer class, such as `torch.optim.AdamW`.
            params: parameters or parameter groups; default all parameters.
            options: as for `cls`.

        Raises:
            InputError: `cls` is no optimizer class, or its step needs a closure.
        """
        made = generated(cls)(self.parameters() if params is None else params, **options)
        self._optimizer = ref(made)
        return made

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the norm of all gradients, as `torch.nn.utils.clip_grad_norm_` on one device.

        Args:
            norm_type: p of the p-norm, positive or inf.

        Returns:
            The norm before clipping, a plain tensor without dims, equal on all ranks.

        Raises:
            AutoparError: `no_sync` holds gradients back.
            InputError: `norm_type` is not positive.
            RuntimeError: the norm is not finite and `error_if_nonfinite`.
        """
        self._ledger.require_none("Gradients were to be clipped")
        with torch.no_grad():
            return clip_by_norm(
                self.parameters(), self._comm, max_norm, norm_type, error_if_nonfinite
            )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside reduce no gradients; the first one after reduces the sum.

        Until then `.grad` is as before, zeros where there was none, and what needs whole gradients
        or would lose the others raises: the optimizer's step, `clip_grad_norm_`, `state_dict`.
        `zero_grad` discards what was not reduced.
        """
        ledger = self._ledger
        before, ledger.holding = ledger.holding, True
        guard(ledger)
        try:
            yield
        finally:
            ledger.holding = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of any module; gradients that `no_sync` holds back are discarded."""
        super().zero_grad(set_to_none)
        self._ledger.clear()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module, of DTensors.

        Raises:
            AutoparError: `no_sync` holds gradients back, which it would lose.
        """
        self._ledger.require_none("The state was asked for")
        return super().state_dict(*args, **kwargs)

    def agree(self, signature: str, new: bool = False) -> None:
        """Ranks that call differently must not meet; in local mode counting the rows sees to it.

        Raises:
            BatchError: another rank calls the model, or something else that all ranks must call.
        """
        if self._batch.mode == "global":
            inside = ", inside no_sync()" if self._ledger.holding else ""
            announce(self._comm, signature + inside, wait=new)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load DTensors as they are, and whole tensors by taking this rank's pieces."""
        layouts = {id(state(self, n)): layout for n, layout in self._held.items()}
        known = {n for n, _ in self.named_parameters(remove_duplicate=False)}
        placed = {}
        for name, value in state_dict.items():
            target = state(self, name) if name in known else None
            if target is not None and not is_whole(target) and is_whole(value):
                layout = layouts[id(target)]
                if tuple(value.shape) == tuple(target.shape):
                    local = piece(value, layout, self._mesh, self._comm.coordinate)
                    value = self._placer.dtensor(local.to(target.device), layout)
            placed[name] = value
        return super().load_state_dict(placed, strict=strict, assign=assign)

    def save_pretrained(
        self, folder: str | os.PathLike[str], *, max_shard_bytes: int = 5_000_000_000
    ) -> None:
        """Write the whole model as safetensors; all ranks take part, rank 0 writes.

        The folder of a Hugging Face model loads by its class's `from_pretrained`. No rank holds
        more of the whole than one tensor, and rank 0 than one file. A tied parameter is written
        once.

        Args:
            max_shard_bytes: most bytes of one file, unless a single tensor has more.

        Raises:
            CheckpointError: it could not be written.
            InputError: safetensors is not installed.
        """
        self.agree("save_pretrained", new=True)
        save_whole(
            self.__dict__["_model"], self.state_dict(), folder, max_shard_bytes,
            writes=self._comm.rank == 0, share=self._comm.exchange,
        )  # fmt: skip

    def get_rng_state(self) -> dict[str, int]:
        """What fixes the random numbers to come, such as dropout masks.

        Returns:
            the seed, and as `step` the number of calls with gradients so far.
        """
        return {"seed": self._comm.seed, "step": self._steps}

    def set_rng_state(self, state: Mapping[str, int]) -> None:
        """Continue with the random numbers of `get_rng_state`, on any mesh."""
        self._comm.seed, self._steps = state["seed"], state["step"]

    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole plain state dict, the same on every rank."""
        out = {}
        for name, tensor in self.state_dict().items():
            value = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            out[name] = value.detach().clone()
        return out
