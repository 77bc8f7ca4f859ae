"""Device copies against the real engine, with host tensors standing in for device tensors.

A buffer that goes back to the engine too early would carry the bytes of an earlier save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from statehold import _core
from statehold.errors import ClosedError
from statehold.plan import plan_save
from statehold.state.capture import CapturedTensor, capture
from statehold.state.device import (
    BlockingBackend,
    DeviceLink,
    DeviceLoader,
    DeviceStager,
    StreamBackend,
)
from statehold.state.restore import Destination
from statehold.testing import SimFs
from statehold.transfer import build_manifest, external_sources, start_read, start_write
from support.device import Deferred

MIB = 1 << 20
DEADLINE_S = 60.0


@pytest.fixture
def fs() -> SimFs:
    return SimFs(0)


@pytest.fixture
def engine(fs: SimFs) -> Iterator[_core.Engine]:
    engine = _core.Engine(fs, 2 * MIB, MIB, 2)
    yield engine
    engine.close()


def state_of(seed: int = 0) -> dict[str, torch.Tensor]:
    """More than three times the staging memory, of sizes that straddle buffers."""
    make = torch.Generator().manual_seed(seed)
    sizes = {"a": 3 * MIB + 12, "b": MIB // 2, "c": 3 * MIB, "d": 8, "e": 4}
    state = {name: torch.randn(size // 4, generator=make) for name, size in sizes.items()}
    state["half"] = torch.randn(5, 7, generator=make).bfloat16()
    state["scalar"] = torch.tensor(3.0)
    state["flags"] = torch.tensor([True, False, True])
    return state


def captured_of(state: dict[str, Any], host: tuple[str, ...] = ()) -> list[CapturedTensor]:
    tensors = capture(state).tensors
    for item in tensors:
        item.external = item.spec.name not in host
    return tensors


class Saving:
    """One save of `tensors` into `fs`, its external part still to be copied."""

    def __init__(self, fs: SimFs, engine: _core.Engine, tensors: list[CapturedTensor]) -> None:
        self.plan = plan_save([item.spec for item in tensors], step=1)
        self.job = start_write(engine, self.plan, tensors)
        self.sources = external_sources(self.plan, tensors)
        fs.mkdir("/run")
        self.job.attach(fs.open_write(f"/run/{self.plan.file_name}", self.plan.file_bytes))

    def finish(self) -> Any:
        assert self.job.wait_written(DEADLINE_S)
        self.job.finish()
        return build_manifest(self.plan, {}, self.job.checksums())


def load(engine: _core.Engine, manifest: Any, backend: StreamBackend,
         host: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:  # fmt: skip
    blank = {name: torch.full_like(tensor, 1) for name, tensor in state_of().items()}
    targets = [Destination(name, t, None, name not in host) for name, t in blank.items()]
    reading = start_read(engine, "/run", manifest, targets)
    DeviceLoader(backend, reading.external_targets).run(reading.job)
    assert reading.job.wait(DEADLINE_S)
    return blank


def unmoved() -> None:
    return None


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


@pytest.mark.parametrize("make", [Deferred, BlockingBackend])
@pytest.mark.parametrize("host", [(), ("b", "c"), ("a", "half")])
def test_bytes_make_the_round_trip(
    fs: SimFs, engine: _core.Engine, make: Any, host: tuple[str, ...]
) -> None:
    state = state_of()
    saving = Saving(fs, engine, captured_of(state, host))
    DeviceStager(make(), saving.sources, unmoved).run(saving.job)
    assert same(load(engine, saving.finish(), make(), host), state)


def test_buffers_go_back_only_after_their_copies(fs: SimFs, engine: _core.Engine) -> None:
    backend = Deferred()
    saving = Saving(fs, engine, captured_of(state_of()))
    job = saving.job
    due: dict[int, int] = {}

    class Watched:
        @property
        def fills_left(self) -> int:
            return job.fills_left

        def next_fill(self, timeout: float | None) -> _core.Fill | None:
            fill = job.next_fill(timeout)
            if fill is not None:
                due[fill.token] = backend.copies + len(fill.pieces)
            return fill

        def filled(self, fill: _core.Fill) -> None:
            assert backend.done >= due.pop(fill.token)
            job.filled(fill)

    DeviceStager(backend, saving.sources, unmoved).run(Watched())
    assert due == {}
    saving.finish()


def test_copies_follow_the_training_stream(fs: SimFs, engine: _core.Engine) -> None:
    backend = Deferred()
    saving = Saving(fs, engine, captured_of(state_of()))
    stager = DeviceStager(backend, saving.sources, unmoved)
    assert backend.log == ["follow"]
    stager.run(saving.job)
    saving.finish()


def test_an_update_passes_behind_the_last_copy(fs: SimFs, engine: _core.Engine) -> None:
    backend = Deferred()
    saving = Saving(fs, engine, captured_of(state_of()))
    stager = DeviceStager(backend, saving.sources, unmoved)
    assert not stager.passing(timeout=0)
    stager.run(saving.job)
    assert stager.passing(timeout=0)
    assert backend.log[-1] == f"hold back {backend.copies}"
    saving.finish()


def test_an_update_may_pass_before_the_copies_are_done() -> None:
    backend = Deferred()
    source = torch.arange(8, dtype=torch.uint8)
    stager = DeviceStager(backend, {1: source}, unmoved)
    job = OneFill(when_filled=lambda: None)
    passed: list[bool] = []
    backend.run_until = lambda _: passed.append(stager.passing(timeout=0))
    stager.run(job)
    assert passed
    assert passed[0]


class OneFill:
    """A job with a single buffer of eight bytes."""

    def __init__(self, when_filled: Callable[[], object]) -> None:
        self.fills_left = 1
        self.view = memoryview(bytearray(8))
        self.pieces = [(1, 0, 0, 8)]
        self._when_filled = when_filled

    def next_fill(self, timeout: float | None) -> OneFill | None:
        self.fills_left = 0
        return self

    def filled(self, fill: OneFill) -> None:
        self._when_filled()


@pytest.mark.parametrize(("moves", "passes", "torn"), [
    ("before", True, "w"), ("before", False, "w"), ("after", True, None), ("never", False, None),
])  # fmt: skip
def test_changes_count_until_an_update_passed(moves: str, passes: bool, torn: str | None) -> None:
    changed: list[str] = []
    stager = DeviceStager(Deferred(), {1: torch.zeros(8, dtype=torch.uint8)},
                          lambda: changed[0] if changed else None)  # fmt: skip

    def while_copying() -> None:
        if moves == "before":
            changed.append("w")
        if passes:
            assert stager.passing(timeout=0)
        if moves == "after":
            changed.append("w")

    stager.run(OneFill(while_copying))
    assert stager.torn() == torn


def test_a_lost_device_fails_the_save_and_lends_nothing(fs: SimFs, engine: _core.Engine) -> None:
    saving = Saving(fs, engine, captured_of(state_of()))
    stager = DeviceStager(Deferred(fail_at=3), saving.sources, unmoved)
    with pytest.raises(RuntimeError, match="the device is lost"):
        stager.run(saving.job)
    assert not stager.passing(timeout=0)
    saving.job.cancel()
    fs.unlink(f"/run/{saving.plan.file_name}")
    fs.rmdir("/run")
    state = state_of(1)  # all buffers are there again: this one needs each of them many times
    again = Saving(fs, engine, captured_of(state))
    DeviceStager(Deferred(), again.sources, unmoved).run(again.job)
    assert same(load(engine, again.finish(), Deferred()), state)


def test_a_cancelled_save_ends_the_copying(fs: SimFs, engine: _core.Engine) -> None:
    saving = Saving(fs, engine, captured_of(state_of()))
    saving.job.cancel()
    stager = DeviceStager(Deferred(), saving.sources, unmoved)
    with pytest.raises(ClosedError):
        stager.run(saving.job)
    assert not stager.passing(timeout=0)


def test_a_corrupt_file_fails_the_load(fs: SimFs, engine: _core.Engine) -> None:
    saving = Saving(fs, engine, captured_of(state_of()))
    DeviceStager(Deferred(), saving.sources, unmoved).run(saving.job)
    manifest = saving.finish()
    fs.corrupt(f"/run/{saving.plan.file_name}", saving.plan.begins[0] + 5, 1)
    with pytest.raises(_core.Mismatch):
        load(engine, manifest, Deferred())


def test_staging_memory_is_pinned_once(engine: _core.Engine) -> None:
    backend = Deferred()
    link = DeviceLink(engine.staging, engine.staging_address, backend)
    assert backend.log == []
    link.stager({1: torch.zeros(1)}, unmoved)
    link.loader({1: torch.zeros(1)})
    assert [entry for entry in backend.log if "pin" in entry] == [f"pin {2 * MIB}"]
    link.close()
    link.close()
    assert backend.log.count("unpin") == 1
    assert link.note == ""


def test_memory_that_cannot_be_pinned_is_used_as_it_is(engine: _core.Engine) -> None:
    backend = Deferred(pin_note="not permitted")
    link = DeviceLink(engine.staging, engine.staging_address, backend)
    link.stager({1: torch.zeros(1)}, unmoved)
    link.stager({1: torch.zeros(1)}, unmoved)
    assert link.note == "not permitted"
    link.close()
    assert [entry for entry in backend.log if "pin" in entry] == [f"pin {2 * MIB}"]
