"""A joiner takes the state of live replicas: every bit of it, whatever becomes of a holder."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from statehold.errors import StateMismatchError
from statehold.net import addresses
from statehold.net import wire as net_wire
from statehold.net.secret import ENVIRONMENT, Secret
from statehold.net.wire import SecretError, Wire, connect
from statehold.process.worker import Flag
from statehold.resilience import transfer
from statehold.resilience.meeting import Desk, MeetingPlace
from statehold.resilience.protocol.actions import GroupLostError
from statehold.resilience.state_bytes import Arriving, ByteRun, Offer
from statehold.resilience.transfer import OfferServer, StateTransfer
from support.faults import must

HOST = "127.0.0.1"
HOLDERS = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(40, 60)
        self.norm = nn.BatchNorm1d(60)
        self.picture = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.narrow = nn.Parameter(torch.randn(33).to(torch.bfloat16))
        self.number = nn.Parameter(torch.randn(()))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.last = nn.Linear(40, 60)
        self.last.weight = self.first.weight

    def loss(self) -> Tensor:
        hidden = self.last(torch.randn(8, 40)) + self.norm(self.first(torch.randn(8, 40)))
        picture = self.picture(torch.randn(2, 3, 4, 4))
        return hidden.sum() * self.number + picture.square().sum() + self.narrow.float().sum()


def state_of(seed: int, steps: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(steps):
        optimizer.zero_grad()
        model.loss().backward()
        optimizer.step()
        scheduler.step()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def contents(state: dict[str, Any]) -> list[Any]:
    found: list[Any] = []

    def walk(value: Any) -> None:
        if isinstance(value, Tensor):
            found.append((value.dtype, value.shape, value.stride(), value.tolist()))
        elif isinstance(value, dict):
            for key in value:
                found.append(key)
                walk(value[key])
        elif isinstance(value, list | tuple):
            for each in value:
                walk(each)
        else:
            found.append(value)

    for each in state.values():
        walk(each.state_dict())
    return found


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PIECE_BYTES", 1000)
    monkeypatch.setattr(transfer, "RANGE_BYTES", 3500)


class Job:
    """Holders of equal states, and the state of a joiner."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.revoked = Flag()
        self.states = [state_of(seed=1, steps=3) for _ in range(HOLDERS)]
        self.holders = [StateTransfer(each, HOST) for each in self.states]
        self.joined = state_of(seed=2, steps=0)
        self.joiner = StateTransfer(self.joined, HOST)

    def where(self, epoch: int, rank: int, size: int = HOLDERS + 1) -> MeetingPlace:
        return MeetingPlace(self.desk.address, epoch, (rank, 0), (size, 1), HOST, self.revoked)

    def serve(self) -> None:
        for rank, each in enumerate(self.holders):
            each.serve(self.where(5, rank))

    def fetch(self) -> None:
        self.joiner.fetch(self.where(5, HOLDERS))

    def close(self) -> None:
        self.revoked.set()
        for each in self.holders:
            each.close()


@pytest.fixture(params=["one host", "two hosts"])
def job(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    if request.param == "two hosts":
        monkeypatch.setattr(transfer, "_near", elsewhere)
    desk = Desk(HOST)
    found = Job(desk)
    yield found
    found.close()
    desk.close()


def elsewhere(name: str, until: float, revoked: Flag) -> None:
    """On another host, nobody has the name of a holder's Unix socket."""


def instead(server: Any, name: str, call: Callable[..., Any]) -> None:
    """Replace a method of one server; `call` gets the original one first."""
    original = getattr(server, name)
    setattr(server, name, lambda *args, **given: call(partial(original, **given), *args))


def only_first(job: Job, number: int, call: Callable[..., Any]) -> None:
    """Replace what this holder sends. The others send nothing before it has been called."""
    called = Flag()

    def calling(original: Any, *args: Any) -> None:
        try:
            call(original, *args)
        finally:
            called.set()

    def waiting(original: Any, *args: Any) -> None:
        must(called.wait(60))
        original(*args)

    for place, each in enumerate(job.holders):
        instead(each.server, "_send", calling if place == number else waiting)


def test_every_bit_arrives_and_training_goes_on_alike(small_pieces: None, job: Job) -> None:
    job.serve()
    job.fetch()
    assert contents(job.joined) == contents(job.states[0])
    assert job.joined["model"].last.weight is job.joined["model"].first.weight
    for state in (job.joined, job.states[0]):
        torch.manual_seed(3)
        state["optimizer"].zero_grad()
        state["model"].loss().backward()
        state["optimizer"].step()
        state["scheduler"].step()
    assert contents(job.joined) == contents(job.states[0])


def test_a_part_of_a_holder_that_goes_comes_from_others(
    small_pieces: None, job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    def send(original: Any, *args: Any) -> None:
        raise OSError("gone")

    job.serve()
    only_first(job, 0, send)
    job.fetch()
    assert contents(job.joined) == contents(job.states[0])
    assert "the peer has closed the connection" in caplog.text


def test_a_wrong_byte_is_found_and_comes_from_others(
    small_pieces: None, job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    class Flipping:
        def __init__(self, wire: Any) -> None:
            self._wire = wire

        def pour(self, data: Any, until: float) -> None:
            changed = bytearray(data)
            changed[-1] ^= 16
            self._wire.pour(changed, until)

    def send(original: Any, wire: Any, *args: Any) -> None:
        original(Flipping(wire), *args)

    job.serve()
    only_first(job, 2, send)
    job.fetch()
    assert contents(job.joined) == contents(job.states[0])
    assert "differ from their checksum" in caplog.text


def test_a_holder_that_describes_another_state_has_no_part(
    small_pieces: None, job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    job.states[1]["scheduler"].step()
    job.serve()
    sent: list[Any] = []
    instead(job.holders[1].server, "_send", lambda original, *args: sent.append(args))
    job.fetch()
    assert contents(job.joined) == contents(job.states[0]) != contents(job.states[1])
    assert not sent
    assert "another state" in caplog.text


def test_nobody_is_served_after_the_state_may_have_changed(job: Job) -> None:
    job.serve()
    for each in job.holders:
        each.stop_serving()
    with pytest.raises(GroupLostError, match="the transfer of the state has failed"):
        job.fetch()


def test_a_holder_that_has_become_a_joiner_gives_its_state_to_nobody(job: Job) -> None:
    """It was fenced, and takes another state. A joiner of the epoch before may not know that."""
    job.joiner.serve(job.where(4, 0, 2))
    job.serve()
    job.fetch()
    late = StateTransfer(state_of(seed=3, steps=0), HOST)
    with pytest.raises(GroupLostError) as caught:
        late.fetch(job.where(4, 1, 2))
    job.joiner.close()
    assert caught.value.facts["reason"] == "no holder of the state answers"


def test_the_state_stops_to_be_read_in_the_middle(
    small_pieces: None, job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)

    def send(original: Any, *args: Any) -> None:
        original(*args)
        for each in job.holders:
            each.stop_serving()

    job.serve()
    only_first(job, 0, send)
    with pytest.raises(GroupLostError) as caught:
        job.fetch()
    assert caught.value.facts["reason"] == "no holder of the state is left"


def test_a_parameter_that_changes_inside_a_step_is_told(
    small_pieces: None, job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    job.serve()
    for each in job.states:
        with torch.no_grad():
            each["model"].first.bias.mul_(0.5)
    with pytest.raises(GroupLostError, match="the transfer of the state has failed"):
        job.fetch()
    assert "model.first.bias changes inside a step" in caplog.text


def test_a_range_that_cannot_be_placed_is_taken_again(
    small_pieces: None, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device may fail: nobody took the range of the thread that had met this, and all waited."""
    write, failed = ByteRun.write, []

    def failing(run: ByteRun, begin: int, data: Tensor) -> None:
        if not failed:
            failed.append(begin)
            raise RuntimeError("the device has failed")
        write(run, begin, data)

    monkeypatch.setattr(ByteRun, "write", failing)
    job.serve()
    job.fetch()
    assert failed
    assert contents(job.joined) == contents(job.states[0])


def test_a_transfer_ends_with_its_epoch(small_pieces: None, job: Job) -> None:
    asked = Flag()

    def send(original: Any, *args: Any) -> None:
        asked.set()
        job.revoked.wait()

    job.serve()
    for each in job.holders:
        instead(each.server, "_send", send)
    with ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(job.fetch)
        must(asked.wait(60))
        job.revoked.set()
        with pytest.raises(GroupLostError) as caught:
            fetching.result()
    assert caught.value.facts["reason"] == "the epoch has ended"


def test_a_joiner_of_another_model_is_refused_by_name(job: Job) -> None:
    job.serve()
    job.joined["model"].first = nn.Linear(41, 60)
    with pytest.raises(StateMismatchError, match=r"first\.weight"):
        job.fetch()


def test_buffers_are_those_of_the_beginning_of_the_step() -> None:
    """A forward pass changes them before the optimizer steps."""
    state = state_of(1, 1)
    before = state["model"].norm.running_mean.clone()
    offer = Offer(state)
    state["model"].loss()
    assert not torch.equal(before, state["model"].norm.running_mean)
    joined = state_of(2, 0)
    arriving = Arriving(joined, offer.document)
    everything = torch.empty(offer.run.nbytes, dtype=torch.uint8)
    offer.run.read(0, everything)
    arriving.run.write(0, everything)
    arriving.finish()
    assert torch.equal(before, joined["model"].norm.running_mean)


# Strangers


@pytest.fixture
def server() -> Iterator[OfferServer]:
    found = OfferServer(HOST)
    found.offer(3, Offer(state_of(1, 1)))
    yield found
    found.close()


def call(server: OfferServer) -> Wire:
    """A wire of who knows the secret, and has asked for nothing yet."""
    address = addresses.split(server.address.partition("/")[0])
    return connect(address, "state", Secret(""), soon())


def soon() -> float:
    return time.monotonic() + 20


@pytest.mark.parametrize(
    "request_line",
    [
        b"[0, 4611686018427387904]", b"[5, 5]", b"[-1, 4]", b"[0, 5000000]", b"[0]", b"{}", b"7",
        b'["a", "b"]', b"[" * 50, b"[" * 50_000,
    ],
)  # fmt: skip
def test_who_asks_for_no_range_of_the_state_is_hung_up_on(
    server: OfferServer, request_line: bytes
) -> None:
    with contextlib.closing(call(server)) as stranger:
        stranger.send(b"3", soon())
        assert stranger.receive(soon())
        stranger.send(request_line, soon())
        with pytest.raises(ConnectionResetError):
            stranger.read(1, soon())


@pytest.mark.parametrize("line", [b"2", b"[3]", b"[" * 50, b"[" * 50_000, b"", b"3" * 70])
def test_who_names_no_epoch_is_hung_up_on(server: OfferServer, line: bytes) -> None:
    with contextlib.closing(call(server)) as stranger:
        stranger.send(line, soon())
        with pytest.raises(ConnectionResetError):
            stranger.read(1, soon())


def test_who_does_not_know_the_secret_gets_no_state(
    server: OfferServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither through TCP nor through the Unix socket, and no memory of both is made."""
    monkeypatch.setenv(ENVIRONMENT, "the secret of another job")
    for address in (server.address, f"{server.address}x"):
        with pytest.raises(SecretError):
            transfer.join(address, 3, soon(), Flag())


def test_it_closes_while_a_device_that_hangs_is_read(
    server: OfferServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the device gives later goes to nobody: the state may have changed by then."""
    offer = Offer(state_of(1, 1))
    server.offer(3, offer)
    run, is_read, is_there = offer.run, Flag(), Flag()

    def read(begin: int, into: torch.Tensor) -> None:
        is_read.set()
        must(is_there.wait(60))

    monkeypatch.setattr(run, "read", read)
    with contextlib.closing(call(server)) as joiner:
        joiner.send(b"3", soon())
        must(joiner.receive(soon()))
        joiner.send(f"[0, {run.nbytes}]".encode(), soon())
        must(is_read.wait(60))
        server.close()
        assert not is_there.is_set
        is_there.set()
        with pytest.raises(ConnectionResetError):
            joiner.read(1, soon())


def test_the_number_of_lines_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third one is let in, and served when one of the others has gone."""
    monkeypatch.setattr(transfer, "LINES_MAX", 2)
    server = OfferServer(HOST)
    server.offer(3, Offer(state_of(1, 1)))
    lines = [call(server) for _ in range(3)]
    for each in lines[:2]:
        each.send(b"3", soon())
        must(each.receive(soon()))
    lines[2].send(b"3", soon())
    with pytest.raises(TimeoutError):
        lines[2].receive(time.monotonic() + 0.3)
    lines[0].close()
    must(lines[2].receive(soon()))
    for each in lines:
        each.close()
    server.close()


def test_joiners_wait_for_their_turns(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more than LINES_MAX, each was out of the job after the time that a connection may take."""
    monkeypatch.setattr(transfer, "LINES_MAX", 1)
    has_asked, waits, send, wait = Flag(), Flag(), Wire.send, Wire.wait
    clock = SimpleNamespace(monotonic=time.monotonic)

    def sending(wire: Wire, frame: bytes, until: float) -> None:
        send(wire, frame, until)
        if frame == b"5":
            has_asked.set()

    def waiting(wire: Wire, events: int, until: float) -> None:
        if has_asked.is_set:
            waits.set()
        wait(wire, events, until)

    job.serve()
    first = [call(each.server) for each in job.holders]
    for each in first:
        each.send(b"5", soon())
        must(each.receive(soon()))
    monkeypatch.setattr(net_wire, "time", clock)
    monkeypatch.setattr(transfer, "time", clock)
    monkeypatch.setattr(Wire, "send", sending)
    monkeypatch.setattr(Wire, "wait", waiting)
    with ThreadPoolExecutor() as pool:
        joined = pool.submit(job.fetch)
        must(waits.wait(60))
        clock.monotonic = lambda: time.monotonic() + 3600
        for each in first:
            each.close()
        joined.result(60)
    assert contents(job.joined) == contents(job.states[0])


@pytest.mark.parametrize(
    "document",
    [
        b"", b"[" * 50_000, b"{}", b'{"state": 1, "tensors": [["a", "F32", [1]]], "sizes": [1.5]}',
        b'{"state": 1, "tensors": [["a", "F32"]], "sizes": [4]}',
        b'{"state": 1, "tensors": [["a", "F32", [-1]]], "sizes": [4]}',
    ],
)  # fmt: skip
def test_what_describes_no_state_is_refused(document: bytes) -> None:
    with pytest.raises(ValueError):
        Arriving(state_of(1, 1), document)


def test_a_description_whose_sizes_are_not_those_of_its_shapes_is_refused() -> None:
    """The bytes of a range would have been written beyond the tensor."""
    described = json.loads(Offer(state_of(1, 1)).document)
    described["sizes"][0] += 4096
    with pytest.raises(ValueError, match="another size"):
        Arriving(state_of(2, 1), json.dumps(described).encode())
