"""A step that has lost a file, or the end of one, does not count for any command."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from statehold.observe import background_log
from statehold.reading.places import file_system
from statehold.steps.store import Store
from statehold.steps.target import CopyEngine, DirectoryPlace, StoreSite
from support.faults import DEADLINE_S, SMALL
from support.ranks import Ranks

Asked = Callable[..., tuple[int, Any]]
STEPS = (1, 2, 3, 4)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


LOSSES: dict[str, Callable[[Path], None]] = {"gone": os.remove, "cut": cut}


@pytest.fixture(params=[1, 2])
def run_of(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Four steps of one rank, or of two."""
    run, size = tmp_path / "run", request.param
    with Ranks(file_system(), size, str(run)) as ranks:
        for step in STEPS:
            ranks.save(step, lambda rank, step=step: {"w": torch.full((900,), float(step + rank))})
    return run


def files_of(run: Path, step: int, kind: str) -> list[Path]:
    return sorted((run / f"step-{step:012d}").glob(f"*.{kind}"))


@pytest.mark.thorough
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", ["safetensors", "json"])
def test_the_steps_that_count(run_of: Path, ask: Asked, loss: str, kind: str) -> None:
    for step in (3, 4):
        LOSSES[loss](files_of(run_of, step, kind)[-1])
    code, told = ask("ls", run_of)
    assert code == 1
    assert [each["state"] for each in told["steps"]] == ["committed"] * 2 + ["damaged"] * 2
    assert statehold.open(run_of).steps() == [1, 2]
    assert statehold.open(run_of).newest().step == 2
    code, told = ask("prune", run_of, "--keep", 1, "--yes")
    assert (code, told["damaged"]) == (0, [3, 4])
    assert [each["step"] for each in told["retire"]] == [1]
    code, told = ask("verify", f"{run_of}@2")
    assert code == 0
    code, told = ask("show", run_of)
    assert (code, told["step"]) == (0, 2)


@pytest.mark.thorough
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", ["safetensors", "json", "manifest"])
def test_verify_lists_the_damage_of_the_newest_step(
    run_of: Path, ask: Asked, loss: str, kind: str
) -> None:
    file = run_of / "step-000000000004" / "manifest.json"
    LOSSES[loss](file if kind == "manifest" else files_of(run_of, 4, kind)[-1])
    for asked in (run_of, f"{run_of}@newest"):
        code, told = ask("verify", asked)
        assert (code, [each["step"] for each in told["steps"]]) == (1, [4])
        assert told["steps"][0]["damage"] == ask("verify", f"{run_of}@4")[1]["steps"][0]["damage"]
        assert told["steps"][0]["damage"] != []


def test_who_passes_over_a_newer_step_says_so(
    run_of: Path, ask: Asked, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    files_of(run_of, 4, "safetensors")[-1].unlink()
    (run_of / "step-000000000004").rename(run_of / "step-000000000005")
    child = run_of.parent / "child"
    passing: list[Callable[[], Any]] = [
        lambda: ask("show", run_of),
        lambda: ask("diff", run_of, f"{run_of}@1"),
        lambda: ask("export", run_of, run_of.parent / "out", "--to", "torch"),
        lambda: ask("fork", run_of, child),
        lambda: ask("copy", run_of, run_of.parent / "copy"),
        lambda: statehold.load(run_of, rank=0),
        lambda: statehold.open(run_of).newest(),
        lambda: statehold.open(run_of).steps(),
    ]
    for call in passing:
        caplog.clear()
        monkeypatch.setattr(background_log, "_logged", set())
        call()
        assert f"step 5 of {run_of} has lost a file" in caplog.text
        assert f"statehold verify {run_of}@5" in caplog.text


def edited(manifest: Path, **members: object) -> None:
    """With a seal that is right, as another program would write it."""
    body = {**json.loads(manifest.read_bytes()), **members}
    body.pop("manifest_sha256")
    raw = json.dumps(body, separators=(",", ":")).encode()[:-1]
    seal = hashlib.sha256(raw).hexdigest()
    manifest.write_bytes(raw + f',"manifest_sha256":"{seal}"}}\n'.encode())


def renamed(run: Path) -> None:
    (run / "step-000000000004").rename(run / "step-000000000009")


def newer(run: Path) -> None:
    edited(run / "step-000000000004" / "manifest.json", version=99)


@pytest.mark.parametrize(
    ("change", "number", "state"), [(renamed, 9, "damaged"), (newer, 4, "newer format")]
)
def test_no_step_that_restores_goes_for_one_that_does_not(
    run_of: Path, ask: Asked, change: Callable[[Path], None], number: int, state: str
) -> None:
    change(run_of)
    assert [each["state"] for each in ask("ls", run_of)[1]["steps"]] == ["committed"] * 3 + [state]
    code, told = ask("prune", run_of, "--keep", 1, "--yes")
    assert (code, told["keep"], told["damaged"]) == (0, [3, number], [number])
    assert [each["step"] for each in told["retire"]] == [1, 2]
    assert ask("verify", f"{run_of}@3")[0] == 0


def test_a_renamed_step_is_not_the_newest(run_of: Path, ask: Asked) -> None:
    renamed(run_of)
    assert statehold.open(run_of).newest().step == 3
    assert ask("show", run_of)[1]["step"] == 3


@pytest.mark.parametrize("change", [renamed, newer])
def test_the_first_save_of_a_job_leaves_a_step_that_restores(
    run_of: Path, change: Callable[[Path], None]
) -> None:
    """It makes room before the new step is there."""
    change(run_of)
    store = Store(file_system(), str(run_of), keep=1, reuse=False)
    engine = CopyEngine(store.fs, 1 << 20)
    place = DirectoryPlace(StoreSite("here", store, str(run_of), engine, yields=False))
    place.prepare(None)
    place.make_room()
    place.close()
    assert store.steps()[0] == 3


def test_a_copy_that_has_lost_a_file_is_made_again(run_of: Path, ask: Asked) -> None:
    other = run_of.parent / "other"
    assert ask("copy", f"{run_of}@2", other)[0] == 0
    files_of(other, 2, "safetensors")[-1].unlink()
    assert ask("copy", f"{run_of}@2", other)[0] == 0
    assert ask("verify", f"{other}@2")[0] == 0


def test_a_step_in_memory_is_not_freed_for_one_that_has_lost_a_file(
    memory: Path, tmp_path: Path, ask: Asked
) -> None:
    run = tmp_path / "run"
    levels = [statehold.Memory(path=memory, agent=False), statehold.Directory()]
    with statehold.Checkpointer(run, levels=levels, **SMALL) as ckpt:
        ckpt.save(1, {"w": torch.ones(900)}).wait("committed", DEADLINE_S)
        ckpt.flush()
    assert ask("free", run)[1]["newer"] == []
    files_of(run, 1, "safetensors")[0].unlink()
    assert ask("free", run)[1]["newer"] == [1]
