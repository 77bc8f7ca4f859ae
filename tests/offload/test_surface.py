"""What torch programs do with an optimizer works with an offloaded one; the rest is refused."""

from __future__ import annotations

import copy
import errno
import gc
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import statehold
from statehold import offload
from statehold.errors import ClosedError, StateMismatchError, StorageError, UsageError
from statehold.offload.state import OffloadedState
from statehold.offload.store import SubgroupStore
from support.faults import DEADLINE_S, must
from support.faults import SMALL as SMALL_RUN
from support.twins import KINDS, Twins, same_bits, snapshot

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SMALL = 70_000


def param(*shape: int, dtype: torch.dtype = F32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(shape, dtype=dtype))


def on(tmp_path: Path) -> dict[str, Any]:
    return {"tiers": [offload.Path(tmp_path)], "subgroup_bytes": SMALL}


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_a_scaler_divides_gradients_and_skips_updates(tmp_path: Path, dtype: torch.dtype) -> None:
    twins = Twins([(100, 333)], [dtype], **on(tmp_path))
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in range(2)]
    for bad in (False, True, False, False):
        twins.backward(scale=64.0)
        if bad:
            for tensor in (*twins.params, *twins.masters):
                tensor.grad[0, 0] = float("inf")
        before = twins.ours.stats.updates
        for scaler, optimizer in zip(scalers, (twins.ours, twins.torchs), strict=True):
            scaler.scale(torch.zeros(()))  # makes its scale
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert twins.ours.stats.updates == before + (not bad)
    assert scalers[0].get_scale() == scalers[1].get_scale()
    twins.check()


def test_the_scale_of_an_update_that_failed_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scaler multiplied it into the next one. SGD shows it in the weights."""

    def refused(*_: object) -> None:
        raise StorageError("no bytes", errno=errno.EIO)

    twins = Twins([(1000, 333)], [F32], kind="SGD", options={"momentum": 0.9}, **on(tmp_path))
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    twins.train(1)
    go_back = snapshot(twins)
    twins.backward()
    scalers[0].scale(torch.zeros(()))  # makes its scale
    with monkeypatch.context() as patch:
        patch.setattr(SubgroupStore, "read", refused)
        with pytest.raises(StorageError, match="no bytes"):
            scalers[0].step(twins.ours)
    assert twins.ours.has_lost_state
    go_back()
    twins.backward(scale=1024.0)
    for scaler, optimizer in zip(scalers, (twins.ours, twins.torchs), strict=True):
        scaler.scale(torch.zeros(()))
        scaler.step(optimizer)
        optimizer.zero_grad()
    twins.check()


def test_state_without_a_field_is_none(tmp_path: Path) -> None:
    """Older releases of torch keep a momentum of None where SGD has none."""
    twins = Twins([(100, 333)], [BF16], kind="SGD", **on(tmp_path))
    twins.train(2)
    saved = {"state": {0: {"momentum_buffer": None}}, **groups_of(twins)}
    twins.ours.load_state_dict(saved)
    assert twins.ours.state_dict()["state"] == {}
    with statehold.Checkpointer(tmp_path / "run", **SMALL_RUN) as ckpt:
        ckpt.save(1, {"opt": twins.ours}).wait("committed", DEADLINE_S)


def groups_of(twins: Twins) -> dict[str, Any]:
    return {"param_groups": twins.ours.state_dict()["param_groups"]}


def test_clipping_by_the_global_norm(tmp_path: Path) -> None:
    twins = Twins([(100, 333), (7,)], [F32], **on(tmp_path))
    for _ in range(3):
        twins.backward(scale=100.0)
        for tensors in (twins.params, twins.masters):
            assert torch.nn.utils.clip_grad_norm_(tensors, 1.0) > 1.0
        twins.step()
    twins.check()


def test_a_closure_is_called_with_gradients_enabled(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(5))
    optimizer = offload.SGD([weight], lr=0.5, momentum=0.9, **on(tmp_path))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 5.0
    assert optimizer.step(closure).item() == 0.0


def test_hooks_and_schedulers_see_the_step(tmp_path: Path) -> None:
    weight = param(10)
    optimizer = offload.AdamW([weight], lr=1.0, **on(tmp_path))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    weight.grad = torch.ones(10)
    optimizer.step()
    scheduler.step()
    assert seen == ["before", "after"]
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_hooks_of_a_load_change_and_see_the_state(tmp_path: Path) -> None:
    """The hook that comes first matches parameters by name, as the documentation of torch does."""
    twins = Twins([(129, 65), (129, 65)], [BF16], **on(tmp_path))
    twins.train(2)
    saved = twins.ours.state_dict()
    seen: list[Any] = []

    def swap(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        seen.append("first")
        state["param_groups"] = copy.deepcopy(state["param_groups"])
        state["param_groups"][0]["lr"] = 0.5
        return {**state, "state": {0: state["state"][1], 1: state["state"][0]}}

    def second(_: Any, state: dict[str, Any]) -> None:
        seen.append("second")
        state["state"] = {1: state["state"][1]}

    def after(optimizer: Any) -> None:
        seen.append((len(optimizer.state), optimizer.param_groups[0]["lr"]))

    other = offload.AdamW([param(129, 65, dtype=BF16) for _ in range(2)], **on(tmp_path))
    other.register_load_state_dict_pre_hook(swap)
    other.register_load_state_dict_pre_hook(second)
    other.register_load_state_dict_post_hook(after)
    other.load_state_dict(saved)
    assert seen == ["first", "second", (1, 0.5)]
    (found,) = other.state_dict()["state"].items()
    assert found[0] == 1
    assert all(same_bits(found[1][name], value) for name, value in saved["state"][0].items())
    assert saved["param_groups"][0]["lr"] == 1e-2
    other.load_state_dict(saved)  # once more
    assert len(seen) == 6


@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
@pytest.mark.parametrize("how", ["load", "restore", "group"])
def test_weight_decay_is_decoupled_where_torch_does_so(tmp_path: Path, kind: str, how: str) -> None:
    """The group says so, and state of the other kind may set it there."""
    options = {"weight_decay": 0.5}
    other = {"Adam": "AdamW", "AdamW": "Adam"}[kind]
    old = Twins([(129, 65)], [F32], kind=other, options=options, tiers=[offload.Host("8MiB")])
    new = Twins([(129, 65)], [F32], kind=kind, options=options, **on(tmp_path))
    old.train(1)
    with statehold.Checkpointer(tmp_path / "run", **SMALL_RUN) as ckpt:
        ckpt.save(1, {"opt": old.ours}).wait("committed", DEADLINE_S)
        for each in (new.ours, new.torchs):
            if how == "group":
                each.param_groups[0]["decoupled_weight_decay"] = kind == "Adam"
            elif how == "load":
                each.load_state_dict(copy.deepcopy(old.torchs.state_dict()))
            else:
                ckpt.restore({"opt": each})
    one, two = (each.param_groups[0] for each in (new.ours, new.torchs))
    assert one["decoupled_weight_decay"] is two["decoupled_weight_decay"]
    new.train(2)
    new.check()


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_of_an_older_torch_lacks_options(tmp_path: Path, kind: str) -> None:
    """Then they are off, whatever the optimizer was made with."""
    options = {"momentum": 0.9} if kind == "SGD" else {}
    old = Twins([(129, 65)], [F32], kind=kind, options=options, tiers=[offload.Host("8MiB")])
    old.train(2)
    new = Twins(
        [(129, 65)], [F32], kind=kind, options={**options, "maximize": True}, **on(tmp_path)
    )
    for ours, of in ((new.ours, old.ours), (new.torchs, old.torchs)):
        state = copy.deepcopy(of.state_dict())
        lacking = "maximize", "amsgrad", "nesterov", "capturable", "differentiable", "foreach"
        state["param_groups"] = [
            {key: value for key, value in group.items() if key not in lacking}
            for group in state["param_groups"]
        ]
        ours.load_state_dict(state)
        assert ours.param_groups[0]["maximize"] is False
        assert "maximize" not in state["param_groups"][0]
    new.train(2)
    new.check()


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_state_goes_to_torch_and_back(tmp_path: Path, dtype: torch.dtype) -> None:
    """In the middle of a training, in both directions."""
    twins = Twins([(129, 65), (4,), (80_000,)], [dtype], **on(tmp_path))
    twins.train(2)
    plain = torch.optim.AdamW(twins.masters, lr=0.5, fused=True)
    saved = twins.ours.state_dict()
    plain.load_state_dict({**saved, "state": {
        index: {name: value for name, value in fields.items() if name != "master"}
        for index, fields in saved["state"].items()
    }})  # fmt: skip
    twins.torchs = plain
    twins.train(2)
    twins.check()
    state = plain.state_dict()
    masters = [each.detach().clone() for each in twins.masters]
    twins.train(1)
    twins.ours.load_state_dict(state)
    with torch.no_grad():
        for weight, master, before in zip(twins.params, twins.masters, masters, strict=True):
            weight.copy_(before)
            master.copy_(before.to(dtype))  # what a plain optimizer in 16 bit has of it
    plain.load_state_dict(state)
    twins.train(2)
    twins.check()


def test_a_state_brings_its_hyper_parameters(tmp_path: Path) -> None:
    """As with torch: the groups are those of the state, whatever the optimizer was made with."""
    shapes = [(129, 65), (80_000,)]
    old = Twins(shapes, [BF16], groups=[{}, {"weight_decay": 0.3}], tiers=[offload.Host("8MiB")])
    old.train(2)
    groups = [{"lr": 0.5, "betas": (0.1, 0.2)}, {"lr": 0.7, "maximize": True}]
    new = Twins(shapes, [BF16], seed=1, groups=groups, **on(tmp_path))
    new.train(1)
    with torch.no_grad():
        for tensors, values in ((new.params, old.params), (new.masters, old.masters)):
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
    new.ours.load_state_dict(old.ours.state_dict())
    new.torchs.load_state_dict(copy.deepcopy(old.torchs.state_dict()))
    for ours, torchs in zip(new.ours.param_groups, new.torchs.param_groups, strict=True):
        for name in ("lr", "betas", "weight_decay", "maximize"):
            assert ours[name] == torchs[name] != groups[0].get(name)
    new.train(2)
    new.check()


def test_a_state_dict_is_a_copy(tmp_path: Path) -> None:
    twins = Twins([(80_000,)], [BF16], **on(tmp_path))
    twins.train(1)
    before = copy.deepcopy(twins.ours.state_dict())
    kept = twins.ours.state_dict()
    twins.train(1)
    for name, value in before["state"][0].items():
        assert same_bits(kept["state"][0][name], value)
    assert not list(twins.ours.state)


@pytest.mark.parametrize("flat", [False, True])
def test_torchs_distributed_state_dict_reads_and_takes_the_state(
    tmp_path: Path, flat: bool
) -> None:
    """Before it reads, it makes an update with zero gradients if an optimizer has no state."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    models = [torch.nn.Linear(129, 65, dtype=BF16) for _ in range(2)]
    ours, other = (offload.AdamW(each.named_parameters(), **on(tmp_path)) for each in models)
    for model, optimizer in zip(models, (ours, other), strict=True):
        for each in model.parameters():
            each.grad = torch.randn(each.shape, generator=torch.Generator().manual_seed(0)).to(BF16)
        optimizer.step()
        optimizer.zero_grad()
    before = ours.state_dict()["state"]
    shown = get_optimizer_state_dict(models[0], ours, options=options)
    name = "state.weight.master" if flat else "state"
    assert same_bits(shown[name] if flat else shown[name]["weight"]["master"], before[0]["master"])
    set_optimizer_state_dict(models[1], other, shown, options=options)
    for optimizer in (ours, other):
        state = optimizer.state_dict()["state"]
        assert state.keys() == before.keys()
        for index, fields in before.items():
            assert all(same_bits(state[index][name], value) for name, value in fields.items())


def test_state_has_a_copy_of_what_is_on_tiers(tmp_path: Path) -> None:
    twins = Twins([(129, 65), (5,)], [BF16], **on(tmp_path))
    optimizer = twins.ours
    assert not optimizer.state
    twins.backward(skip=[1])
    optimizer.step()
    assert len(optimizer.state) == 1
    expected = optimizer.state_dict()["state"][0]
    found = optimizer.state[twins.params[0]]
    assert found.keys() == expected.keys()
    assert all(same_bits(found[name], value) for name, value in expected.items())
    assert not optimizer.state[twins.params[1]]
    optimizer.load_state_dict(optimizer.state_dict())
    assert len(optimizer.state) == 1


def test_parameters_without_updates_have_no_state(tmp_path: Path) -> None:
    twins = Twins([(80_000,), (5,)], [BF16], **on(tmp_path))
    assert twins.ours.state_dict()["state"] == {}
    twins.backward(skip=[1])
    twins.step()
    twins.check()
    twins.ours.load_state_dict(twins.ours.state_dict())
    twins.train(1)
    twins.check()


def test_names_of_parameters_are_kept(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = offload.AdamW(model.named_parameters(), **on(tmp_path))
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]


def refused(text: str, params: Any, tiers: Any, **options: Any) -> UsageError:
    with pytest.raises(UsageError, match=text) as caught:
        offload.AdamW(params, tiers=tiers, **options)
    return caught.value


@pytest.mark.parametrize(
    ("weight", "got"),
    [
        (param(4, dtype=torch.float64), "torch.float64"),
        (param(4, dtype=torch.complex64), "torch.complex64"),
        (torch.nn.Parameter(torch.zeros(4, device="meta")), "meta"),
        (torch.nn.Parameter(torch.zeros(1).expand(8)), "strides"),
        (torch.nn.Parameter(torch.zeros(4, 4)[:, ::2]), "strides"),
    ],
    ids=str,
)
def test_other_parameters_are_refused(tmp_path: Path, weight: Any, got: str) -> None:
    error = refused("cannot be offloaded", [param(2), weight], [offload.Path(tmp_path)])
    assert error.facts["parameter"] == "parameter 1"
    assert got in error.facts["got"]


def test_shared_memory_is_refused(tmp_path: Path) -> None:
    base = torch.zeros(10)
    views = [torch.nn.Parameter(base[:6]), torch.nn.Parameter(base[5:])]
    refused("share memory", views, [offload.Path(tmp_path)])


def test_tiers_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    here, weights = offload.Path(tmp_path), [param(10)]
    refused("at least one of them", weights, [])
    refused("at least one of them", weights, ["4GiB"])
    refused("given once, as the first tier", weights, [here, offload.Host("1GiB")])
    refused("the same directory", weights, [here, offload.Path(tmp_path / ".")])
    refused("not a directory", weights, [offload.Path(tmp_path / "absent")])
    with pytest.raises(UsageError, match="at least one byte a second"):
        offload.Path(tmp_path, bytes_per_s=0)
    with pytest.raises(UsageError, match="not a size"):
        offload.Host("4G")


def test_a_relative_path_stays_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program may change its working directory, even to one with a path of the same name."""
    for name in ("here/opt", "there/opt"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    twins = Twins([(80_000,)], [BF16], tiers=[offload.Path("opt")], subgroup_bytes=SMALL)
    twins.train(2)
    monkeypatch.chdir(tmp_path / "there")
    twins.train(2)
    twins.check()
    assert not list((tmp_path / "there/opt").iterdir())
    twins.ours.close()
    assert not list((tmp_path / "here").rglob("*.state"))


def test_what_does_not_fit_is_refused_with_the_figures(tmp_path: Path) -> None:
    weights = [param(1 << 20)]
    error = refused("does not fit into Host", weights, [offload.Host("1MiB")])
    assert "2 subgroups of 4 MiB" in error.facts["needed"]
    error = refused("too small", weights, [offload.Path(tmp_path)], subgroup_bytes=4096)
    assert error.facts == {"expected": "at least 8 KiB", "got": "4 KiB"}


def test_too_little_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from statehold.offload import sizes
    from statehold.process.host_memory import Room

    monkeypatch.setattr(sizes, "available", lambda: Room(1 << 20, "left in a test"))
    error = refused("not enough memory", [param(1 << 20)], [offload.Path(tmp_path)])
    assert error.facts["available"] == "1 MiB left in a test"
    assert "0 buffers of Host and 2 of the pipeline, 4 MiB each" in error.facts["needed"]


def test_torch_checks_the_options(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Invalid learning rate"):
        offload.AdamW([param(2)], lr=-1.0, tiers=[offload.Path(tmp_path)])
    with pytest.raises(TypeError):
        offload.AdamW([param(2)])  # type: ignore[call-arg]


def test_sparse_gradients_are_refused_before_anything_changes(tmp_path: Path) -> None:
    dense, table = param(10), torch.nn.Embedding(10, 3, sparse=True)
    optimizer = offload.AdamW([dense, table.weight], **on(tmp_path))
    dense.grad = torch.ones(10)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match="sparse"):
        optimizer.step()
    assert not dense.any()
    table.weight.grad = None
    optimizer.step()  # nothing has failed
    assert dense.all()


def test_what_would_change_the_cut_is_refused(tmp_path: Path) -> None:
    weight = param(10)
    optimizer = offload.AdamW([weight], **on(tmp_path))
    with pytest.raises(UsageError, match="no more parameters"):
        optimizer.add_param_group({"params": [param(2)]})
    optimizer.param_groups[0]["amsgrad"] = True
    weight.grad = torch.ones(10)
    with pytest.raises(UsageError, match="would change what is kept"):
        optimizer.step()
    with pytest.raises(UsageError, match="copied nor pickled"):
        copy.deepcopy(optimizer)
    with pytest.raises(UsageError, match="nothing can be offloaded"):
        offload.SGD([param(2)], tiers=[offload.Host("1MiB")])


def test_a_state_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    optimizer = offload.AdamW([param(10)], **on(tmp_path))
    other = torch.optim.SGD([param(10)], momentum=0.9)
    other.param_groups[0]["params"][0].grad = torch.ones(10)
    other.step()
    state = {**optimizer.state_dict(), "state": other.state_dict()["state"]}
    with pytest.raises(StateMismatchError, match="does not fit") as caught:
        optimizer.load_state_dict(state)
    assert caught.value.facts["got"] == "nothing"
    state["state"][0] = {"step": 1, "exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(10)}
    with pytest.raises(StateMismatchError, match=r"exp_avg in a tensor of shape \(10,\)"):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.to(torch.bfloat16),
        lambda model: setattr(model.weight, "data", torch.zeros(3, 4)),
    ],
)
def test_a_parameter_that_was_changed_after_its_optimizer_was_made(tmp_path, change) -> None:
    model = torch.nn.Linear(4, 4, bias=False)
    optimizer = offload.AdamW(model.named_parameters(), **on(tmp_path))
    change(model)
    model.weight.grad = torch.zeros_like(model.weight)
    with pytest.raises(UsageError, match="converted or moved") as caught:
        optimizer.step()
    assert caught.value.facts["parameter"] == "weight"


def fused_into_columns(weight: torch.nn.Parameter) -> torch.Tensor:
    """Returns what is beside it in memory."""
    left, right = torch.zeros(*weight.shape[:-1], 2 * weight.shape[-1]).chunk(2, -1)
    weight.data = left.copy_(weight.data)
    return right


def to_channels_last(weight: torch.nn.Parameter) -> torch.Tensor:
    weight.data = weight.data.to(memory_format=torch.channels_last)
    return torch.zeros(0)


@pytest.mark.parametrize("change", [fused_into_columns, to_channels_last])
def test_a_parameter_in_another_order_of_memory_is_refused(tmp_path: Path, change: Any) -> None:
    """Its moments are in the order that it had. Nothing beside it is written."""
    twins = Twins([(8, 4, 3, 3)], [F32], **on(tmp_path))
    twins.train(1)
    (weight,), optimizer, before = twins.params, twins.ours, twins.params[0].data
    saved = optimizer.state_dict()
    beside = change(weight)
    weight.grad = torch.ones_like(weight)
    for call in (
        optimizer.step,
        optimizer.state_dict,
        lambda: optimizer.state[weight],
        lambda: optimizer.load_state_dict(saved),
        lambda: optimizer.stored_parameters([]),
    ):
        with pytest.raises(UsageError, match="converted or moved") as caught:
            call()
        assert caught.value.facts["parameter"] == "parameter 0"
        assert str(before.stride()) in caught.value.facts["expected"]
    assert torch.equal(weight, before)
    assert not beside.any()
    weight.data, weight.grad = before, None
    twins.train(1)
    twins.check()


def test_another_stride_of_one_element_is_the_same_order(tmp_path: Path) -> None:
    twins = Twins([(8, 4, 1, 1)], [F32], **on(tmp_path))
    twins.train(1)
    before = twins.params[0].stride()
    to_channels_last(twins.params[0])
    assert twins.params[0].stride() != before
    twins.train(1)
    twins.check()


@pytest.mark.parametrize(
    ("change", "named", "got"),
    [
        (lambda first, _: first.__setitem__(0, param(4)), "a", "in no group"),
        (lambda first, second: second.append(first.pop(0)), "a", "number 2, in group 1"),
        (lambda first, _: first.pop(1), "c", "in no group"),
        (lambda _, second: second.append(param(4)), "one more", "number 3, in group 1"),
        (lambda first, _: first.reverse(), "a", "number 1, in group 0"),
        (
            lambda first, second: second.append(first[0]),
            "one more",
            "number 0, in group 0 and number 3, in group 1",
        ),
    ],
    ids=["replaced", "moved", "removed", "added", "reordered", "twice"],
)
def test_other_parameters_in_the_groups_are_refused(
    tmp_path: Path, change: Any, named: str, got: str
) -> None:
    weights = {name: param(4) for name in "abc"}
    groups = [[weights["a"], weights["c"]], [weights["b"]]]
    names = [["a", "c"], ["b"]]
    optimizer = offload.AdamW(
        [
            {"params": list(zip(own, each, strict=True)), "lr": 0.5}
            for own, each in zip(names, groups, strict=True)
        ],
        **on(tmp_path),
    )
    for each in weights.values():
        each.grad = torch.ones_like(each)
    optimizer.step()
    saved = optimizer.state_dict()
    before = {name: each.detach().clone() for name, each in weights.items()}
    live = [group["params"] for group in optimizer.param_groups]
    kept = [list(each) for each in live]
    change(*live)
    for call in (
        optimizer.step,
        optimizer.state_dict,
        lambda: optimizer.load_state_dict(saved),
        lambda: optimizer.load_stored(saved["state"], lambda _: None),
        lambda: optimizer.stored_parameters([]),
    ):
        with pytest.raises(UsageError, match="the parameters of the groups are others") as caught:
            call()
        assert caught.value.facts["parameter"] == named
        assert caught.value.facts["got"] == got
    assert all(torch.equal(each, before[name]) for name, each in weights.items())
    for each, own in zip(live, kept, strict=True):
        each[:] = own
    optimizer.step()
    assert not any(torch.equal(each, before[name]) for name, each in weights.items())


@pytest.mark.parametrize("wrong", ["entry", "option", "count"])
def test_a_refused_state_leaves_the_groups_as_they_are(tmp_path: Path, wrong: str) -> None:
    optimizer = offload.AdamW([param(10)], **on(tmp_path))
    state = optimizer.state_dict()
    (group,) = state["param_groups"]
    group["lr"] = 0.5
    if wrong == "entry":
        state["state"][0] = {"step": 1, "exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(10)}
    elif wrong == "option":
        group["amsgrad"] = True
    else:
        group["params"] = [0, 1]
    with pytest.raises((StateMismatchError, UsageError, ValueError)):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert not optimizer.param_groups[0]["amsgrad"]


def test_a_closed_optimizer_refuses(tmp_path: Path) -> None:
    twins = Twins([(80_000,)], [BF16], **on(tmp_path))
    twins.train(2)
    assert list(tmp_path.rglob("*.state"))
    twins.ours.close()
    twins.ours.close()
    assert not list(tmp_path.rglob("*.state"))
    with pytest.raises(ClosedError):
        twins.train(1)
    with pytest.raises(ClosedError):
        twins.ours.state_dict()


def test_a_forked_child_is_refused(tmp_path: Path) -> None:
    """It has none of the threads that an update would wait for. Its parent goes on."""
    twins = Twins([(80_000,)], [F32], **on(tmp_path))
    twins.train(1)
    saved = twins.ours.state_dict()
    twins.backward()
    calls = (
        twins.ours.step,
        twins.ours.state_dict,
        lambda: twins.ours.state[twins.params[0]],
        lambda: twins.ours.load_state_dict(saved),
        lambda: twins.ours.stored_parameters([]),
    )
    for call in calls:
        child = os.fork()
        if not child:
            signal.alarm(int(DEADLINE_S))  # of a child that waits
            try:
                call()
            except ClosedError as error:
                os._exit("belongs to the process that was forked" in str(error))
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    twins.step()
    twins.check()


def test_dropping_waits_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector may do it in a thread that holds locks of others. A later optimizer waits."""
    ended = OffloadedState.close
    order: list[str] = []
    go_on = threading.Event()

    def close(state: OffloadedState) -> None:
        must(go_on.wait(DEADLINE_S))
        ended(state)
        order.append("ended")

    with monkeypatch.context() as patched:
        patched.setattr(OffloadedState, "close", close)
        optimizer = offload.AdamW([param(10)], **on(tmp_path))
        optimizer.cycle = optimizer
        del optimizer
        gc.collect()
        order.append("collected")
        go_on.set()
        later = offload.AdamW([param(10)], **on(tmp_path))
        order.append("made another")
    assert order == ["collected", "ended", "made another"]
    assert [each.name for each in tmp_path.iterdir()] == ["optimizer-0"]
    later.close()


def test_threads_of_torch_stay_as_they_were(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    offload.AdamW([param(10)], **on(tmp_path)).close()
    assert torch.get_num_threads() == before
