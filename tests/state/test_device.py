"""The device path on host memory, with the real engine: late copies make every wrong order show."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import statehold
from statehold.errors import ChecksumError, StateholdError, TornSnapshot
from statehold.state.device import Devices
from support.faults import DEADLINE_S, SMALL, Holdup, must
from support.streams import LateStreams, copies_of, install
from support.training import Training, bits

NO_RNG = {"rng": b""}


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> LateStreams:
    return install(monkeypatch)


@pytest.fixture
def ckpt(tmp_path: Path, streams: LateStreams) -> Iterator[statehold.Checkpointer]:
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        yield ckpt
        streams.finish.set()


def trained(width: int = 32) -> Training:
    training = Training(width=width)
    training.step()
    return training


def restored(ckpt: statehold.Checkpointer, step: int, width: int = 32) -> dict[str, bytes]:
    training = Training(seed=9, width=width)
    ckpt.restore(training.state, step)
    return bits(training) | NO_RNG


@pytest.mark.parametrize("width", [32, 1024])  # one buffer, and many times the staging memory
def test_every_byte_arrives(ckpt: statehold.Checkpointer, width: int) -> None:
    training = trained(width)
    expected = {}
    for step in range(1, 4):
        training.step()
        expected[step] = bits(training) | NO_RNG
        ckpt.save(step, training.state)
    ckpt.close()
    with statehold.Checkpointer(ckpt._run, **SMALL) as again:
        for step in expected:
            assert restored(again, step, width) == expected[step]


def test_buffers_are_pinned_once_and_only_those_that_are_used(
    tmp_path: Path, streams: LateStreams
) -> None:
    training = trained()
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        ckpt.save(1, {"host": torch.tensor(3.0)}).wait("committed", DEADLINE_S)
        assert not streams.pinned, "no device has a part in it yet"
        for step in range(2, 5):
            ckpt.save(step, training.state).wait("committed", DEADLINE_S)
        ckpt.restore(training.state)
        engine = ckpt._opened().engine
        used = set(streams.pinned)
        assert len(used) == len(streams.pinned) == 1  # of two: the state fits in one
        assert used <= {(engine.staging_address + at, 1 << 20) for at in (0, 1 << 20)}
        larger = trained(width=1024)
        ckpt.save(5, larger.state).wait("committed", DEADLINE_S)
        assert len(set(streams.pinned)) == len(streams.pinned) == 2
        assert not streams.unpinned
    assert sorted(streams.unpinned) == sorted(address for address, _ in streams.pinned)


def test_memory_that_cannot_be_pinned_is_used_and_reported(
    ckpt: statehold.Checkpointer, streams: LateStreams, caplog: pytest.LogCaptureFixture
) -> None:
    streams.may_pin = False
    training = trained()
    for step in (1, 2):
        ckpt.save(step, training.state).wait("committed", DEADLINE_S)
    assert restored(ckpt, 2) == bits(training) | NO_RNG
    assert caplog.text.count("could not be pinned") == 1
    ckpt.close()
    assert not streams.unpinned


def test_the_gate_makes_the_stream_wait_instead_of_the_host(
    ckpt: statehold.Checkpointer, streams: LateStreams
) -> None:
    training = trained()
    expected = bits(training) | NO_RNG
    streams.finish.clear()
    save = ckpt.save(1, training.state)  # returns although no device copy can complete
    must(copies_of(ckpt)._enqueued.wait(DEADLINE_S))
    training.step()
    training.step()
    assert not save.done("staged")
    assert save.stats.gate_s == 0
    assert streams.waits == 2
    assert bits(training)["hidden.weight"] != expected["hidden.weight"]
    streams.finish.set()
    save.wait("committed", DEADLINE_S)  # the update was let through: it is no torn snapshot
    assert restored(ckpt, 1) == expected


def test_the_host_waits_while_copies_are_to_be_enqueued(
    ckpt: statehold.Checkpointer, streams: LateStreams
) -> None:
    holdup = Holdup(ckpt)
    training = trained(width=1024)
    expected = bits(training) | NO_RNG
    save = ckpt.save(1, training.state)
    must(holdup.waiting.wait(DEADLINE_S))
    assert not copies_of(ckpt).passing()
    with pytest.raises(statehold.errors.WaitTimeout):
        ckpt.gate(0.01)
    holdup.release()
    training.step()
    assert save.done("staged") or streams.waits
    save.wait("committed", DEADLINE_S)
    assert restored(ckpt, 1, width=1024) == expected


def test_no_stream_waits_for_lazy_host_tensors(
    ckpt: statehold.Checkpointer, streams: LateStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_host = torch.randn(1 << 15)
    monkeypatch.setattr(
        "statehold.state.capture.is_external", lambda t: t.data_ptr() != on_host.data_ptr()
    )
    state = {"host": statehold.Gated(on_host), "device": statehold.Gated(torch.randn(64))}
    streams.finish.clear()
    ckpt.save(1, state)
    copies = copies_of(ckpt)
    must(copies._enqueued.wait(DEADLINE_S))
    assert not copies.passing()
    streams.finish.set()
    ckpt.gate(DEADLINE_S)


def test_a_change_before_the_gate_fails_the_save(
    ckpt: statehold.Checkpointer, streams: LateStreams
) -> None:
    training = trained()
    streams.finish.clear()
    save = ckpt.save(1, training.state)
    copies = copies_of(ckpt)
    must(copies._enqueued.wait(DEADLINE_S))
    with torch.no_grad():
        training.model.hidden.weight.add_(1)
    assert not copies.passing()
    streams.finish.set()
    with pytest.raises(TornSnapshot) as caught:
        save.wait("committed", DEADLINE_S)
    assert caught.value.facts["tensor"] == "model.hidden.weight"
    assert not copies.passing(), "a failed save is not passed, it is waited for: it has ended"
    training.step()
    assert ckpt.steps() == []


def test_buffers_are_those_of_the_call(ckpt: statehold.Checkpointer, streams: LateStreams) -> None:
    training = trained()
    expected = bits(training) | NO_RNG
    streams.finish.clear()
    save = ckpt.save(1, training.state)
    training.backward()  # moves the running mean; copied by nobody so far
    streams.finish.set()
    save.wait("committed", DEADLINE_S)
    assert restored(ckpt, 1)["norm.running_mean"] == expected["norm.running_mean"]


def test_non_contiguous_and_odd_dtypes(ckpt: statehold.Checkpointer) -> None:
    state: dict[str, Any] = {
        "transposed": statehold.Gated(torch.arange(12.0).reshape(3, 4).t()),
        "sliced": torch.arange(40).reshape(4, 10)[:, 2:7],
        "offset": torch.arange(10, dtype=torch.int16)[3:],
        "conj": torch.randn(5, dtype=torch.complex64).conj(),
        "bool": torch.tensor([True, False, True]),
        "fp8": torch.randn(7).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 3),
    }
    ckpt.save(1, state).wait("committed", DEADLINE_S)

    def plain(value: Any) -> Any:
        return value.value if isinstance(value, statehold.Gated) else value

    live = {name: torch.zeros_like(plain(value)) for name, value in state.items()}
    live["transposed"] = torch.zeros(3, 4).t()
    live["sliced"] = torch.zeros(4, 10, dtype=torch.int64)[:, 2:7]
    ckpt.restore(live)
    for name, value in live.items():
        assert value.resolve_conj().tolist() == plain(state[name]).resolve_conj().tolist(), name
    assert not live["sliced"].is_contiguous()


def test_damage_is_found_before_anything_reaches_the_device(
    ckpt: statehold.Checkpointer,
) -> None:
    training = trained()
    ckpt.save(1, training.state).wait("committed", DEADLINE_S)
    [path] = Path(ckpt._run).glob("step-*/*.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    live = Training(seed=4)
    before = bits(live)
    with pytest.raises(ChecksumError):
        ckpt.restore(live.state, 1)
    assert bits(live)["hidden.weight"] == before["hidden.weight"]
    ckpt.save(2, training.state).wait("committed", DEADLINE_S)  # every buffer came back
    assert restored(ckpt, 2) == bits(training) | NO_RNG


class OneBuffer:
    """A job with a single buffer: it can lend the next only when it has the last one back."""

    def __init__(self, streams: LateStreams, fails_at: int | None = None) -> None:
        self.memory = bytearray(4)
        self.written = b""
        self.fills_left = 3
        self._fails_at = fails_at
        self._lent = False

    def next_fill(self, timeout: float | None) -> Any:
        if self.fills_left == self._fails_at:
            raise StateholdError("the job has failed")
        if self._lent:
            assert timeout == 0, "would wait for ever"
            return None
        if not self.fills_left:
            return None
        self.fills_left -= 1
        self._lent = True
        offset = 4 * (2 - self.fills_left)
        return SimpleNamespace(view=memoryview(self.memory), pieces=[(1, offset, 0, 4)])

    def filled(self, fill: Any) -> None:
        self._lent = False
        self.written += bytes(self.memory)

    def wait_eager(self, timeout: float | None) -> bool:
        return True


@pytest.mark.parametrize(("fails_at", "written"), [(None, 12), (1, 8), (3, 0)])
def test_buffers_go_back_after_their_copies(
    streams: LateStreams, fails_at: int | None, written: int
) -> None:
    source = torch.arange(12, dtype=torch.uint8)
    captured = statehold.state.capture.capture({"t": statehold.Gated(source)})
    job = OneBuffer(streams, fails_at)
    copies = Devices().copies(job, captured, captured.tensors)
    assert copies is not None
    if fails_at is None:
        copies.run()
    else:
        with pytest.raises(StateholdError):
            copies.run()
    assert not job._lent
    assert job.written == bytes(source.tolist())[:written]


def test_a_failing_copy_gives_its_buffer_back(
    streams: LateStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = statehold.state.capture.capture({"t": torch.arange(12, dtype=torch.uint8)})
    job = OneBuffer(streams)
    copies = Devices().copies(job, captured, captured.tensors)
    assert copies is not None

    def fails(*_: object) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(streams, "copy", fails)
    with pytest.raises(RuntimeError, match="device lost"):
        copies.run()
    assert not job._lent


def test_what_an_optimizer_keeps_is_not_cloned_on_the_device(streams: LateStreams) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    capture = statehold.state.capture.capture
    cloned = {each.spec.name for each in capture(state, stepping=[optimizer]).tensors if each.owned}
    assert cloned == {"model.weight", "model.bias"}
    assert all(each.owned for each in capture(state).tensors)


def test_host_states_involve_no_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("statehold.state.device.backend_for", pytest.fail)
    model = nn.Linear(4, 4)
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        ckpt.save(1, {"model": model}).wait("committed", DEADLINE_S)
        got = ckpt.restore({"model": model})
        assert got == 1
