"""A Checkpointer that is rebound or dropped without close(): nothing is lost, the run is free."""

from __future__ import annotations

import gc
import logging
import os
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from soak.usage import Usage, settled
from statehold import Checkpointer
from statehold.checkpoint import keeper
from statehold.checkpoint.keeper import wait_for_dropped
from statehold.errors import ClosedError, RunBusyError, StateholdError
from support import scripts
from support.faults import DEADLINE_S, SMALL, Holdup, ctrl_c_in_join, must


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """What happens does not wait for the cyclic collector."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def aside() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def state(value: float = 1.0) -> dict[str, Any]:
    return {"w": torch.full((1 << 20,), value)}


def check_free(run: Path, newest: int) -> None:
    """Another Checkpointer finds what was saved, and may save."""
    with Checkpointer(run, **SMALL) as ckpt:
        live = state(0.0)
        assert ckpt.restore(live) == newest
        assert torch.equal(live["w"], state(float(newest))["w"])
        ckpt.save(newest + 1, state(newest + 1)).wait("committed", DEADLINE_S)


def test_a_save_is_committed_though_its_checkpointer_is_gone(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "statehold"):
        save = Checkpointer(run, **SMALL).save(1, state())
        waited = save.wait("committed", DEADLINE_S)
        assert waited is save
        wait_for_dropped(str(run))
    told = [each for each in caplog.records if "dropped without close()" in each.getMessage()]
    assert [each.levelname for each in told] == ["INFO"]
    assert not [each for each in caplog.records if each.levelno > logging.INFO]
    check_free(run, 1)


def test_the_next_one_waits_for_what_is_still_being_saved(
    run: Path, aside: ThreadPoolExecutor
) -> None:
    model = torch.nn.Linear(1200, 1200)  # more than the staging memory, and copied later
    ckpt = Checkpointer(run, **SMALL)
    holdup = Holdup(ckpt)
    save = ckpt.save(1, {"model": model})
    must(holdup.waiting.wait(DEADLINE_S))
    ckpt = Checkpointer(run, **SMALL)
    live = {"model": torch.nn.Linear(1200, 1200)}
    restored: Future[int | None] = aside.submit(ckpt.restore, live)
    assert not save.done("committed")
    holdup.release()
    must(restored.result(DEADLINE_S) == 1)
    ckpt.save(2, state(2.0)).wait("committed", DEADLINE_S)
    ckpt.close()
    assert save.done("committed")


def test_updates_still_wait_until_the_save_is_staged(run: Path, aside: ThreadPoolExecutor) -> None:
    big = torch.nn.Linear(1200, 1200)  # more than the staging memory
    optimizer = torch.optim.SGD(big.parameters(), lr=1.0)
    big.weight.grad, big.bias.grad = torch.ones(1200, 1200), torch.ones(1200)
    expected = big.weight.detach().clone()
    ckpt = Checkpointer(run, **SMALL)
    holdup = Holdup(ckpt)
    save = ckpt.save(1, {"big": big})
    must(holdup.waiting.wait(DEADLINE_S))
    del ckpt
    begun = threading.Event()

    def update() -> None:
        begun.set()
        optimizer.step()

    updated = aside.submit(update)
    must(begun.wait(DEADLINE_S))
    assert not save.done("staged")
    assert torch.equal(big.weight.detach(), expected)
    holdup.release()
    updated.result(DEADLINE_S)
    assert save.done("staged")
    save.wait("committed", DEADLINE_S)
    wait_for_dropped(str(run))
    live = torch.nn.Linear(1200, 1200)
    with Checkpointer(run, **SMALL) as after:
        assert after.restore({"big": live}) == 1
    assert torch.equal(live.weight.detach(), expected)


def test_one_in_a_reference_cycle_makes_way(run: Path) -> None:
    circle: list[Any] = [Checkpointer(run, **SMALL)]
    circle.append(circle)
    circle[0].save(1, state())
    del circle
    ckpt = Checkpointer(run, **SMALL)
    ckpt.save(2, state(2.0)).wait("committed", DEADLINE_S)
    assert ckpt.steps() == [1, 2]
    ckpt.close()


def trained(run: Path, refs: list[Any]) -> None:
    ckpt = Checkpointer(run, **SMALL)
    refs.append(weakref.ref(ckpt))
    ckpt.save(1, state())
    ckpt.save(2, {"f": len})


def test_one_that_only_the_traceback_of_an_old_error_holds_makes_way(run: Path) -> None:
    refs: list[Any] = []
    with pytest.raises(StateholdError) as kept:
        trained(run, refs)
    with Checkpointer(run, **SMALL) as ckpt:
        ckpt.save(2, state(2.0)).wait("committed", DEADLINE_S)
        assert ckpt.steps() == [1, 2]
        before = refs[0]()
        assert before is not None
        with pytest.raises(ClosedError, match="took the run over"):
            before.save(3, state())
        before.close()
        ckpt.save(3, state(3.0)).wait("committed", DEADLINE_S)
    assert kept.value.__traceback__ is not None


def test_one_that_is_in_use_keeps_the_run(run: Path) -> None:
    ckpt = Checkpointer(run, **SMALL)
    ckpt.save(1, state()).wait("committed", DEADLINE_S)
    with Checkpointer(run, **SMALL) as other, pytest.raises(RunBusyError, match="already saving"):
        other.save(2, state())
    ckpt.save(2, state(2.0)).wait("committed", DEADLINE_S)
    ckpt.close()
    check_free(run, 2)


def test_one_in_a_with_statement_keeps_the_run(run: Path) -> None:
    with Checkpointer(run, **SMALL) as first:
        first.save(1, state()).wait("committed", DEADLINE_S)
        del first
        with Checkpointer(run, **SMALL) as other, pytest.raises(RunBusyError):
            other.save(2, state())
    check_free(run, 1)


def test_threads_and_memory_are_given_back(run: Path) -> None:
    Checkpointer(run, **SMALL).save(1, state()).wait("committed", DEADLINE_S)
    wait_for_dropped(str(run))
    before, threads = Usage.now(), threading.active_count()
    for step in range(2, 12):
        Checkpointer(run, keep=2, **SMALL).save(step, state(step)).wait("committed", DEADLINE_S)
    wait_for_dropped(str(run))
    gc.collect()
    assert not settled(before).growth_since(before)
    assert threading.active_count() == threads
    assert keeper.keepers == []


def test_hooks_of_dropped_ones_do_not_pile_up(run: Path) -> None:
    from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks

    with Checkpointer(run, **SMALL):
        before = set(hooks)
    for step in range(1, 4):
        Checkpointer(run, **SMALL).save(step, state(step)).wait("committed", DEADLINE_S)
        wait_for_dropped(str(run))
        assert set(hooks) == before
    with Checkpointer(run, **SMALL):
        pass
    assert set(hooks) == before


def test_a_fork_drops_it_and_changes_nothing(run: Path) -> None:
    ckpt = Checkpointer(run, **SMALL)
    ckpt.save(1, state()).wait("committed", DEADLINE_S)
    pid = os.fork()
    if pid == 0:
        del ckpt
        gc.collect()
        os._exit(len(keeper.keepers))
    _, status = os.waitpid(pid, 0)
    assert status == 0
    ckpt.save(2, state(2.0)).wait("committed", DEADLINE_S)
    ckpt.close()
    check_free(run, 2)


SCRIPT = """
import sys, torch, statehold
def train():
    ckpt = statehold.Checkpointer(sys.argv[1], staging_bytes="2MiB",
    io=statehold.Io(buffer_bytes="1MiB"))
    for step in (1, 2):
        ckpt.save(step, {"w": torch.full((1 << 20,), float(step))})
train()
"""


def test_a_script_that_ends_after_it_was_dropped_still_commits(run: Path) -> None:
    result = scripts.run(["-c", SCRIPT, run])
    assert (result.returncode, result.stderr) == (0, "")
    check_free(run, 2)


def test_ctrl_c_in_close_gives_everything_back(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ckpt = Checkpointer(run, **SMALL)
    save = ckpt.save(1, state())
    fired = ctrl_c_in_join(monkeypatch, "statehold-keeper")
    with pytest.raises(KeyboardInterrupt):
        ckpt.close()
    assert len(fired) == 2
    assert save.done("committed")
    check_free(run, 1)


def test_what_was_opened_is_closed_where_the_rest_cannot_be(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, threads = Usage.now(), threading.active_count()

    def refuse(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("statehold.checkpoint.opening.Pipeline", refuse)
    ckpt = statehold.Checkpointer(run, **SMALL)
    with pytest.raises(KeyboardInterrupt) as kept:
        ckpt.steps()
    assert threading.active_count() == threads
    assert not settled(before).growth_since(before)
    assert kept.value is not None


ENDS = """
import atexit, sys, threading, torch, statehold
def save(ckpt):
    try:
        ckpt.save(2, {"w": torch.ones(8)})
    except statehold.errors.ClosedError as error:
        print(error.summary, flush=True)
ckpt = statehold.Checkpointer(sys.argv[1])
if "new" in sys.argv:
    ckpt = None
    atexit.register(lambda: save(statehold.Checkpointer(sys.argv[1])))
elif "late" in sys.argv:
    ckpt.save(1, {"w": torch.ones(8)})
    atexit.register(save, ckpt)
elif "thread" in sys.argv:
    ckpt.save(1, {"w": torch.ones(8)})
    def train():
        threading.main_thread().join()
        save(ckpt)
    threading.Thread(target=train).start()
"""


@pytest.mark.parametrize("who", ["new", "late", "thread"])
def test_who_saves_when_the_program_has_ended_is_told_so(run: Path, who: str) -> None:
    result = scripts.run(["-c", ENDS, run, who])
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "the program ends: its main thread has ended\n"
