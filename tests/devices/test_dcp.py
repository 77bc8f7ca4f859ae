"""dcp.load to devices: the path of a restore, with one engine for all of a load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from statehold import Io, _core
from statehold.errors import UsageError
from statehold.integrations.dcp import StorageReader, StorageWriter
from statehold.tensors import destinations
from support.cuda import Machine
from support.laid_out import MIB

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:The argument 'device' of Tensor.is_pinned"),
]

DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn]


def values() -> dict[str, torch.Tensor]:
    wide = torch.arange(512 * 1024, dtype=torch.float32).view(512, 1024)  # 2 MiB
    many = {f"small.{index}": torch.randn(7).to(dtype) for index, dtype in enumerate(DTYPES)}
    return {"wide": wide, "twisted": wide.sin(), "scalar": torch.tensor(2.5), **many}


def places(machine: Machine, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Zeros on the device, with the dims of `twisted` in another order."""
    zeros = {name: torch.zeros_like(value) for name, value in state.items()}
    zeros["twisted"] = torch.zeros(1024, 512).t()
    return {name: machine.put(value) for name, value in zeros.items()}


def saved(tmp_path: Path, state: dict[str, torch.Tensor]) -> str:
    path = f"{tmp_path}/step-1"
    dcp.save(state, checkpoint_id=path, storage_writer=StorageWriter(), no_dist=True)
    return path


def load(state: dict[str, Any], path: str) -> None:
    reader = StorageReader(staging_bytes="4MiB", io=Io(buffer_bytes="1MiB"))
    dcp.load(state, checkpoint_id=path, storage_reader=reader, no_dist=True)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The engines that are opened."""
    opened: list[object] = []
    make = _core.Engine

    def engine(*args: Any, **kwargs: Any) -> Any:
        opened.append(args)
        return make(*args, **kwargs)

    monkeypatch.setattr(_core, "Engine", engine)
    return opened


def test_a_load_to_a_device_is_pinned_and_needs_one_buffer(
    tmp_path: Path, machine: Machine, engines: list[object]
) -> None:
    state = values()
    path = saved(tmp_path, state)
    live = places(machine, state)
    engines.clear()
    machine.reset_peak()
    before = machine.bytes_on()
    load(live, path)
    assert machine.peak_on() - before <= MIB
    assert machine.pins.most >= MIB, "copies from memory that is not pinned wait for the device"
    assert not machine.pins.ranges
    assert len(engines) == 1
    assert live["twisted"].stride() == (1, 512)
    for name, value in state.items():
        got, expected = (
            each.flatten().view(torch.uint8) for each in (machine.read(live[name]), value)
        )
        assert got.equal(expected), name


@pytest.mark.parametrize("what", ["load", "save"])
def test_nothing_is_done_during_a_capture(tmp_path: Path, machine: Machine, what: str) -> None:
    state = values()
    path = saved(tmp_path, state)
    live = places(machine, state)
    with (
        pytest.raises(dcp.CheckpointException) as caught,
        machine.cuda.graph(machine.cuda.CUDAGraph()),
    ):
        load(live, path) if what == "load" else saved(tmp_path / "other", live)
    assert isinstance(caught.value.failures[0][0], UsageError)
    load(live, path)
    assert machine.read(live["wide"]).equal(state["wide"])


def test_other_dtypes_are_converted_on_the_device(tmp_path: Path, machine: Machine) -> None:
    state = {"w": torch.randn(300, 300), "ints": torch.arange(100)}
    path = saved(tmp_path, state)
    live = {
        "w": machine.put(torch.zeros(300, 300, dtype=torch.bfloat16)),
        "ints": machine.put(torch.zeros(100, dtype=torch.float64)),
    }
    load(live, path)
    assert machine.read(live["w"]).equal(state["w"].bfloat16())
    assert machine.read(live["ints"]).equal(state["ints"].double())


def test_device_and_host_tensors_in_one_load(
    tmp_path: Path, machine: Machine, engines: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"w{index}": torch.randn(1 << 17) for index in range(6)}
    path = saved(tmp_path, state)
    live = {name: torch.zeros(1 << 17) for name in state}
    for name in ("w0", "w3"):
        live[name] = machine.put(live[name])
    for name in ("w1", "w4"):
        live[name] = live[name].double()
    engines.clear()
    monkeypatch.setattr(destinations, "BLOCK_BYTES", MIB // 4)  # two for each of another dtype
    load(live, path)
    assert len(engines) == 1
    for name, value in state.items():
        got = machine.read(live[name]) if machine.is_on_device(live[name]) else live[name]
        assert got.equal(value.to(got.dtype)), name


def test_a_state_goes_from_device_to_device(tmp_path: Path, machine: Machine) -> None:
    state = values()
    source = {name: machine.put(value) for name, value in state.items()}
    source["wide"].add_(1)  # late, as is all that a device is given
    live = places(machine, state)
    load(live, saved(tmp_path, source))
    assert machine.read(live["wide"]).equal(state["wide"] + 1)
    assert machine.read(live["twisted"]).equal(state["twisted"])
    assert not machine.pins.ranges
