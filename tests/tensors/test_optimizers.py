"""Optimizers, schedulers and their like: what is resumed continues bit for bit."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import statehold
from statehold.errors import StateMismatchError
from statehold.format.selection import Selection
from support.faults import DEADLINE_S, SMALL, Holdup
from support.inside import trainer
from support.matching import MemoryStep, eager

Build = Callable[[nn.Module], torch.optim.Optimizer]


class Overriding(torch.optim.SGD):
    """Brings its own state_dict(), as some wrappers do."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"mine": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        mine = state.pop("mine")
        assert mine == 3
        super().load_state_dict(state)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    first, *others = model.parameters()
    return [{"params": [first], "lr": 0.01}, {"params": others, "lr": 0.02, "weight_decay": 0.1}]


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.dim() == 2]


OPTIMIZERS: dict[str, Build] = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), 0.01),
    "adamw foreach": lambda m: torch.optim.AdamW(m.parameters(), 0.01, foreach=True),
    "adamw fused": lambda m: torch.optim.AdamW(m.parameters(), 0.01, fused=True),
    "adamw one by one": lambda m: torch.optim.AdamW(m.parameters(), 0.01, foreach=False),
    "adamw tensor lr": lambda m: torch.optim.AdamW(m.parameters(), torch.tensor(0.01)),
    "adamw groups": lambda m: torch.optim.AdamW(groups(m)),
    "adamw named": lambda m: torch.optim.AdamW(m.named_parameters(), 0.01),
    "adam amsgrad": lambda m: torch.optim.Adam(m.parameters(), 0.01, amsgrad=True),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), 0.1),
    "sgd momentum": lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, nesterov=True),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters(), 0.01),
    "muon": lambda m: torch.optim.Muon(matrices(m), 0.01),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), 0.01, momentum=0.5, centered=True),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), 0.01),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), 0.01),
    "lbfgs": lambda m: torch.optim.LBFGS(m.parameters(), 0.1, max_iter=3, history_size=3),
    "overriding": lambda m: Overriding(m.parameters(), 0.1, momentum=0.9),
}

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "multi step": lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 6, 8]),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 3), lr_scheduler.ExponentialLR(o, 0.9)], [4]
    ),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 12),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
}


class Run:
    """A model, an optimizer and perhaps a scheduler; data come from torch's generator."""

    def __init__(self, build: Build, schedule: Callable[..., Any] | None = None) -> None:
        self.model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        self.optimizer = build(self.model)
        self.scheduler = schedule(self.optimizer) if schedule else None

    @property
    def state(self) -> dict[str, Any]:
        state = {"model": self.model, "optimizer": self.optimizer, "rng": statehold.Rng()}
        return state | ({"scheduler": self.scheduler} if self.scheduler else {})

    def step(self) -> str:
        data, goal = torch.randn(8, 6), torch.randn(8, 3)

        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = (self.model(data) - goal).square().mean()
            loss.backward()
            return loss

        loss = self.optimizer.step(closure).item()
        if isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(loss)
        elif self.scheduler:
            self.scheduler.step()
        return loss.hex()

    def steps(self, count: int) -> list[str]:
        return [self.step() for _ in range(count)]


def content(value: Any) -> Any:
    """Something to compare: tensors become bytes, objects their state."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.detach().reshape(-1).tolist()
    if isinstance(value, dict):
        return {key: content(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [content(item) for item in value]
    return type(value), repr(value)


def everything(run: Run) -> Any:
    scheduler = run.scheduler.state_dict() if run.scheduler else None
    return content([run.model.state_dict(), run.optimizer.state_dict(), scheduler])


def check_continuation(directory: Path, build: Build, schedule: Callable[..., Any] | None) -> None:
    torch.manual_seed(4)
    whole = Run(build, schedule)
    whole.steps(5)
    with statehold.Checkpointer(directory, **SMALL) as ckpt:
        ckpt.save(5, whole.state)
    at_the_save = everything(whole)
    losses = whole.steps(5)
    torch.manual_seed(77)
    resumed = Run(build, schedule)
    with statehold.Checkpointer(directory, **SMALL) as ckpt:
        got = ckpt.restore(resumed.state)
        assert got == 5
    assert everything(resumed) == at_the_save
    assert resumed.steps(5) == losses
    assert everything(resumed) == everything(whole)


@pytest.mark.thorough
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_continue(tmp_path: Path, name: str) -> None:
    check_continuation(tmp_path / "run", OPTIMIZERS[name], None)


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:.*epoch parameter:UserWarning")  # raised inside SequentialLR
def test_schedulers_continue(tmp_path: Path, name: str) -> None:
    check_continuation(tmp_path / "run", OPTIMIZERS["sgd momentum"], SCHEDULERS[name])


def test_what_must_be_copied_before_save_returns() -> None:
    run = Run(OPTIMIZERS["adamw tensor lr"])
    run.step()
    assert eager(run.state) == {"optimizer.param_groups.0.lr"}


@pytest.mark.parametrize("fused", [False, True])
def test_made_state_is_laid_out_as_its_parameter(fused: bool) -> None:
    """A fused update walks through the memory of both at once, whatever their strides say."""

    def build() -> tuple[nn.Module, torch.optim.AdamW]:
        model = nn.ModuleDict({"wide": nn.Conv2d(3, 4, 3), "thin": nn.Conv2d(1, 4, 3)})
        model = model.to(memory_format=torch.channels_last)
        model.turned = nn.Parameter(torch.randn(6, 5).t())
        return model, torch.optim.AdamW(model.parameters(), 0.1, fused=fused)

    def step(model: nn.Module, optimizer: torch.optim.AdamW) -> None:
        torch.manual_seed(3)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()

    (model, optimizer), (fresh, resumed) = build(), build()
    step(model, optimizer)
    MemoryStep({"m": model, "o": optimizer}).restore({"m": fresh, "o": resumed})
    for parameter in fresh.parameters():
        kept = resumed.state[parameter]
        assert kept["exp_avg"].stride() == kept["exp_avg_sq"].stride() == parameter.stride()
    step(model, optimizer)
    step(fresh, resumed)
    assert content(fresh.state_dict()) == content(model.state_dict())


def test_a_step_without_optimizer_state_clears_it() -> None:
    fresh, used = Run(OPTIMIZERS["adamw"]), Run(OPTIMIZERS["adamw"])
    step = MemoryStep({"model": fresh.model, "optimizer": fresh.optimizer})
    used.steps(2)
    step.restore({"model": used.model, "optimizer": used.optimizer})
    assert not used.optimizer.state
    used.step()


def test_stale_entries_are_removed_and_missing_ones_made() -> None:
    saved, live = Run(OPTIMIZERS["adamw"]), Run(OPTIMIZERS["adam amsgrad"])
    saved.step(), live.step()
    parameter = live.model[0].weight
    dicts = live.optimizer.state[parameter]
    moment = dicts["exp_avg"]
    del dicts["exp_avg_sq"]
    assert "max_exp_avg_sq" in dicts
    MemoryStep(saved.state).restore(live.state)
    assert live.optimizer.state[parameter] is dicts
    assert set(dicts) == {"step", "exp_avg", "exp_avg_sq"}
    assert dicts["exp_avg"] is moment
    expected = saved.optimizer.state[saved.model[0].weight]
    assert content(dicts) == content(expected)


class Unusual(torch.optim.Optimizer):
    """Keeps a common step beside the parameters' states, and numbers instead of names in these."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "$factor": 2})

    def step(self, closure: Callable[[], torch.Tensor]) -> torch.Tensor:
        loss = closure()
        self.state["shared"]["steps"] = self.state["shared"].get("steps", 0) + 1
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault(0, torch.zeros_like(parameter)).lerp_(parameter.grad, 0.5)
            with torch.no_grad():
                parameter.sub_(state[0] / self.state["shared"]["steps"])
        return loss


def test_unusual_optimizers_continue(tmp_path: Path) -> None:
    check_continuation(tmp_path / "run", lambda model: Unusual(model.parameters()), None)


def test_other_state_that_the_step_lacks_is_removed() -> None:
    saved, live = Run(lambda m: Unusual(m.parameters())), Run(lambda m: Unusual(m.parameters()))
    step = MemoryStep(saved.state)
    live.step()
    step.restore(live.state)
    assert not live.optimizer.state


def test_names_that_look_like_tags_come_back() -> None:
    def build() -> dict[str, Any]:
        model = nn.ParameterDict({"$tensor": torch.randn(2), "$": torch.randn(1)})
        optimizer = torch.optim.AdamW(model.parameters())
        sum(parameter.sum() for parameter in model.values()).backward()
        optimizer.step()
        return {"$m": model, "$o": optimizer}

    saved, live = build(), build()
    MemoryStep(saved).restore(live)
    assert content([live["$m"].state_dict(), live["$o"].state_dict()]) == content(
        [saved["$m"].state_dict(), saved["$o"].state_dict()]
    )


def test_own_state_dicts_are_filled_in_place() -> None:
    saved, live = Run(OPTIMIZERS["overriding"]), Run(OPTIMIZERS["overriding"])
    saved.step(), live.step()
    moments = [state["momentum_buffer"] for state in live.optimizer.state.values()]
    restoration = MemoryStep(saved.state).restore(live.state)
    own = {tensor.data_ptr() for tensor in [*live.model.parameters(), *moments]}
    assert {target.tensor.data_ptr() for target in restoration.destinations} == own
    assert [s["momentum_buffer"].data_ptr() for s in live.optimizer.state.values()] == [
        moment.data_ptr() for moment in moments
    ]


def test_tensor_lr_keeps_its_storage() -> None:
    saved, live = Run(OPTIMIZERS["adamw tensor lr"]), Run(OPTIMIZERS["adamw tensor lr"])
    saved.optimizer.param_groups[0]["lr"].fill_(0.5)
    lr = live.optimizer.param_groups[0]["lr"]
    MemoryStep(saved.state).restore(live.state)
    assert live.optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == 0.5


def test_neither_the_order_nor_the_groups_of_parameters_matter() -> None:
    saved, live = Run(OPTIMIZERS["sgd"]), Run(OPTIMIZERS["sgd"])
    saved.step()
    group = live.optimizer.param_groups[0]
    group["params"].reverse()
    live.optimizer.add_param_group({"params": [group["params"].pop()], "lr": 9.0})
    MemoryStep(saved.state).restore(live.state)
    assert [each["lr"] for each in live.optimizer.param_groups] == [group["lr"]] * 2
    for (name, ours), theirs in zip(
        live.model.named_parameters(), saved.model.parameters(), strict=True
    ):
        state = live.optimizer.state[ours], saved.optimizer.state[theirs]
        assert content(state[0]) == content(state[1]), name


def test_a_group_out_of_several_has_to_agree_on_options() -> None:
    saved, live = Run(OPTIMIZERS["adamw groups"]), Run(OPTIMIZERS["adamw"])
    with pytest.raises(StateMismatchError) as caught:
        MemoryStep(saved.state).prepare(live.state)
    assert "weight_decay" in caught.value.facts["optimizer.param_groups.0"]
    for skip in (["optimizer.param_groups.0"], ["*.weight_decay", "*.lr"]):
        MemoryStep(saved.state).restore(live.state, selection=Selection(skip=skip))
        assert live.optimizer.param_groups[0]["weight_decay"] == 0.01
    for group in saved.optimizer.param_groups:
        group |= {"weight_decay": 0.25, "lr": 0.5}
    MemoryStep(saved.state).restore(live.state)
    assert live.optimizer.param_groups[0]["weight_decay"] == 0.25


def widened(kind: str, width: int) -> dict[str, Any]:
    """A model and an optimizer that has stepped; only the first weight has the width."""
    model = nn.Sequential(nn.Linear(width, 4), nn.Linear(4, 2))
    optimizer = OPTIMIZERS[kind](model)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(3, width)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("is_fresh", [True, False])
def test_state_of_a_parameter_of_another_shape_is_refused(kind: str, is_fresh: bool) -> None:
    step, live = MemoryStep(widened(kind, 3)), widened(kind, 5)
    if is_fresh:
        live["optimizer"] = OPTIMIZERS[kind](live["model"])
    skip = ["model.0.weight"]
    if kind != "sgd":  # which keeps nothing
        for only in (None, ["optimizer"]):
            with pytest.raises(StateMismatchError) as caught:
                step.prepare(live, selection=Selection(only, skip))
            (name,) = caught.value.facts
            assert name == (
                "optimizer" if kind == "overriding" else "optimizer.state.model.0.weight"
            )
            assert f'skip=["{name}"]' in caught.value.hint
        skip += [name]
    step.restore(live, selection=Selection(skip=skip))
    live["optimizer"].step(lambda: live["model"](torch.ones(3, 5)).square().mean())


@pytest.mark.parametrize("kind", [kind for kind in OPTIMIZERS if kind != "sgd"])
@pytest.mark.parametrize("by_hand", [True, False])
def test_state_without_names_is_known_by_its_shapes(kind: str, by_hand: bool) -> None:
    def named(state: dict[str, Any]) -> dict[str, Any]:
        optimizer = state["optimizer"]
        return {"optimizer": optimizer.state_dict() if by_hand else optimizer}

    step, live = MemoryStep(named(widened(kind, 3))), OPTIMIZERS[kind](widened(kind, 3)["model"])
    step.restore({"optimizer": live})
    live = OPTIMIZERS[kind](widened(kind, 5)["model"])
    with pytest.raises(StateMismatchError, match="optimizer"):
        step.prepare({"optimizer": live})


def test_state_goes_with_a_module_that_takes_another_shape() -> None:
    class Growing(nn.Linear):
        def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
            self.weight.data = self.weight.data.new_empty(state[f"{prefix}weight"].shape)
            super()._load_from_state_dict(state, prefix, *rest)

    saved = widened("adamw", 5)
    live = nn.Sequential(Growing(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(live.parameters())
    MemoryStep(saved).restore({"optimizer": optimizer, "model": live})
    assert content(optimizer.state_dict()["state"]) == content(
        saved["optimizer"].state_dict()["state"]
    )


def test_a_new_group_takes_no_options_of_another_one() -> None:
    body, adapter, head = (nn.Linear(2, 2) for _ in range(3))
    model = nn.ModuleList([body, head])
    before = torch.optim.SGD([{"params": body.parameters()}, {"params": head.parameters()}], 0.5)
    before.param_groups[1]["lr"] = 0.25
    step = MemoryStep({"m": model, "o": before})
    groups = [{"params": each.parameters(), "lr": 9.0} for each in (body, adapter, head)]
    live, selection = torch.optim.SGD(groups), Selection(strict=False)
    model.append(adapter)
    step.restore({"m": model, "o": live}, selection=selection)
    assert [group["lr"] for group in live.param_groups] == [0.5, 9.0, 0.25]


@pytest.mark.parametrize(("of_step", "of_run"), [("adamw", "sgd momentum"), ("sgd", "adamw")])
def test_a_step_of_another_kind_of_optimizer_is_no_match(of_step: str, of_run: str) -> None:
    saved, live = Run(OPTIMIZERS[of_step]), Run(OPTIMIZERS[of_run])
    saved.step()
    kept = dict(live.optimizer.param_groups[0])
    with pytest.raises(StateMismatchError, match="differ") as caught:
        MemoryStep(saved.state).prepare(live.state)
    text = caught.value.facts["optimizer.param_groups.0"]
    ours, theirs = text.split("those of another kind of optimizer")
    names = ("betas", "momentum") if of_step == "adamw" else ("momentum", "betas")
    assert names[0] in theirs
    assert names[1] in ours
    assert not any(path.startswith("optimizer.param_groups.0.") for path in caught.value.facts)
    assert live.optimizer.param_groups[0] == kept
    assert not live.optimizer.state
    selection = Selection(strict=False)
    found = MemoryStep(saved.state).restore(live.state, selection=selection)
    assert "optimizer.param_groups.0.betas" in (*found.missing, *found.unexpected)


def test_options_that_only_one_side_has_are_no_other_kind_of_optimizer() -> None:
    saved, live = Run(OPTIMIZERS["adamw"]), Run(OPTIMIZERS["adamw"])
    saved.step()
    saved.optimizer.param_groups[0]["initial_lr"] = 0.5  # a scheduler that this run lacks
    MemoryStep(saved.state).restore(live.state)
    assert live.optimizer.param_groups[0]["initial_lr"] == 0.5
    del saved.optimizer.param_groups[0]["initial_lr"]
    del saved.optimizer.param_groups[0]["decoupled_weight_decay"]  # a step of an older torch
    MemoryStep(saved.state).restore(live.state)
    assert live.optimizer.param_groups[0]["decoupled_weight_decay"]


def test_parameters_that_the_step_does_not_have_are_named() -> None:
    saved, live = Run(OPTIMIZERS["sgd"]), Run(OPTIMIZERS["sgd"])
    saved.optimizer.param_groups[0]["params"].pop(0)
    with pytest.raises(StateMismatchError) as caught:
        MemoryStep(saved.state).prepare(live.state)
    assert list(caught.value.facts) == ["optimizer.state.model.0.weight"]
    saved, live = Run(OPTIMIZERS["sgd"]), Run(OPTIMIZERS["sgd"])
    live.optimizer.param_groups[0]["params"].pop(0)
    with pytest.raises(StateMismatchError, match="expected nothing") as caught:
        MemoryStep(saved.state).prepare(live.state)
    assert list(caught.value.facts) == ["optimizer.state.model.0.weight"]


def test_parameters_that_no_module_names() -> None:
    def loose() -> tuple[nn.Parameter, torch.optim.Optimizer]:
        parameter = nn.Parameter(torch.ones(3))
        return parameter, torch.optim.SGD([parameter], 0.1, momentum=0.9)

    parameter, optimizer = loose()
    parameter.sum().backward()
    optimizer.step()
    step = MemoryStep({"p": parameter, "o": optimizer})
    assert step.manifest.state["o"]["param_groups"][0]["params"] == ["0"]
    other, fresh = loose()
    step.restore({"p": other, "o": fresh})
    assert torch.equal(other, parameter)
    assert content(fresh.state_dict()) == content(optimizer.state_dict())


@pytest.mark.parametrize("name", ["adamw", "overriding"])
def test_the_gate_stands_before_every_optimizer(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(OPTIMIZERS[name])
    run.step()
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        holdup = Holdup(ckpt)
        ckpt.save(1, run.state | {"more": statehold.Gated(torch.randn(1 << 20))})
        wait, asked = trainer(ckpt).gate.wait, []

        def observed() -> None:
            asked.append(holdup.release())
            wait(DEADLINE_S)

        monkeypatch.setattr(trainer(ckpt).gate, "wait", observed)
        run.step()
        assert len(asked) == 1


def test_grad_scaler(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    run = Run(OPTIMIZERS["sgd"])
    for _ in range(3):
        loss = run.model(torch.randn(2, 6)).sum()
        scaler.scale(loss).backward()
        scaler.step(run.optimizer)
        scaler.update()
    expected = copy.deepcopy(scaler.state_dict())
    assert expected["scale"] > 8
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        ckpt.save(1, {"scaler": scaler}).wait("committed", DEADLINE_S)
        fresh = torch.amp.GradScaler("cpu")
        ckpt.restore({"scaler": fresh})
    assert fresh.state_dict() == expected


def test_milestones_come_back_as_a_counter() -> None:
    run = Run(OPTIMIZERS["sgd"], SCHEDULERS["multi step"])
    other = Run(OPTIMIZERS["sgd"], lambda o: lr_scheduler.MultiStepLR(o, [1]))
    MemoryStep(run.state).restore(other.state)
    assert type(other.scheduler.milestones) is Counter
    assert other.scheduler.milestones == Counter({2: 2, 6: 1, 8: 1})


class Loader:
    """Like torchdata's StatefulDataLoader: nested state, None before the first batch."""

    def __init__(self) -> None:
        self.position: int | None = None
        self.workers = [{"seed": 1, "sampler": torch.arange(3)}]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "_workers": self.workers, "$step": (0, b"x")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.workers = state["position"], state["_workers"]
        assert state["$step"] == (0, b"x")


def test_objects_with_state(tmp_path: Path) -> None:
    loader, fresh = Loader(), Loader()
    loader.position = 12
    loader.workers[0]["sampler"][1] = 9
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        ckpt.save(1, {"loaders": [loader]}).wait("committed", DEADLINE_S)
        ckpt.restore({"loaders": [fresh]})
    assert content(fresh.state_dict()) == content(loader.state_dict())
