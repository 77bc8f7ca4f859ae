"""Training that goes on from a step equals training that never stopped, for every optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from statehold.errors import StateMismatchError, UnsupportedValueError
from statehold.state.capture import capture
from statehold.state.optimizers import is_standard, state_device
from statehold.state.rng import Rng
from support.memory_store import MemoryStep, raw

Make = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]


class Own(torch.optim.SGD):
    """An optimizer with a state_dict() of its own: it stores momentum under another name."""

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


def groups_of(make: Callable[..., torch.optim.Optimizer], **options: Any) -> Make:
    """Two parameter groups with options of their own."""

    def made(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        first, *rest = parameters
        return make([{"params": [first], "lr": 0.02}, {"params": rest, "weight_decay": 0.3}],
                    lr=0.01, **options)  # fmt: skip

    return made


def muon(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=0.01)


OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "adamw groups": groups_of(torch.optim.AdamW),
    "adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, maximize=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
    "sgd groups": groups_of(torch.optim.SGD, momentum=0.5),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "muon": muon,
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
    "own state_dict": lambda p: Own(p, lr=0.01, momentum=0.9),
    "global state": lambda p: WithGlobalState(p, lr=0.01, momentum=0.9),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(torch.relu(self.norm(self.first(x)))))


class Run:
    def __init__(self, make: Make, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Net()
        self.optimizer = make(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.state = {"optimizer": self.optimizer, "model": self.model,
                      "scheduler": self.scheduler, "rng": Rng()}  # fmt: skip

    def train(self, steps: int) -> list[str]:
        return [self._step() for _ in range(steps)]

    def _step(self) -> str:
        x, y = torch.randn(16, 6), torch.randint(0, 2, (16,))

        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(x), y)
            loss.backward()
            return loss

        loss = closure()
        if isinstance(self.optimizer, torch.optim.LBFGS):
            self.optimizer.step(closure)
        else:
            self.optimizer.step()
        self.scheduler.step()
        return loss.item().hex()

    def bits(self) -> Any:
        return plain(
            [self.model.state_dict(), self.optimizer.state_dict(), self.scheduler.state_dict()]
        )


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), str(value.device), raw(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return repr(value)


@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "used"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_bit_for_bit(name: str, fresh: bool) -> None:
    run = Run(OPTIMIZERS[name], seed=0)
    run.train(5)
    step = MemoryStep(run.state)
    expected = [run.train(5), run.bits()]

    resumed = Run(OPTIMIZERS[name], seed=1)
    if not fresh:
        resumed.train(2)
    before = addresses(resumed)
    step.restore(resumed.state)
    if name != "lbfgs":  # its history is lists, whose length changes
        assert before.items() <= addresses(resumed).items()
    assert [resumed.train(5), resumed.bits()] == expected


def addresses(run: Run) -> dict[str, int]:
    found = {name: tensor.data_ptr() for name, tensor in run.model.state_dict().items()}
    for index, parameter in enumerate(run.model.parameters()):
        state = run.optimizer.state.get(parameter, {})
        found |= {f"{index}.{key}": value.data_ptr() for key, value in state.items()
                  if isinstance(value, torch.Tensor)}  # fmt: skip
    return found


def test_state_is_named_by_parameters_wherever_the_optimizer_stands() -> None:
    run = Run(OPTIMIZERS["adamw"], seed=0)
    run.train(1)
    names = {item.spec.name: item.spec.eager for item in capture(run.state).tensors}
    assert names["optimizer.state.model.first.weight.exp_avg"] is False
    assert names["optimizer.state.model.last.bias.step"] is False
    assert capture(run.state).optimizers == [run.optimizer]


def test_parameters_of_no_module_go_by_their_index() -> None:
    weights = [torch.ones(3, requires_grad=True), torch.ones(4, requires_grad=True)]
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    found = capture({"w": weights, "opt": optimizer}).tensors
    names = {item.spec.name: item.spec.eager for item in found}
    assert names == {"w.0": False, "w.1": False,
                     "opt.state.0.momentum_buffer": False,
                     "opt.state.1.momentum_buffer": False}  # fmt: skip


def test_tensors_in_groups_are_eager_and_keep_their_place() -> None:
    run = Run(OPTIMIZERS["adamw tensor lr"], seed=0)
    run.train(2)
    names = {item.spec.name: item.spec.eager for item in capture(run.state).tensors}
    assert names["optimizer.param_groups.0.lr"] is True
    step = MemoryStep(run.state)
    other = Run(OPTIMIZERS["adamw tensor lr"], seed=1)
    lr = other.optimizer.param_groups[0]["lr"]
    step.restore(other.state)
    assert other.optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == run.optimizer.param_groups[0]["lr"].item()


def test_entries_that_the_step_lacks_are_removed() -> None:
    run = Run(OPTIMIZERS["sgd"], seed=0)
    run.train(1)
    step = MemoryStep(run.state)
    other = Run(OPTIMIZERS["sgd momentum"], seed=0)
    other.train(1)
    step.restore(other.state)
    assert not any(state.get("momentum_buffer") is not None
                   for state in other.optimizer.state.values())  # fmt: skip
    assert other.optimizer.param_groups[0]["momentum"] == 0


def test_other_parameters_are_a_mismatch() -> None:
    run = Run(OPTIMIZERS["adamw"], seed=0)
    step = MemoryStep(run.state)
    other = Run(OPTIMIZERS["adamw groups"], seed=0)
    before = other.bits()
    with pytest.raises(StateMismatchError) as caught:
        step.restore(other.state)
    assert "optimizer.param_groups" in caught.value.facts
    assert other.bits() == before


def test_hooks_on_state_dict_are_heard() -> None:
    run = Run(OPTIMIZERS["sgd momentum"], seed=0)
    run.train(1)
    assert is_standard(run.optimizer)
    run.optimizer.register_state_dict_post_hook(lambda _, state: {**state, "mine": 5})
    assert not is_standard(run.optimizer)
    assert capture(run.state).tree["optimizer"]["mine"] == 5


@pytest.mark.parametrize(
    ("key", "group", "device"),
    [("step", {}, "cpu"), ("step", {"fused": True}, "meta"), ("step", {"capturable": True}, "meta"),
     ("exp_avg", {}, "meta"), ("step", {"fused": None, "capturable": False}, "cpu")],
)  # fmt: skip
def test_where_missing_state_is_made(key: str, group: dict[str, Any], device: str) -> None:
    assert state_device(group, key, torch.empty(1, device="meta")).type == device


def test_state_on_another_device_than_the_saved_options_need_is_made_anew() -> None:
    run = Run(OPTIMIZERS["adamw fused"], seed=0)
    run.train(1)
    step = MemoryStep(run.state)
    resumed = Run(OPTIMIZERS["adamw"], seed=1)
    step.restore(resumed.state)
    assert resumed.optimizer.param_groups[0]["fused"] is True
    assert plain(resumed.optimizer.state_dict()) == plain(run.optimizer.state_dict())


def test_a_function_in_a_group_is_refused_with_its_path() -> None:
    run = Run(OPTIMIZERS["sgd"], seed=0)
    run.optimizer.param_groups[0]["rule"] = lambda x: x
    with pytest.raises(UnsupportedValueError) as caught:
        capture(run.state)
    assert caught.value.facts["path"] == "optimizer.param_groups.0.rule"


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=30),
    "multi step": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4, 4, 7]),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20),
    "restarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.LinearLR(o, total_iters=3),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [3]),
}  # fmt: skip


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_go_on(name: str, tensor_lr: bool) -> None:
    def make() -> tuple[torch.optim.Optimizer, Any]:
        lr = torch.tensor(0.1) if tensor_lr else 0.1
        optimizer = torch.optim.AdamW([torch.ones(2, requires_grad=True)], lr=lr)
        return optimizer, SCHEDULERS[name](optimizer)

    def advance(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
        rates = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            rates.append(float(optimizer.param_groups[0]["lr"]))
        return rates

    optimizer, scheduler = make()
    advance(optimizer, scheduler, 4)
    step = MemoryStep({"optimizer": optimizer, "scheduler": scheduler})
    expected = [advance(optimizer, scheduler, 5), plain(scheduler.state_dict())]
    optimizer, scheduler = make()
    step.restore({"optimizer": optimizer, "scheduler": scheduler})
    assert [advance(optimizer, scheduler, 5), plain(scheduler.state_dict())] == expected


def test_plateau_scheduler_and_scaler_go_on() -> None:
    optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for loss in (1.0, 2.0, 3.0):
        plateau.step(loss)
    step = MemoryStep({"plateau": plateau, "scaler": scaler})
    expected = copy.deepcopy(plateau.state_dict())
    fresh = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    other = torch.amp.GradScaler("cpu")
    step.restore({"plateau": fresh, "scaler": other})
    assert fresh.state_dict() == expected
    assert other.state_dict() == scaler.state_dict()
