"""A reader beside a job that saves the same step again, and retires steps: what it reads is one of
the two, nothing is called damaged, and nothing is renamed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from statehold import errors
from statehold.steps.nearest import Nearest
from support.faults import DEADLINE_S, SMALL
from support.in_memory import SimFs, checkpointer_on

DATA = "rank-00000-of-00001.safetensors"


def content(value: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((100_000,), value, dtype=torch.uint8)}


def saved(fs: SimFs, *saves: tuple[int, int], keep: int = 2) -> None:
    """A job that saves (step, value), and ends."""
    with checkpointer_on(fs, "/run", keep=keep, **SMALL) as ckpt:
        for step, value in saves:
            ckpt.save(step, content(value)).wait("committed", DEADLINE_S)


@pytest.fixture
def fs() -> SimFs:
    fs = SimFs(seed=1)
    saved(fs, (1, 1), (2, 2))
    return fs


@pytest.fixture(autouse=True)
def _strict() -> None:
    warnings.simplefilter("error", RuntimeWarning)


class Meanwhile:
    """Something that happens once, after the manifest was read and before the data is located."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, act: Callable[[], None], times: int
    ) -> None:
        self.happened = 0
        find = Nearest.find

        def late(*arguments: object) -> str:
            if self.happened < times:
                self.happened += 1
                act()
            return find(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(Nearest, "find", late)


def names(fs: SimFs) -> list[str]:
    return [name for name, _ in fs.listdir("/run") if name.startswith("step-")]


@pytest.mark.parametrize("step", [None, 2])
@pytest.mark.parametrize("times", [1, 3])
def test_a_step_that_is_saved_again_meanwhile_is_read_anew(
    fs, monkeypatch, step, times, caplog
) -> None:
    values = iter(range(22, 30))
    meanwhile = Meanwhile(monkeypatch, lambda: saved(fs, (2, next(values))), times)
    live = content(0)
    with checkpointer_on(fs, "/run", **SMALL) as ckpt:
        got = ckpt.restore(live, step)
    assert (got, int(live["w"][0]), meanwhile.happened) == (2, 21 + times, times)
    assert names(fs) == ["step-000000000001", "step-000000000002"]
    assert "damaged" not in caplog.text
    assert "not intact" not in caplog.text


def test_a_step_that_is_retired_meanwhile_is_no_damage(fs, monkeypatch, caplog) -> None:
    meanwhile = Meanwhile(monkeypatch, lambda: saved(fs, (3, 3), (4, 4)), 1)
    live = content(0)
    with checkpointer_on(fs, "/run", **SMALL) as ckpt:
        got = ckpt.restore(live)
    assert (got, int(live["w"][0]), meanwhile.happened) == (4, 4, 1)
    assert names(fs) == ["step-000000000003", "step-000000000004"]
    assert "not intact" not in caplog.text


def test_a_single_step_that_is_retired_meanwhile_is_not_found(fs, monkeypatch) -> None:
    Meanwhile(monkeypatch, lambda: saved(fs, (3, 3), (4, 4)), 1)
    with (
        checkpointer_on(fs, "/run", **SMALL) as ckpt,
        pytest.raises(errors.StepNotFoundError, match="step 2 is not committed"),
    ):
        ckpt.restore(content(0), 2)


def test_a_step_that_never_stays_is_an_error_in_the_end(fs, monkeypatch) -> None:
    monkeypatch.setattr("statehold.checkpoint.restore.call.BEGINNINGS_MAX", 3)
    values = iter(range(22, 30))
    meanwhile = Meanwhile(monkeypatch, lambda: saved(fs, (2, next(values))), 1000)
    with (
        checkpointer_on(fs, "/run", **SMALL) as ckpt,
        pytest.raises(errors.StorageError, match="ESTALE") as caught,
    ):
        ckpt.restore(content(0))
    assert meanwhile.happened == 4
    assert "another save" in str(caught.value)
    assert names(fs) == ["step-000000000001", "step-000000000002"]


def flip(fs: SimFs, step: int) -> None:
    path = f"/run/step-{step:012d}/{DATA}"
    fs.corrupt(path, (fs.stat_bytes(path) or 0) - 5, 0x04)


def test_damage_that_is_gone_under_the_lock_hides_nothing(fs, monkeypatch) -> None:
    """As of a writer that this reader cannot tell from damage: the read under the lock decides."""
    flip(fs, 2)
    claims = []

    def claim(opened: object, step: int) -> bool:
        claims.append(step)
        flip(fs, 2)  # it is as it was
        return True

    monkeypatch.setattr("statehold.checkpoint.session.Session.claim", claim)
    live = content(0)
    with checkpointer_on(fs, "/run", **SMALL) as ckpt:
        got = ckpt.restore(live)
    assert (got, int(live["w"][0]), claims) == (2, 2, [2])
    assert names(fs) == ["step-000000000001", "step-000000000002"]


@pytest.mark.filterwarnings("default::RuntimeWarning")
def test_a_damaged_step_of_a_run_that_another_job_has_is_passed_over_and_stays(
    tmp_path: Path,
) -> None:
    fs = SimFs(seed=1)
    saved(fs, (1, 1), (2, 2))
    with checkpointer_on(fs, "/run", **SMALL) as writer:
        writer.save(3, content(3)).wait("committed", DEADLINE_S)
        flip(fs, 3)
        with (
            checkpointer_on(fs, "/run", **SMALL) as reader,
            pytest.warns(RuntimeWarning, match="step 3 is damaged; step 2 was restored"),
        ):
            got = reader.restore(content(0))
        assert got == 2
        assert names(fs)[-1] == "step-000000000003"
        writer.save(3, content(33)).wait("committed", DEADLINE_S)
    live = content(0)
    with checkpointer_on(fs, "/run", **SMALL) as reader:
        got = reader.restore(live)
    assert (got, int(live["w"][0])) == (3, 33)
