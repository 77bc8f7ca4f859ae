"""Capture: what a step holds, what it is called, what is copied at once, what is refused."""

from __future__ import annotations

import argparse
import collections
import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import statehold
from statehold.errors import UnsupportedValueError, UsageError
from statehold.tensors import composed
from statehold.tensors.found import Seen
from statehold.tensors.kinds import capture, parts
from statehold.tensors.stepping import Stepping
from statehold.tensors.storable import version_of
from support.matching import captured, eager
from support.wrapped import compiled


class Everything(nn.Module):
    """Parameters in a list, tied ones, both kinds of buffers, extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))])
        self.embed = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.extra: Any = {"calls": 3, "seen": (1, 2)}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_the_entries_of_a_module() -> None:
    found = capture({"model": Everything()})
    names = [tensor.spec.name for tensor in found.tensors]
    assert sorted(names) == [
        "model.embed.weight", "model.kept", "model.layers.0", "model.layers.1",
    ]  # fmt: skip
    assert found.tree["model"]["head.weight"] == {"$tensor": "model.embed.weight"}
    assert found.tree["model"]["_extra_state"] == {"calls": 3, "seen": {"$tuple": [1, 2]}}
    assert eager({"model": Everything()}) == {"model.kept"}


def test_wrappers_leave_no_trace_in_names() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    expected = set(captured({"m": model}))
    partly = nn.Sequential(compiled(model[0]), model[1])
    assert any("_orig_mod" in name for name in partly.state_dict())
    assert set(captured({"m": partly})) == expected
    assert set(captured({"m": compiled(model)})) == expected
    assert set(captured({"m": nn.DataParallel(model)})) == expected
    assert set(captured({"m": nn.DataParallel(compiled(model))})) == expected


def test_a_module_whose_own_name_is_module_keeps_it() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)

    assert set(captured({"m": Outer()})) == {"m.module.weight", "m.module.bias"}


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_who_is_copied_before_save_returns() -> None:
    model, optimizer = trained()
    ema = nn.Linear(2, 2)
    momentum = optimizer.state[model.bias]["momentum_buffer"]
    state = {
        "model": model,
        "optimizer": optimizer,
        "ema": statehold.Volatile(ema),
        "raw": torch.ones(2),
        "gated": statehold.Gated({"a": [torch.ones(2)], "buffers": nn.BatchNorm1d(2)}),
        "won": statehold.Gated([statehold.Volatile(torch.ones(2)), torch.ones(3)]),
        "lost": statehold.Volatile([statehold.Gated(torch.ones(2))]),
        "slice of a parameter": model.weight.data[0],
        "alias of a moment": momentum[:1],
    }
    assert eager(state) == {
        "ema.weight", "ema.bias", "raw", "won.0", "lost.0",
        "gated.buffers.running_mean", "gated.buffers.running_var",
        "gated.buffers.num_batches_tracked",
    }  # fmt: skip


def test_a_volatile_alias_makes_the_parameter_eager() -> None:
    model, _ = trained()
    for state in (
        {"model": model, "copy": statehold.Volatile(model.weight)},
        {"copy": statehold.Volatile(model.weight), "model": model},
    ):
        found = capture(state)
        [name] = {t.spec.name for t in found.tensors if t.spec.eager}
        assert name == next(iter(state)) + (".weight" if "model" in next(iter(state)) else "")
        assert len(found.tensors) == 2


def test_what_a_stepping_optimizer_keeps_for_itself_is_lazy_wherever_it_is() -> None:
    model, optimizer = trained()
    momentum = optimizer.state[model.weight]["momentum_buffer"]
    optimizer.state[model.weight] |= {
        "gradient": model.weight.grad,  # backward changes it
        "parameter": model.weight.data,  # who swaps weights changes it
        "nested": {"deep": torch.ones(2)},
    }
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "alias": momentum[:1],
        "volatile": statehold.Volatile([optimizer.state[model.bias]["momentum_buffer"]]),
    }
    found = capture(state, stepping=[optimizer]).tensors
    lazy = {each.spec.name for each in found if not each.eager}
    assert lazy == {"optimizer.state.0.momentum_buffer", "alias"}
    assert [each.spec for each in found] == [each.spec for each in capture(state).tensors], (
        "ranks must lay out alike, and one of them may not know who steps"
    )
    assert all(each.eager for each in capture(state).tensors)


def test_optimizers_are_not_kept_alive_for_having_stepped() -> None:
    _, optimizer = trained()
    stepping = Stepping()
    stepping.saw(optimizer)
    assert stepping.take() == [optimizer]
    assert stepping.take() == []
    stepping.saw(optimizer)
    alive = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert alive() is None
    assert stepping.take() == []


def test_captured_tensors_keep_memory_and_version() -> None:
    model, _ = trained()
    found = capture({"model": model})
    address = model.weight.data_ptr()
    assert found.moved(eager=False) is None
    with torch.no_grad():
        model.bias.add_(1)
    assert found.moved(eager=False) == "model.bias"
    assert found.moved(eager=True) is None
    model.weight.data = torch.zeros(2, 2)
    [weight] = [t for t in found.tensors if t.spec.name == "model.weight"]
    assert weight.address == weight.alias.data_ptr() == address


def test_whoever_settles_first_decides() -> None:
    model, _ = trained()
    found = capture({"model": model})
    assert found.settle() is None
    with torch.no_grad():
        model.bias.add_(1)
    assert found.settle() is None, "a change that was let through"
    late = capture({"model": model})
    with torch.no_grad():
        model.bias.add_(1)
    assert late.settle() == late.settle() == "model.bias"


def test_the_tree_shares_nothing_with_the_state() -> None:
    state = {"progress": {"tokens": [1, 2]}}
    tree = capture(state).tree
    state["progress"]["tokens"].append(3)
    assert tree == {"progress": {"tokens": [1, 2]}}


def test_ties_need_the_same_elements() -> None:
    base = torch.arange(6.0)
    state = {"a": base, "b": base.view(2, 3), "c": base[:3], "d": base, "e": torch.empty(0)}
    found = capture(state | {"f": state["e"]})
    assert [t.spec.name for t in found.tensors] == ["a", "b", "c", "e", "f"]
    assert found.tree["d"] == {"$tensor": "a"}


class Named(collections.namedtuple("Named", "x")):
    pass


REFUSED: dict[str, Any] = {
    "a meta tensor": lambda: torch.empty(2, device="meta"),
    "a sparse tensor": lambda: torch.eye(2).to_sparse(),
    "a compressed tensor": lambda: torch.eye(2).to_sparse_csr(),
    "a quantized tensor": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "a nested tensor": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "a subclass": lambda: torch.ones(2).as_subclass(type("Mine", (torch.Tensor,), {})),
    "complex32": lambda: torch.ones(2, dtype=torch.complex32),
    "a lambda": lambda: lambda: 3,
    "a function": lambda: len,
    "a class": lambda: int,
    "an object": lambda: object(),
    "a namespace": lambda: argparse.Namespace(lr=3),
    "a named tuple": lambda: Named(3),
    "a defaultdict": lambda: collections.defaultdict(int),
    "an uninitialized parameter": lambda: nn.LazyLinear(3),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_and_where(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sparse CSR, nested and quantized tensors are announced
        value = REFUSED[name]()
    with pytest.raises(UnsupportedValueError) as caught:
        capture({"deep": [{"down": value}]})
    assert str(caught.value.facts["path"]).startswith("deep.0.down")
    assert caught.value.hint


def test_a_jagged_tensor_is_refused_by_name_though_its_class_is_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its shape has a number that no step can hold, which the save found out in the background."""
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with pytest.raises(UnsupportedValueError, match="a nested tensor") as caught:
        capture({"t": jagged})
    assert "allow_tensor_class" not in str(caught.value)
    monkeypatch.setattr(composed, "allowed", {})
    statehold.allow_tensor_class(type(jagged))
    with pytest.raises(UnsupportedValueError, match="a nested tensor"):
        capture({"t": jagged})


def test_a_tensor_of_onednn_is_not_called_sparse() -> None:
    with pytest.raises(UnsupportedValueError, match="a tensor of oneDNN cannot be stored"):
        capture({"t": torch.ones(2, 2).to_mkldnn()})


def test_uninitialized_parameters_are_called_that() -> None:
    with pytest.raises(UnsupportedValueError, match="an uninitialized parameter"):
        capture({"m": nn.LazyLinear(3)})


def test_cycles_are_refused() -> None:
    loop: list[Any] = []
    loop.append({"again": loop})
    with pytest.raises(UnsupportedValueError) as caught:
        capture({"a": loop})
    assert caught.value.facts["path"] == "a.0.again"


def test_depth_is_bounded_and_sharing_costs_nothing() -> None:
    deep: list[Any] = []
    for _ in range(3000):
        deep = [deep]
    with pytest.raises(UnsupportedValueError):
        capture({"a": deep})
    model = nn.Linear(1, 1)
    shared: list[Any] = [model]
    for _ in range(100):
        shared = [shared, shared]  # 2**100 containers, were they visited at every reference
    assert list(parts({"a": shared})) == [("a" + 101 * ".0", model)]


def test_names_that_collide() -> None:
    for state in (
        {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}},
        {"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1)},
        {1: torch.ones(1), "1": torch.zeros(1)},
    ):
        with pytest.raises(UnsupportedValueError) as caught:
            capture(state)
        assert caught.value.facts["path"] in {"a.b", "1"}


def test_a_state_is_a_mapping() -> None:
    with pytest.raises(UsageError):
        capture([torch.ones(1)])  # type: ignore[arg-type]


# -- the facts about PyTorch that tensors/storable.py relies on ----------------------------------


def moves(change: Any) -> bool:
    """Whether `change` moves the version counter that a detached alias sees."""
    model, optimizer = nn.Linear(3, 3), None
    alias = model.weight.detach()
    before = version_of(alias)
    optimizer = change(model)
    if optimizer is not None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return version_of(alias) != before


def in_place(model: nn.Module) -> None:
    with torch.no_grad():
        model.weight.add_(1)


def through_a_view(model: nn.Module) -> None:
    with torch.no_grad():
        model.weight[0].zero_()


def foreach(model: nn.Module) -> None:
    with torch.no_grad():
        torch._foreach_add_([model.weight], 1.0)


def through_data(model: nn.Module) -> None:
    model.weight.data.add_(1)


def through_numpy(model: nn.Module) -> None:
    model.weight.detach().numpy()[:] = 1


def by_optimizer(kind: Any, **options: Any) -> Any:
    return lambda model: kind(model.parameters(), 0.1, **options)


OPTIM = torch.optim
CHANGES = {
    "in place": (in_place, True),
    "through a view": (through_a_view, True),
    "foreach": (foreach, True),
    "adamw": (by_optimizer(OPTIM.AdamW, foreach=False), True),
    "adamw foreach": (by_optimizer(OPTIM.AdamW, foreach=True), True),
    "adamw fused": (by_optimizer(OPTIM.AdamW, fused=True), False),
    "sgd fused": (by_optimizer(OPTIM.SGD, fused=True), False),
    "adagrad fused": (by_optimizer(OPTIM.Adagrad, fused=True), False),
    "adafactor": (by_optimizer(OPTIM.Adafactor), True),
    "through .data": (through_data, False),
    "through NumPy": (through_numpy, False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_moves_the_version_counter(name: str) -> None:
    change, expected = CHANGES[name]
    assert moves(change) is expected


def test_inference_tensors_have_no_counter_and_are_copied_at_once() -> None:
    with torch.inference_mode():
        tensor = torch.ones(2)
    found = captured({"t": statehold.Gated(tensor)})["t"]
    assert found.version == -1
    assert found.spec.eager
    parameter = nn.Parameter(torch.ones(2))
    before = version_of(parameter)
    with torch.inference_mode():
        parameter.add_(1)
    assert version_of(parameter) != before


def test_changes_to_optimizer_state_are_seen() -> None:
    for options in ({"foreach": False}, {"foreach": True}):
        model = nn.Linear(3, 3)
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        found = captured({"model": model, "optimizer": optimizer})
        optimizer.step()
        for name, tensor in found.items():
            assert version_of(tensor.tensor) != tensor.version, (options, name)


def test_what_is_equal_in_the_next_capture_is_the_same_spec() -> None:
    """Plans then find at once that nothing has changed."""
    model, optimizer = trained()
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "x": torch.ones(3)}
    seen = Seen()
    first = capture(state, seen=seen).tensors
    again = capture(state, seen=seen).tensors
    assert all(a.spec is b.spec for a, b in zip(first, again, strict=True))
    changes = [torch.ones(4), torch.ones(4, dtype=torch.int32), statehold.Gated(torch.ones(4))]
    for value in changes:
        expected = capture(state | {"x": value}).tensors
        found = capture(state | {"x": value}, seen=seen).tensors
        assert [each.spec for each in found] == [each.spec for each in expected]


def test_views_at_one_address_are_told_apart() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    views = {"a": base, "b": base[:2], "c": base.t(), "d": base[:2], "e": base.view(torch.int32)}
    found = capture(views)
    assert [each.spec.name for each in found.tensors] == ["a", "b", "c", "e"]


def test_parameters_that_no_part_of_the_state_holds_are_told() -> None:
    model, loss = torch.nn.Linear(2, 2), torch.nn.Bilinear(2, 2, 1)
    alone = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters(), alone])
    state = {"model": model, "optimizer": optimizer}
    told = capture({**state, "alone": alone}).doubts
    assert len(told) == 2
    assert 'a parameter of "optimizer" are not saved: number 2, of shape [1, 2, 2]' in told[0]
    assert "number 3, of shape [1]" in told[1]
    assert not capture({**state, "loss": loss.state_dict(), "more": [alone]}).doubts
    assert not capture({"weights": model.state_dict(), "optimizer": optimizer}).doubts
