"""Ctrl-C anywhere in a wait for a flag or a thread: both can be waited for again, and the end of a
program ends all that is open."""

from __future__ import annotations

import queue
import threading

import pytest

from statehold.process import ending
from statehold.process.worker import Flag, Thread
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


def test_after_ctrl_c_in_join_a_thread_that_runs_is_waited_for_again() -> None:
    class Waiting(Thread):
        def __init__(self) -> None:
            self.goes_on = Flag()
            super().__init__(self.goes_on.wait, "waiting")
            self.start()

    def ends_once_it_is_told(thread: Waiting) -> None:
        assert thread.is_alive()
        assert not ended_in_time(thread, 0.001)
        thread.goes_on.set()
        assert ended_in_time(thread, DEADLINE_S)

    def ended_in_time(thread: Waiting, timeout: float) -> bool:
        thread.join(timeout)
        return not thread.is_alive()

    waits = [Thread.join, threading.Thread.join, Flag.wait]
    waits += [getattr(threading.Thread, "_wait_for_tstate_lock", threading.Thread.join)]
    assert "wait" in interrupt_everywhere(
        waits, Waiting, lambda thread: thread.join(0.001), ends_once_it_is_told
    )


def test_ctrl_c_in_the_end_of_one_object_ends_the_others_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Open:
        def _end(self) -> None:
            ended.append(self)
            if len(ended) == 2:
                raise KeyboardInterrupt

    ended: list[Open] = []
    several = [Open() for _ in range(3)]
    monkeypatch.setattr(ending, "_open", set(several))
    with pytest.raises(KeyboardInterrupt):
        ending.end_all()
    assert set(ended) == set(several)
