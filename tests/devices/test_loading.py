"""What a restore needs on devices, and what it leaves as it was: from any layout to any layout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import statehold
from devices.conftest import bits_on, trained_on, training_on
from statehold.checkpoint.restore.read_plan import ReadPlan
from statehold.layout.layout import Box, Layout
from statehold.tensors.destinations import Destination
from statehold.tensors.devices import Devices
from statehold.tensors.devices.placing import ChunkPlace
from support.cuda import Machine, install
from support.faults import DEADLINE_S, SMALL
from support.laid_out import MIB, Arrays, Disk, opened, tensors_of
from support.meshes import mesh
from support.records import cut

WIDE = 1024
ROWS, COLUMNS = 0, 1


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A machine with two devices."""
    machine = install(monkeypatch, count=2)
    with machine.in_use():
        yield machine


def floats(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def split(ranks: int, *dims: int) -> Layout:
    """The dims of a tensor over as many axes of `ranks` ranks each."""
    return Layout(mesh(*[ranks] * len(dims)), tuple(enumerate(dims)))


def more_than_the_result(
    machine: Machine, arrays: Arrays, saved: Layout, live: Layout, is_strided: bool = False
) -> int:
    """The bytes that a device has at most beside its targets while they are read, for the rank that
    needs most. Checks every byte."""
    with opened(arrays) as disk:
        size = len(saved.mesh.ranks)
        disk.save(tensors_of(arrays, dict.fromkeys(arrays, saved)), size)
        return max(
            _beside(machine, disk, arrays, live, rank, is_strided) for rank in live.mesh.ranks
        )


def _beside(
    machine: Machine, disk: Disk, arrays: Arrays, live: Layout, rank: int, is_strided: bool
) -> int:
    ranks, devices = len(live.mesh.ranks), Devices()
    found = [
        _destination(machine, name, array, live.box(array.shape, rank), is_strided)
        for name, array in arrays.items()
    ]
    before = machine.bytes_on()
    machine.reset_peak()
    disk.read(ReadPlan(disk.saved(rank, ranks), found, rank=rank, ranks=ranks), devices)
    devices.close()
    assert machine.bytes_on() == before
    for each in found:
        expected = np.ascontiguousarray(cut(arrays[each.name], each.box))
        assert machine.read(each.tensor).numpy().tobytes() == expected.tobytes()
    return machine.peak_on() - before


def _destination(
    machine: Machine, name: str, array: Any, box: Box, is_strided: bool
) -> Destination:
    tensor = torch.zeros(box.shape, dtype=torch.from_numpy(array[:0]).dtype)
    if is_strided:
        tensor = torch.zeros(box.shape[::-1], dtype=tensor.dtype).t()
    return Destination(name, machine.put(tensor), True, box, shared=True)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("saved", "live"),
    [
        pytest.param(split(4, ROWS), split(8, ROWS), id="FSDP 4 to 8"),
        pytest.param(split(4, ROWS), split(3, ROWS), id="FSDP 4 to 3"),
        pytest.param(split(4, ROWS), split(8, COLUMNS), id="rows to columns"),
        pytest.param(split(2, ROWS, COLUMNS), split(4, ROWS), id="FSDP over TP to FSDP"),
    ],
)
def test_a_restore_needs_one_buffer_on_a_device(
    machine: Machine, saved: Layout, live: Layout
) -> None:
    arrays = {"one": floats(4 * WIDE, WIDE), "two": floats(4 * WIDE, WIDE)}  # 16 MiB each
    assert more_than_the_result(machine, arrays, saved, live) <= MIB


def test_strided_tensors_need_one_buffer(machine: Machine) -> None:
    arrays = {"one": floats(4 * WIDE, WIDE), "two": floats(2 * WIDE, WIDE)}
    assert more_than_the_result(machine, arrays, split(2, ROWS), split(2, ROWS), True) <= MIB


def test_runs_that_lie_together_need_nothing(machine: Machine) -> None:
    """Beside what a block of the file has at its ends: few bytes of a tensor."""
    arrays = {"one": floats(4 * WIDE, WIDE)}
    assert more_than_the_result(machine, arrays, split(1, ROWS), split(1, ROWS)) <= 4096
    assert more_than_the_result(machine, arrays, split(4, ROWS), split(8, ROWS)) <= 4096


def test_strided_live_tensors_are_filled_where_they_are(
    ckpt: statehold.Checkpointer, machine: Machine
) -> None:
    weights = torch.randn(8, 64, 32, 32)
    ckpt.save(1, {"w": weights}).wait("committed", DEADLINE_S)
    live = {"w": machine.put(torch.zeros_like(weights).to(memory_format=torch.channels_last))}
    address = live["w"].data_ptr()
    machine.reset_peak()
    before = machine.bytes_on()
    ckpt.restore(live)
    assert machine.peak_on() - before <= MIB < weights.nbytes
    assert live["w"].data_ptr() == address
    assert torch.equal(machine.read(live["w"]), weights)


def test_conjugate_and_negative_tensors_need_no_copy(
    ckpt: statehold.Checkpointer, machine: Machine
) -> None:
    numbers = torch.randn(1 << 18, dtype=torch.complex64)
    ckpt.save(1, {"conj": numbers, "neg": numbers.imag.clone()}).wait("committed", DEADLINE_S)
    memory = machine.put(torch.zeros_like(numbers)), machine.put(torch.zeros_like(numbers))
    live = {"conj": memory[0].conj(), "neg": memory[1].conj().imag}
    machine.reset_peak()
    before = machine.bytes_on()
    ckpt.restore(live)
    assert machine.peak_on() - before <= MIB
    with machine.still():
        assert torch.equal(live["conj"].resolve_conj(), numbers)
        assert torch.equal(live["neg"].resolve_neg(), numbers.imag)
        assert live["neg"].is_neg()


def test_small_tensors_are_placed_together(ckpt: statehold.Checkpointer, machine: Machine) -> None:
    state = {f"layers.{index}": torch.randn(33) for index in range(300)}
    ckpt.save(1, state).wait("committed", DEADLINE_S)
    live = {name: machine.put(torch.zeros_like(value)) for name, value in state.items()}
    before = machine.timeline.launches
    ckpt.restore(live)
    assert machine.timeline.launches - before <= 8, "one copy, one kernel, and events"
    assert all(torch.equal(machine.read(live[name]), value) for name, value in state.items())


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("current", [None, 1])
def test_current_devices_and_streams_stay_as_they_are(
    tmp_path: Path, pair: Machine, used: tuple[int, ...], current: int | None
) -> None:
    state = {f"w{index}": torch.randn(1 << 17) for index in range(4)}
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        ckpt.save(1, state).wait("committed", DEADLINE_S)
        if current is not None:
            pair.cuda.set_device(current)
            pair.cuda.set_stream(pair.cuda.Stream())
        streams = [pair.current(device) for device in (0, 1)]
        live = {
            name: pair.put(torch.zeros_like(value), used[index % len(used)])
            for index, (name, value) in enumerate(state.items())
        }
        ckpt.restore(live)
        assert pair.cuda.current_device() == (current or 0)
        assert [pair.current(device) for device in (0, 1)] == streams
        assert pair.contexts == set(used) | ({1} if current else set())
        assert all(torch.equal(pair.read(live[name]), value) for name, value in state.items())


@pytest.mark.parametrize("dim", [0, 1])
def test_a_restore_comes_between_what_is_queued_before_and_after(
    ckpt: statehold.Checkpointer, machine: Machine, dim: int
) -> None:
    weights = torch.randn(512, 512)
    ckpt.save(1, {"w": weights}).wait("committed", DEADLINE_S)
    live = machine.put(torch.zeros(512, 512) if dim else torch.zeros(512, 512).t())
    live.fill_(3)  # late, as is all that a stream is given
    ckpt.restore({"w": live})
    doubled = live * 2
    live.fill_(4)
    assert torch.equal(machine.read(doubled), weights * 2)


def test_damage_leaves_no_memory_on_the_device(
    tmp_path: Path, ckpt: statehold.Checkpointer, machine: Machine
) -> None:
    weights = torch.randn(2048, 512)
    ckpt.save(1, {"w": weights}).wait("committed", DEADLINE_S)
    [path] = (tmp_path / "run").glob("step-*/*.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    live = machine.put(torch.zeros(512, 2048).t())
    before = machine.bytes_on()
    with pytest.raises(statehold.errors.ChecksumError):
        ckpt.restore({"w": live}, 1)
    machine.finish()
    assert machine.bytes_on() == before


def test_the_state_of_a_fresh_optimizer_is_made_on_the_device(
    ckpt: statehold.Checkpointer, machine: Machine
) -> None:
    training = trained_on(machine)
    ckpt.save(1, training.state).wait("committed", DEADLINE_S)
    fresh = training_on(machine, seed=9)
    ckpt.restore(fresh.state)
    assert bits_on(machine, fresh) == bits_on(machine, training)
    for state in fresh.optimizer.state.values():
        assert machine.is_on_device(state["exp_avg"])
        assert not machine.is_on_device(state["step"]), "AdamW reads it on the host"


DTYPES = [
    torch.bool, torch.uint8, torch.int16, torch.int64, torch.uint32, torch.float64, torch.bfloat16,
    torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
]  # fmt: skip


def blank(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    *rest, last = shape
    return torch.zeros(*rest, last * dtype.itemsize, dtype=torch.uint8).view(dtype)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, in order."""
    if tensor.dtype.itemsize == 16:
        tensor = torch.view_as_real(tensor).flatten(-2)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(bits[tensor.dtype.itemsize]).contiguous().view(torch.uint8)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_large", [False, True])
def test_every_dtype_goes_to_every_kind_of_memory(
    ckpt: statehold.Checkpointer, machine: Machine, dtype: torch.dtype, is_large: bool
) -> None:
    """Bit for bit, also NaN."""
    rows = 3 << 10 if is_large else 5  # over several buffers, or less than one
    patterns = torch.randint(
        0, 2 if dtype is torch.bool else 256, (rows, 60 * dtype.itemsize), dtype=torch.uint8
    )
    saved = patterns.view(dtype)
    ckpt.save(1, dict.fromkeys(("plain", "strided", "part"), saved)).wait("committed", DEADLINE_S)
    live = {
        "plain": machine.put(blank(dtype, rows, 60)),
        "strided": machine.put(blank(dtype, 60, rows)).t(),
        "part": machine.put(blank(dtype, rows + 2, 3, 60))[1:-1, 1],
    }
    ckpt.restore(live)
    for name, value in live.items():
        assert raw(machine.read(value)).equal(patterns), name


def test_a_device_with_little_memory_gets_less_scratch(
    ckpt: statehold.Checkpointer, machine: Machine
) -> None:
    state = {"w": torch.randn(1024, 1024), "v": torch.randn(64), "x": torch.randn(16, 16)}
    ckpt.save(1, state).wait("committed", DEADLINE_S)
    live = {name: torch.zeros_like(value) for name, value in state.items()}
    live |= {"w": torch.zeros(1024, 1024).t(), "x": torch.zeros(16, 16).t()}
    live = {name: machine.put(value) for name, value in live.items()}
    machine.memory.limits[0] = machine.bytes_on() + 100_000
    ckpt.restore(live)
    assert all(machine.read(live[name]).equal(value) for name, value in state.items())


def test_a_device_without_memory_fails_the_restore_alone(
    ckpt: statehold.Checkpointer, machine: Machine
) -> None:
    weights = torch.randn(1024, 1024)
    ckpt.save(1, {"w": weights}).wait("committed", DEADLINE_S)
    live = {"w": machine.put(torch.zeros(1024, 1024).t())}
    machine.memory.limits[0] = machine.bytes_on()
    with pytest.raises(statehold.errors.DeviceError, match="out of memory"):
        ckpt.restore(live)
    machine.memory.limits.clear()
    ckpt.restore(live)  # all buffers have come back
    assert machine.read(live["w"]).equal(weights)


def test_elements_that_runs_would_cut_are_refused_before_anything_is_read(machine: Machine) -> None:
    arrays = {"one": floats(8, 8)}
    with opened(arrays) as disk:
        disk.save(tensors_of(arrays, {"one": split(1)}), 1)
        saved = disk.saved(0, 1)
        [chunk] = saved.chunks("one", Box.whole((8, 8)))
        moved = chunk._replace(begin=chunk.begin + 2, end=chunk.end + 2)
        strided, plain = machine.put(torch.zeros(8, 8).t()), machine.put(torch.zeros(8, 8))
        plan = ReadPlan(saved)
        plan.place("one", moved, Box.whole((8, 8)), plain, external=True)
        with pytest.raises(statehold.errors.ManifestError) as caught:
            plan.place("one", moved, Box.whole((8, 8)), strided, external=True)
    assert caught.value.facts["tensor"] == "one"


class OneReady:
    """A job that hands out one buffer."""

    ready_left = 0

    def __init__(self, content: bytes, pieces: list[tuple[int, int, int, int]]) -> None:
        self._ready: Any = SimpleNamespace(view=memoryview(bytearray(content)), pieces=pieces)

    def next_readies(self, timeout: float | None, most: int) -> list[Any]:
        ready, self._ready = self._ready, None
        return [] if ready is None else [ready]

    def release_all(self, readies: Any) -> None:
        pass


def test_wide_elements_behind_narrow_ones_are_aligned_in_scratch_memory(machine: Machine) -> None:
    """Steps have the widest dtypes first; other files may not."""
    narrow, wide = torch.arange(5, dtype=torch.int16), torch.arange(6.0, dtype=torch.float64)
    content = bytes(6) + narrow.numpy().tobytes() + wide.numpy().tobytes()
    live = machine.put(torch.zeros(5, 2, dtype=torch.int16)[:, 0])
    grid = machine.put(torch.zeros(3, 2, dtype=torch.float64).t())
    places = {
        1: ChunkPlace.of(live, torch.int16, (5,), Box.whole((5,))),
        2: ChunkPlace.of(grid, torch.float64, (2, 3), Box.whole((2, 3))),
    }
    Devices().load(OneReady(content, [(1, 0, 6, 10), (2, 0, 16, 48)]), places)
    assert machine.read(live).equal(narrow)
    assert machine.read(grid).equal(wide.view(2, 3))


@pytest.mark.parametrize("restores_in_inference", [False, True])
def test_inference_tensors_are_filled(
    ckpt: statehold.Checkpointer, machine: Machine, restores_in_inference: bool
) -> None:
    state = {"strided": torch.randn(3000, 200), "plain": torch.randn(1 << 17), "v": torch.randn(9)}
    ckpt.save(1, state).wait("committed", DEADLINE_S)
    with torch.inference_mode():
        live = {name: machine.put(torch.zeros_like(value)) for name, value in state.items()}
        live["strided"] = machine.put(torch.zeros(200, 3000)).t()
    assert all(value.is_inference() for value in live.values())
    with torch.inference_mode(restores_in_inference):
        ckpt.restore(live)
    assert all(machine.read(live[name]).equal(value) for name, value in state.items())
