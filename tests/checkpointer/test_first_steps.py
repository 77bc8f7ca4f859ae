"""What goes wrong in first scripts: paths, wrong objects, forgotten parts, another order."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from statehold import Checkpointer, Directory, Memory, Rng
from statehold.errors import StateMismatchError, UsageError
from support.faults import DEADLINE_S, SMALL


def made(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


@pytest.fixture
def ckpt(run: Path) -> Iterator[Checkpointer]:
    with Checkpointer(run, **SMALL) as ckpt:
        ckpt.save(7, made()).wait("committed", DEADLINE_S)
        yield ckpt


REFUSED = [
    (lambda run: Checkpointer("~/runs/x"), "os.path.expanduser"),
    (lambda run: Directory(path="~/runs/x"), "os.path.expanduser"),
    (lambda run: Checkpointer(run / "step-000000000007"), "restore(state, step=7)"),
    (lambda run: Checkpointer(f"{run}/step-000000000007/"), "the directory of a step"),
    (lambda run: Checkpointer(run, levels=5), "write levels=[...]"),
    (lambda run: Checkpointer(run, levels=[Memory]), "Directory(every=10)"),
    (lambda run: Rng(torch.Generator()), 'Rng({"data": generator})'),
]


@pytest.mark.parametrize(("make", "told"), REFUSED)
def test_what_is_refused_at_once(run: Path, make: Any, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        make(run)
    assert told in str(caught.value)


@pytest.mark.parametrize("state", [None, nn.Linear(2, 2), [nn.Linear(2, 2)], (1, 2)], ids=repr)
def test_what_is_no_state_also_of_an_empty_run(run: Path, state: Any) -> None:
    with Checkpointer(run, **SMALL) as ckpt:
        with pytest.raises(UsageError, match="must be a mutable mapping") as caught:
            ckpt.restore(state)
        assert 'restore({"model": model' in str(caught.value.hint)
        with pytest.raises(UsageError, match="a mapping of names") as caught:
            ckpt.save(1, state)
        assert 'save(step, {"model": model' in str(caught.value.hint)


@pytest.mark.parametrize("timeout", ["5", True, [1], float("nan")])
def test_a_time_to_wait_is_a_number(ckpt: Checkpointer, timeout: Any) -> None:
    save = ckpt.save(8, made())
    for call in (lambda: save.wait(timeout=timeout), lambda: ckpt.flush(timeout)):
        with pytest.raises(UsageError, match="not a time to wait"):
            call()
    with pytest.raises(UsageError, match="not a time to wait"):
        ckpt.gate(timeout)
    save.wait("committed", DEADLINE_S)


@pytest.mark.parametrize("timeout", [float("inf"), 1e30, 10**400, 5e9])
def test_any_number_is_a_time_to_wait(ckpt: Checkpointer, timeout: float) -> None:
    save = ckpt.save(8, made())
    save.wait("committed", DEADLINE_S)
    for call in (lambda: save.wait("committed", timeout), lambda: ckpt.flush(timeout)):
        call()
    ckpt.gate(timeout)


def test_a_trace_is_a_file(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the trace is a directory"):
        Checkpointer(run, trace=tmp_path, **SMALL).steps()


@pytest.mark.parametrize("live", [nn.Linear, lambda: 1, (each for each in [1]), object()])
def test_a_live_value_that_no_step_can_hold_is_not_replaced(ckpt: Checkpointer, live: Any) -> None:
    state = {"model": live}
    with pytest.raises(StateMismatchError, match="a live value that a step can hold"):
        ckpt.restore(state, only=["model"])
    assert state["model"] is live
    state = {"model": None}
    assert ckpt.restore(state, only=["model"]) == 7
    assert set(state["model"]) == {"weight", "bias"}


def test_the_hint_names_the_part_that_was_renamed(ckpt: Checkpointer) -> None:
    live = made(1)
    state = {"net": live["model"], "optimizer": live["optimizer"]}
    with pytest.raises(StateMismatchError) as caught:
        ckpt.restore(state)
    assert 'rename={"model": "net"}' in str(caught.value.hint)
    assert ckpt.restore(state, rename={"model": "net"}) == 7


def test_a_value_is_not_taken_for_a_part_that_was_renamed(ckpt: Checkpointer) -> None:
    with pytest.raises(StateMismatchError) as caught:
        ckpt.restore({"model": made(1)["model"], "epoch": 0})
    assert "rename" not in str(caught.value.hint)


@pytest.mark.parametrize("also", [{}, {"model": nn.Linear(2, 3)}])
def test_the_model_of_an_optimizer_is_missed(ckpt: Checkpointer, also: dict[str, Any]) -> None:
    state = {**also, "optimizer": made(1)["optimizer"]}
    with pytest.raises(StateMismatchError) as caught:
        ckpt.restore(state, only=list(state))
    assert "put the model that it updates into the state" in str(caught.value.hint)


class Failing:
    """Gives its state, or takes it, with an error."""

    def __init__(self, *, gives: bool) -> None:
        self.gives = gives

    def state_dict(self) -> dict[str, Any]:
        return {"i": 1} if self.gives else {}["give"]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("take")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_errors_of_the_users_own_code_say_which_object_it_was(run: Path) -> None:
    with Checkpointer(run, **SMALL) as ckpt:
        with pytest.raises(KeyError, match="give") as caught:
            ckpt.save(1, {"mine": Failing(gives=False)})
        assert 'the state of "mine"' in caught.value.__notes__[0]
        mine = {"mine": Failing(gives=True)}
        ckpt.save(1, mine).wait("committed", DEADLINE_S)
        with pytest.raises(KeyError, match="take") as caught:
            ckpt.restore(mine)
        assert 'while "mine" was restored' in caught.value.__notes__[0]


@pytest.mark.parametrize("name", ["optimizer", "outer.optimizer"])
def test_the_state_dict_of_an_optimizer_that_was_saved_itself(tmp_path: Path, name: str) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()

    def state(value: Any) -> dict[str, Any]:
        return {"model": model} | (
            {"outer": {"optimizer": value}} if "." in name else {name: value}
        )

    with Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        ckpt.save(1, state(optimizer)).wait("committed", DEADLINE_S)
        with pytest.raises(StateMismatchError) as caught:
            ckpt.restore(state(optimizer.state_dict()))
        assert f'put it into the state as "{name}", not its state_dict()' in caught.value.hint
        fewer = optimizer.state_dict()
        del fewer["state"][1]
        ckpt.save(2, state(fewer)).wait("committed", DEADLINE_S)
        with pytest.raises(StateMismatchError) as caught:
            ckpt.restore(state(optimizer.state_dict()))  # by number, both times
        assert "state_dict" not in caught.value.hint
