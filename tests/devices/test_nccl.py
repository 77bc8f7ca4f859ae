"""Groups that sum over NCCL, with a stand-in for torch's class, on an emulated device."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from statehold.process.worker import Flag
from statehold.resilience.groups import GroupLostError, Groups
from statehold.resilience.meeting import Desk, MeetingPlace
from support.cuda import Machine
from support.faults import DEADLINE_S, must

HOST = "127.0.0.1"
DEVICE = torch.device("cuda", 0)
HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
SETTINGS = (HANDLING, "TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_DESYNC_DEBUG")


class Nccl:
    """In the place of ProcessGroupNCCL. connects, ends: what every sum waits for."""

    def __init__(self) -> None:
        self.seen: list[dict[str, str | None]] = []
        self.connecting, self.aborted = threading.Event(), threading.Event()
        self.connects, self.ends = threading.Event(), threading.Event()
        self.connects.set(), self.ends.set()
        self.callers: list[str] = []

    def Options(self) -> Any:
        return SimpleNamespace(config=SimpleNamespace())

    def __call__(self, store: object, *_: object) -> Any:
        self.seen.append({name: os.environ.get(name) for name in SETTINGS})
        return SimpleNamespace(
            store=store,
            eager_connect_single_device=lambda _: None,
            allreduce=self.allreduce,
            abort=self.aborted.set,
        )

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        self.callers.append(threading.current_thread().name)
        self.connecting.set()
        must(self.connects.wait(DEADLINE_S))
        return SimpleNamespace(
            is_completed=self.ends.is_set, exception=lambda: None, wait=lambda: None
        )


@pytest.fixture
def nccl(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nccl]:
    nccl = Nccl()
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    monkeypatch.setenv("TORCH_NCCL_NONBLOCKING_TIMEOUT", "60")
    yield nccl
    nccl.connects.set(), nccl.ends.set()


def on_two(revoked: list[Flag]) -> list[Any]:
    """The groups of two ranks, or why there are none."""
    desk = Desk(HOST)

    def build(rank: int) -> Any:
        try:
            return Groups(
                MeetingPlace(desk.address, 1, (rank, 0), (2, 1), HOST, revoked[rank]), DEVICE
            )
        except GroupLostError as error:
            return error

    try:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(build, range(2)))
    finally:
        desk.close()


def test_errors_are_left_to_poll_whatever_torchrun_has_set(
    nccl: Nccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HANDLING, "1")
    monkeypatch.delenv(SETTINGS[1], raising=False)
    monkeypatch.setenv(SETTINGS[2], "1")
    for each in on_two([Flag(), Flag()]):
        each.drop()
        must(each.join(DEADLINE_S))
    assert nccl.seen == [dict.fromkeys(SETTINGS, "0")] * 2
    assert [os.environ.get(name) for name in SETTINGS] == ["1", None, "1"]


def test_nobody_but_the_thread_of_the_groups_waits_for_a_connection(nccl: Nccl) -> None:
    """It is waited for where the groups are built, and that ends when they are given up."""
    nccl.connects.clear()
    revoked = [Flag(), Flag()]

    def revoke() -> None:
        nccl.connecting.wait(DEADLINE_S)
        for each in revoked:
            each.set()

    revoking = threading.Thread(target=revoke)
    revoking.start()
    found = on_two(revoked)
    revoking.join()
    assert [type(each) for each in found] == [GroupLostError] * 2
    assert set(nccl.callers) == {"statehold-groups"}


def test_a_tensor_is_kept_while_an_aborted_kernel_may_write_into_it(
    nccl: Nccl, machine: Machine
) -> None:
    first, second = on_two([Flag(), Flag()])
    nccl.ends.clear()
    tensor = machine.put(torch.ones(4))
    kept = weakref.ref(tensor)
    pending = first.start(tensor)
    del tensor
    first.drop(), second.drop()
    with pytest.raises(GroupLostError, match="the epoch has ended"):
        pending.wait()
    must(nccl.aborted.wait(DEADLINE_S))
    del pending
    assert not first.join(0.1)
    gc.collect()
    assert kept() is not None
    nccl.ends.set()
    must(first.join(DEADLINE_S))
    must(second.join(DEADLINE_S))
    gc.collect()
    assert kept() is None
