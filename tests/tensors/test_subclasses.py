"""Tensors that are made of others: saved by their parts, restored in place or put together anew."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

import statehold
from statehold.errors import StateMismatchError, TornSnapshot, UnsupportedValueError, UsageError
from statehold.tensors import composed
from statehold.tensors.storable import version_of
from support.faults import SMALL, Holdup
from support.matching import MemoryStep, captured, eager
from support.quantized import Around, Copying, Made, Other, Small, layer


@pytest.fixture(autouse=True)
def allowed() -> Iterator[None]:
    statehold.allow_tensor_class(Made, rowwise=["codes", "scale"], shared=["levels"])
    statehold.allow_tensor_class(Around)
    statehold.allow_tensor_class(Copying)
    yield
    composed.allowed.clear()


def parts(tensor: Any) -> list[list[Any]]:
    return [getattr(tensor, name).tolist() for name in Made.names]


def trained(lr: float = 0.1) -> tuple[nn.Module, Small]:
    module = nn.Linear(5, 6, bias=False)
    optimizer = Small(module.parameters(), lr)
    for _ in range(2):
        module.weight.grad = torch.randn_like(module.weight)
        optimizer.step()
    return module, optimizer


def test_names_and_nodes() -> None:
    module = layer()
    step = MemoryStep({"m": module})
    assert list(step.manifest.tensors) == [
        "m.weight.scale", "m.weight.levels", "m.bias", "m.weight.codes"
    ]  # fmt: skip
    node = step.manifest.state["m"]["weight"]["$subclass"]
    assert node["class"] == "support.quantized.Made"
    assert node["context"] == {"$tuple": ["rows", 1.5, {"$torch": {"dtype": "float32"}}]}
    assert (node["shape"], node["stride"], node["part"]) == ([6, 5], [5, 1], None)
    assert node["tensors"]["codes"] == {"$tensor": "m.weight.codes"}
    assert step.manifest.version == 3
    assert MemoryStep({"m": module.bias}).manifest.version == 1


def test_inner_tensors_are_filled_in_place() -> None:
    saved, live = layer(), layer()
    weight = live.weight
    places = [getattr(weight, name).data_ptr() for name in Made.names]
    versions = version_of(weight.codes)
    report = MemoryStep({"m": saved}).restore({"m": live}).report
    assert live.weight is weight
    assert [getattr(weight, name).data_ptr() for name in Made.names] == places
    assert parts(weight) == parts(saved.weight)
    assert version_of(weight.codes) > versions
    assert report.loaded == ("m.weight", "m.bias")


def test_a_fresh_optimizer_gets_them() -> None:
    module, optimizer = trained()
    step = MemoryStep({"m": module, "o": optimizer})
    other = nn.Linear(5, 6, bias=False)
    fresh = Small(other.parameters(), 9.0)
    step.restore({"m": other, "o": fresh})
    mean = fresh.state[other.weight]["mean"]
    assert type(mean) is Made
    assert mean.context == ("rows", 1.5, torch.float32)
    assert parts(mean) == parts(optimizer.state[module.weight]["mean"])
    gradient = torch.randn(6, 5)
    for part, each in ((module, optimizer), (other, fresh)):
        part.weight.grad = gradient
        each.step()
    assert torch.equal(module.weight, other.weight)


def test_a_used_optimizer_keeps_its_tensors() -> None:
    module, optimizer = trained()
    other, used = trained(9.0)
    mean = used.state[other.weight]["mean"]
    MemoryStep({"m": module, "o": optimizer}).restore({"m": other, "o": used})
    assert used.state[other.weight]["mean"] is mean
    assert parts(mean) == parts(optimizer.state[module.weight]["mean"])


def test_anything_may_hold_them() -> None:
    ema = Made.of(torch.randn(3, 4))
    around = Around(Made.of(torch.randn(2, 2)), None)
    step = MemoryStep({"ema": ema, "list": [around, ema]})
    assert [*step.manifest.tensors][-1] == "list.0.inner.codes"
    live = {"ema": Made.of(torch.zeros(3, 4)), "list": []}
    step.restore(live)
    assert parts(live["ema"]) == parts(ema)
    assert parts(live["list"][0].inner) == parts(around.inner)
    assert parts(live["list"][1]) == parts(ema)


def test_which_are_lazy() -> None:
    module, optimizer = trained()
    state = {"m": module, "o": optimizer, "same": optimizer.state[module.weight]["mean"]}
    assert eager(state) == set()
    assert eager({"m": layer(), "ema": Made.of(torch.ones(2, 2))}) == {
        f"ema.{name}" for name in Made.names
    }
    assert not eager({"g": statehold.Gated(Made.of(torch.ones(2, 2)))})


def test_ties_are_kept() -> None:
    def tied() -> nn.Module:
        module = nn.Module()
        module.one, module.other = layer(), nn.Module()
        module.other.weight = module.one.weight
        return module

    saved, live = tied(), tied()
    step = MemoryStep({"m": saved})
    assert len(step.manifest.tensors) == 4
    step.restore({"m": live})
    assert live.one.weight is live.other.weight
    assert parts(live.other.weight) == parts(saved.one.weight)


class Preference(enum.Enum):
    FAST = 1


def test_contexts_that_are_not_plain_are_refused_by_name() -> None:
    made = Made.of(torch.ones(2, 2), {"block": 4, "preference": Preference.FAST})
    with pytest.raises(UnsupportedValueError) as caught:
        MemoryStep({"m": {"w": made}})
    assert caught.value.facts["path"] == "m.w.<context>.preference"
    assert caught.value.facts["class"] == "support.quantized.Made"


def test_classes_that_nobody_allowed_are_refused() -> None:
    with pytest.raises(UnsupportedValueError) as caught:
        MemoryStep({"w": Other.of(torch.ones(2, 2))})
    assert caught.value.facts == {"path": "w", "type": "support.quantized.Other"}
    assert "statehold.allow_tensor_class" in str(caught.value)


def test_the_hint_names_no_function_that_would_refuse_the_class() -> None:
    class Mine(nn.Parameter):
        """Without __tensor_flatten__."""

    with pytest.raises(UsageError):
        statehold.allow_tensor_class(Mine)
    with pytest.raises(UnsupportedValueError) as caught:
        MemoryStep({"w": Mine(torch.ones(2))})
    assert caught.value.hint == (
        "give its class __tensor_flatten__ and __tensor_unflatten__ and allow it with "
        "statehold.allow_tensor_class, or store the tensors it is made of"
    )


def test_no_class_is_looked_up_because_a_step_names_it() -> None:
    step = MemoryStep({"w": Made.of(torch.ones(2, 2))})
    composed.allowed.clear()
    with pytest.raises(UnsupportedValueError) as caught:
        step.prepare({"w": None})
    assert caught.value.facts["class"] == "support.quantized.Made"


def test_only_classes_that_can_be_taken_apart_are_allowed() -> None:
    with pytest.raises(UsageError):
        statehold.allow_tensor_class(nn.Parameter)
    with pytest.raises(UsageError):
        statehold.allow_tensor_class(Made.of(torch.ones(2, 2)))
    for given in ({"rowwise": "codes"}, {"shared": "levels"}):  # a text is letters, none a tensor
        with pytest.raises(UsageError, match="a list of names"):
            statehold.allow_tensor_class(Made, **given)


def test_a_class_that_copies_is_filled_in_place_only() -> None:
    saved, live = Copying.of(torch.randn(2, 2)), Copying.of(torch.zeros(2, 2))
    step = MemoryStep({"w": saved})
    step.restore({"w": live})
    assert parts(live) == parts(saved)
    with pytest.raises(StateMismatchError, match="does not put its tensors together"):
        step.prepare({"w": None})


LIVE = {
    "another context": lambda: Made.of(torch.ones(6, 5), ("rows", 2.0, torch.float32)),
    "another shape": lambda: Made.of(torch.ones(6, 4)),
    "another class": lambda: Copying.of(torch.ones(6, 5)),
    "a plain tensor": lambda: torch.ones(6, 5),
}


@pytest.mark.parametrize("build", LIVE.values(), ids=LIVE)
def test_differences_are_listed_before_anything_changes(build: Any) -> None:
    saved, live = layer(), layer()
    live.weight = nn.Parameter(build(), requires_grad=False)
    before = live.bias.tolist()
    with pytest.raises(StateMismatchError) as caught:
        MemoryStep({"m": saved}).prepare({"m": live})
    assert list(caught.value.facts) == ["m.weight"]
    assert "support.quantized.Made" in caught.value.facts["m.weight"]
    assert live.bias.tolist() == before


def test_a_plain_tensor_of_the_step_does_not_fit_one() -> None:
    with pytest.raises(StateMismatchError) as caught:
        MemoryStep({"w": torch.ones(6, 5)}).prepare({"w": Made.of(torch.ones(6, 5))})
    assert caught.value.facts["w"] == (
        "expected support.quantized.Made [6, 5], got F32 [6, 5] in the step"
    )


def test_names_of_inner_tensors_collide_with_none() -> None:
    with pytest.raises(UnsupportedValueError, match="the same name"):
        MemoryStep({"w": Made.of(torch.ones(2, 2)), "w.codes": torch.ones(3)})


def test_what_changes_inside_is_noticed() -> None:
    module, optimizer = trained()
    found = statehold.tensors.kinds.capture({"m": module, "o": optimizer})
    optimizer.state[module.weight]["mean"].codes.add_(1)
    assert found.moved(eager=False) == "o.state.m.weight.mean.codes"


def test_a_replaced_inner_tensor_is_saved_from_where_it_was() -> None:
    made = Made.of(torch.randn(2, 2))
    state = {"w": statehold.Gated(made)}
    codes = made.codes.tolist()
    found = captured(state)
    made.codes = torch.zeros(2, 2, dtype=torch.int8)
    assert found["w.codes"].tensor.tolist() == codes
    assert captured(state)["w.codes"].address == made.codes.data_ptr()


def test_through_a_checkpointer(tmp_path: Path) -> None:
    module, optimizer = trained()
    quantized = layer()
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        save = ckpt.save(3, {"m": module, "o": optimizer, "q": quantized})
        save.wait("committed")
    other, fresh, blank = nn.Linear(5, 6, bias=False), None, layer()
    fresh = Small(other.parameters())
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        got = ckpt.restore({"m": other, "o": fresh, "q": blank})
    assert got == 3
    assert parts(blank.weight) == parts(quantized.weight)
    assert parts(fresh.state[other.weight]["mean"]) == parts(optimizer.state[module.weight]["mean"])
    (file,) = (tmp_path / "run").glob("step-*/*.safetensors")
    with safe_open(file, "pt") as stock:
        assert torch.equal(stock.get_tensor("q.weight.codes"), quantized.weight.codes)


def test_a_torn_one_fails_the_save(tmp_path: Path) -> None:
    made = Made.of(torch.randn(1 << 11, 1 << 11))
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        holdup = Holdup(ckpt)
        save = ckpt.save(1, {"w": statehold.Gated(made)})
        made.codes.add_(1)  # without ckpt.gate()
        holdup.release()
        with pytest.raises(TornSnapshot, match=r"w\.codes"):
            save.wait("committed")
