"""The house gets smaller, never larger: house.json has a line for each figure, and it only falls.

A figure above its line fails, and so does one clearly below: the file always tells the truth.
`support.house` reads the figures off the source, `support.entered` off a save and a restore.
"""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
from collections import Counter
from pathlib import Path

import pytest

from support import scripts
from support.house import Figures, figures

ROOT = Path(__file__).parents[2]
LINES = Path(__file__).with_name("house.json")
SLACK = 100  # a hundredth of a line below it is as good as on it
PLACES_MAX = 30


def lines() -> dict[str, int]:
    found: dict[str, int] = json.loads(LINES.read_text())
    return found


def faults(now: Figures, then: Figures, allowed: dict[str, int]) -> list[str]:
    """What is wrong with the figures; `then` are those of the commit that has set the lines."""
    found = []
    for name, places in now.items():
        figure, line = places.total(), allowed[name]
        if figure > line:
            grown = [f"  {place}: +{n}" for place, n in (places - then[name]).most_common()]
            found += [f"{name}: {figure}, the line is {line}. What grew:", *grown[:PLACES_MAX]]
        elif figure < line - line // SLACK:
            found.append(f"{name}: {figure}. In tests/api/house.json, lower the line to {figure}")
    return found


def changed(*arguments: str) -> bytes:
    """What git says; empty where there is no git, or no history."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True).stdout


def last_commit() -> str:
    """The one that has set the lines."""
    return changed("log", "-1", "--format=%H", "--", str(LINES)).decode().strip()


def figures_then(folder: Path) -> Figures:
    """Those of the source in the commit that has set the lines."""
    if commit := last_commit():
        with tarfile.open(fileobj=io.BytesIO(changed("archive", commit, "src", "tests"))) as tree:
            tree.extractall(folder, filter="data")
    return figures(folder)


def ways(folder: Path, change: str = "") -> Figures:
    """A place is a file, and how many of its functions are entered."""
    code = f"import sys\n{change}\nfrom support.entered import main; main(sys.argv[1])"
    done = scripts.run(["-c", code, folder / "run"])
    assert done.returncode == 0, done.stderr
    found = {}
    for way, seen in json.loads(done.stdout).items():
        found[f"{way} enters files"] = Counter({path for path, _ in seen})
        found[f"{way} enters functions"] = Counter(path for path, _ in seen)
    return found


def ways_then(now: Figures) -> Figures:
    """As far as can be told: as now, in the files that have not changed since."""
    new = changed("diff", "--name-only", last_commit(), "--", "src").decode()
    new += changed("ls-files", "--others", "--", "src").decode()
    return {
        name: Counter({p: n for p, n in places.items() if f"src/statehold/{p}" not in new})
        for name, places in now.items()
    }


def test_the_source_is_no_larger(tmp_path: Path) -> None:
    now = figures(ROOT)
    assert not faults(now, now, lines()), "\n".join(faults(now, figures_then(tmp_path), lines()))


def test_a_save_and_a_restore_enter_no_more(tmp_path: Path) -> None:
    now = ways(tmp_path)
    assert not faults(now, now, lines()), "\n".join(faults(now, ways_then(now), lines()))


HOUSE = {
    "src/statehold/one/a.py": "class One: ...\n",
    "src/statehold/one/b.py": "from statehold.one.a import One\n",
    "tests/test_one.py": "",
}
# What raises a figure by one, or by two where a pair is needed: the file, its text, and the place.
RAISES = [
    ("code lines", "src/statehold/one/a.py", "class One:\n    x = 1\n", "one/a.py: +1"),
    ("files", "src/statehold/two.py", "", "two.py: +1"),
    ("class names with several meanings", "src/statehold/two.py", "class One: ...\n", "One: "),
    (
        "internal modules with __all__",
        "src/statehold/one/a.py",
        '__all__ = ["One"]\nclass One: ...\n',
        "one/a.py: +1",
    ),
    (
        "modules with one importer",
        "src/statehold/two.py",
        "def late():\n    from statehold.one import b\n",
        "one/b.py (for statehold/two.py): +1",
    ),
    ("private reaches in src", "src/statehold/two.py", "def f(x): return x._y\n", "two.py: _y: +1"),
    (
        "private reaches in tests",
        "tests/test_one.py",
        "def f(x): x._y = 1\n",
        "test_one.py: _y: +1",
    ),
]


def house(folder: Path, files: dict[str, str]) -> Figures:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return figures(folder)


@pytest.mark.parametrize(("name", "file", "text", "place"), RAISES)
def test_each_figure_of_the_source_can_fail(
    name: str, file: str, text: str, place: str, tmp_path: Path
) -> None:
    then = house(tmp_path / "then", HOUSE)
    allowed = {each: places.total() for each, places in then.items()}
    assert faults(then, then, allowed) == []
    now = house(tmp_path / "now", {**HOUSE, file: text})
    said = "\n".join(faults(now, then, {**dict.fromkeys(allowed, 99), name: allowed[name]}))
    assert f"{name}: {now[name].total()}, the line is {allowed[name]}. What grew:\n  " in said
    assert place in said
    assert f"{name}: {allowed[name]}. In tests/api/house.json, lower the line to" in "\n".join(
        faults(then, then, {**allowed, name: now[name].total()})
    )


def test_every_line_is_one_of_a_figure(tmp_path: Path) -> None:
    ways_too = [
        f"{way} enters {what}" for way in ("restore", "save") for what in ("files", "functions")
    ]
    assert list(lines()) == sorted([*figures(tmp_path), *ways_too])


def test_the_figures_of_the_ways_can_fail(tmp_path: Path) -> None:
    """A save and a restore that ask a file more, on whichever thread, enter one more."""
    change = """
import threading
import statehold
from statehold.checkpoint.checkpointer import Checkpointer
from statehold.planners.intervals import young_s

def one_more(call):
    def work(*arguments):
        other = threading.Thread(target=young_s, args=(1.0, 1.0))
        other.start()
        other.join()
        return call(*arguments)
    return work

Checkpointer.save = one_more(Checkpointer.save)
Checkpointer.restore = one_more(Checkpointer.restore)
"""
    now = ways(tmp_path, change)
    for name, places in now.items():
        figure = places.total()
        (said,) = faults({name: places}, {name: Counter()}, {name: figure - 1})[:1]
        assert said == f"{name}: {figure}, the line is {figure - 1}. What grew:"
        assert places["planners/intervals.py"] == 1
