"""Commands beside a job that saves the same step again, or retires it, while they look at it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.conftest import Asked
from statehold.cli import checking
from statehold.cli import places as files
from statehold.reading import places
from support.runs import arrays_of, write_step

WORDS = {
    "show": ("show", "RUN@2"),
    "tensor": ("show", "RUN@2", "model.weight"),
    "diff": ("diff", "RUN@1", "RUN@2"),
    "verify": ("verify", "RUN@2"),
    "ls": ("ls", "RUN"),
    "report": ("report", "RUN"),
}


class Meanwhile:
    """Something that happens once, after the manifest of step 2 was read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
        self.happened = 0
        open_step, load = places.open_step, places.load_manifest

        def once(step: int) -> None:
            if step == 2 and not self.happened:
                self.happened += 1
                act()

        def opened(read, directory: str, step: int, *rest: int):  # type: ignore[no-untyped-def]
            saved = open_step(read, directory, step, *rest)
            once(step)
            return saved

        def loaded(fs, directory: str):  # type: ignore[no-untyped-def]
            manifest = load(fs, directory)
            once(manifest.step)
            return manifest

        monkeypatch.setattr(places, "open_step", opened)
        monkeypatch.setattr(checking, "load_manifest", loaded)


@pytest.fixture
def again(run: Path, tmp_path: Path) -> Callable[[], None]:
    """Saves step 2 again, with other tensors, as a job does."""

    def replace() -> None:
        other = tmp_path / "other"
        write_step(other, 2, arrays_of(5.0), epoch=7, name="x")
        step = run / "step-000000000002"
        os.rename(step, tmp_path / "before")
        os.rename(other / step.name, step)

    return replace


@pytest.mark.parametrize("command", ["tensor", "diff", "verify"])
def test_a_step_that_is_saved_again_meanwhile(run, ask, monkeypatch, again, command: str) -> None:
    meanwhile = Meanwhile(monkeypatch, again)
    words = [word.replace("RUN", str(run)) for word in WORDS[command]]
    code, told = ask(*words)
    assert meanwhile.happened == 1
    assert code == (1 if command == "diff" else 0), told
    if command == "verify":
        assert told["intact"]
    monkeypatch.undo()
    _, alone = ask(*words)
    told.pop("steps", None)  # which say how long it took
    alone.pop("steps", None)
    assert alone == told


def test_verify_reads_the_directory_that_it_is_given_and_no_other(run: Path, ask: Asked) -> None:
    """A save that was stopped has left the step before it under another name."""
    step = run / "step-000000000002"
    left = step.with_name(f"{step.name}.replaced")
    shutil.copytree(step, left)
    file = next(left.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    assert [ask("verify", each)[0] for each in (step, left)] == [0, 1]


@pytest.mark.parametrize("command", ["tensor", "diff", "verify"])
def test_a_step_that_is_retired_meanwhile_is_not_found(run, ask, monkeypatch, command) -> None:
    meanwhile = Meanwhile(monkeypatch, lambda: shutil.rmtree(run / "step-000000000002"))
    code, told = ask(*(word.replace("RUN", str(run)) for word in WORDS[command]))
    assert meanwhile.happened == 1
    assert code not in (0, 1)
    assert "damage" not in str(told)


@pytest.mark.parametrize("command", ["ls", "report"])
def test_a_step_that_is_retired_meanwhile_is_not_listed(run, ask, monkeypatch, command) -> None:
    load, happened = files.load_manifest, []

    def loaded(fs, directory: str):  # type: ignore[no-untyped-def]
        if directory.endswith("2") and not happened:
            happened.append(directory)
            shutil.rmtree(directory)
        return load(fs, directory)

    monkeypatch.setattr(files, "load_manifest", loaded)
    code, told = ask(*(word.replace("RUN", str(run)) for word in WORDS[command]))
    assert happened
    assert code == 0
    assert [step["step"] for step in told["steps"]] == [1]
