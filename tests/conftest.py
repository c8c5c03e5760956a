"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pool import Pool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start processes run one after the other, beside those that do not."""
    for item in items:
        apart = item.path.stem in ("test_crash", "test_failure", "test_steps", "test_inductor")
        if apart or "pool" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("processes"))


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Real gloo processes: `pool.run(n, fn, *args)`."""
    processes = Pool()
    yield processes
    processes.close()
