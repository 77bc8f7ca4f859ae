"""Other threads of the program: they train other models, fork, and decide over the collector."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import statehold
from statehold.checkpoint.save.gate import Gate
from statehold.tensors import updates
from statehold.tensors.stepping import Gradients
from support.faults import must

SMALL = {"staging_bytes": "32MiB"}


def stepped(weight: nn.Parameter, kind: type[torch.optim.SGD] = torch.optim.SGD) -> torch.optim.SGD:
    weight.grad = torch.zeros_like(weight)
    return kind([weight], lr=0.1)


def test_a_save_that_comes_while_another_thread_forgets_is_held() -> None:
    """What an update of another thread has waited for is over; what came meanwhile is not."""
    gate = Gate()

    class Over:
        is_of_this_process = True

        def done(self, event: str) -> bool:
            return True

        def has_ended(self, event: str) -> bool:
            if not came:  # asked in the midst of forgetting
                came.append(beside)
                gate.hold_for(beside)
            return True

    beside: Any = type("Beside", (), {"has_ended": lambda self, event: False})()
    over, came = cast("Any", Over()), list[Any]()
    gate.hold_for(over)
    gate.wait()
    assert list(gate.held) == [beside]
    gate.remove()


def test_gradients_are_looked_at_alone() -> None:
    """A thread that looks waits for one that is just noting an optimizer."""
    gradients, lookers, looked = Gradients(), list[threading.Thread](), list[bool]()

    class Noted(torch.optim.SGD):
        def __hash__(self) -> int:  # gradients looks it up, or notes it
            if is_noted:
                lookers.append(threading.Thread(target=gradients.are_waiting))
                lookers[-1].start()
                lookers[-1].join(0.02)
                looked.append(not lookers[-1].is_alive())
            return id(self)

    is_noted = False
    optimizer = stepped(nn.Parameter(torch.ones(2)), Noted)
    is_noted = True
    gradients.saw(optimizer)
    is_noted = False
    assert looked == [False, False]
    for each in lookers:
        each.join(60)
    assert not gradients.are_waiting()
    optimizer.zero_grad()
    optimizer.param_groups[0]["params"][0].grad = torch.zeros(2)
    assert gradients.are_waiting()


def test_close_while_another_thread_goes_through_the_hooks(tmp_path: Any) -> None:
    weight = nn.Parameter(torch.ones(2))
    other = stepped(weight)
    inside, closed = threading.Event(), threading.Event()

    def block(*_: Any) -> None:
        inside.set()
        must(closed.wait(60))

    errors: list[BaseException] = []

    def step() -> None:
        try:
            other.step()
        except BaseException as error:
            errors.append(error)

    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        ckpt.save(1, {"w": weight}).wait("committed", 60)
        hook = register_optimizer_step_pre_hook(block)
        thread = threading.Thread(target=step)
        thread.start()
        must(inside.wait(60))
    closed.set()
    thread.join(60)
    hook.remove()
    assert errors == []


def test_an_action_that_is_taken_off_meanwhile_is_not_called_as_none() -> None:
    class Twice:
        """Taken off between two looks at it."""

        looks = 0

        @property
        def action(self) -> Any:
            self.looks += 1
            return (lambda _: None) if self.looks == 1 else None

    updates.StepHook.run(Twice(), None)  # type: ignore[arg-type]


def test_a_watcher_that_comes_while_the_last_one_leaves_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The hooks are on in the end, whatever thread takes them off or puts them on."""
    lock, put_on = threading.RLock(), updates.graphs.put_on
    has_come, has_left, comers = threading.Event(), threading.Event(), list[threading.Thread]()

    class Told:
        """The lock, which tells that a thread has to wait for it."""

        def __enter__(self) -> None:
            if not lock.acquire(blocking=False):
                has_come.set()
                lock.acquire()

        def __exit__(self, *error: object) -> None:
            lock.release()

    def taken_off(hook: Any, action: Any) -> None:
        if action is None and not comers:  # the last one has left, and the hooks are still on
            comers.append(threading.Thread(target=comes.stand))
            comers[0].start()
            must(has_come.wait(60))
        vars(hook)["action"] = action

    def halfway(action: Any) -> None:
        if comers:
            has_come.set()
            must(has_left.wait(60))
        put_on(action)

    goes, comes = Gate(), Gate()
    monkeypatch.setattr(updates, "_watchers", ())
    monkeypatch.setattr(updates, "_switching", Told(), raising=False)
    monkeypatch.setattr(updates.graphs, "put_on", halfway)
    goes.stand()
    action = property(lambda hook: vars(hook)["action"], taken_off)
    monkeypatch.setattr(updates.StepHook, "action", action, raising=False)
    goes.remove()
    has_left.set()
    must(comers, "nobody has come meanwhile")
    comers[0].join(60)
    optimizer = stepped(nn.Parameter(torch.ones(2)))
    optimizer.step()
    assert comes.stepping.take() == [optimizer]
    comes.remove()


def test_a_child_that_is_forked_while_a_thread_puts_hooks_on_can_put_them_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forkers, pids, put_on = list[threading.Thread](), list[int](), updates.graphs.put_on

    def forks(action: Any) -> None:
        if not forkers:
            forkers.append(threading.Thread(target=fork))
            forkers[0].start()
            forkers[0].join(60)
        put_on(action)

    def fork() -> None:
        if pid := os.fork():
            pids.append(pid)
            return
        signal.alarm(20)  # ends a child that waits for a thread of its parent
        Gate().stand()
        os._exit(0)

    gate = Gate()
    monkeypatch.setattr(updates.graphs, "put_on", forks)
    gate.stand()
    gate.remove()
    must(pids, "nothing was forked")
    assert os.waitpid(pids[0], 0)[1] == 0


def test_a_save_leaves_the_collector_alone(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    switched: list[str] = []
    monkeypatch.setattr(gc, "disable", lambda: switched.append("off"))
    monkeypatch.setattr(gc, "enable", lambda: switched.append("on"))
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        ckpt.save(1, {"w": torch.ones(3)}).wait("committed", 60)
    assert switched == []


@pytest.mark.parametrize("is_frozen", [True, False])
def test_tensors_can_be_swapped_after_everything(tmp_path: Any, is_frozen: bool) -> None:
    """torch refuses to swap a tensor that anybody has a weak reference to, and so does
    Module.to() with torch.__future__.set_swap_module_params_on_conversion(True)."""
    model = nn.Linear(1024, 512)
    model.requires_grad_(not is_frozen)
    head = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([head, *(() if is_frozen else model.parameters())], lr=0.1)
    state = {"model": model, "head": head, "optimizer": optimizer}
    run = tmp_path / "run"

    def swap() -> None:
        assert all(
            weakref.getweakrefs(p.grad) == [] for p in model.parameters() if p.grad is not None
        )
        optimizer.zero_grad()
        for each in model.parameters():
            like = nn.Parameter(each.detach().clone(), each.requires_grad)
            torch.utils.swap_tensors(each, like)

    with statehold.Checkpointer(run, keep=2, **SMALL) as ckpt:
        for step in range(1, 5):
            for each in optimizer.param_groups[0]["params"]:
                each.grad = torch.zeros_like(each)
            optimizer.step()
            ckpt.save(step, state).wait("committed", 60)
            swap()
        assert ckpt.restore(state) == 4
        swap()
    with statehold.subscribe(str(run), {"model": model}) as updates:
        updates.wait(60).apply()
        swap()
