"""Memory nodes: which one a device is on, and that pages go there."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import statehold
from devices.conftest import trained_on
from statehold.tensors.devices import cuda, numa
from support.cuda import Machine
from support.faults import DEADLINE_S

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two nodes, and a device on the second one."""
    for node in (0, 1):
        (tmp_path / f"devices/system/node/node{node}").mkdir(parents=True)
    place = tmp_path / "bus/pci/devices/0000:0a:00.0"
    place.mkdir(parents=True)
    (place / "numa_node").write_text("1\n")
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=10, pci_device_id=0)
    fake = SimpleNamespace(get_device_properties=lambda _: properties)
    monkeypatch.setattr(numa, "cuda", fake)
    monkeypatch.setattr(numa, "SYSFS", tmp_path)
    return place


def test_the_node_of_a_device(sysfs: Path) -> None:
    assert numa.node_of(DEVICE) == 1


@pytest.mark.parametrize("content", ["-1\n", "", "none\n"])
def test_a_node_that_is_not_known(sysfs: Path, content: str) -> None:
    (sysfs / "numa_node").write_text(content)
    assert numa.node_of(DEVICE) is None


def test_one_node_needs_no_choice(sysfs: Path) -> None:
    (numa.SYSFS / "devices/system/node/node1").rmdir()
    assert numa.node_of(DEVICE) is None


def test_pages_that_are_there_stay_readable() -> None:
    """On this machine, to its first node, as far as the kernel lets us."""
    with mmap.mmap(-1, 1 << 20) as memory:
        memory[:] = bytes(range(256)) * 4096
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if not numa.bring(address, 1 << 20, 0):
            pytest.skip("the kernel does not let this process choose a memory node")
        assert memory[:] == bytes(range(256)) * 4096


def test_a_node_that_is_not_there_is_refused() -> None:
    with mmap.mmap(-1, 1 << 16) as memory:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert not numa.bring(address, 1 << 16, 900)


def test_each_buffer_is_brought_there_before_it_is_pinned(
    ckpt: statehold.Checkpointer, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    brought: list[tuple[int, int, int]] = []

    def bring(address: int, nbytes: int, node: int) -> bool:
        assert address not in machine.pins.ranges
        brought.append((address, nbytes, node))
        return True

    monkeypatch.setattr(cuda.numa, "node_of", lambda _: 1)
    monkeypatch.setattr(cuda.numa, "bring", bring)
    training = trained_on(machine, width=1024)
    for step in (1, 2):
        ckpt.save(step, training.state).wait("committed", DEADLINE_S)
    assert {(a, n) for a, n, _ in brought} == set(machine.pins.ranges.items())
    assert [node for *_, node in brought] == [1, 1]
