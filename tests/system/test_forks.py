"""A fork in the middle of a save: the parent commits, the child changes nothing and never hangs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import statehold
from statehold import errors
from support.contents import FITS, THREADS, check_restored, committed, content
from support.faults import DEADLINE_S, must
from support.faulty import HOLD, fault
from support.victims import Victims

ENDED_WELL = 7


def tree(run: Path) -> dict[str, int]:
    """What is in the run, and how large it is."""
    return {str(path): path.stat().st_size for path in sorted(run.rglob("*"))}


def use_everything(
    run: Path, ckpt: statehold.Checkpointer, save: statehold.Save, optimizer
) -> None:
    """A fork that uses what its parent has opened gets an error, and waits for nothing."""
    attempts: list[Callable[[], object]] = [
        lambda: ckpt.save(9, content(9)),
        lambda: ckpt.restore(content(0)),
        ckpt.steps,
        lambda: ckpt.rewind(0),
        lambda: save.wait("committed"),
    ]
    for attempt in attempts:
        with pytest.raises(errors.ClosedError, match="process that was forked") as caught:
            attempt()
        assert caught.value.facts["begun by"] == f"process {os.getppid()}"
    optimizer.step()
    ckpt.gate()
    ckpt.close()
    ckpt.close()
    with pytest.raises(errors.RunBusyError) as caught_busy:
        statehold.Checkpointer(run, **THREADS).save(9, content(9))
    assert f"process {os.getppid()} on" in caught_busy.value.facts["held by"]


def fork(body: Callable[[], None], end: str) -> int:
    pid = os.fork()
    if pid == 0:
        body()
        if end == "exit":
            raise SystemExit(ENDED_WELL)
        os._exit(ENDED_WELL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def forked_while_saving(folder: Path, function: str, end: str, where: str) -> None:
    run = folder / "run"
    weight = torch.nn.Parameter(torch.zeros(FITS))
    weight.grad = torch.ones(FITS)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    statuses = []
    with statehold.Checkpointer(run, keep=2, **THREADS) as ckpt:
        committed(ckpt, 1)
        with fault(function, run, HOLD, nth=1) as held:
            save = ckpt.save(2, {**content(2, FITS), "weight": weight})
            held.wait_fired()
            before = tree(run)

            def child() -> None:
                statuses.append(fork(lambda: use_everything(run, ckpt, save, optimizer), end))

            if where == "thread":
                thread = threading.Thread(target=child)
                thread.start()
                thread.join(DEADLINE_S)
            else:
                child()
            after = tree(run)
            held.release()
        save.wait("committed", DEADLINE_S)
        live = {**content(0, FITS), "weight": torch.ones(FITS)}
        got = ckpt.restore(live)
        assert got == 2
        assert torch.equal(live["w"], content(2, FITS)["w"])
        assert torch.equal(live["weight"], weight)
        committed(ckpt, 3)
    assert statuses == [ENDED_WELL]
    assert after == before
    with statehold.Checkpointer(run, **THREADS) as ckpt:
        assert ckpt.steps() == [2, 3]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("where", "end"), [("main", "_exit"), ("main", "exit"), ("thread", "_exit")]
)
@pytest.mark.parametrize("function", ["pwrite", "rename"])
def test_a_fork_while_a_call_hangs(
    victims: Victims, tmp_path: Path, function: str, where: str, end: str
) -> None:
    victims.run(forked_while_saving, tmp_path, function, end, where)


def forked_before_the_first_use(folder: Path) -> None:
    ckpt = statehold.Checkpointer(folder / "run", **THREADS)
    assert fork(lambda: committed(ckpt, 1) and ckpt.close(), "_exit") == ENDED_WELL
    check_restored(ckpt, 1)
    committed(ckpt, 2)
    check_restored(ckpt, 2)


@pytest.mark.thorough
def test_what_was_not_used_before_the_fork_is_the_childs_own(
    victims: Victims, tmp_path: Path
) -> None:
    victims.run(forked_before_the_first_use, tmp_path)


def forked_after_a_failure(folder: Path) -> None:
    """The lock of a parent that has given it up can be had by the fork."""
    ckpt = statehold.Checkpointer(folder / "run", **THREADS)
    committed(ckpt, 1)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        must(os.read(read, 1) == b"!")
        with statehold.Checkpointer(folder / "run", **THREADS) as own:
            committed(own, 2)
        os._exit(ENDED_WELL)
    ckpt.close()
    os.write(write, b"!")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == ENDED_WELL
    with statehold.Checkpointer(folder / "run", **THREADS) as ckpt:
        check_restored(ckpt, 2)


def test_a_fork_can_take_the_run_over(victims: Victims, tmp_path: Path) -> None:
    victims.run(forked_after_a_failure, tmp_path)
