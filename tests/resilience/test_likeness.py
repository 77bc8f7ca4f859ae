"""What the members of a job must have alike: what a digest covers, and when; what it leaves out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from statehold import Rng
from statehold.errors import UsageError
from statehold.resilience import likeness
from statehold.resilience.likeness import Likeness, refusal
from statehold.resilience.state_bytes import Offer

State = dict[str, Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(40, 60)
        self.norm = nn.BatchNorm1d(60)
        self.picture = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.narrow = nn.Parameter(torch.randn(33).to(torch.bfloat16))
        self.nothing = nn.Parameter(torch.empty(0, 4))

    def loss(self) -> torch.Tensor:
        hidden = self.norm(self.first(torch.randn(8, 40)))
        picture = self.picture(torch.randn(2, 3, 4, 4))
        return hidden.square().sum() + picture.square().sum() + self.narrow.float().sum()


def state_of(steps: int = 2) -> State:
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(steps):
        optimizer.zero_grad()
        model.loss().backward()
        optimizer.step()
        scheduler.step()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "best": 0.5}


def _flip(tensor: torch.Tensor) -> None:
    tensor.detach().reshape(-1).view(torch.uint8)[1] ^= 4


CHANGES: dict[str, Callable[[State], object]] = {
    "model.first.weight": lambda it: _flip(it["model"].first.weight),
    "model.narrow": lambda it: _flip(it["model"].narrow),
    "model.norm.running_mean": lambda it: _flip(it["model"].norm.running_mean),
    "optimizer.state.model.first.bias.exp_avg": lambda it: _flip(
        it["optimizer"].state[it["model"].first.bias]["exp_avg"]
    ),
    "optimizer.param_groups.0.lr": lambda it: it["optimizer"].param_groups[0].update(lr=0.2),
    "scheduler.last_epoch": lambda it: vars(it["scheduler"]).update(last_epoch=7),
    "best.$float": lambda it: it.update(best=math.nan),
    "model.first.bias.requires_grad": lambda it: it["model"].first.bias.requires_grad_(False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_differs_is_in_the_digest_and_has_a_name(name: str) -> None:
    one, two = state_of(), state_of()
    like, other = Likeness(one), Likeness(two)
    assert like.digest() == other.digest() == like.digest()
    assert like.digest(3) == other.digest(3)
    CHANGES[name](two)
    assert like.digest() != other.digest()
    assert like.digest(3) != other.digest(3)  # it is a small state
    mine, theirs = like.parts(), other.parts()
    differ = [key for key in {**theirs, **mine} if mine.get(key) != theirs.get(key)]
    assert name in differ
    assert all(key.startswith(name.partition(".$")[0]) for key in differ)


def test_a_tensor_of_one_element_may_have_any_stride() -> None:
    wide, narrow = {"a": torch.arange(4.0)[1::2][:1]}, {"a": torch.ones(1)}
    assert wide["a"].stride() == (2,)
    assert Likeness(wide).digest() == Likeness(narrow).digest()
    found = torch.zeros(4, dtype=torch.uint8)
    Offer(wide).run.read(0, found)
    assert found.view(torch.float32).tolist() == [1.0]


def test_an_update_that_was_skipped_is_seen() -> None:
    assert Likeness(state_of(2)).digest(0) != Likeness(state_of(3)).digest(0)


def test_generators_and_loaders_are_each_replicas_own() -> None:
    one, two = state_of(), state_of()
    for state in (one, two):
        state["more"] = {"rng": Rng(), "data": DataLoader([1, 2, 3])}
    like = Likeness(one).digest()
    torch.rand(3)
    next(iter(two["more"]["data"]))
    assert Likeness(two).digest() == like


@pytest.mark.parametrize("turns", [1, 4, likeness.TURNS_MAX])
def test_every_byte_is_seen_within_so_many_steps(
    monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    state = {"moments": torch.zeros(977), "small": torch.zeros(2), "all": torch.zeros(1000).t()}
    nbytes = sum(each.nbytes for each in state.values())
    monkeypatch.setattr(likeness, "SMALL_BYTES", 8)
    monkeypatch.setattr(likeness, "SHARE_BYTES_MIN", -(-nbytes // turns))
    like = Likeness(state)
    assert like.turns() == turns
    steps = range(5, 5 + turns)
    before = [like.digest(step) for step in steps]
    for each in (state["moments"], state["all"]):
        for byte in range(0, each.nbytes, 61):
            each.view(torch.uint8)[byte] ^= 1
            seen = [like.digest(step) != was for step, was in zip(steps, before, strict=True)]
            assert sum(seen) == 1
            each.view(torch.uint8)[byte] ^= 1
    state["small"][0] = 1
    assert all(like.digest(step) != was for step, was in zip(steps, before, strict=True))


class Observed(nn.Module):
    """Calls `change` in forward, which changes a buffer."""

    def __init__(self, change: Callable[[Observed], object], *, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("most", torch.ones(3), persistent=persistent)
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change(self)
        return x


BUFFERS: dict[str, Callable[[Observed], object]] = {
    "in place": lambda it: it.most.add_(1),
    "through data": lambda it: it.most.data.add_(1),
    "another tensor": lambda it: setattr(it, "most", it.most + 1),
}


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("change", BUFFERS)
def test_a_microbatch_that_changes_a_buffer_is_refused(change: str, *, persistent: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), Observed(BUFFERS[change], persistent=persistent))
    like = Likeness({"model": model})
    like.note()
    like.check()
    model(torch.ones(1, 2))
    with pytest.raises(UsageError, match="changes a buffer") as refused:
        like.check()
    assert refused.value.facts == {"buffer": "model.1.most"}


def test_a_large_buffer_is_read_when_its_version_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(likeness, "SMALL_BYTES", 4)
    model = Observed(BUFFERS["in place"])
    like = Likeness({"model": model})
    like.note()
    model.most.copy_(torch.ones(3))
    like.check()
    model(torch.ones(1))
    with pytest.raises(UsageError, match="changes a buffer"):
        like.check()


@pytest.mark.parametrize(
    "model",
    [
        nn.BatchNorm1d(3).eval(),
        nn.BatchNorm1d(3, track_running_stats=False),
        nn.LayerNorm(3),
        Observed(lambda it: it.most.copy_(torch.ones(3))),
        Observed(lambda it: setattr(it, "most", torch.ones(len(it.most) + 1))),  # a cache grows
    ],
    ids=["eval", "no statistics", "LayerNorm", "equal values", "a cache"],
)
def test_buffers_that_keep_their_values_are_none_of_it(model: nn.Module) -> None:
    like = Likeness({"model": model})
    like.note()
    model(torch.ones(4, 3))
    like.check()


def _head(state: State) -> nn.Parameter:
    state["head"] = nn.Linear(60, 1)
    state["optimizer"].add_param_group({"params": list(state["head"].parameters())})
    return next(state["head"].parameters())


def _late(state: State) -> nn.Parameter:
    state["model"].late = nn.Linear(60, 60)
    state["optimizer"].add_param_group({"params": list(state["model"].late.parameters())})
    return next(state["model"].late.parameters())


def _of_an_optimizer(state: State) -> nn.Parameter:
    found = nn.Parameter(torch.ones(3))
    state["more"] = [torch.optim.SGD([nn.Parameter(torch.ones(2)), found], lr=0.1)]
    return found


OUTSIDE: dict[str, Callable[[State], nn.Parameter]] = {
    "head.weight": _head,
    "model.late.weight": _late,
    "number 1 of more.0": _of_an_optimizer,
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_gradient_that_nobody_sums_is_refused_by_the_name_of_its_parameter(name: str) -> None:
    state = state_of()
    like = Likeness(state, summed=list(state["model"].parameters()))
    like.note()
    param = OUTSIDE[name](state)
    for _ in range(2):  # it gets a first gradient, and one is added to it
        param.sum().backward()
        with pytest.raises(UsageError, match="does not sum") as refused:
            like.check()
        assert refused.value.facts["parameter"] == name
        like.note()
        like.check()


def test_gradients_that_no_microbatch_has_given_are_none_of_it() -> None:
    """Masters in another type, and averaged weights: the program sets what they have."""
    state = state_of()
    state["model"].norm.eval()
    masters = [nn.Parameter(each.detach().double()) for each in state["model"].parameters()]
    state["masters"] = torch.optim.SGD(masters, lr=0.1)
    state["averaged"] = torch.optim.swa_utils.AveragedModel(state["model"])
    like = Likeness(state, summed=list(state["model"].parameters()))
    for _ in range(2):
        like.note()
        state["model"].loss().backward()
        like.check()
        for master, each in zip(masters, state["model"].parameters(), strict=True):
            master.grad = None if each.grad is None else each.grad.double()


def test_a_refusal_says_who_what_and_what_is_safe() -> None:
    others = {"a": {"lr": "0.1", "x": "1"}, "b": {"lr": "0.2", "x": "1"}}
    facts = refusal("a", others, step=40, turns=32).facts
    assert (facts["replica"], facts["other"], facts["what"]) == ("a", "b", "lr")
    assert facts["lr"] == "here 0.1, there 0.2"
    assert facts["safe"] == "saved steps up to 8: the members were alike there"
