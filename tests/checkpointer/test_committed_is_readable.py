"""What save() takes can be restored into the state that was saved; what cannot, it refuses by path.

The limits of the format hold for a whole state, however its levels come about.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import statehold
from statehold.encoding.values import DEPTH_MAX, Encoder
from statehold.errors import UnsupportedValueError, UsageError
from statehold.format.entries import EntryReader
from statehold.layout.share import PlanCache, RankPlan
from support.faults import DEADLINE_S, SMALL
from support.in_memory import SimFs, checkpointer_on
from support.quantized import Made
from support.ranks import Ranks


class Holder:
    """An object that gives its state itself, and takes it."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner = state["inner"]


class OneWay:
    """Gives files for its state, and takes nothing back."""

    def stored_state(self) -> Any:
        raise AssertionError("asked for what cannot be restored")


def nested(times: int, value: Any, wrap: Callable[[Any], Any] = lambda value: (value,)) -> Any:
    for _ in range(times):
        value = wrap(value)
    return value


def optimizer() -> torch.optim.Optimizer:
    found = torch.optim.Adam(nn.Linear(3, 2).parameters())
    for group in found.param_groups:
        for each in group["params"]:
            each.grad = torch.ones_like(each)
    found.step()
    return found


def made() -> torch.Tensor:
    statehold.allow_tensor_class(Made)
    return Made.of(torch.ones(4, 4))


NAN = float("nan")
# Of a value: how many levels of the state it takes.
LEVELS: dict[str, tuple[int, Callable[[], Any]]] = {
    "number": (0, lambda: 5),
    "large number": (1, lambda: 2**70),
    "infinity": (1, lambda: float("inf")),
    "bytes": (1, lambda: b"x"),
    "complex": (1, lambda: 1j),
    "dtype": (1, lambda: torch.float32),
    "tensor": (1, lambda: torch.ones(2)),
    "complex tensor": (1, lambda: torch.ones(2, dtype=torch.complex128)),
    "dict of tensors": (2, lambda: {"a": torch.ones(2), "b": torch.ones(3)}),
    "dict of dicts of tensors": (3, lambda: {"a": {"x": torch.ones(2)}, "b": {"x": torch.ones(3)}}),
    "tensor made of others": (3, made),  # its context is a tuple with a dtype
    "module": (2, lambda: nn.Linear(3, 2)),
    "optimizer": (4, optimizer),
    "object": (1, lambda: Holder(1)),
    "objects around a list": (12, lambda: nested(11, [1], Holder)),
    "marked": (1, lambda: statehold.Volatile(torch.ones(2))),
}


def save_and_restore(run: Path, value: Any) -> Any:
    """`value` after a save of a state with it, and a restore into the same state."""
    state = {"w": torch.ones(3), "value": value}
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        ckpt.save(1, state).wait("committed", DEADLINE_S)
        assert ckpt.restore(state) == 1
    return state["value"]


@pytest.mark.thorough
@pytest.mark.parametrize("name", LEVELS)
def test_depth_counts_over_the_whole_state(run: Path, name: str) -> None:
    levels, make = LEVELS[name]
    around = DEPTH_MAX - 1 - levels
    save_and_restore(run / "fits", nested(around, make()))
    with pytest.raises(UnsupportedValueError, match="more than 100 deep") as caught:
        save_and_restore(run / "does not", nested(around + 1, make()))
    assert caught.value.facts["path"].startswith("value.0.0")
    assert not list(run.glob("does not/step-*"))


@pytest.mark.parametrize(
    ("value", "path", "told"),
    [
        (deque([1], 2**53), "value", "maxlen"),
        ({NAN: 1, "a": 2}, "value.{}", "NaN"),
        (OrderedDict([(complex(NAN, 0), 1)]), "value.{}", "NaN"),
        ({(1, NAN): 1}, "value.{}.1", "NaN"),
        ({Holder(1): 1}, "value.{}", "dict key"),
        ({1: {frozenset({Holder(1)}): 1}}, "value.1.{}.{}", "dict key"),
        (OneWay(), "value", "cannot be stored"),
        (torch.ones(0).expand(2**62, 0), "value", "no step can hold"),
        (nested(300, 1, Holder), None, "flatten it"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused_with_its_path(run: Path, value: Any, path: str | None, told: str) -> None:
    with pytest.raises(UnsupportedValueError, match=told) as caught:
        save_and_restore(run, value)
    assert path is None or caught.value.facts["path"] == path
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        assert ckpt.steps() == []


@pytest.mark.parametrize("key", ["__metadata__", "\ud800", ""])
def test_a_name_that_no_data_file_can_hold(run: Path, key: str) -> None:
    save_and_restore(run, {key: torch.ones(3)} if key != "\ud800" else 1)
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        with pytest.raises(UnsupportedValueError) as caught:
            ckpt.save(2, {key: torch.ones(3), "y": torch.ones(3)})
        assert "rename" in str(caught.value)
        assert caught.value.facts["path"].strip("'\"") in (key, "\\ud800")
        ckpt.save(3, {"y": torch.ones(3)}).wait("committed", DEADLINE_S)


@pytest.mark.parametrize("name", ["ba\nse", "ba\x7fse"], ids=ascii)
def test_the_path_of_a_run_that_no_step_can_record(tmp_path: Path, name: str) -> None:
    base, state = tmp_path / name, {"w": torch.ones(3)}
    with statehold.Checkpointer(tmp_path / "base", **SMALL) as ckpt:
        ckpt.save(1, state).wait("committed", DEADLINE_S)
    (tmp_path / "base").rename(base)
    source = statehold.Checkpointer(tmp_path / "source", **SMALL)
    with source, pytest.raises(UsageError, match="record the path"):
        source.restore(state, source=base)
    with statehold.Checkpointer(tmp_path / "child", parent=f"{base}@1", **SMALL) as ckpt:
        with pytest.raises(UsageError, match="record the path"):
            ckpt.restore(state)
        assert ckpt.steps() == []


class Process(Ranks):
    """A process that is alone."""

    def _opened(self, options: dict[str, Any]) -> list[statehold.Checkpointer]:
        return [checkpointer_on(self.fs, self.run, **options)]


def own(rank: int) -> dict[str, Any]:
    """A tensor that differs between the ranks."""
    return {"own": torch.full((3,), float(rank)), "value": 1}


def mixed(rank: int) -> dict[str, Any]:
    """A tensor that the ranks have alike, too."""
    return {**own(rank), "alike": torch.ones(3)}


@pytest.fixture(params=[1, 2])
def steady(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """A job that has saved the same tensors until it plans each save like the one before it."""
    size = request.param
    with (Ranks if size > 1 else Process)(SimFs(seed=1), size) as ranks:
        for step in (1, 2, 3):  # the third is planned with what the first has taught the ranks
            ranks.save(step, mixed)
        yield ranks


def assert_no_reader(steady: Ranks, state_of: Callable[[int], dict[str, Any]]) -> None:
    for error in steady.failures(4, state_of):
        assert "no reader would accept" in str(error)
    assert steady.ckpts[0].steps() == [1, 2, 3]


def test_a_document_that_no_reader_accepts_is_not_committed(
    monkeypatch: pytest.MonkeyPatch, steady: Ranks
) -> None:
    """Whatever the checks of save() may have missed."""
    node = Encoder.node

    def strange(to: Encoder, value: Any, *at: Any) -> Any:
        return {"$unknown": 1} if type(value) is bytes else node(to, value, *at)

    monkeypatch.setattr(Encoder, "node", strange)
    assert_no_reader(steady, lambda rank: {**mixed(rank), "value": b"x"})


def test_the_tensors_of_saves_that_are_alike_are_read_again_once(
    monkeypatch: pytest.MonkeyPatch, steady: Ranks
) -> None:
    """To read thousands of them again would take most of the time of a commit."""
    read = Counter[str]()
    monkeypatch.setattr(EntryReader, "name", lambda _, name: read.update([name]))
    steady.save(4, mixed)
    assert not read
    steady.save(5, lambda rank: {**mixed(rank), "own": torch.ones(4)})
    assert read == {"own": steady.size, "alike": steady.size}


@pytest.mark.parametrize("wrong", [{"shape": (2,)}, {"offsets": (1,)}])
def test_the_tensors_of_another_plan_are_read_again(
    monkeypatch: pytest.MonkeyPatch, steady: Ranks, wrong: dict[str, Any]
) -> None:
    """A plan cannot change, so a damaged one is another one, although it has the same share."""
    plan_of = PlanCache.get

    def damaged(self: PlanCache, *given: Any) -> RankPlan:
        plan = plan_of(self, *given)
        specs = (*plan.save.specs[:-1], plan.save.specs[-1]._replace(**wrong))
        return replace(plan, save=replace(plan.save, specs=specs))

    monkeypatch.setattr(PlanCache, "get", damaged)
    assert_no_reader(steady, mixed)
