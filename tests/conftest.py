"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from pool import Pool


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start processes run one after the other, beside those that do not."""
    for item in items:
        apart = item.path.stem in ("test_crash", "test_failure", "test_steps", "test_inductor")
        if apart or "pool" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("processes"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """What torch and transformers are made of stays: to search it for garbage costs a fifth."""
    if session.items:  # else this process runs no tests, and needs no torch
        import captures

        captures.keep()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    grouped = getattr(session.config.option, "loadgroup", False)
    marked = [item for item in session.items if item.get_closest_marker("xdist_group")]
    if grouped and not all(item.nodeid.endswith("@processes") for item in marked):
        raise pytest.UsageError(  # pytest-xdist 3.8 groups nothing under pytest 9.2, silently
            "This pytest-xdist does not keep a group of tests together. Try the versions of "
            "constraints.txt, or leave out --numprocesses."
        )


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Real gloo processes: `pool.run(n, fn, *args)`."""
    processes = Pool()
    yield processes
    processes.close()
