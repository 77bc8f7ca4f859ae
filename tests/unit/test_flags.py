"""A flag is usable after Ctrl-C anywhere in wait() and set(), and whoever waits for it goes on."""

from __future__ import annotations

import queue
import threading

import pytest

from statehold.process.worker import Flag
from support.faults import DEADLINE_S
from support.interrupts import ends, interrupt_everywhere


def sets_and_waits(flag: Flag) -> None:
    flag.set()
    assert flag.wait(DEADLINE_S)
    assert flag.is_set


def test_ctrl_c_in_wait_leaves_a_flag_that_can_be_set() -> None:
    places = interrupt_everywhere([Flag.wait], Flag, lambda flag: flag.wait(0.001), sets_and_waits)
    assert places == {"wait"}


def test_ctrl_c_in_a_wait_that_sees_it_set_takes_it_from_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class SetWhileSomebodyWaits(queue.SimpleQueue[None]):
        def get(self, block: bool = True, timeout: float | None = None) -> None:
            assert ends(flags[-1].set)
            super().get(block, timeout)

    flags: list[Flag] = []

    def make() -> Flag:
        with monkeypatch.context() as patched:
            patched.setattr(queue, "SimpleQueue", SetWhileSomebodyWaits)
            flags.append(Flag())
        return flags[-1]

    def waits(flag: Flag) -> None:
        flag.set()
        flag.wait()

    assert "wait" in interrupt_everywhere([Flag.wait], make, Flag.wait, waits)
    assert any(flag.is_set for flag in flags)


def test_ctrl_c_in_set_leaves_a_flag_that_can_be_set() -> None:
    assert interrupt_everywhere([Flag.set], Flag, Flag.set, sets_and_waits) == {"set"}


def test_all_who_wait_go_on() -> None:
    flag = Flag()
    threads = [threading.Thread(target=flag.wait, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    flag.set()
    assert all(ends(thread.join) for thread in threads)


def test_a_wait_ends_after_its_time() -> None:
    flag = Flag()
    assert not flag.wait(0)
    assert not flag.wait(-1)
    assert not flag.wait(0.001)
    flag.set()
    assert flag.wait(-1)
