"""Imports point down only, the native core has few users, and torch stays where it belongs.

Every import counts: those inside functions, and those under `if TYPE_CHECKING:`. A module that
another one only names in annotations is still one that its reader has to know.
"""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

from support.house import imports, module_name

SOURCE = Path(__file__).parents[2] / "src"
PACKAGE = "statehold"
CORE = "statehold._core"

# The units of the package from the bottom up: modules and folders. A unit may import what stands
# before it, and nothing else. A module belongs to the longest unit that its name begins with.
UNITS = [
    "errors",
    "_version",
    "units",
    "options",
    "process",
    "encoding",
    "net",
    "ranks.membership",
    "layout",
    "format",
    "planners",
    "lowrank",
    "resilience.protocol",
    "observe",
    "ranks",
    "tensors",
    "io",
    "offload",
    "checkpoint.telemetry",
    "checkpoint.cadence",
    "steps",
    "checkpoint.levels",
    "checkpoint.agent",
    "checkpoint.save",
    "checkpoint.restore",
    "checkpoint",
    "reading",
    "subscription",
    "lineage",
    "kv",
    "kv.caches",
    "kv.vllm",
    "resilience",
    "metrics",
    "testing",
    "integrations",
    "dcp",
    "cli",
    "__main__",
]
CORE_USERS = {
    "io",
    "offload",
    "steps",
    "checkpoint.save",
    "checkpoint.levels",
    "checkpoint.agent",
    "checkpoint",
    "reading",
    "subscription",
    "kv",
    "kv.vllm",
    "resilience",
    "testing",
    "integrations",
    "cli",
}
TORCH_USERS = {
    "kv.vllm",
    "lowrank",
    "tensors",
    "offload",
    "reading",
    "subscription",
    "kv.caches",
    "resilience",
    "testing",
    "integrations",
}
# Units that may not even name torch in annotations: they make sense without it.
PURE = {
    "errors",
    "units",
    "options",
    "encoding",
    "ranks.membership",
    "layout",
    "format",
    "resilience.protocol",
    "planners",
}
LOOSE_MODULES_MAX = 8


def modules() -> dict[str, Path]:
    """Dotted name -> file, for every module of the package."""
    found = {}
    for path in sorted((SOURCE / PACKAGE).rglob("*.py")):
        found[module_name(path.relative_to(SOURCE).as_posix())] = path
    return found


def called(path: Path, *names: str) -> list[tuple[str, int]]:
    """The calls of these built-in functions, with their lines."""
    text = path.read_text("utf-8")
    if not re.search(rf"\b({'|'.join(names)})\b", text):
        return []
    calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    found = ((getattr(call.func, "id", ""), call.lineno) for call in calls)
    return [(name, line) for name, line in found if name in names]


def unit(dotted: str) -> str | None:
    """The unit that a dotted name of the package lies in; None for the package, and for others."""
    name = dotted.removeprefix(f"{PACKAGE}.")
    if name == dotted:
        return None
    found = [each for each in UNITS if name == each or name.startswith(f"{each}.")]
    return max(found, key=len, default=None)


def inner(name: str, path: Path, *, types: bool = True) -> set[str]:
    """The modules of the package that a module imports; `_core` counts as one. The packages that it
    lies in do not count: `from . import sibling` names them."""
    known = MODULES.keys() | {CORE}
    found = {
        dotted for dotted in imports(name, path.read_text("utf-8"), types=types) if dotted in known
    }
    return {dotted for dotted in found if not f"{name}.".startswith(f"{dotted}.")}


MODULES = modules()


def rank(name: str) -> int:
    """Where the unit of a module stands; modules that are in none are above all."""
    found = unit(name)
    return len(UNITS) if found is None else UNITS.index(found)


def points_up(name: str, targets: set[str]) -> list[str]:
    """What is wrong with a module that imports these: its place, or theirs."""
    if unit(name) is None:
        return [f"{name} is in no unit: place it in this test"]
    return [f"{name} imports {each}, which is above" for each in targets if rank(each) > rank(name)]


def test_imports_point_down() -> None:
    inside = {name: inner(name, path) - {CORE} for name, path in MODULES.items() if name != PACKAGE}
    assert sum(map(len, inside.values())) > len(inside)
    problems = [each for name, targets in inside.items() for each in points_up(name, targets)]
    assert not problems, "\n".join(problems)
    assert points_up(f"{PACKAGE}.io.a", {f"{PACKAGE}.cli.b", f"{PACKAGE}.units", f"{PACKAGE}.new"})
    assert points_up(f"{PACKAGE}.new", set())


def cycle_in(graph: dict[str, set[str]]) -> list[str]:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_there_are_no_cycles() -> None:
    assert cycle_in({"a": {"b"}, "b": {"a"}}) == ["a", "b", "a"]
    graph = {name: inner(name, path) for name, path in MODULES.items()}
    assert cycle_in(graph) == []


def test_the_top_level_is_a_table_of_contents() -> None:
    loose = list((SOURCE / PACKAGE).glob("*.py"))
    assert len(loose) <= LOOSE_MODULES_MAX
    assert all(unit(name) for name in MODULES if name != PACKAGE)


def test_few_units_touch_the_core() -> None:
    users = {unit(name) for name, path in MODULES.items() if CORE in inner(name, path, types=False)}
    assert users <= CORE_USERS | {"tensors"}


def test_tensors_only_read_tensors_with_the_core() -> None:
    taken = {
        dotted
        for name, path in MODULES.items()
        if unit(name) == "tensors"
        for dotted in imports(name, path.read_text("utf-8"))
        if dotted.startswith(CORE)
    }
    assert taken == {CORE, *(f"{CORE}.read_{what}" for what in ("elements", "forms", "members"))}


def roots(name: str, path: Path, *, types: bool) -> set[str]:
    return {dotted.split(".")[0] for dotted in imports(name, path.read_text("utf-8"), types=types)}


def test_torch_stays_in_its_layer() -> None:
    for name, path in MODULES.items():
        if unit(name) not in TORCH_USERS:
            heavy = {"torch"} if name == "statehold.cli.numbers" else {"torch", "numpy"}
            assert not roots(name, path, types=False) & heavy, name
        if unit(name) in PURE:
            assert not roots(name, path, types=True) & {"torch", "numpy"}, name


def test_pure_modules_do_no_input_or_output() -> None:
    for name, path in MODULES.items():
        if unit(name) in PURE - {"errors", "options"}:  # these ask os for error texts, CPU counts
            effects = {"os", "pathlib", "shutil", "tempfile", "subprocess", "socket", "threading"}
            assert not roots(name, path, types=True) & effects, name
            assert not called(path, "open"), name


def test_nothing_can_unpickle_or_evaluate() -> None:
    for name, path in MODULES.items():
        if name == "statehold.integrations.formats.untrusted":
            continue  # reads the metadata of stock checkpoints, and admits a list of classes only
        assert not roots(name, path, types=True) & {"pickle", "marshal", "shelve", "dill"}, name
        assert not called(path, "eval", "exec"), name


def test_importing_the_package_is_light() -> None:
    """It loads two modules of its own, and little of Python: 35 modules with 3.11."""
    code = (
        "import sys; before = set(sys.modules); import statehold; "
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = done.stdout.split()
    own = [name for name in loaded if name.partition(".")[0] == "statehold"]
    assert own == ["statehold", "statehold._version", "statehold.errors"]
    assert not {"torch", "numpy"} & set(loaded)
    assert len(loaded) < 60, loaded


def test_a_run_of_one_host_loads_nothing_of_several(tmp_path: Path) -> None:
    code = (
        "import sys, statehold\n"
        "with statehold.Checkpointer(sys.argv[1], staging_bytes='64MiB') as ckpt:\n"
        "    ckpt.save(1, {'step': 1}).wait('committed')\n"
        "    assert ckpt.restore({'step': 0}) == 1\n"
        "print(*(name for name in sys.modules if name.startswith(sys.argv[2])))"
    )
    hosts = f"{PACKAGE}.checkpoint.levels.hosts"
    assert any(name.startswith(f"{hosts}.") for name in MODULES)
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "run", hosts],
        capture_output=True, text=True, check=True, timeout=240,
    )  # fmt: skip
    assert done.stdout.split() == []


def sample(text: str, *, types: bool) -> set[str]:
    return imports("statehold.a.b", text, types=types)


def test_this_test_sees_what_it_should() -> None:
    text = (
        "import typing as t\n"
        "from .c import d\n"
        "from .. import e\n"
        "if t.TYPE_CHECKING:\n    import torch\n"
        "else:\n    import numpy\n"
        "def f():\n    from statehold.storage import store\n"
        "try:\n    import g\nexcept ImportError:\n    pass\n"
    )
    running = sample(text, types=False)
    assert {
        "statehold.a.c",
        "statehold.a.c.d",
        "statehold.e",
        "statehold.storage.store",
    } <= running
    assert {"numpy", "g", "typing"} <= running
    assert "torch" not in running
    assert sample(text, types=True) == running | {"torch"}
