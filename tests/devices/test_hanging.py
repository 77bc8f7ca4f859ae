"""A device that hangs: neither the end of a Checkpointer nor that of a program waits for ever."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from devices.conftest import trained_on
from statehold.checkpoint.save.pipeline import Pipeline
from statehold.errors import DeviceError
from statehold.process.worker import Worker
from statehold.tensors.devices.jobs import Fills, OfOne
from support import scripts
from support.cuda import Machine
from support.faults import DEADLINE_S, SMALL, Holdup, ctrl_c_in_join, must
from support.inside import inside, passage

SOON: dict[str, Any] = {**SMALL, "peer_timeout_s": 0.2}


@pytest.fixture
def hung(machine: Machine) -> Iterator[Machine]:
    """A device that begins to hang once `may_finish` is cleared, and is whole again at the end."""
    yield machine
    machine.timeline.may_finish.set()
    for each in stagers():
        each.join(DEADLINE_S)


def stagers() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "statehold-stage_0"]


def committed(run: Path) -> list[int]:
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        return ckpt.steps()


def hang_in_save(
    machine: Machine, ckpt: statehold.Checkpointer, step: int = 2, width: int = 1024
) -> statehold.Save:
    """A save whose copies are never made. width: by default of more than the staging memory."""
    training = trained_on(machine, width)
    machine.finish()
    machine.timeline.may_finish.clear()
    return ckpt.save(step, {"model": training.model})


def test_close_gives_up_a_save_that_a_device_never_copies(tmp_path: Path, hung: Machine) -> None:
    ckpt = statehold.Checkpointer(tmp_path / "run", **SOON)
    ckpt.save(1, {"w": torch.ones(8)}).wait("committed", DEADLINE_S)
    save = hang_in_save(hung, ckpt)
    with pytest.raises(DeviceError, match="does not finish") as caught:
        ckpt.close()
    assert not hung.timeline.may_finish.is_set()
    assert caught.value.facts["failed"] == "the save of step 2; nothing was published"
    assert caught.value.facts["still safe"] == "step 1 and older"
    assert save.error is caught.value
    assert committed(tmp_path / "run") == [1]
    assert not list((tmp_path / "run").glob("*partial*"))


def test_memory_that_a_device_may_write_into_is_kept_until_it_is_done(
    tmp_path: Path, hung: Machine
) -> None:
    """It writes there when it comes back late, and nobody else has that memory."""
    ckpt = statehold.Checkpointer(tmp_path / "run", **SOON)
    hang_in_save(hung, ckpt)
    with pytest.raises(DeviceError):
        ckpt.close()
    del ckpt
    [stager], pinned = stagers(), dict(hung.pins.ranges)
    assert pinned
    libc = ctypes.CDLL(None)
    for address, nbytes in pinned.items():
        assert libc.msync(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), 1) == 0
    host = {"w": torch.arange(1 << 20, dtype=torch.float32)}
    with statehold.Checkpointer(tmp_path / "other", **SMALL) as other:
        save = other.save(1, host)
        hung.timeline.may_finish.set()
        save.wait("committed", DEADLINE_S)
        stager.join(DEADLINE_S)
        assert not stager.is_alive()
        restored = {"w": torch.zeros(1 << 20)}
        other.restore(restored)
    assert torch.equal(restored["w"], host["w"])
    assert not hung.pins.ranges  # unpinned, and as Machine.unpin checks, before it was unmapped
    assert committed(tmp_path / "run") == []


def test_a_device_that_comes_back_in_time_loses_no_save(
    tmp_path: Path, hung: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt = statehold.Checkpointer(tmp_path / "run", **SMALL)
    save = hang_in_save(hung, ckpt)
    finish = Pipeline.finish_staging

    def back(pipeline: Pipeline) -> None:
        hung.timeline.may_finish.set()
        finish(pipeline)

    monkeypatch.setattr(Pipeline, "finish_staging", back)
    ckpt.close()
    assert save.done("committed")
    assert committed(tmp_path / "run") == [2]


@pytest.mark.thorough
def test_a_save_of_host_memory_behind_it_is_committed(tmp_path: Path, hung: Machine) -> None:
    ckpt = statehold.Checkpointer(tmp_path / "run", **{**SOON, "peer_timeout_s": 3})
    hang_in_save(hung, ckpt)
    weights = torch.arange(1 << 20, dtype=torch.float32)
    host = ckpt.save(3, {"w": statehold.Gated(weights)})
    with pytest.raises(DeviceError) as caught:
        ckpt.close()
    assert not hung.timeline.may_finish.is_set()
    assert caught.value.facts["failed"] == "the save of step 2; nothing was published"
    assert host.done("committed")
    assert committed(tmp_path / "run") == [3]


def test_a_save_of_the_same_device_behind_it_is_given_up_with_it(
    tmp_path: Path, hung: Machine
) -> None:
    ckpt = statehold.Checkpointer(tmp_path / "run", **SOON)
    saves = [hang_in_save(hung, ckpt), ckpt.save(3, {"w": hung.put(torch.ones(8))})]
    with pytest.raises(DeviceError):
        ckpt.close()
    assert [type(save.error) for save in saves] == [DeviceError, DeviceError]
    assert committed(tmp_path / "run") == []


def test_a_save_that_waits_for_the_disk_is_not_given_up(
    tmp_path: Path, hung: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt = statehold.Checkpointer(tmp_path / "run", **{**SMALL, "peer_timeout_s": 0.01})
    holdup, next_fills, vain = Holdup(ckpt), Fills.next_fills, threading.Semaphore(0)

    def noted(fills: Fills, timeout: float | None, most: int) -> list[OfOne]:
        if timeout is None:  # there is nothing on the device
            vain.release()
        return next_fills(fills, timeout, most)

    monkeypatch.setattr(Fills, "next_fills", noted)
    save = ckpt.save(1, {"model": trained_on(hung, width=1024).model})
    must(holdup.waiting.wait(DEADLINE_S))
    for _ in ("the first buffers", "more of them, which the disk has"):
        must(vain.acquire(timeout=DEADLINE_S))
    pipeline, passed, asked = inside(ckpt).pipeline, Worker.passed, []

    def counted(worker: Worker, until: float | None) -> bool:
        asked.append(until)
        if len(asked) == 3:  # the disk has been slow for longer than a device may hang
            pipeline.device_s = DEADLINE_S
            holdup.release()
        return passed(worker, until)

    monkeypatch.setattr(Worker, "passed", counted)
    ckpt.close()
    assert len(asked) >= 3
    assert save.done("committed")


def test_ctrl_c_while_close_waits_for_the_device(
    tmp_path: Path, hung: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt = statehold.Checkpointer(tmp_path / "run", **SOON)
    ckpt.save(1, {"w": torch.ones(8)}).wait("committed", DEADLINE_S)
    save = hang_in_save(hung, ckpt)
    fired = ctrl_c_in_join(monkeypatch, "statehold-keeper")
    with pytest.raises(KeyboardInterrupt):
        ckpt.close()
    assert len(fired) == 2
    assert isinstance(save.error, DeviceError)
    assert committed(tmp_path / "run") == [1]


PROGRAM = """
import sys
import threading

import torch

import statehold
from statehold.checkpoint.save.pipeline import Pipeline


class Hung:
    fingerprints, waits_since = {}, 1.0

    def run(self):
        threading.Event().wait()

    def wait_eager(self):
        pass

    def let_go(self):
        pass


ckpt = statehold.Checkpointer(sys.argv[1], peer_timeout_s=0.2)
ckpt.save(1, {"w": torch.ones(8)}).wait()
submit = Pipeline.submit


def beside_a_device(pipeline, work):
    work.copies = Hung()
    submit(pipeline, work)


Pipeline.submit = beside_a_device
kept = ckpt.save(2, {"w": torch.ones(8)})
"""


def test_a_program_ends_beside_a_device_that_hangs(tmp_path: Path) -> None:
    """It has closed nothing. What is wrong is in the log."""
    done = scripts.run(["-c", PROGRAM, tmp_path / "run"])
    assert done.returncode == 0, done.stderr
    assert "the save of step 2; nothing was published" in done.stderr
    assert "step 1 and older" in done.stderr
    assert committed(tmp_path / "run") == [1]


def test_ctrl_c_in_a_save_that_waits_for_one_that_hangs(
    tmp_path: Path, hung: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call is interrupted, and the end of the block waits no longer than for another device."""
    ckpt = statehold.Checkpointer(tmp_path / "run", **SOON)
    first = hang_in_save(hung, ckpt, 1)
    ckpt.save(2, {"w": statehold.Gated(torch.ones(8))})
    fired = []

    def interrupted(*_: Any) -> bool:
        fired.append(True)
        raise KeyboardInterrupt

    monkeypatch.setattr(passage(first), "wait_ended", interrupted)
    with pytest.raises(KeyboardInterrupt), ckpt:
        ckpt.save(3, {"w": torch.ones(8)})
    assert fired
    assert isinstance(first.error, DeviceError)
    assert committed(tmp_path / "run") == [2]


def test_the_storage_is_not_blamed_for_it(
    tmp_path: Path, hung: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    ckpt = statehold.Checkpointer(tmp_path / "run", **SOON)
    pipeline = inside(ckpt).pipeline
    hang_in_save(hung, ckpt, width=32)
    ckpt.gate(DEADLINE_S)  # all copies are enqueued
    pipeline.stalls.after_s = 0.0
    for work in pipeline.to_stage.values():
        pipeline.stalls.warn(work)
    with pytest.raises(DeviceError):
        ckpt.close()
    assert "after 0 s: a device is busy, or hangs" in caplog.messages[0]
