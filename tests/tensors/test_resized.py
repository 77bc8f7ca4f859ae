"""Modules with code of their own for loading: what load_state_dict() takes, and does."""

from __future__ import annotations

import copy
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from statehold.errors import StateMismatchError
from statehold.format.selection import Selection
from support.matching import MemoryStep


class Book(nn.Module):
    """A code book that grows: a parameter and a buffer of as many rows as were saved."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.full((rows, 2), float(rows)))
        self.register_buffer("used", torch.full((rows,), rows))
        self.log: list[int] = []
        self.inside = nn.Linear(2, 2)

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.log.append(len(state[f"{prefix}rows"]))
        self.rows.data = self.rows.data.new_empty(state[f"{prefix}rows"].shape)
        self.used.resize_(state[f"{prefix}used"].shape)
        super()._load_from_state_dict(state, prefix, *rest)


class Reaching(Book):
    """One that clears what is in it, which a module that is only asked must not reach."""

    def _load_from_state_dict(self, *arguments: Any) -> None:
        for each in self.children():
            each.weight.data.zero_()
        super()._load_from_state_dict(*arguments)


class Clever(Book):
    """One that looks at the values, which are not there before they are read."""

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        assert state[f"{prefix}used"].sum().item() >= 0
        super()._load_from_state_dict(state, prefix, *rest)


class Hooked(nn.Module):
    """One with a hook, which reaches the module itself."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.register_buffer("used", torch.full((rows,), rows))
        self.register_load_state_dict_pre_hook(
            lambda module, state, prefix, *_: module.used.resize_(state[f"{prefix}used"].shape)
        )


def observed(train: bool) -> nn.Module:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantization = torch.ao.quantization
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        model = quantization.prepare_qat(model.train())
        if train:
            model(torch.randn(8, 4))
    return model


def bits(module: nn.Module) -> dict[str, Any]:
    return {name: (each.shape, each.tolist()) for name, each in module.state_dict().items()}


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("wrap", [lambda m: m, nn.DataParallel, torch.compile])
def test_a_fresh_module_takes_what_was_learned(wrap: Any) -> None:
    saved = nn.Sequential(observed(True), Book(5))
    saved[1].used.fill_(7)
    live = nn.Sequential(observed(False), Book(2))
    optimizer = torch.optim.SGD(live.parameters(), lr=1.0)
    step = MemoryStep({"model": saved})
    report = step.restore({"model": wrap(live)}).report
    assert bits(live) == bits(saved)
    assert "model.1.rows" in report.loaded
    assert optimizer.param_groups[0]["params"] == list(live.parameters())


@pytest.mark.parametrize("other", [nn.BatchNorm1d, lambda rows: nn.Linear(rows, 2), Clever, Hooked])
def test_nothing_changes_where_a_module_may_not_take_it(other: Any) -> None:
    step = MemoryStep({"a": {"model": nn.ModuleList([Reaching(5), other(5)])}})
    live = nn.ModuleList([Reaching(2), other(2)])
    before, log = bits(live), copy.copy(live[0].log)
    with pytest.raises(StateMismatchError) as caught:
        step.prepare({"a": {"model": live}})
    assert bits(live) == before
    assert live[0].log == log
    assert all(name.startswith("a.model.1.") for name in caught.value.facts)
    by_hand = 'load_state_dict(statehold.load("RUN@1", "a.model"))'
    assert (by_hand in caught.value.hint) == (other in (Clever, Hooked))


def modules_themselves(module: nn.Module) -> nn.Module:
    return module


class Prepared(nn.Linear):
    """One with values that are made of its weight, as a cache or the folded scales of a layer."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.made = self.weight.detach() * 2

    def prepare(self, *_: Any) -> None:
        self.made = self.weight.detach() * 2


class Overriding(Prepared):
    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        result = super().load_state_dict(*arguments, **options)
        self.prepare()
        return result


class OverridingInside(Prepared):
    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        self.prepare()


class HookedAfter(Prepared):
    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(Prepared.prepare)


@pytest.mark.parametrize(
    "wrap", [modules_themselves, nn.Sequential, nn.DataParallel, torch.compile]
)
@pytest.mark.parametrize("kind", [Overriding, OverridingInside, HookedAfter])
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_what_a_module_does_when_it_is_loaded_is_done(kind: Any, wrap: Any) -> None:
    saved, live, loaded = kind(), kind(), kind()
    wrap(loaded).load_state_dict(wrap(saved).state_dict())
    MemoryStep({"model": wrap(saved)}).restore({"model": wrap(live)}, selection=Selection())
    assert torch.equal(live.weight, saved.weight)
    if torch.equal(loaded.made, saved.made):  # torch does not ask an overriding module in another
        assert torch.equal(live.made, saved.made)
    else:
        assert kind is Overriding
        assert wrap is not modules_themselves


def test_a_module_that_keeps_its_weights_is_not_loaded() -> None:
    step = MemoryStep({"model": HookedAfter(), "other": nn.Linear(2, 2)})
    live = HookedAfter()
    live.made = torch.zeros(2, 2)
    step.restore({"model": live, "other": nn.Linear(2, 2)}, selection=Selection(skip=["model"]))
    assert not live.made.any()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_a_module_that_fails_when_it_is_loaded_is_named() -> None:
    saved, live = HookedAfter(), HookedAfter()
    live.register_load_state_dict_post_hook(lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError) as caught:
        MemoryStep({"model": saved}).restore({"model": live})
    assert 'while "model" was restored' in "".join(caught.value.__notes__)


class Renaming(nn.Sequential):
    """One that knows the names of its first version."""

    def load_state_dict(self, state: Any, *arguments: Any, **options: Any) -> Any:
        state = {name.removeprefix("old."): each for name, each in state.items()}
        return super().load_state_dict(state, *arguments, **options)


class Padding(nn.Embedding):
    """One that keeps its own rows where the saved one has fewer."""

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        own = self.weight.detach().clone()
        own[: len(state[f"{prefix}weight"])] = state[f"{prefix}weight"]
        state[f"{prefix}weight"] = own
        super()._load_from_state_dict(state, prefix, *rest)


def small() -> nn.Module:
    return nn.Embedding(2, 2)


def of_first_version() -> nn.Module:
    model = nn.Module()
    model.old = nn.Sequential(nn.Linear(2, 2))
    return model


def with_old_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(2, 2)))


def with_new_norm() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))


@pytest.mark.parametrize(
    ("saved", "live"),
    [
        (of_first_version, lambda: Renaming(nn.Linear(2, 2))),
        (with_old_norm, with_new_norm),
        (small, lambda: Padding(3, 2)),
    ],
)
def test_a_module_with_a_way_of_its_own_is_sent_there(saved: Any, live: Any) -> None:
    made = saved()
    live().load_state_dict(made.state_dict())
    with pytest.raises(StateMismatchError) as caught:
        MemoryStep({"model": made}).prepare({"model": live()})
    assert (
        'skip=["model"]) and load_state_dict(statehold.load("RUN@1", "model"))' in caught.value.hint
    )


@pytest.mark.parametrize("live", [nn.BatchNorm1d, nn.LayerNorm])
def test_modules_of_torch_have_no_way_of_their_own(live: Any) -> None:
    step = MemoryStep({"model": nn.ModuleList([nn.BatchNorm1d(2)])})
    with pytest.raises(StateMismatchError) as caught:
        step.prepare({"model": nn.ModuleList([live(3)])})
    assert "load_state_dict" not in caught.value.hint
    assert "cast=True" not in caught.value.hint  # the dtypes are the same


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_is_advised_where_only_dtypes_differ(dtype: torch.dtype) -> None:
    step = MemoryStep({"a": torch.ones(3)})
    for shape, is_advised in ((3, True), (4, False)):
        with pytest.raises(StateMismatchError) as caught:
            step.prepare({"a": torch.ones(shape, dtype=dtype)})
        assert ("cast=True" in caught.value.hint) == is_advised


class Scaled(nn.Module):
    """As before torch 0.4, a scale of one element; now of none."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full(shape, float(len(shape))))
        self.register_buffer("count", torch.full(shape, 7 + len(shape)))
        self.bias = nn.Parameter(torch.full((2,), float(len(shape))))


class ScaledInAWayOfItsOwn(Scaled):
    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state, prefix, *rest)


@pytest.mark.parametrize("kind", [Scaled, ScaledInAWayOfItsOwn])
@pytest.mark.parametrize("is_inside", [False, True])
def test_one_element_goes_into_a_tensor_without_dimensions_as_in_torch(
    kind: type[Scaled], is_inside: bool
) -> None:
    made = (lambda *shape: nn.Sequential(kind(*shape))) if is_inside else kind
    saved, live = made(1), made()
    kept = [each.data_ptr() for each in live.state_dict().values()]
    MemoryStep({"model": saved}).restore({"model": live})
    values = [each.tolist() for each in live.state_dict().values()]
    assert values == [1.0, [1.0, 1.0], 8]
    assert [each.data_ptr() for each in live.state_dict().values()] == kept
    for shape in ((2,), (1, 1)):  # torch takes the first of two, too
        with pytest.raises(StateMismatchError):
            MemoryStep({"model": made(*shape)}).prepare({"model": made()})
    with pytest.raises(StateMismatchError):
        MemoryStep({"model": made()}).prepare({"model": made(1)})
