"""on_commit=: called after each commit, in order; whatever callbacks do, saves go on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import statehold
from statehold import Checkpointer, Save
from statehold.checkpoint.save import handle
from statehold.errors import StateholdError, UsageError
from statehold.observe.background_log import BackgroundLog
from support.faults import DEADLINE_S, SMALL, must, spy_on
from support.in_memory import SimFs
from support.interrupts import interrupt_everywhere
from support.levels import settle
from support.ranks import Ranks


class Stuck:
    """A callback that does not return before it is let go."""

    def __init__(self) -> None:
        self.here, self.go_on = threading.Event(), threading.Event()
        self.called: list[int] = []

    def __call__(self, save: Save) -> None:
        self.called.append(save.step)
        self.here.set()
        self.go_on.wait(DEADLINE_S)


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    found = Stuck()
    yield found
    found.go_on.set()


def test_callbacks_are_called_in_order_with_what_is_committed(run: Path) -> None:
    seen: list[tuple[str, int, bool, bool]] = []

    def note(name: str, save: Save) -> None:
        is_there = (run / f"step-{save.step:012d}").is_dir()
        seen.append((name, save.step, save.done("committed"), is_there))

    both = [lambda save: note("a", save), lambda save: note("b", save)]
    with Checkpointer(run, on_commit=both, **SMALL) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, {"x": step})
    assert seen == [(name, step, True, True) for step in (1, 2, 3) for name in "ab"]


def written() -> None:
    """Wait for the thread that writes the lines of the log (background_log)."""
    for thread in threading.enumerate():
        if thread.name == "statehold-log":
            thread.join(DEADLINE_S)


def test_what_a_callback_raises_is_logged_and_the_others_are_called(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    called: list[int] = []

    def fail(save: Save) -> None:
        raise SystemExit("enough") if save.step == 1 else ValueError("no")

    with Checkpointer(run, on_commit=[fail, lambda s: called.append(s.step)], **SMALL) as ckpt:
        ckpt.save(1, {"x": 1})
        ckpt.save(2, {"x": 2}).wait("committed", DEADLINE_S)
    assert called == [1, 2]
    written()
    errors = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    assert [text.split(";")[0] for text in errors] == [
        f"step {step} is committed and safe" for step in (1, 2)
    ]
    assert "SystemExit: enough" in errors[0]
    assert "ValueError: no" in errors[1]


def test_no_save_waits_for_a_callback_that_hangs(
    run: Path,
    stuck: Stuck,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(handle, "QUEUED_MAX", 3)
    monkeypatch.setattr(handle.Callbacks.close, "__defaults__", (0.0,))
    with Checkpointer(run, on_commit=stuck, keep=2, **SMALL) as ckpt:
        ckpt.save(1, {"x": 1})
        must(stuck.here.wait(DEADLINE_S))
        for step in range(2, 8):  # three of them wait, and three are left out
            ckpt.save(step, {"x": step}).wait("committed", DEADLINE_S)
        settle(ckpt)
        assert ckpt.steps() == [6, 7]
    written()
    texts = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert [f"step {step} is committed" in texts[step - 5] for step in (5, 6, 7)] == [True] * 3
    assert texts[-1].endswith("since step 1 was committed; the Checkpointer closes without it")
    with Checkpointer(run, **SMALL) as ckpt:  # the run is free
        ckpt.save(8, {"x": 8}).wait("committed", DEADLINE_S)
    assert stuck.called == [1]


def test_a_save_that_fails_or_is_not_due_calls_nobody(run: Path) -> None:
    called: list[int] = []

    def refuse(operation: str, args: tuple[Any, ...]) -> None:
        if operation == "open_write" and "000000000001" in args[0]:
            raise StateholdError("no")

    levels = [statehold.Directory(every=10)]
    callback = lambda save: called.append(save.step)  # noqa: E731
    ckpt = Checkpointer(run, levels=levels, on_commit=callback, **SMALL)
    spy_on(ckpt, refuse)
    with pytest.raises(StateholdError, match="no"):
        ckpt.save(1, {"x": 1}).wait("committed", DEADLINE_S)
    ckpt.save(2, {"x": 2}, force=True).wait("committed", DEADLINE_S)
    assert ckpt.save(3, {"x": 3}).is_skipped
    ckpt.close()
    assert called == [2]


def test_each_rank_calls_its_own() -> None:
    called: list[tuple[int, str]] = []

    def note(save: Save) -> None:
        called.append((save.step, threading.current_thread().name))

    with Ranks(SimFs(seed=1), 2, on_commit=note) as ranks:
        ranks.save(1, lambda rank: {"rank": rank})
    assert called == [(1, "statehold-callbacks")] * 2


def test_without_callbacks_there_is_no_thread(run: Path) -> None:
    with Checkpointer(run, **SMALL) as ckpt:
        ckpt.save(1, {"x": 1})
        assert "statehold-callbacks" not in {each.name for each in threading.enumerate()}


@pytest.mark.parametrize("bad", [1, "print", [print, 1]])
def test_what_cannot_be_called_is_refused(run: Path, bad: Any) -> None:
    with pytest.raises(UsageError, match="on_commit must be a function"):
        Checkpointer(run, on_commit=bad)


def test_ctrl_c_while_the_checkpointer_waits_for_callbacks_hangs_no_commit() -> None:
    log, save = BackgroundLog(), SimpleNamespace(step=1)
    places = interrupt_everywhere(
        [handle.Callbacks.close],
        lambda: handle.Callbacks([lambda _: None], log),
        handle.Callbacks.close,
        lambda callbacks: (callbacks.committed(save), callbacks.close()),
    )
    assert "close" in places
