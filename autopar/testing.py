"""The golden-graph pytest plugin: a `golden` fixture for generated code, graphs and plans.

A test passes text, or anything whose `str` is text, and it must equal the committed file
`golden/<module>/<test>.py` beside the test file. `pytest --update-golden` writes the files and
prints what changed. A golden that no test asks for any more fails the run (and is deleted by
`--update-golden`), provided that every test of its module ran, in this process or, with
pytest-xdist, in its workers.

Before/After, for `golden(text, name="plan")` in `test_two[4]` of `tests/test_zero.py`:

    tests/golden/zero/two-4-plan.py

This module loads in every pytest session where autopar is installed, so it imports no torch.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Golden"]

_FOLDER = "golden"
_HINT = "run pytest with --update-golden, then read the diff before you commit it"


def _file_stem(test: str, name: str | None) -> str:
    """A filename for a test: letters, digits, '.', '_' and dashes, at most 120 characters.

    The prefix `test_` goes, or pytest would collect the goldens themselves.
    """
    whole = test.removeprefix("test_") + (f"-{name}" if name else "")
    stem = re.sub(r"[^A-Za-z0-9._]+", "-", whole).strip("-.") or "golden"
    if len(stem) > 120:
        stem = f"{stem[:108]}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"
    return stem


def _diff(old: str, new: str, file: str) -> str:
    lines = difflib.unified_diff(
        old.splitlines(), new.splitlines(), f"{file} (committed)", f"{file} (now)", lineterm=""
    )
    return "\n".join(lines)


class _Session:
    """What one pytest session asked of the goldens."""

    def __init__(self, config: pytest.Config) -> None:
        self.update = bool(config.getoption("--update-golden"))
        self.root = config.rootpath
        self.asked: dict[Path, str] = {}  # golden file -> test id
        self.collected: dict[Path, set[str]] = {}  # test file -> test ids that will run
        self.finished: dict[Path, set[str]] = {}  # test file -> test ids that came to their end
        self.partial: set[Path] = set()  # test files of which only some tests were collected
        self.reports: list[str] = []
        self.orphans: list[Path] = []

    def record(self) -> dict[str, Any]:
        """All of it in plain types, to travel from a worker of pytest-xdist."""
        return {
            "asked": {str(p): owner for p, owner in self.asked.items()},
            "collected": {str(p): sorted(ids) for p, ids in self.collected.items()},
            "finished": {str(p): sorted(ids) for p, ids in self.finished.items()},
            "partial": [str(p) for p in self.partial],
            "reports": self.reports,
        }

    def add(self, record: dict[str, Any]) -> None:
        """Take in the record of a worker."""
        self.asked.update({Path(p): owner for p, owner in record["asked"].items()})
        for name in ("collected", "finished"):
            for path, ids in record[name].items():
                getattr(self, name).setdefault(Path(path), set()).update(ids)
        self.partial.update(map(Path, record["partial"]))
        self.reports += record["reports"]

    def shown(self, path: Path) -> str:
        """`path` relative to the root where it lies below it."""
        return path.relative_to(self.root).as_posix() if self.root in path.parents else str(path)

    def find_orphans(self) -> list[Path]:
        """Goldens that no test asked for, of test files that ran whole or exist no more."""
        found: list[Path] = []
        for test_file, ids in self.collected.items():
            if test_file not in self.partial and ids == self.finished.get(test_file):
                found += golden_folder(test_file).glob("*.py")
        for root in {test_file.parent for test_file in self.collected}:
            folders = (p for p in (root / _FOLDER).glob("*") if p.is_dir())
            for folder in folders:
                if not any((root / f"{p}{folder.name}.py").exists() for p in ("test_", "")):
                    found += folder.glob("*.py")
        return sorted(set(found) - self.asked.keys())


class _Workers:
    """Gathers what the workers of pytest-xdist asked of the goldens."""

    def __init__(self, session: _Session) -> None:
        self._session = session

    def pytest_testnodedown(self, node: Any) -> None:
        """A worker has ended."""
        record = getattr(node, "workeroutput", {}).get("autopar_goldens")
        if record is not None:
            self._session.add(record)


_KEY = pytest.StashKey[_Session]()


def golden_folder(test_file: Path) -> Path:
    """Where the goldens of `test_file` lie."""
    return test_file.parent / _FOLDER / test_file.stem.removeprefix("test_")


class Golden:
    """Compares text with the golden file of the running test; made by the `golden` fixture."""

    def __init__(self, session: _Session, test_file: Path, test: str, test_id: str) -> None:
        self._session, self._file, self._test, self._id = session, test_file, test, test_id
        self._stems: set[str] = set()

    def __call__(self, text: object, name: str | None = None) -> None:
        """Fail unless `str(text)` equals the golden file.

        Args:
            text: the text, or an object whose `str` is the text.
            name: tells several goldens of one test apart.
        """
        __tracebackhide__ = True
        session = self._session
        stem = _file_stem(self._test, name)
        path = golden_folder(self._file) / f"{stem}.py"
        owner = session.asked.setdefault(path, self._id)
        if owner != self._id or stem in self._stems:
            pytest.fail(
                f"golden file {session.shown(path)} is asked for twice, by {owner} and {self._id}; "
                "pass a different name=",
                pytrace=False,
            )
        self._stems.add(stem)
        now = str(text).rstrip("\n") + "\n"
        old = path.read_text(encoding="utf-8") if path.is_file() else None
        if old == now:
            return
        if not session.update:
            shown = session.shown(path)
            message = (
                f"golden file {shown} is missing: {_HINT}\n\n{now}"
                if old is None
                else f"golden file {shown} differs; if that is meant, {_HINT}\n"
                + _diff(old, now, shown)
            )
            pytest.fail(message, pytrace=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(now, encoding="utf-8")
        session.reports.append(_diff(old or "", now, session.shown(path)))


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Compare text with this test's golden file: `golden(text, name=None)`."""
    node = request.node
    test = node.name if node.cls is None else f"{node.cls.__name__}-{node.name}"
    return Golden(request.config.stash[_KEY], node.path, test, node.nodeid)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --update-golden."""
    parser.getgroup("autopar").addoption(
        "--update-golden",
        action="store_true",
        help="write the golden files from what the tests produce, and print what changed",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Start the record of this session."""
    session = config.stash[_KEY] = _Session(config)
    if config.pluginmanager.hasplugin("xdist") and not hasattr(config, "workeroutput"):
        config.pluginmanager.register(_Workers(session))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Note the tests of each file; a file named by a test id is incomplete."""
    session = config.stash[_KEY]
    for item in items:
        session.collected.setdefault(item.path, set()).add(item.nodeid)
    for arg in config.args:
        if "::" in arg:
            session.partial.add((config.invocation_params.dir / arg.split("::")[0]).resolve())


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Note the files of which some tests will not run."""
    for item in items:
        item.config.stash[_KEY].partial.add(item.path)


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Note each test whose body ended without a failure or skip."""
    if call.when == "call" and call.excinfo is None:
        item.config.stash[_KEY].finished.setdefault(item.path, set()).add(item.nodeid)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail on, or delete, goldens that no test asked for."""
    record = session.config.stash[_KEY]
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["autopar_goldens"] = record.record()
        return
    record.orphans = record.find_orphans()
    if record.update:
        for path in record.orphans:
            path.unlink()
            if not any(path.parent.iterdir()):
                path.parent.rmdir()
    elif record.orphans and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what was rewritten, deleted or is asked for by no test."""
    record = terminalreporter.config.stash[_KEY]
    if record.reports:
        terminalreporter.section("golden files rewritten")
        for text in record.reports:
            terminalreporter.write_line(text)
    if record.orphans:
        verb = "deleted" if record.update else "asked for by no test"
        terminalreporter.section(f"golden files {verb}", red=not record.update)
        for path in record.orphans:
            terminalreporter.write_line(record.shown(path))
        if not record.update:
            terminalreporter.write_line("delete them, or run pytest with --update-golden")
