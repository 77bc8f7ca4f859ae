"""Restore: everything in place, nothing changed on a mismatch, every difference in one message."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
from torch import nn

import statehold
from statehold.errors import StateMismatchError
from statehold.format.selection import Selection
from support.faults import DEADLINE_S, SMALL
from support.matching import MemoryStep
from support.training import Training, bits
from support.wrapped import compiled


class Everything(nn.Module):
    """Parameters in a list, buffers of both kinds, extra state, perhaps tied weights."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.randn(2)), nn.Parameter(torch.randn(3))])
        self.embed = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("kept", torch.randn(2))
        self.register_buffer("scratch", torch.randn(2), persistent=False)
        self.extra: Any = {"calls": 3}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def same(left: nn.Module, right: nn.Module) -> bool:
    ours, theirs = left.state_dict(), right.state_dict()
    tensors = [name for name, value in ours.items() if isinstance(value, torch.Tensor)]
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in tensors)


def test_modules_through_a_whole_step(tmp_path: Path) -> None:
    saved, live = Everything(), Everything()
    saved.extra = {"calls": 4, "seen": (1, b"x")}
    scratch = live.scratch.clone()
    places = {name: value.data_ptr() for name, value in live.named_parameters()}
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        ckpt.save(1, {"model": saved}).wait("committed", DEADLINE_S)
        ckpt.restore({"model": live})
    assert same(live, saved)
    assert live.extra == saved.extra
    assert torch.equal(live.scratch, scratch), "not part of the state"
    assert {name: value.data_ptr() for name, value in live.named_parameters()} == places
    assert live.head.weight is live.embed.weight


def test_saved_tied_restored_into_untied() -> None:
    saved, live = Everything(tied=True), Everything(tied=False)
    MemoryStep({"m": saved}).restore({"m": live})
    assert same(live, saved)
    assert live.head.weight.data_ptr() != live.embed.weight.data_ptr()


def test_saved_untied_restored_into_tied_needs_equal_values() -> None:
    saved, live = Everything(tied=False), Everything(tied=True)
    before = live.embed.weight.clone()
    with pytest.raises(StateMismatchError) as caught:
        MemoryStep({"m": saved}).restore({"m": live})
    assert caught.value.facts["m.head.weight"] == (
        "expected one tensor, as it is tied, got other values than m.embed.weight"
    )
    assert torch.equal(live.embed.weight, before)
    with torch.no_grad():
        saved.head.weight.copy_(saved.embed.weight)
    MemoryStep({"m": saved}).restore({"m": live})
    assert same(live, saved)


@pytest.mark.parametrize("kept", ["a", "b"])
def test_a_tied_tensor_that_the_step_has_by_one_name_is_there_by_all(kept: str) -> None:
    one, two, saved = nn.Linear(2, 2), nn.Linear(2, 2, bias=False), torch.randn(2, 2)
    two.weight = one.weight
    parts: dict[str, dict[str, torch.Tensor]] = {"a": {"bias": torch.ones(2)}, "b": {}}
    parts[kept]["weight"] = saved
    state = {"a": one, "b": two, "c": one.weight}
    MemoryStep(parts).restore(state, selection=Selection(only=["a", "c"]))
    assert torch.equal(one.weight, saved)


def test_wrapped_and_bare_models_take_each_other() -> None:
    for saved, live in (
        (nn.DataParallel(nn.Linear(2, 2)), nn.Linear(2, 2)),
        (nn.Linear(2, 2), compiled(nn.Linear(2, 2))),
        (compiled(nn.Linear(2, 2)), nn.DataParallel(compiled(nn.Linear(2, 2)))),
    ):
        MemoryStep({"m": saved}).restore({"m": live})
        pairs = zip(saved.parameters(), live.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def test_every_difference_is_listed_and_nothing_changes(tmp_path: Path) -> None:
    saved = {
        "model": nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)),
        "only saved": torch.ones(2),
        "kind": torch.ones(2),
        "was a module": nn.Linear(1, 1),
        "plain": 3,
        "dict": {"a": 1, "new": torch.ones(1)},
    }
    live_tensor = torch.zeros(2)
    live: dict[str, Any] = {
        "model": nn.Sequential(nn.Linear(2, 4), nn.Linear(3, 1, dtype=torch.float64), nn.ReLU()),
        "only live": live_tensor,
        "kind": "text",
        "was a module": 3,
        "plain": live_tensor,
        "dict": {"a": 2, "stale": 0},
    }
    live["model"].register_buffer("extra", torch.zeros(1))
    before = {name: value.clone() for name, value in live["model"].state_dict().items()}
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        ckpt.save(1, saved).wait("committed", DEADLINE_S)
        with pytest.raises(StateMismatchError) as caught:
            ckpt.restore(live)
    facts = caught.value.facts
    assert {name: facts[name] for name in facts if name not in {"step", "other steps"}} == {
        "only saved": "expected nothing, got an entry of the step",
        "only live": "expected an entry of the step, got nothing",
        "model.0.weight": "expected F32 [4, 2], got F32 [3, 2] in the step",
        "model.0.bias": "expected F32 [4], got F32 [3] in the step",
        "model.1.weight": "expected F64 [1, 3], got F32 [1, 3] in the step",
        "model.1.bias": "expected F64 [1], got F32 [1] in the step",
        "model.extra": "expected F32 [1], got nothing in the step",
        "kind": "expected a plain value, got a tensor",
        "was a module": "expected a plain value, got entries with tensors, such as those of a "
        "module",
        "plain": "expected F32 [2], got a plain value",
        "dict.stale": "expected an entry of the step, got nothing",
    }
    assert "11 places" in str(caught.value)
    assert live["dict"] == {"a": 2, "stale": 0}
    assert live_tensor.tolist() == [0, 0]
    after = live["model"].state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_long_list_of_differences_is_cut() -> None:
    saved = {str(i): torch.ones(1) for i in range(50)}
    with pytest.raises(StateMismatchError) as caught:
        MemoryStep({"t": saved}).prepare({"t": {k: torch.ones(2) for k in saved}})
    assert len(caught.value.facts) == 21
    assert caught.value.facts["..."] == "30 more"


def test_containers_are_updated_where_they_are() -> None:
    saved = {
        "dict": {"a": 1, "b": [1, 2, 3], 5: "five"},
        "ordered": OrderedDict(z=1, a=2),
        "list": [1, {"x": 2}, torch.full((2,), 7.0)],
        "tuple": (torch.full((2,), 8.0), 9),
        "grown": [],
        "marked": statehold.Volatile(3),
    }
    live: dict[str, Any] = {
        "dict": {"a": 0, "b": [0]},
        "ordered": OrderedDict(a=0),
        "list": [0, {"x": 0}, torch.zeros(2)],
        "tuple": (torch.zeros(2), 0),
        "grown": [4, 5],
        "marked": statehold.Volatile(0),
    }
    before = dict(live)
    inner = live["dict"]["b"], live["list"][1], live["list"][2], live["tuple"][0]
    MemoryStep(saved).restore(live)
    for name in ("dict", "ordered", "list", "grown", "marked"):
        assert live[name] is before[name]
    assert live["dict"] == saved["dict"]
    assert live["ordered"] == saved["ordered"]
    assert live["grown"] == []
    assert live["marked"].value == 3
    assert (live["dict"]["b"], live["list"][1], live["list"][2]) == (inner[0], inner[1], inner[2])
    assert live["list"][2] is inner[2]
    assert live["list"][2].tolist() == [7, 7]
    assert live["tuple"][0] is inner[3]
    assert live["tuple"][0].tolist() == [8, 8]
    assert live["tuple"][1] == 9


def test_live_containers_may_hold_themselves() -> None:
    loop: list[Any] = []
    loop.append(loop)
    live = {"a": loop}
    MemoryStep({"a": 3}).restore(live)
    assert live == {"a": 3}


def test_tensors_that_nobody_has_yet_are_made() -> None:
    shared = torch.ones(3)
    live: dict[str, Any] = {"cache": {}}
    MemoryStep({"cache": {"a": shared, "b": shared, "c": [torch.zeros(0, 2)]}}).restore(live)
    assert live["cache"]["a"] is live["cache"]["b"]
    assert live["cache"]["a"].tolist() == [1, 1, 1]
    assert live["cache"]["c"][0].shape == (0, 2)


def test_version_counters_of_restored_tensors_move() -> None:
    saved, live = nn.Linear(2, 2), nn.Linear(2, 2)
    data = torch.ones(1, 2, requires_grad=True)
    loss = live(data).sum()
    MemoryStep({"m": saved}).restore({"m": live})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_no_second_copy_of_the_model_is_made() -> None:
    training = Training()
    training.step()
    step = MemoryStep(training.state)
    live = Training(seed=3)
    live.step()
    restoration = step.prepare(live.state)
    own = {t.data_ptr() for t in live.model.state_dict().values()}
    own |= {t.data_ptr() for state in live.optimizer.state.values() for t in state.values()}
    assert {target.tensor.data_ptr() for target in restoration.destinations} == own
    step.restore(live.state)
    assert bits(live) == bits(training)


def test_a_frozen_model_and_gradients_are_left_alone() -> None:
    saved, live = nn.Linear(2, 2), nn.Linear(2, 2)
    live.weight.requires_grad_(False)
    live.bias.grad = torch.ones(2)
    MemoryStep({"m": saved}).restore({"m": live})
    assert same(saved, live)
    assert not live.weight.requires_grad
    assert live.bias.requires_grad
    assert live.bias.grad.tolist() == [1, 1]


def test_tensors_of_other_types_cannot_be_restored_into() -> None:
    step = MemoryStep({"t": torch.ones(2)})
    for live in (torch.empty(2, device="meta"), torch.zeros(2).to_sparse()):
        with pytest.raises(statehold.errors.UnsupportedValueError) as caught:
            step.prepare({"t": live})
        assert caught.value.facts["path"] == "t"


def test_one_difference_is_one_place() -> None:
    step = MemoryStep({"t": torch.ones(2)})
    with pytest.raises(StateMismatchError, match="differ in 1 place; nothing was changed"):
        step.prepare({"t": torch.ones(3)})


def test_live_dtypes_that_no_step_can_hold_are_a_mismatch() -> None:
    step = MemoryStep({"t": torch.ones(2)})
    with pytest.raises(StateMismatchError) as caught:
        step.prepare({"t": torch.ones(2, dtype=torch.complex128)})
    assert caught.value.facts["t"] == "expected complex128 [2], got F32 [2] in the step"


def test_extra_state_reaches_submodules() -> None:
    saved, live = nn.Sequential(Everything()), nn.Sequential(Everything())
    saved[0].extra = torch.ones(2), "x"
    live[0].extra = None
    MemoryStep({"m": saved}).restore({"m": live})
    assert live[0].extra[0].tolist() == [1, 1]
    assert live[0].extra[1] == "x"


@pytest.mark.parametrize("value", [None, False, "", (), {}, 2.5, [None, torch.ones(1)]])
def test_extra_state_is_any_value(value: Any) -> None:
    saved, live = Everything(), Everything()
    saved.extra = value
    MemoryStep({"m": saved}).restore({"m": live})
    assert live.extra == value
    assert type(live.extra) is type(value)
    assert same(live, saved)


def test_what_is_made_in_inference_mode_can_be_trained() -> None:
    def built() -> dict[str, Any]:
        model = nn.Linear(3, 3)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

    def train(state: dict[str, Any]) -> None:
        state["model"](torch.ones(1, 3)).sum().backward()
        state["optimizer"].step()

    saved, live = built(), built()
    train(saved)
    step = MemoryStep(saved)
    with torch.inference_mode():
        step.restore(live)
    entries = live["optimizer"].state[live["model"].weight]
    assert entries.keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert not any(each.is_inference() for each in entries.values())
    train(live)


def test_paths_come_back_where_the_live_value_is_one() -> None:
    step = MemoryStep({"a": Path("x/y"), "l": [Path("q"), 1], "d": {"p": PurePosixPath("/z")}})
    live: dict[str, Any] = {"a": Path("n"), "l": [PurePosixPath("r"), 2], "d": {}}
    step.restore(live)
    assert live == {"a": Path("x/y"), "l": [PurePosixPath("q"), 1], "d": {"p": "/z"}}
    assert [type(live["a"]), type(live["l"][0])] == [type(Path()), PurePosixPath]


def test_a_deque_a_set_and_a_counter_are_filled_where_they_are() -> None:
    """A loop goes on with its own."""
    step = MemoryStep({"d": deque([1, 2], 5), "s": {1, 2}, "c": Counter("aab"), "e": deque([1], 3)})
    live: dict[str, Any] = {"d": deque([9], 5), "s": {9}, "c": Counter("z"), "e": deque([9], 7)}
    own = dict(live)
    step.restore(live)
    assert (own["d"], own["s"], own["c"]) == (deque([1, 2]), {1, 2}, Counter("aab"))
    assert all(live[name] is own[name] for name in "dsc")
    assert live["e"] == deque([1])
    assert live["e"].maxlen == 3


class _Average:
    """Begins as the weight itself, and has a tensor of its own from the first update on."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.mean = weight.detach()

    def update(self, weight: torch.Tensor) -> None:
        self.mean = (self.mean + weight.detach()) / 2

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = state["mean"]


@pytest.mark.parametrize("order", [("model", "average"), ("average", "model")])
def test_an_object_that_begins_with_a_weight_gets_its_own_tensor(order: tuple[str, str]) -> None:
    def made() -> dict[str, Any]:
        model = nn.Linear(2, 2, bias=False)
        parts = {"model": model, "average": _Average(model.weight)}
        return {name: parts[name] for name in order}

    saved, live = made(), made()
    with torch.no_grad():
        saved["model"].weight.data = saved["model"].weight + 1
    saved["average"].update(saved["model"].weight)
    MemoryStep(saved).restore(live)
    assert torch.equal(live["model"].weight, saved["model"].weight)
    assert torch.equal(live["average"].mean, saved["average"].mean)


class _Plain(nn.Linear):
    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return super().state_dict()


def test_a_module_whose_state_dict_takes_no_options() -> None:
    saved, live = _Plain(2, 2), _Plain(2, 2)
    MemoryStep({"model": saved}).restore({"model": live})
    assert torch.equal(live.weight, saved.weight)
    assert torch.equal(live.bias, saved.bias)
