"""Bytes and values come back where they were; what does not fit is listed beforehand."""

from __future__ import annotations

import copy
import types
from collections import Counter, OrderedDict, deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import statehold
from statehold.errors import ManifestError, StateMismatchError, UnsupportedValueError, UsageError
from statehold.state.restore import prepare
from support.memory_store import MemoryStep, raw, round_trip


def mismatch(step: MemoryStep, live: dict[str, Any]) -> StateMismatchError:
    with pytest.raises(StateMismatchError) as caught:
        prepare(live, step.manifest)
    assert "nothing was changed" in caught.value.summary
    return caught.value


# -- modules -------------------------------------------------------------------------------------


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


def test_what_is_not_in_place_is_handed_over() -> None:
    saved, live = nn.Sequential(Counted()), nn.Sequential(Counted())
    saved[0].calls, saved[0].scale = torch.arange(3.0), 7.0
    before = live[0].weight.data_ptr()
    round_trip({"m": saved}, {"m": live})
    assert live[0].calls.tolist() == [0, 1, 2]
    assert live[0].scale == 7.0
    assert torch.equal(live[0].weight, saved[0].weight)
    assert live[0].weight.data_ptr() == before


def test_buffers_that_are_not_persistent_are_left_alone() -> None:
    def make(value: float) -> nn.Module:
        module = nn.Module()
        module.register_buffer("kept", torch.full((2,), value))
        module.register_buffer("derived", torch.full((2,), value), persistent=False)
        return module

    live = make(2.0)
    round_trip({"m": make(1.0)}, {"m": live})
    assert live.kept.tolist() == [1, 1]
    assert live.derived.tolist() == [2, 2]


def test_a_wrapped_module_is_restored_from_a_plain_one_and_back() -> None:
    plain, other = nn.Linear(3, 3), nn.Linear(3, 3)
    wrapped = torch.compile(nn.DataParallel(other), backend="eager")
    round_trip({"m": plain}, {"m": wrapped})
    assert torch.equal(other.weight, plain.weight)
    nn.init.zeros_(plain.weight)
    round_trip({"m": wrapped}, {"m": plain})
    assert torch.equal(other.weight, plain.weight)


def test_a_tied_pair_fills_an_untied_one() -> None:
    saved = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    saved[1].weight = saved[0].weight
    live = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    round_trip({"m": saved}, {"m": live})
    assert torch.equal(live[0].weight, saved[0].weight)
    assert torch.equal(live[1].weight, saved[0].weight)


def test_an_untied_pair_fills_a_tied_one_only_if_it_is_equal() -> None:
    saved = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    live = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    live[1].weight = live[0].weight
    error = mismatch(MemoryStep({"m": saved}), {"m": live})
    assert "m.0.weight" in error.facts["m.1.weight"]
    with torch.no_grad():
        saved[1].weight.copy_(saved[0].weight)
    round_trip({"m": saved}, {"m": live})
    assert torch.equal(live[0].weight, saved[0].weight)


def test_autograd_notices_a_restore_between_forward_and_backward() -> None:
    model = nn.Linear(3, 3)
    step = MemoryStep({"m": model})
    loss = model(model(torch.ones(3))).sum()
    step.restore({"m": model})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# -- tensors ---------------------------------------------------------------------------------------


def layouts() -> dict[str, torch.Tensor]:
    return {
        "contiguous": torch.zeros(4, 6), "transposed": torch.zeros(6, 4).t(),
        "sliced": torch.zeros(8, 12)[::2, 1::2], "offset": torch.zeros(40)[9:33].view(4, 6),
        "parameter": nn.Parameter(torch.zeros(4, 6)), "frozen": torch.zeros(4, 6).detach(),
        "neg": torch.zeros(4, 6, dtype=torch.complex64).conj().imag,
    }  # fmt: skip


@pytest.mark.parametrize("layout", layouts())
def test_every_layout_is_filled_in_place(layout: str) -> None:
    live = layouts()[layout]
    before = live.data_ptr()
    saved = torch.randn(4, 6)
    state = {"t": live}
    round_trip({"t": saved}, state)
    assert state["t"] is live
    assert live.data_ptr() == before
    assert torch.equal(live, saved)


def test_elements_between_those_of_a_view_are_left_alone() -> None:
    base = torch.full((4, 4), 5.0)
    round_trip({"t": torch.zeros(2, 2)}, {"t": base[::2, ::2]})
    assert base.sum() == 5.0 * 12


def test_an_expanded_tensor_cannot_be_filled() -> None:
    error = mismatch(MemoryStep({"t": torch.ones(3, 4)}), {"t": torch.ones(3, 1).expand(3, 4)})
    assert "expanded" in error.facts["t"]


def test_a_meta_tensor_cannot_be_filled() -> None:
    with pytest.raises(UnsupportedValueError) as caught:
        prepare({"t": torch.ones(2, device="meta")}, MemoryStep({"t": torch.ones(2)}).manifest)
    assert caught.value.facts["path"] == "t"


def test_arrays_and_scalars_come_back() -> None:
    state = {
        "array": np.arange(6, dtype=np.int16).reshape(2, 3), "turned": np.arange(4.0)[::-1],
        "zero": np.array(2.5), "float": np.float64(0.1), "half": np.float16(1.5),
        "bool": np.bool_(True), "complex": np.complex128(1 + 2j), "int": np.uint8(200),
    }  # fmt: skip
    frozen = np.zeros(4)
    frozen.flags.writeable = False
    live = {"array": np.zeros((2, 3), np.int16), "turned": frozen, "zero": None, "float": 0.0,
            "half": None, "bool": False, "complex": 0j, "int": 0}  # fmt: skip
    array = live["array"]
    round_trip(state, live)
    assert live["array"] is array
    for key, value in state.items():
        assert type(live[key]) is type(value)
        assert live[key].dtype == value.dtype
        assert np.array_equal(live[key], value)
    assert frozen.tolist() == [0, 0, 0, 0]


# -- containers --------------------------------------------------------------------------------


def test_dicts_and_lists_are_updated_where_they_are() -> None:
    inner: dict[str, Any] = {"seen": 1}
    items: list[Any] = [1, 2, 3]
    ordered: OrderedDict[str, int] = OrderedDict(a=1)
    live = {"d": {"inner": inner}, "l": items, "o": ordered}
    outer = live["d"]
    round_trip({"d": {"inner": {"seen": 5, "new": (1, None)}}, "l": ["x"],
                "o": OrderedDict(b=2, a=3)}, live)  # fmt: skip
    assert live["d"] is outer
    assert outer["inner"] is inner
    assert inner == {"seen": 5, "new": (1, None)}
    assert live["l"] is items
    assert items == ["x"]
    assert live["o"] is ordered
    assert list(ordered.items()) == [("b", 2), ("a", 3)]


def test_tuples_are_rebuilt_around_what_stays() -> None:
    weight = torch.zeros(2)
    live: dict[str, Any] = {"t": (weight, 1), "same": (weight,)}
    same = live["same"]
    round_trip({"t": (torch.ones(2), 9), "same": (torch.ones(2),)}, live)
    assert live["t"][0] is weight
    assert live["t"][1] == 9
    assert live["same"] is same


def test_every_container_comes_back_with_its_type() -> None:
    state = {"set": {1, 2}, "frozen": frozenset({"a"}), "count": Counter("aab"), 3: b"bytes",
             "deque": deque([1, [2]], maxlen=4), "size": torch.Size([2, 3]),
             "dtype": torch.bfloat16, "device": torch.device("cuda:1"),
             (1, "k"): 2**70}  # fmt: skip
    live: dict[Any, Any] = dict.fromkeys(state)
    round_trip({"v": state}, {"v": live})
    assert live == state
    assert [type(value) for value in live.values()] == [type(value) for value in state.values()]
    assert live["deque"].maxlen == 4


def test_tensors_of_new_entries_are_made() -> None:
    live: dict[str, Any] = {"d": {}, "l": [], "n": None}
    shared = torch.arange(3)
    round_trip({"d": {"a": shared, "b": [shared]}, "l": [torch.ones(2)], "n": torch.ones(1)}, live)
    assert live["d"]["a"].tolist() == [0, 1, 2]
    assert live["d"]["b"][0] is live["d"]["a"]
    assert live["l"][0].tolist() == [1, 1]
    assert live["n"].item() == 1


def test_marks_are_looked_through_both_ways() -> None:
    live: dict[str, Any] = {"a": torch.zeros(2), "b": statehold.Gated((1, torch.zeros(1)))}
    round_trip({"a": statehold.Volatile(torch.ones(2)), "b": (2, torch.ones(1))}, live)
    assert live["a"].tolist() == [1, 1]
    assert live["b"].value[0] == 2
    assert live["b"].value[1].item() == 1


def test_a_state_that_cannot_take_values_is_refused() -> None:
    with pytest.raises(UsageError):
        prepare(types.MappingProxyType({"x": 1}), MemoryStep({"x": 1}).manifest)


# -- objects -----------------------------------------------------------------------------------


class Loader:
    """A data loader with its position, a large tensor and a generator's state."""

    def __init__(self, seed: int) -> None:
        self.position = seed
        self.table = torch.full((1000,), float(seed))
        self.loaded: list[dict[str, Any]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "table": self.table, "nested": ({"t": self.table[:2]},)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded.append(state)
        self.position, self.table = state["position"], state["table"]


def test_objects_get_their_state_once_and_no_second_copy_of_tensors() -> None:
    live = Loader(2)
    table = live.table
    round_trip({"loader": Loader(1)}, {"loader": live})
    assert len(live.loaded) == 1
    assert live.position == 1
    assert live.table.data_ptr() == table.data_ptr()
    assert live.table[0] == 1
    assert type(live.loaded[0]["nested"]) is tuple


# -- mismatches --------------------------------------------------------------------------------


def test_every_difference_is_listed_and_nothing_changes() -> None:
    saved = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
    live = nn.Sequential(nn.Linear(2, 2), nn.Linear(3, 3), nn.Linear(1, 1)).half()
    before = [raw(p) for p in live.parameters()]
    progress = {"tokens": 4, "epoch": 1}
    state = {"m": live, "progress": progress, "new": 1, "t": torch.ones(1)}
    error = mismatch(MemoryStep({"m": saved, "progress": {"tokens": 9}, "old": 2, "t": 5}), state)
    assert error.facts["m.0.weight"] == "expected F16 [2, 2], got F32 [2, 2] in the step"
    assert error.facts["m.1.weight"] == "expected F16 [3, 3], got F32 [3, 2] in the step"
    assert "nothing in the step" in error.facts["m.2.bias"]
    assert {"progress.epoch", "new", "old", "t"} <= error.facts.keys()
    assert [raw(p) for p in live.parameters()] == before
    assert progress == {"tokens": 4, "epoch": 1}


def test_long_lists_of_differences_are_cut_and_counted() -> None:
    error = mismatch(MemoryStep({"m": nn.ModuleList(nn.Linear(1, 1) for _ in range(30))}),
                     {"m": nn.ModuleList()})  # fmt: skip
    assert "60 places" in error.summary
    assert len(error.facts) == 21
    assert error.facts["..."] == "40 more"
    assert next(iter(error.facts)) == "m.0.weight"


@pytest.mark.parametrize(
    ("saved", "live"),
    [({"x": torch.ones(1)}, {"x": {}}), ({"x": 1}, {"x": torch.ones(1)}),
     ({"x": 1}, {"x": nn.Linear(1, 1)}), ({"x": [torch.ones(1)]}, {"x": [torch.ones(1)] * 2}),
     ({"x": [1]}, {"x": {"a": torch.ones(1)}}),
     ({"x": {}}, {"x": torch.optim.SGD([torch.ones(1)], lr=1)})],
)  # fmt: skip
def test_state_of_another_kind_is_a_mismatch(saved: dict[str, Any], live: dict[str, Any]) -> None:
    assert any(path.startswith("x") for path in mismatch(MemoryStep(saved), live).facts)


@pytest.mark.parametrize(
    "payload",
    [{"dtype": "O", "bytes": "AAAAAAAAAAA="}, {"dtype": "float64", "bytes": "AAAA"},
     {"dtype": "nonsense", "bytes": "AAAA"}],
)  # fmt: skip
def test_scalars_that_lie_are_named(payload: dict[str, str]) -> None:
    step = MemoryStep({"x": np.float64(1)})
    manifest = copy.copy(step.manifest)
    object.__setattr__(manifest, "state", {"x": {"$npscalar": payload}})
    with pytest.raises(ManifestError):
        prepare({"x": 0.0}, manifest)
