"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Real gloo processes: `pool.run(n, fn, *args)`."""
    processes = Pool()
    yield processes
    processes.close()
