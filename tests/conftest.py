"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from pool import Pool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start processes run one after the other, beside those that do not."""
    for item in items:
        apart = item.path.stem in ("test_crash", "test_failure", "test_steps", "test_inductor")
        if apart or "pool" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("processes"))


def pytest_collection_finish() -> None:
    """What torch and transformers are made of stays: to search it for garbage costs a fifth."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Real gloo processes: `pool.run(n, fn, *args)`."""
    processes = Pool()
    yield processes
    processes.close()
