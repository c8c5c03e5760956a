"""autopar: parallel training of an unmodified PyTorch model, in one line.

`autopar.parallelize(model, autopar.mesh("dp=2, tp=2"))`
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar import rules
    from autopar.api import compile, parallelize
    from autopar.checkpoint import Checkpoints
    from autopar.compiled import Compiled
    from autopar.errors import AutoparError
    from autopar.layout import Mesh, mesh
    from autopar.module import ParallelModule
    from autopar.verification import verify

__all__ = [
    "AutoparError",
    "Checkpoints",
    "Compiled",
    "Mesh",
    "ParallelModule",
    "compile",
    "mesh",
    "parallelize",
    "rules",
    "verify",
]

_HOMES = {
    "Checkpoints": "autopar.checkpoint",
    "Compiled": "autopar.compiled",
    "Mesh": "autopar.layout",
    "ParallelModule": "autopar.module",
    "AutoparError": "autopar.errors",
    "compile": "autopar.api",
    "mesh": "autopar.layout",
    "parallelize": "autopar.api",
    "verify": "autopar.verification",
}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first asked for; `import autopar` itself imports nothing."""
    import importlib

    if name == "rules":
        return importlib.import_module("autopar.rules")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'autopar' has no attribute {name!r}")
