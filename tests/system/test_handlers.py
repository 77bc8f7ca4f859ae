"""A signal's handler calls statehold: the call works, or raises UsageError. It never hangs.

The signal comes where a call of statehold calls a Python function, or returns from it.
"""

from __future__ import annotations

import signal
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

import statehold
from statehold import offload
from statehold.errors import StateholdError, UsageError
from statehold.process.reentry import enter
from support.faults import SMALL, must
from support.victims import Victims

OFFLOADED = "of an offloaded optimizer"
FEW = 2  # a call, and its return; a function that is called for each value is the same place


@contextmanager
def interrupted(handle: Callable[[], str], *, only_inside: bool = False) -> Any:
    """Has a signal come at each call of a function. Gives what the handler has said, counted.

    only_inside: from when the outer call of statehold has noted itself, until it returns, and FEW
    times in each function.
    """
    said: Counter[str] = Counter()
    seen: Counter[CodeType] = Counter()
    outer: list[FrameType] = []

    def watch(frame: FrameType, event: str, _value: object) -> None:
        if event not in ("call", "return"):
            return
        seen[frame.f_code] += bool(outer)
        if not only_inside or (outer and seen[frame.f_code] <= FEW):
            signal.raise_signal(signal.SIGUSR2)
        if frame in outer:
            outer.clear()
        elif frame.f_code is enter.__code__ and event == "return" and not outer:
            outer.append(frame.f_back)  # type: ignore[arg-type]

    before = signal.signal(signal.SIGUSR2, lambda *_: said.update([handle()]))
    sys.setprofile(watch)
    try:
        yield said
    finally:
        sys.setprofile(None)
        signal.signal(signal.SIGUSR2, before)


class Trained:
    """A run that has saved, with all that a handler might call."""

    def __init__(self, folder: Path) -> None:
        self.parameter = torch.nn.Parameter(torch.zeros(5000))
        (folder / "tier").mkdir()
        self.sgd = torch.optim.SGD([self.parameter], lr=1.0)
        self.offloaded = offload.AdamW(
            [torch.nn.Parameter(torch.zeros(5000))],
            tiers=[offload.Path(folder / "tier")], subgroup_bytes="48KiB",
        )  # fmt: skip
        self.state = {"w": self.parameter, "o": self.offloaded, "n": {"n": 1}}
        self.ckpt = statehold.Checkpointer(folder / "run", keep=3, **SMALL)
        for step in (1, 2):
            self.train()
            self.last = self.ckpt.save(step, self.state)
        self.last.wait("committed")

    def train(self) -> None:
        for group in (*self.sgd.param_groups, *self.offloaded.param_groups):
            for each in group["params"]:
                each.grad = torch.ones_like(each)
        self.sgd.step()
        self.offloaded.step()

    def close(self) -> None:
        self.ckpt.close()
        self.offloaded.close()

    def calls(self) -> dict[str, Callable[[], object]]:
        ckpt = self.ckpt
        return {
            "save()": lambda: ckpt.save(3, self.state),
            "restore()": lambda: ckpt.restore(self.state),
            "steps()": ckpt.steps,
            "rewind()": lambda: ckpt.rewind(2),
            "levels()": ckpt.levels,
            "flush()": ckpt.flush,
            "backend": lambda: ckpt.backend,
            "gate()": ckpt.gate,
            "leave_on()": lambda: ckpt.leave_on(within_s=100),
            "close()": ckpt.close,
            "wait()": lambda: self.last.wait("committed"),
            f"step() {OFFLOADED}": self.offloaded.step,
        }


@pytest.fixture
def trained(tmp_path: Path) -> Any:
    found = Trained(tmp_path)
    yield found
    found.close()


OUTER = [
    "save()", "restore()", "steps()", "rewind()", "levels()", "flush()", "gate()", "leave_on()",
    "close()", f"step() {OFFLOADED}",
]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("outer", OUTER)
def test_a_call_inside_another_is_refused_at_every_point(trained: Trained, outer: str) -> None:
    calls = trained.calls()

    def handle() -> str:
        for call in calls.values():
            with pytest.raises(UsageError, match="by a signal's handler"):
                call()
        return "refused"

    with interrupted(handle, only_inside=True) as said:
        calls[outer]()
    assert said["refused"] > 1
    if outer == "close()":
        return
    trained.train()
    trained.ckpt.save(4, trained.state).wait("committed")
    live = {"w": torch.nn.Parameter(torch.ones(5000)), "n": {"n": 0}}
    got = trained.ckpt.restore(live, strict=False)
    assert (got, live["n"]) == (4, {"n": 1})
    assert torch.equal(live["w"], trained.parameter)


def test_a_handler_may_save_while_a_save_is_waited_for(trained: Trained) -> None:
    steps = iter(range(10, 1000))

    def handle() -> str:
        step = next(steps)
        return f"{trained.ckpt.save(step, trained.state).wait('committed').step}"

    last = trained.ckpt.save(3, trained.state)
    with interrupted(handle) as said:
        last.wait("committed")
    assert len(said) > 3
    assert trained.ckpt.steps()[-1] == max(map(int, said))


class Leaves(Exception):
    pass


def test_a_handler_that_raises_leaves_nothing_behind(trained: Trained) -> None:
    """Whatever the handler's error interrupts, the next call is no call inside another."""
    for number in range(3, 200, 17):
        points = iter(range(number))

        def handle(points: Any = points) -> str:
            if next(points, None) is None:
                raise Leaves
            return "goes on"

        with suppress(Leaves, StateholdError), interrupted(handle):
            trained.ckpt.save(number, trained.state)
    errors = []
    for number in (1000, 1001):
        try:
            trained.ckpt.save(number, trained.state).wait("committed")
        except StateholdError as error:  # of an interrupted save
            errors.append(str(error))
    assert trained.ckpt.steps()[-1] == 1001
    assert not any("by the same thread" in each for each in errors)


def asked_everywhere(folder: Path) -> None:
    trained = Trained(folder)
    trained.ckpt.leave_on(within_s=1000)

    def handle() -> str:
        trained.ckpt.leave()
        return "asked"

    with interrupted(handle) as said:
        trained.ckpt.leave()
        trained.ckpt.steps()
    must(said["asked"] > 10 and trained.ckpt.is_leaving)


def test_a_job_may_be_asked_to_leave_at_every_point(victims: Victims, tmp_path: Path) -> None:
    """leave() is what a handler should call, so it works inside all calls, and inside itself."""
    victims.run(asked_everywhere, tmp_path)
