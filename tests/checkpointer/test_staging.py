"""How much staging memory there is: exactly what was asked for, or what the state needs and the
memory of the host allows."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from statehold.errors import StorageError, storage_error
from statehold.io import runtime as runtimes
from statehold.process import host_memory as memory
from statehold.units import MiB
from support.faults import DEADLINE_S, Holdup
from support.inside import inside

OPTIONS: dict[str, Any] = {"io": statehold.Io(buffer_bytes=MiB, copy_threads=1)}
PLENTY = 600 * MiB


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A host whose available memory a test can set; 2 MiB of staging to begin with."""
    found = {"available": PLENTY}
    monkeypatch.setattr(runtimes, "FIRST_BYTES", 2 * MiB)
    monkeypatch.setattr(memory, "available", lambda: memory.Room(found["available"], "on a test"))
    return found


def state(mib: int, seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {"w": torch.randn(mib * MiB // 4)}


def size_of(ckpt: statehold.Checkpointer) -> int:
    return inside(ckpt).runtime.staging_bytes


def saved(ckpt: statehold.Checkpointer, step: int, mib: int) -> int:
    """The staging memory after a save of so much, which is restored and compared."""
    expected = state(mib, seed=step)
    ckpt.save(step, expected).wait("committed", DEADLINE_S)
    got = {"w": torch.zeros(mib * MiB // 4)}
    ckpt.restore(got)
    assert torch.equal(got["w"], expected["w"])
    return size_of(ckpt)


@pytest.mark.parametrize(
    ("step", "available", "ranks", "expected"),
    [
        (0, 24 << 30, 1, 1 << 30),
        (40 << 10, 24 << 30, 1, 1 << 30),
        (4 << 30, 24 << 30, 1, 5 << 30),
        (9 << 30, 24 << 30, 1, 8 << 30),  # a third
        (9 << 30, 24 << 30, 8, 1 << 30),
        (0, 300 << 20, 1, 100 << 20),
        (0, 0, 1, 0),
    ],
)
def test_a_quarter_more_than_the_step_and_a_third_of_the_memory_at_most(
    step: int, available: int, ranks: int, expected: int
) -> None:
    assert runtimes.chosen(step, available, ranks) == expected


def test_what_is_asked_for_is_exact(run: Path, host: dict[str, int]) -> None:
    with statehold.Checkpointer(run, **OPTIONS, staging_bytes="3MiB") as ckpt:
        assert size_of(ckpt) == 3 * MiB
        assert saved(ckpt, 1, 8) == 3 * MiB
    host["available"] = 0
    with statehold.Checkpointer(run, **OPTIONS, staging_bytes="3MiB") as ckpt:
        assert size_of(ckpt) == 3 * MiB


def test_a_step_that_does_not_fit_gets_the_memory_once(
    run: Path, host: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "statehold")
    with statehold.Checkpointer(run, **OPTIONS) as ckpt:
        assert size_of(ckpt) == 2 * MiB
        assert saved(ckpt, 1, 1) == 2 * MiB
        assert "staging" not in caplog.text
        assert saved(ckpt, 2, 8) == 10 * MiB
        engine = inside(ckpt).runtime.engine
        assert saved(ckpt, 3, 8) == 10 * MiB
        assert saved(ckpt, 4, 1) == 10 * MiB
        assert inside(ckpt).runtime.engine is engine
    [line] = [record for record in caplog.records if "staging" in record.getMessage()]
    assert line.levelno == logging.INFO
    assert "staging memory of 10 MiB for 8" in line.getMessage()
    assert "a third of 600 MiB on a test" in line.getMessage()


def test_the_memory_of_the_host_is_shared_with_other_ranks(
    run: Path, host: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "50")
    with statehold.Checkpointer(run, **OPTIONS) as ckpt:
        assert saved(ckpt, 1, 8) == 4 * MiB  # of 600 a third, and of that a 50th


def test_little_memory_is_looked_at_once(
    run: Path, host: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "statehold")
    host["available"] = 12 * MiB
    with statehold.Checkpointer(run, **OPTIONS) as ckpt:
        assert saved(ckpt, 1, 8) == 4 * MiB
        assert "updates also wait for writes" in caplog.text
        host["available"] = PLENTY
        assert saved(ckpt, 2, 8) == 4 * MiB
        assert saved(ckpt, 3, 9) == 4 * MiB
        assert saved(ckpt, 4, 16) == 20 * MiB  # it has outgrown what was looked for
    host["available"] = 0
    with statehold.Checkpointer(run, **OPTIONS) as ckpt:
        assert size_of(ckpt) == 2 * MiB, "two buffers are always there"


def test_a_state_that_grows_waits_for_the_save_under_way(run: Path, host: dict[str, int]) -> None:
    """Moments are born in the first step: the save after it is three times as large."""
    with statehold.Checkpointer(run, **OPTIONS) as ckpt:
        holdup = Holdup(ckpt)
        first, second = state(1, seed=1), state(8, seed=2)
        save = ckpt.save(1, first)
        draining = inside(ckpt).pipeline.drain

        def drain() -> None:
            assert not save.done("committed")
            holdup.release()
            draining()
            assert save.done("committed")

        inside(ckpt).pipeline.drain = drain  # type: ignore[method-assign]
        ckpt.save(2, second).wait("committed", DEADLINE_S)
        assert size_of(ckpt) == 10 * MiB
        for step, expected in ((1, first), (2, second)):
            got = {"w": torch.zeros_like(expected["w"])}
            ckpt.restore(got, step)
            assert torch.equal(got["w"], expected["w"])


def test_memory_that_cannot_be_had_costs_no_save(
    run: Path,
    host: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    real, refused, most = runtimes.open_engine, [], [2 * MiB]

    def engine(fs: Any, nbytes: int, *rest: Any) -> Any:
        if nbytes > most[-1]:
            refused.append(nbytes)
            raise storage_error("map the staging memory", 12, "")
        return real(fs, nbytes, *rest)

    monkeypatch.setattr(runtimes, "open_engine", engine)
    with statehold.Checkpointer(run, **OPTIONS) as ckpt:
        assert saved(ckpt, 1, 8) == 2 * MiB
        assert refused == [10 * MiB]
        assert "cannot enlarge the staging memory" in caplog.text
        most.append(0)
        with pytest.raises(StorageError):
            ckpt.save(2, state(16))
        assert refused[1:] == [20 * MiB, 2 * MiB], "not even what there was"
        most.pop()
        assert saved(ckpt, 3, 16) == 2 * MiB
