"""The optional backend: the generated graphs compiled by TorchInductor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from autopar.codegen import Functions
from autopar.program import Phases
from autopar.runtime import Communicator
from autopar.runtime.kernels import bind

__all__ = ["compiled_functions"]


def compiled_functions(phases: Phases, comm: Communicator) -> Functions:
    """Forward and backward of `phases`, compiled at their first call."""
    forward = _compiled(bind(phases.forward, comm))
    n = phases.n_results

    def run_forward(_: Communicator, device: torch.device, inputs: list[Tensor]) -> Any:
        out = forward(inputs)
        return out[:n], out[n:]

    if not phases.gradients:
        return Functions(run_forward, None)
    backward = _compiled(bind(phases.backward, comm))

    def run_backward(_: Communicator, device: torch.device, inputs: list[Tensor]) -> Any:
        return backward(inputs)

    return Functions(run_forward, run_backward)


def _compiled(gm: fx.GraphModule) -> Any:
    function = torch.compile(gm, backend="inductor", fullgraph=True, dynamic=False)

    def run(inputs: list[Tensor]) -> list[Any]:
        given = list(inputs)
        inputs.clear()
        with torch.no_grad():
            return list(function(*given))

    return run
