"""The golden plugin, run in pytest sessions of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

ONE = "def test_one(golden):\n    golden('a = 1')\n"
TWO = ONE + "def test_two(golden):\n    golden('b = 2')\n"


@pytest.fixture
def run(pytester):
    def run(source=None, *options, file="test_mod.py"):
        if source is not None:
            (pytester.path / file).write_text(source)
        return pytester.runpytest("-p", "autopar.testing", "-p", "no:cacheprovider", *options)

    return run


def files(pytester):
    return sorted(
        p.relative_to(pytester.path / "golden").as_posix()
        for p in (pytester.path / "golden").rglob("*")
        if p.is_file()
    )


def test_golden_missing_fails_with_hint(run, pytester):
    result = run(ONE)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*golden/mod/one.py is missing*--update-golden*", "*a = 1*"])
    assert not (pytester.path / "golden").exists()


def test_golden_update_writes_then_passes(run, pytester):
    result = run(TWO, "--update-golden")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*golden files rewritten*", "+a = 1"])
    assert files(pytester) == ["mod/one.py", "mod/two.py"]
    assert (pytester.path / "golden/mod/one.py").read_text() == "a = 1\n"
    result = run()
    result.assert_outcomes(passed=2)
    result.stdout.no_fnmatch_line("*golden files*")


def test_golden_change_shows_diff(run, pytester):
    run(ONE, "--update-golden")
    changed = ONE.replace("a = 1", "a = 3")
    result = run(changed)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*differs*--update-golden*", "-a = 1", "+a = 3"])
    result = run(changed, "--update-golden")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["-a = 1", "+a = 3"])
    run().assert_outcomes(passed=1)


def test_golden_orphan_fails_by_name(run, pytester):
    run(TWO, "--update-golden")
    result = run(ONE)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*asked for by no test*", "golden/mod/two.py"])
    assert files(pytester) == ["mod/one.py", "mod/two.py"]


def test_golden_orphan_is_deleted_by_update(run, pytester):
    run(TWO, "--update-golden")
    result = run("def test_none(): pass", "--update-golden")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*deleted*", "golden/mod/one.py", "golden/mod/two.py"])
    assert files(pytester) == []
    assert not (pytester.path / "golden/mod").exists()


@pytest.mark.parametrize("spread", ["load", "loadfile"])
def test_goldens_are_gathered_from_workers(run, pytester, spread):
    """Each of two processes runs a part of the tests; both kinds of report come together."""
    workers = ("-n", "2", "--dist", spread)
    result = run(TWO, "--update-golden", *workers)
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*golden files rewritten*"])
    assert files(pytester) == ["mod/one.py", "mod/two.py"]
    result = run(ONE, *workers)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*asked for by no test*", "*golden/mod/two.py*"])
    run(ONE, "--update-golden", *workers)
    assert files(pytester) == ["mod/one.py"]


def test_golden_of_removed_module_is_orphan(run, pytester):
    run(ONE, "--update-golden", file="test_gone.py")
    (pytester.path / "test_gone.py").unlink()
    result = run("def test_other(): pass")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["golden/gone/one.py"])


@pytest.mark.parametrize("options", [["-k", "one"], ["test_mod.py::test_one"], ["-x"]])
def test_golden_partial_run_reports_no_orphans(run, pytester, options):
    run(TWO, "--update-golden")
    source = ONE + "def test_fails(): assert 0\ndef test_later(): pass\n"
    result = run(source, *options)
    result.stdout.no_fnmatch_line("*asked for by no test*")
    run(source, "--update-golden", *options)
    assert files(pytester) == ["mod/one.py", "mod/two.py"]


def test_golden_skipped_test_keeps_its_file(run, pytester):
    run(ONE, "--update-golden")
    result = run("import pytest\n@pytest.mark.skip\n" + ONE, "--update-golden")
    result.assert_outcomes(skipped=1)
    assert files(pytester) == ["mod/one.py"]


def test_golden_names_are_safe_filenames(run, pytester):
    source = """
import pytest
@pytest.mark.parametrize("mesh", ["dp=2, tp=2", "a/../b", "x" * 300])
def test_mesh(golden, mesh):
    golden(mesh)
    golden(mesh, name="second one")
class TestThings:
    def test_inside(self, golden):
        golden(17)
"""
    run(source, "--update-golden").assert_outcomes(passed=4)
    run().assert_outcomes(passed=4)
    found = files(pytester)
    assert {
        "mod/mesh-dp-2-tp-2.py",
        "mod/mesh-dp-2-tp-2-second-one.py",
        "mod/mesh-a-..-b.py",
        "mod/TestThings-test_inside.py",
    } <= set(found)
    assert len(found) == 7
    assert all(len(name) < 140 for name in found)


def test_golden_asked_twice_fails(run):
    result = run("def test_one(golden):\n    golden('a')\n    golden('a')\n", "--update-golden")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*asked for twice*name=*"])


def test_golden_of_two_tests_never_share_a_file(run):
    source = """
import pytest
@pytest.mark.parametrize("x", ["a b", "a,b"])
def test_one(golden, x):
    golden("same")
"""
    result = run(source, "--update-golden")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*asked for twice, by *a b* and *a,b*"])


def test_plugin_import_loads_no_torch():
    code = "import autopar.testing, sys; sys.exit('torch' in sys.modules)"
    root = Path(__file__).parent.parent
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0
