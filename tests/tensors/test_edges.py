"""Corners of a state that were lost, mixed up or refused too late before these tests."""

from __future__ import annotations

import ctypes
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import statehold
from statehold.errors import ManifestError, StateMismatchError, UnsupportedValueError, UsageError
from statehold.tensors import columns
from statehold.tensors import found as found_module
from statehold.tensors.kinds import capture
from statehold.tensors.kinds.rng import Rng
from support.matching import MemoryStep, captured, eager
from support.wrapped import compiled


def refusal(state: dict[str, Any]) -> UnsupportedValueError:
    with pytest.raises(UnsupportedValueError) as caught:
        capture(state)
    return caught.value


# -- capture -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: {"k": nn.Linear}, "k"),
        (lambda: {"a": np.array(["x"])}, "a"),
        (lambda: {"a": np.array([1.0], dtype=">f4")}, "a"),
        (lambda: {"a": {"m": np.ma.masked_array([1.0])}}, "a.m"),
        (lambda: {"a": np.array([object()])}, "a"),
        (lambda: {"t": np.str_("text")}, "t"),
        (lambda: {"v": np.zeros(1, dtype=[("x", "f4"), ("y", "i4")])[0]}, "v"),
    ],
)
def test_what_no_step_can_hold_is_refused_with_its_path(make: Any, path: str) -> None:
    error = refusal(make())
    assert error.facts["path"] == path
    assert error.hint


def test_cycles_through_objects_and_marks_are_refused() -> None:
    by_mark: dict[str, Any] = {}
    by_mark["mark"] = statehold.Gated([by_mark])

    class Node:
        def state_dict(self) -> Any:
            return {"next": [self]}

        def load_state_dict(self, state: Any) -> None: ...

    by_dict: dict[str, Any] = {"tensors": {"t": torch.ones(1)}}
    by_dict["self"] = by_dict
    for value in (by_mark, by_dict, Node()):
        assert "holds itself" in refusal({"v": value}).summary


def test_a_mode_that_makes_fake_tensors_is_named() -> None:
    state = {"x": [torch.ones(2)]}
    with FakeTensorMode(allow_non_fake_inputs=True):
        refused = refusal(state)
    assert refused.facts["path"] == "x.0"
    assert "FakeTensorMode" in str(refused)


@pytest.mark.thorough
def test_dicts_of_dicts_are_saved_once_if_only_some_hold_tensors() -> None:
    many: dict[str, Any] = {str(i): {"t": torch.full((1,), float(i))} for i in range(3000)}
    many["deep"] = {"more": {"t": torch.ones(1)}}
    step = MemoryStep(many)
    back = {key: {"t": torch.zeros(1)} for key in many if key != "deep"}
    step.restore({**back, "deep": {"more": {"t": torch.zeros(1)}}})
    assert all(back[key]["t"].item() == float(key) for key in back)


def test_keys_that_look_like_tags_survive() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    expected = model.weight.detach().clone()
    step = MemoryStep({"$m": model, "$o": optimizer, "$v": {"$tensor": 1}})
    nn.init.zeros_(model.weight)
    step.restore({"$m": model, "$o": optimizer, "$v": {"$tensor": 0}})
    assert torch.equal(model.weight, expected)


def test_temporaries_of_state_dict_are_not_taken_for_each_other() -> None:
    class Temporary:
        """Its tensor is freed as soon as the copy of its conjugate is made."""

        def __init__(self, value: int) -> None:
            self.value = value

        def state_dict(self) -> torch.Tensor:
            return torch.full((1 << 16,), self.value, dtype=torch.complex64).conj()

        def load_state_dict(self, state: Any) -> None: ...

    found = captured({"x": [Temporary(value) for value in range(8)]})
    assert [found[f"x.{i}"].tensor[0].real.item() for i in range(8)] == list(range(8))


def test_a_conjugate_view_is_not_tied_to_what_it_shows_the_conjugate_of() -> None:
    base = torch.complex(torch.arange(3.0), torch.ones(3))
    plain = torch.zeros(3, dtype=torch.complex64)
    MemoryStep({"base": base, "view": base.conj()}).restore({"base": plain, "view": plain.conj()})
    assert torch.equal(plain, base)
    other = torch.zeros(3, dtype=torch.complex64)
    MemoryStep({"base": base, "view": base.conj()}).restore({"base": plain, "view": other})
    assert torch.equal(other, base.conj())


def test_small_host_tensors_beside_device_tensors_are_cloned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(found_module, "is_external", lambda tensor: tensor.numel() == 4)
    small, large = torch.zeros(3), torch.zeros(1 << 16)
    device = torch.zeros(4)
    state = {"small": small, "large": large, "device": statehold.Gated(device)}
    found = captured(state)
    # save() would wait for the device with every eager one
    assert {name for name, each in found.items() if each.eager} == {"large"}
    assert eager(state) == {"small", "large"}  # the layout does not follow from sizes
    assert found["small"].owned
    assert found["small"].address != small.data_ptr()
    assert found["device"].address == device.data_ptr()


SIGNALLING = 0x7FA00001  # the bits of a NaN that no arithmetic leaves as they are


@pytest.mark.parametrize("bits", [0x3F800000, -(1 << 31), SIGNALLING])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_numbers_beside_device_tensors_are_copied_bit_by_bit(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, bits: int
) -> None:
    monkeypatch.setattr(found_module, "is_external", lambda tensor: tensor.dim() > 0)
    monkeypatch.setattr(columns, "devices_of", lambda given: [(t.dim() > 0) - 1 for t in given])
    numbers = torch.tensor([7, 1, 8, bits, 9, 2], dtype=torch.int32).view(dtype)
    found = captured({"device": torch.zeros(4)} | {f"n{i}": n for i, n in enumerate(numbers)})
    copies = [found[f"n{index}"] for index in range(len(numbers))]
    assert all(each.owned for each in copies)
    raw = [ctypes.string_at(each.address, dtype.itemsize) for each in copies]
    assert b"".join(raw) == bytes(numbers.view(torch.uint8).tolist())


def test_volatile_makes_a_device_tensor_a_clone_in_either_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(found_module, "is_external", lambda _: True)
    model = nn.Linear(2, 2, bias=False)
    for state in (
        {"model": model, "ema": statehold.Volatile(model.weight)},
        {"ema": statehold.Volatile(model.weight), "model": model},
    ):
        (found,) = captured(state).values()
        assert found.owned
        assert found.address != model.weight.data_ptr()


# -- modules -----------------------------------------------------------------------------------


def test_wrappers_leave_names_in_whatever_order_they_are() -> None:
    plain = set(captured({"m": nn.Linear(1, 1)}))
    for wrap in (compiled, nn.DataParallel):
        assert set(captured({"m": wrap(nn.Linear(1, 1))})) == plain
    assert set(captured({"m": compiled(nn.DataParallel(nn.Linear(1, 1)))})) == plain
    assert set(captured({"m": nn.DataParallel(compiled(nn.Linear(1, 1)))})) == plain


def test_names_that_only_resemble_a_wrapper_stay() -> None:
    inner = nn.Module()
    inner.my_orig_mod = nn.Linear(1, 1, bias=False)
    inner.module = compiled(nn.Linear(1, 1, bias=False))
    assert set(captured({"m": inner})) == {"m.my_orig_mod.weight", "m.module.weight"}


class Counted(nn.Linear):
    """Extra state that is a tensor, and an entry that state_dict() hooks make up."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.calls = torch.zeros(3)
        self.scale = 1.0
        self._register_state_dict_hook(self._add_scale)
        self._register_load_state_dict_pre_hook(self._take_scale)

    def get_extra_state(self) -> torch.Tensor:
        return self.calls.clone()

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.calls = state

    @staticmethod
    def _add_scale(module: Any, state: Any, prefix: str, _local: Any) -> None:
        state[prefix + "scale"] = torch.tensor(module.scale)

    def _take_scale(self, state: Any, prefix: str, *_: Any) -> None:
        self.scale = state.pop(prefix + "scale").item()


@pytest.mark.parametrize("wrap", [nn.Sequential, lambda module: compiled(nn.Sequential(module))])
def test_what_is_not_in_place_is_handed_over(wrap: Any) -> None:
    saved, live = Counted(), Counted()
    saved.calls, saved.scale = torch.arange(3.0), 7.0
    before = live.weight.data_ptr()
    MemoryStep({"m": wrap(saved)}).restore({"m": wrap(live)})
    assert live.calls.tolist() == [0, 1, 2]
    assert live.scale == 7.0
    assert torch.equal(live.weight, saved.weight)
    assert live.weight.data_ptr() == before


# -- optimizers --------------------------------------------------------------------------------


class Own(torch.optim.SGD):
    """Brings its own state_dict()."""

    def state_dict(self) -> dict[str, Any]:
        return {"wrapped": super().state_dict(), "version": 7}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict["version"] == 7
        super().load_state_dict(state_dict["wrapped"])


class WithGlobalState(torch.optim.SGD):
    """Keeps something that belongs to no parameter."""

    def step(self, closure: Any = None) -> None:
        self.state["steps"] = {"count": self.state["steps"].get("count", 0) + 1}
        super().step(closure)


class Run:
    def __init__(self, make: type[torch.optim.SGD], seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Linear(4, 4)
        self.optimizer = make(self.model.parameters(), lr=0.1, momentum=0.9)
        self.state = {"optimizer": self.optimizer, "model": self.model, "rng": Rng()}

    def train(self, steps: int) -> list[str]:
        losses = []
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = self.model(torch.randn(8, 4)).square().mean()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item().hex())
        return losses

    def places(self) -> list[int]:
        return [state["momentum_buffer"].data_ptr() for key, state in self.optimizer.state.items()
                if isinstance(key, torch.Tensor)]  # fmt: skip


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("make", [Own, WithGlobalState])
def test_optimizers_with_a_state_of_their_own_go_on(
    make: type[torch.optim.SGD], used: bool
) -> None:
    run = Run(make, 0)
    run.train(3)
    step = MemoryStep(run.state)
    expected = [run.train(3), run.model.weight.tolist(), run.optimizer.state["steps"]]
    resumed = Run(make, 1)
    resumed.train(2 * used)
    places = resumed.places()
    step.restore(resumed.state)
    assert resumed.places()[: len(places)] == places
    found = [resumed.train(3), resumed.model.weight.tolist(), resumed.optimizer.state["steps"]]
    assert found == expected


def test_hooks_on_state_dict_are_heard() -> None:
    run = Run(torch.optim.SGD, 0)
    run.train(1)
    run.optimizer.register_state_dict_post_hook(lambda _, state: {**state, "mine": 5})
    assert capture(run.state).tree["optimizer"]["mine"] == 5


def test_options_of_the_step_decide_where_missing_state_is_made() -> None:
    """`fused` makes `step` live with its parameter: here it decides against the live option."""
    asked: list[Any] = []
    run = Run(torch.optim.SGD, 0)
    run.optimizer = torch.optim.AdamW(run.model.parameters(), fused=True)
    run.state["optimizer"] = run.optimizer
    run.train(1)
    step = MemoryStep(run.state)
    live = Run(torch.optim.SGD, 0)
    live.state["optimizer"] = torch.optim.AdamW(live.model.parameters(), foreach=True)

    def state_device(options: Any, key: str, parameter: torch.Tensor) -> torch.device:
        asked.append((key, options["fused"], options["foreach"]))
        return parameter.device

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("statehold.tensors.kinds.optimizers.state_device", state_device)
        step.prepare(live.state)
    assert ("step", True, None) in asked


# -- restore -----------------------------------------------------------------------------------


def test_a_state_that_cannot_take_values_is_refused() -> None:
    with pytest.raises(UsageError):
        MemoryStep({"x": 1}).prepare(types.MappingProxyType({"x": 1}))


def test_differences_are_listed_in_the_order_of_the_state() -> None:
    step = MemoryStep({"m": nn.ModuleList(nn.Linear(1, 1) for _ in range(30))})
    with pytest.raises(StateMismatchError) as caught:
        step.prepare({"m": nn.ModuleList()})
    listed = list(caught.value.facts)
    assert listed[:4] == ["m.0.weight", "m.0.bias", "m.1.weight", "m.1.bias"]


@pytest.mark.parametrize(
    "payload",
    [
        {"dtype": "O", "bytes": "AAAAAAAAAAA="},
        {"dtype": "float64", "bytes": "AAAA"},
        {"dtype": "nonsense", "bytes": "AAAA"},
        {"dtype": "datetime64[zz]", "bytes": "AAAAAAAAAAA="},
    ],
)
def test_scalars_that_lie_are_named(payload: dict[str, str]) -> None:
    step = MemoryStep({"x": np.float64(1)})
    tree = {"x": {"$npscalar": payload}}
    step.saved = types.SimpleNamespace(step=1, world_size=1, tensors={}, state=tree)
    with pytest.raises(ManifestError):
        step.prepare({"x": 0.0})


def test_scalars_are_stored_by_the_name_of_their_dtype() -> None:
    tree = capture({"x": np.float64(1.5), "t": np.timedelta64(25, "ms")}).tree
    assert tree["x"]["$npscalar"] == {"dtype": "float64", "bytes": "AAAAAAAA+D8="}
    assert tree["t"]["$npscalar"]["dtype"] == "timedelta64[ms]"


def test_tensors_of_ordered_dicts_and_tuples_in_objects_are_filled_where_they_are() -> None:
    class Holder:
        def __init__(self, value: float) -> None:
            self.table = torch.full((100,), value)
            self.loaded: Any = None

        def state_dict(self) -> Any:
            return {0: (self.table, {"x": [self.table[:2]]})}

        def load_state_dict(self, state: Any) -> None:
            self.loaded = state

    live = Holder(2.0)
    MemoryStep({"h": Holder(1.0)}).restore({"h": live})
    assert live.loaded[0][0].data_ptr() == live.table.data_ptr()
    assert live.table[0] == 1.0
    assert type(live.loaded[0]) is tuple
