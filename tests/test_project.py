"""Rules of the project itself: import direction, private torch names, names and texts of files."""

import ast
import importlib.util
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "autopar"

# design, section 10: each imports only what stands to its left; members of one group never import
# each other, except within one folder where the folder is named in INWARD
ORDER = [
    {"errors"},
    {"layout"},
    {"sizes"},
    {"program"},
    {"collectives", "rules", "text"},
    {"arguments", "overlap", "promotion", "roll"},
    {"cost", "check", "expression", "memory", "mistakes", "source", "static"},
    {"pipeline"},
    {"schedule"},
    {"capture", "passes", "strategies"},
    {"loop"},
    {"writer"},
    {"codegen"},
    {"compiled"},
    {"comparison", "moves", "report", "mutation"},
    {"boxes", "elementwise"},
    {"grouping"},
    {"standins", "update"},
    {"optimizers"},
    {"tracing"},
    {"batch", "clipping", "inductor", "parameters", "pretrained", "snapshot"},
    {"training"},
    {"module"},
    {"api", "checkpoint"},
    {"verification"},
    {"__main__", "__init__"},
]
ANYWHERE = {"compat"}  # may be imported by all, imports nothing of autopar
INWARD = {"pipeline", "rules", "passes", "strategies", "runtime"}
RUNTIME_MAY = {
    "errors",
    "layout",
    "collectives",
    "pipeline",
    "schedule",
    "sizes",
    "runtime",
} | ANYWHERE
RUNTIME_USERS = {
    "batch",
    "clipping",
    "inductor",
    "parameters",
    "module",
    "training",
    "verification",
    "api",
    "__main__",
    "__init__",
}
ALONE = {"testing"}


def part_of(path):
    """The part of the design a file belongs to: its first folder or its name."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def sources():
    found = {}
    for base, inside in [(PACKAGE, None), (ROOT / "passes", "passes"), (ROOT / "strategies", "")]:
        for path in sorted(base.rglob("*.py")):
            if inside is None and {"passes", "strategies"} & set(path.relative_to(base).parts):
                continue
            name = PACKAGE / path.relative_to(PACKAGE if inside is None else ROOT)
            found[name] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return found


SOURCES = sources()


def imported(path, tree):
    """(part, line) of every autopar part that a file imports, at any depth of the file."""
    package = ["autopar", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{module}.{a.name}" for a in node.names] if module == "autopar" else [module]
        for name in names:
            if name.split(".")[0] == "autopar":
                yield (name.split(".") + ["__init__"])[1], node.lineno


def test_imports_go_one_way():
    level = {part: i for i, group in enumerate(ORDER) for part in group}
    wrong = []
    for path, tree in SOURCES.items():
        me = part_of(path)
        for other, line in imported(path, tree):
            if other in ANYWHERE or (other == me and me in INWARD):
                continue
            if me == "runtime":
                fine = other in RUNTIME_MAY
            elif me in ANYWHERE | ALONE:
                fine = False
            elif other == "runtime":
                fine = me in RUNTIME_USERS
            else:
                fine = other in level and me in level and level[other] < level[me]
            if not fine:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {other}")
    assert not wrong, "\n".join(wrong)


def test_every_module_has_a_place_in_the_order():
    known = set().union(*ORDER) | ANYWHERE | ALONE | {"runtime"}
    assert {part_of(path) for path in SOURCES} <= known


def private_torch(tree):
    """(dotted name, line) of each private torch name in a file."""
    aliases = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    yield alias.name, node.lineno
                    aliases[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        parts, inner = [], node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if parts and isinstance(inner, ast.Name) and inner.id in aliases:
            yield ".".join([aliases[inner.id], *reversed(parts)]), node.lineno


def is_private(name):
    # torch.ops.aten._softmax and the like are names of operators in the graph, not of Python API
    if name.startswith("torch.ops."):
        return False
    return any(re.match(r"_(?!_)", part) for part in name.split("."))


def test_private_torch_names_stand_in_compat_only():
    wrong = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path, tree in SOURCES.items()
        if path.name != "compat.py"
        for name, line in private_torch(tree)
        if is_private(name)
    ]
    assert not wrong, "\n".join(sorted(set(wrong)))


def test_basenames_are_unique():
    counts = Counter(path.name for path in SOURCES if path.name not in ("__init__.py",))
    assert not [name for name, n in counts.items() if n > 1]


def tracked():
    """Text files that git tracks, or would (untracked and not ignored)."""
    try:
        out = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        ).stdout.decode()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    for name in filter(None, out.split("\0")):
        path = ROOT / name
        if path.is_file() and not path.is_symlink():
            yield name, path


# written in pieces, or this file would find itself
MACHINE = re.compile(
    "|".join(
        ["/wo" + "rk/", "/ho" + "me/", "/ro" + "ot/", "/Us" + "ers/", "[.]py" + "env", "/o" + "pt/"]
    )
)


def test_no_file_names_a_machine_path():
    wrong = []
    for name, path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if MACHINE.search(line):
                wrong.append(f"{name}:{number}: {line.strip()[:100]}")
    assert not wrong, "\n".join(wrong)


def test_readme_commands_exist():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    asked = set(re.findall(r"\bmake ([a-z]+)\b(?= *(?:`|#|$))", readme, re.MULTILINE))
    assert {"demo", "test"} <= asked <= targets
    for script in re.findall(r"\b((?:examples|benchmarks|docs)/[\w./-]+\.\w+)", readme):
        assert (ROOT / script).is_file(), script


def test_ci_runs_the_readme_test_command():
    assert "make test" in (ROOT / ".ci/run").read_text(encoding="utf-8")


def test_symlinks_lead_to_the_folders_at_the_top():
    for name in ("passes", "strategies"):
        assert (PACKAGE / name).resolve() == ROOT / name
        assert importlib.util.find_spec(f"autopar.{name}") is not None


def test_import_of_the_package_is_light():
    code = "import autopar, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
