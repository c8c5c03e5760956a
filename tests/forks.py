"""Processes forked from a server that has imported and compiled all: they start at once.

Importing torch and transformers takes four seconds of each process that does it by itself.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

__all__ = ["context"]


@functools.cache
def context() -> Any:
    """The context of such processes; its server ends with this process."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["crashing"])
    paths = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
    extra = {"AUTOPAR_TEST_WARM": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in extra.items():
            patch.setenv(name, value)
        process = made.Process(target=int)
        process.start()
        process.join()
    return made
