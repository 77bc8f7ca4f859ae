"""subscribe(): tensors of the consumer that it may have and change, forks, and close()."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from statehold.errors import ClosedError, StateMismatchError, UsageError
from statehold.subscription.preparing import Changes, Filled, KnownTensor
from statehold.tensors.storable import version_of
from statehold.units import MiB
from support.faults import DEADLINE_S
from support.published import NAMES, applied, brought, content, save, whole

# -- the consumer's tensors ---------------------------------------------------------------------


def test_a_tensor_that_the_consumer_changes_or_replaces_is_read_as_a_whole(
    ckpt: statehold.Checkpointer, updates: statehold.Subscription, live: dict[str, Any]
) -> None:
    brought(ckpt, updates, 1)
    live["a"].zero_()
    live["b"] = torch.zeros_like(live["b"])
    brought(ckpt, updates, 2)
    assert whole(live) == 2


def test_a_step_that_does_not_fit_changes_nothing(
    ckpt: statehold.Checkpointer, updates: statehold.Subscription, live: dict[str, Any]
) -> None:
    brought(ckpt, updates, 1)
    save(ckpt, 2, {**content(2), "a": torch.zeros(3)})
    with pytest.raises(StateMismatchError, match=r"model\.a") as caught:
        updates.wait(0)
    assert not any(option in str(caught.value) for option in ("skip=", "strict=", "rename="))
    assert whole(live) == 1
    brought(ckpt, updates, 3)
    assert whole(live) == 3


def test_what_a_consumer_may_not_have_is_refused(run: Path) -> None:
    model = torch.nn.Linear(2, 2)
    for state in ({"optimizer": torch.optim.SGD(model.parameters())}, {"rng": statehold.Rng()}):
        with pytest.raises(UsageError, match="modules and tensors"):
            statehold.subscribe(run, state)
    with pytest.raises(UsageError, match="mutable mapping"):
        statehold.subscribe(run, model)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="nothing to update"):
        statehold.subscribe(run, {})
    with pytest.raises(UsageError, match="URL"):
        statehold.subscribe("s3://bucket/run", {"model": model})


def test_a_dtensor_is_refused(run: Path) -> None:
    """Also in a module: its ranks would change to a step at different times."""
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

        mesh = init_device_mesh("cpu", (1,))
        sharded = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        module = distribute_module(torch.nn.Linear(4, 4), mesh)
        for state in ({"a": {"b": [sharded]}}, {"a": module}):
            with pytest.raises(UsageError, match="whole tensors"):
                statehold.subscribe(run, state)
    finally:
        distributed.destroy_process_group()


def test_nothing_is_changed_on_disk(
    run: Path, ckpt: statehold.Checkpointer, updates: statehold.Subscription
) -> None:
    save(ckpt, 1)
    before = {path: os.stat(path) for path in run.rglob("*")}
    applied(updates)
    after = {path: os.stat(path) for path in run.rglob("*")}
    assert {p: (s.st_mtime_ns, s.st_ino, s.st_size) for p, s in before.items()} == {
        p: (s.st_mtime_ns, s.st_ino, s.st_size) for p, s in after.items()
    }
    assert set(NAMES) < set(content(1))


def step_fused(tensor: torch.Tensor) -> None:
    """An update of the memory by an optimizer that moves no version counter."""
    parameter = torch.nn.Parameter(tensor.view(torch.float32))
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], lr=1.0, fused=True).step()


def test_a_tensor_that_a_fused_optimizer_has_changed_is_read_as_a_whole(
    ckpt: statehold.Checkpointer, updates: statehold.Subscription, live: dict[str, Any]
) -> None:
    brought(ckpt, updates, 1)
    step_fused(live["a"])
    brought(ckpt, updates, 2)
    assert whole(live) == 2


def test_memory_that_comes_back_at_its_address_has_nothing_of_a_step() -> None:
    """As after the sleep of an engine: no version moves, and the tensor is as it was but for its
    bytes."""
    tensor, changes = torch.zeros(10 * MiB), Changes()  # so large that the kernel has its memory
    filled = {"a": Filled(tensor, version_of(tensor), KnownTensor.of([], 1))}
    assert changes.without(filled) == filled
    storage = tensor.untyped_storage()
    before = storage.data_ptr(), storage.nbytes(), version_of(tensor)
    storage.resize_(0)
    storage.resize_(before[1])
    if (storage.data_ptr(), storage.nbytes(), version_of(tensor)) != before:
        pytest.skip("the memory came back elsewhere")
    assert changes.without(filled) == {}
    changes.forget()
    assert changes.without(filled) == filled
    changes.close()


@pytest.mark.parametrize("change", [step_fused, torch.Tensor.zero_])
def test_a_tensor_that_changes_between_wait_and_apply(
    ckpt: statehold.Checkpointer,
    updates: statehold.Subscription,
    live: dict[str, Any],
    change: Callable[[torch.Tensor], object],
) -> None:
    brought(ckpt, updates, 1)
    save(ckpt, 2)
    update = updates.wait(DEADLINE_S)
    assert update is not None
    change(live["a"])
    before = {name: tensor.clone() for name, tensor in live.items()}
    with pytest.raises(UsageError, match="changed after the update was read") as caught:
        update.apply()
    assert caught.value.facts["tensor"] == "model.a"
    assert all(torch.equal(live[name], tensor) for name, tensor in before.items())
    assert applied(updates).step == 2
    assert whole(live) == 2


# -- forks, and close() at any time -------------------------------------------------------------


def test_a_fork_leaves_the_subscription_to_its_parent(
    ckpt: statehold.Checkpointer, updates: statehold.Subscription, live: dict[str, Any]
) -> None:
    brought(ckpt, updates, 1)

    child = os.fork()
    if child == 0:
        try:
            with pytest.raises(ClosedError, match="belongs to the process that was forked"):
                updates.wait(0)
            updates.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    brought(ckpt, updates, 2)
    assert whole(live) == 2


def test_a_loop_ends_if_close_comes_just_before_it_waits(
    updates: statehold.Subscription, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = updates.wait

    def closed_first() -> statehold.Update | None:
        updates.close()
        return wait()

    monkeypatch.setattr(updates, "wait", closed_first)
    assert list(updates) == []


def test_running_statistics_of_the_consumer_are_replaced(tmp_path: Path) -> None:
    """Batch norm moves no version counter when it writes them."""

    def made() -> torch.nn.Sequential:
        return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))

    model, ours = made(), made()
    with (
        statehold.Checkpointer(tmp_path / "run") as ckpt,
        statehold.subscribe(tmp_path / "run", {"model": ours}) as updates,
    ):
        for step in (1, 2):
            with torch.no_grad():
                model[0].weight.add_(1)
            ckpt.save(step, {"model": model}).wait("committed", timeout=DEADLINE_S)
            updates.wait(DEADLINE_S).apply()
            for name, value in model.state_dict().items():
                assert torch.equal(ours.state_dict()[name], value), (step, name)
            before = ours[1].running_mean.clone()
            ours(torch.randn(8, 4) * 10 + 5)
            assert not torch.equal(ours[1].running_mean, before)


def test_names_that_look_like_patterns_are_names(tmp_path: Path) -> None:
    saved = {
        "model[0]": torch.ones(2),
        "model*": {"w": torch.full((2,), 2.0)},
        "model0": torch.ones(1),
    }
    live = {"model[0]": torch.zeros(2), "model*": {"w": torch.zeros(2)}}
    with (
        statehold.Checkpointer(tmp_path / "run") as ckpt,
        statehold.subscribe(tmp_path / "run", live) as updates,
    ):
        ckpt.save(1, saved).wait("committed", timeout=DEADLINE_S)
        updates.wait(DEADLINE_S).apply()
    assert torch.equal(live["model[0]"], saved["model[0]"])
    assert torch.equal(live["model*"]["w"], saved["model*"]["w"])
