"""Streams: those that the trainer uses beside the current one, and statehold's own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import statehold
from devices.conftest import trained_on
from statehold.integrations.dcp import StorageWriter
from statehold.tensors import captured
from support.cuda import Machine
from support.cuda.machine import POOL
from support.cuda.streams import Stream
from support.faults import DEADLINE_S, SMALL


@pytest.mark.parametrize("cloned_bytes_max", [captured.CLONED_BYTES_MAX, 0])
def test_what_the_stream_of_the_updates_changes_next_comes_after_eager_copies(
    ckpt: statehold.Checkpointer,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    cloned_bytes_max: int,
) -> None:
    """The loop of training runs on a stream of its own, and save() is called outside of it."""
    monkeypatch.setattr(captured, "CLONED_BYTES_MAX", cloned_bytes_max)
    training, own = trained_on(machine), machine.cuda.Stream()
    statistics = machine.put(torch.zeros(1000))
    machine.finish()
    with machine.cuda.stream(own):
        training.step()
        statistics.add_(1)
    save = ckpt.save(1, {"model": training.model, "statistics": statistics})
    with machine.cuda.stream(own):
        statistics.add_(1)  # as the next forward does
    machine.timeline.run(own)
    save.wait("committed", DEADLINE_S)
    restored = machine.put(torch.zeros(1000))
    ckpt.restore({"statistics": restored}, 1, strict=False)
    assert torch.equal(machine.read(restored), torch.ones(1000))


def test_a_stream_that_another_thread_captures_takes_no_part(
    ckpt: statehold.Checkpointer, machine: Machine
) -> None:
    """Who waits for it would be captured, with all the copies of the save."""
    training, own, graph = trained_on(machine), machine.cuda.Stream(), machine.cuda.CUDAGraph()

    def save(step: int) -> None:
        ckpt.save(step, {"model": training.model}).wait("committed", DEADLINE_S)

    save(1)  # from here on updates are seen
    with machine.cuda.stream(own):
        training.step()
    machine.finish()
    with machine.cuda.graph(graph, own), ThreadPoolExecutor(1, initializer=machine.enter) as other:
        other.submit(save, 2).result(DEADLINE_S)
    assert ckpt.steps() == [1, 2]


def side_streams(machine: Machine) -> list[Stream]:
    """The streams that had work, but for the default one."""
    used = [stream for stream in machine.timeline.streams if stream.given]
    return [stream for stream in used if stream is not machine.default(0)]


def test_the_side_stream_is_none_that_torch_hands_out(
    ckpt: statehold.Checkpointer, machine: Machine
) -> None:
    """Who captures a graph on it captures copies; collectives on it wait for copies."""
    ckpt.save(1, {"w": machine.put(torch.ones(8))}).wait("committed", DEADLINE_S)
    [side] = side_streams(machine)
    handed_out = [machine.cuda.Stream() for _ in range(2 * POOL)]
    assert len(set(handed_out)) == POOL
    assert side not in handed_out


@pytest.mark.filterwarnings("ignore")
def test_all_saves_of_a_process_share_a_side_stream(tmp_path: Path, machine: Machine) -> None:
    """The allocator keeps what was scratch for the stream that it was taken on."""
    state = {"w": machine.put(torch.ones(300, 1000)).t()}
    for index in range(3):
        dcp.save(state, storage_writer=StorageWriter(tmp_path / f"step{index}", **SMALL))
        with statehold.Checkpointer(tmp_path / f"run{index}", **SMALL) as ckpt:
            ckpt.save(1, state).wait("committed", DEADLINE_S)
            ckpt.restore(state)
    assert len(side_streams(machine)) == 1


def test_a_stream_of_torch_has_to_do_where_none_can_be_created(
    ckpt: statehold.Checkpointer, machine: Machine
) -> None:
    machine.may_create_streams = False
    weights = machine.put(torch.ones(8))
    ckpt.save(1, {"w": weights}).wait("committed", DEADLINE_S)
    machine.cuda.default_stream().record_event()
    weights.add_(1)  # no error is left for the next launch
    ckpt.restore({"w": weights})
    assert torch.equal(machine.read(weights), torch.ones(8))
