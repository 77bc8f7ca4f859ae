"""A misspelt name is an error where it is written: in an editor, and at run time with the name that
was meant.

mypy reads a snippet of user code. It follows no import, so it needs only the modules of the public
face, and ends in seconds.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import statehold
from statehold.errors import UsageError

SOURCE = Path(statehold.__file__).parent
CACHE = (
    Path(__file__).parents[2] / ".mypy_cache" / "face"
)  # the second run takes less than a second
FACE = [
    SOURCE / name
    for name in (
        "__init__.py",
        "checkpoint/checkpointer.py",
        "checkpoint/levels/specs.py",
        "options/__init__.py",
        "options/io.py",
        "options/keep.py",
    )
]
SNIPPET = """\
import statehold
from statehold import Checkpointer, Directory, Io, Keep, Memory

good = Checkpointer("run", keep=3, io=Io(queue_depth=64, backend="threads"), staging_bytes="1GiB")
good.save(1, {}, force=True, metrics={"val_loss": 2.1}, tags=["good"])
good.restore({}, best="val_loss", mode="max")
Checkpointer("run", keep=Keep(last=3, every=1000, best=2, metric="val_loss", pinned=[7, "good"]))
Checkpointer("run", levels=[Memory(keep=2), Directory(every="30min")])

Checkpointer("run", kep=3)  # error: kep
Checkpointer("run", queue_depth=64)  # error: queue_depth
Checkpointer("run", coordination="mpi")  # error: coordination
Io(copy_thread=2)  # error: copy_thread
Io(backend="aio")  # error: backend
Keep(lst=3)  # error: lst
good.restore({}, best="val_loss", mode="lowest")  # error: mode
good.save(1, {}, metrics={"val_loss": "low"})  # error: float
Directory(evry=10)  # error: evry
good.save(1, {}, forced=True)  # error: forced
statehold.Checkpionter("run")  # error: Checkpionter
"""


def test_mypy_sees_every_misspelt_name_and_no_other(tmp_path: Path) -> None:
    snippet = tmp_path / "snippet.py"
    snippet.write_text(SNIPPET)
    command = [sys.executable, "-m", "mypy", "--follow-imports=skip", "--no-error-summary",
               f"--cache-dir={CACHE}", snippet, *FACE]  # fmt: skip
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    lines = SNIPPET.splitlines()
    expected = {number for number, line in enumerate(lines, 1) if "# error: " in line}
    errors = re.findall(r"^snippet\.py:(\d+): error: (.*)", found.stdout, re.M)
    assert {int(number) for number, _ in errors} == expected, found.stdout + found.stderr
    for number, text in errors:
        assert lines[int(number) - 1].rpartition("# error: ")[2] in text


@pytest.mark.parametrize(
    ("kind", "given", "hint"),
    [
        ("Checkpointer", {"run": "run", "kep": 3}, "did you mean keep?"),
        ("Checkpointer", {"run": "run", "queue_depth": 64},
         "write io=statehold.Io(queue_depth=...)"),
        ("Io", {"copy_thread": 2}, "did you mean copy_threads?"),
        ("Directory", {"evry": 10}, "did you mean every?"),
        ("Memory", {"copy": 1}, "did you mean copies?"),
        ("ObjectStore", {"url": "s3://b/c", "option": {}}, "did you mean options?"),
    ],
)  # fmt: skip
def test_a_misspelt_keyword_is_answered_with_the_name_that_was_meant(
    kind: str, given: dict[str, Any], hint: str
) -> None:
    with pytest.raises(UsageError) as caught:
        getattr(statehold, kind)(**given)
    assert caught.value.hint == hint
    assert caught.value.facts["got"] in given


@pytest.mark.parametrize(
    ("kind", "given", "hint"),
    [
        ("Io", (8,), "write Io(buffer_bytes=...)"),
        ("Keep", (3, 1000), "write Keep(every=...)"),
        ("Directory", ("/p", 10), "write Directory(every=...)"),
        ("Checkpointer", ("run", 3), "write Checkpointer(keep=...)"),
    ],
)
def test_a_value_without_its_name_is_answered_with_a_name(
    kind: str, given: tuple[Any, ...], hint: str
) -> None:
    with pytest.raises(UsageError, match=f"{kind} takes this value by name only") as caught:
        getattr(statehold, kind)(*given)
    assert caught.value.hint == hint


def test_what_a_level_and_a_keep_are_mostly_given_needs_no_name() -> None:
    assert statehold.Directory("/p") == statehold.Directory(path="/p")
    assert statehold.Memory("/p") == statehold.Memory(path="/p")
    assert statehold.Keep(3) == statehold.Keep(last=3)


def test_a_misspelt_name_is_answered_with_the_name_that_was_meant() -> None:
    with pytest.raises(AttributeError, match="did you mean Checkpointer"):
        statehold.Checkpionter  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'xyzzy'$"):
        statehold.xyzzy  # noqa: B018
