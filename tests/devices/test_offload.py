"""Offloaded optimizers whose parameters are on a device: torch's bits, and nothing too early."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from statehold import offload
from statehold.errors import DeviceError, UsageError
from statehold.offload import on_device
from statehold.offload.on_device import Lanes, Mirror
from statehold.tensors.devices import cuda
from statehold.units import KiB
from support.cuda import Machine, install
from support.device_twins import DeviceTwins
from support.faults import SMALL
from support.seeds import SEED
from support.twins import Twins, same_bits

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
MODES = pytest.mark.parametrize("drains", [False, True], ids=["step", "backward"])


@pytest.mark.thorough
@MODES
@pytest.mark.parametrize("dtypes", [[F32], [BF16], [F16, F32]], ids=str)
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_every_rule_and_dtype(
    machine: Machine, tmp_path: Path, kind: str, dtypes: list[torch.dtype], drains: bool
) -> None:
    options = {"weight_decay": 0.1, **({"momentum": 0.9} if kind == "SGD" else {})}
    twins = DeviceTwins(machine, dtypes, kind=kind, options=options, drain_gradients=drains,
                        tiers=[offload.Path(tmp_path)], subgroup_bytes=40_000)  # fmt: skip
    for missing in ([], [1, 4], []):
        twins.backward(skip=missing)
        twins.backward()
        assert all(param.grad is None for param in twins.params) is drains
        twins.step()
    twins.check()
    assert twins.ours.stats.misses > 0


@pytest.mark.thorough
@MODES
@pytest.mark.parametrize("seed", range(SEED, SEED + 4))
def test_whenever_the_device_works(
    monkeypatch: pytest.MonkeyPatch, seed: int, drains: bool
) -> None:
    machine = install(monkeypatch, seed=seed)
    with machine.in_use():
        twins = DeviceTwins(machine, [BF16, F32], drain_gradients=drains)
        twins.train(3)
        twins.check()


def test_backward_on_a_thread_of_autograd(machine: Machine) -> None:
    """CUDA has one thread a device, which has the stream of the forward; the caller has another."""
    twins = DeviceTwins(machine, [BF16, F32], drain_gradients=True)
    for _ in range(3):
        stream = machine.cuda.Stream()
        stream.wait_stream(machine.default(0))
        seen: list[str] = []

        def backward(stream: Any = stream, seen: list[str] = seen) -> None:
            machine.enter()
            with machine.cuda.stream(stream):
                twins.backward()
                seen.append(threading.current_thread().name)

        thread = threading.Thread(target=backward, name="autograd")
        thread.start()
        thread.join()
        assert seen == ["autograd"]
        assert all(param.grad is None for param in twins.params)
        machine.default(0).wait_stream(stream)  # as the end of backward() does
        twins.step()
    twins.check()


# -- hazards ------------------------------------------------------------------------------------


def hasty(machine: Machine, *, drains: bool) -> bool:
    """Whether a run is right on a device whose own streams are as far ahead of copies as can be."""
    values, half = torch.linspace(-1, 1, 6000), torch.full((6000,), 1.5)
    param = torch.nn.Parameter(machine.put(values.bfloat16()))
    master = torch.nn.Parameter(values.bfloat16().float())
    optimizer = offload.AdamW([param], lr=0.1, tiers=[offload.Host("1MiB")], drain_gradients=drains)
    plain = torch.optim.AdamW([master], lr=0.1, fused=True)
    seen = []
    for number, micro_batches in enumerate([1, 2, 1], 1):
        grad = (half * number).bfloat16()
        for _ in range(micro_batches):
            (param * machine.put(grad)).sum().backward()
            machine.timeline.run(machine.default(0))
        master.grad = (grad * micro_batches).float()
        optimizer.step()
        plain.step()
        optimizer.zero_grad()
        seen.append((param.detach() * 1, master.detach().bfloat16()))  # the next forward
        if number < 3:
            machine.timeline.run(machine.default(0))
    # An update whose gradient comes from a stream that has not waited for the weights.
    with machine.cuda.stream(machine.cuda.Stream()):
        param.grad = machine.put(half.bfloat16())
        optimizer.step()
    master.grad = half.clone()
    plain.step()
    seen.append((param.detach(), master.detach().bfloat16()))
    return all(same_bits(machine.read(got), expected) for got, expected in seen)


@MODES
def test_a_hasty_device_changes_nothing(machine: Machine, drains: bool) -> None:
    assert hasty(machine, drains=drains)


def _lets_go_at_once(self: Mirror) -> None:
    self._moving.clear()


def _forgets_what_was_drained(self: Mirror, index: int) -> None:
    self._drained.clear()
    _BRING(self, index)


_BRING = Mirror._bring_grad


def _waits_for_no(lane: str) -> Callable[[Lanes, str], None]:
    wait = Lanes.wait

    def waits(self: Lanes, its_lane: str) -> None:
        if its_lane != lane:
            wait(self, its_lane)

    return waits


BROKEN: dict[str, tuple[Any, str, Any]] = {
    "a gradient is read too early": (Lanes, "wait", _waits_for_no(on_device.TO_HOST)),
    "memory of a gradient is used again too early": (Mirror, "_let_go", _lets_go_at_once),
    "weights are used before they are back": (
        cuda.CudaBackend, "make_current_wait", lambda *_: None),
    "weights on their way are overwritten": (Lanes, "wait", _waits_for_no(on_device.TO_DEVICE)),
    "an accumulated gradient is lost": (Mirror, "_bring_grad", _forgets_what_was_drained),
}  # fmt: skip


@pytest.mark.parametrize("defect", BROKEN)
def test_a_hasty_device_finds_every_defect(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, defect: str
) -> None:
    monkeypatch.setattr(*BROKEN[defect])
    assert not hasty(machine, drains=True)


# -- memory, waits, and what programs do around an update ---------------------------------------


def test_gradients_give_their_memory_back_in_backward(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_device, "DRAINING_BYTES_MAX", 8192)
    params = [torch.nn.Parameter(machine.put(torch.ones(1024))) for _ in range(10)]
    with closing(offload.AdamW(params, tiers=[offload.Host("1MiB")], drain_gradients=True)):
        loss = sum(((each * 2).sum() for each in params), machine.put(torch.zeros(())))
        before = machine.bytes_on()
        machine.reset_peak()
        loss.backward()
        assert machine.peak_on() < before + 5 * 4096
    plain = [torch.nn.Parameter(machine.put(torch.ones(1024))) for _ in range(10)]
    loss = sum(((each * 2).sum() for each in plain), machine.put(torch.zeros(())))
    before = machine.bytes_on()
    machine.reset_peak()
    loss.backward()
    assert machine.peak_on() >= before + 9 * 4096


def test_no_forked_child_has_memory_that_a_device_reaches(machine: Machine) -> None:
    """A fork copies pinned pages at once, or takes them from the device's sight."""
    params = [torch.nn.Parameter(machine.put(torch.ones(1024))) for _ in range(3)]
    options: dict[str, Any] = {"tiers": [offload.Host("1MiB")], "device_every": 1}
    with closing(offload.AdamW(params, **options)):
        assert len(machine.pins.ranges) == 2  # weights and gradients, and the state
        assert not machine.pins.forked()


@MODES
def test_weights_and_gradients_are_pinned_in_pieces(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, drains: bool
) -> None:
    """Other threads launch nothing while one is pinned. A tensor is in one piece."""
    monkeypatch.setattr(on_device, "PINNED_AT_ONCE_BYTES", 16 * KiB)
    twins = DeviceTwins(machine, [BF16, F32], drain_gradients=drains)
    sizes = sorted(machine.pins.ranges.values())
    longest = max(each.nbytes for each in twins.params)
    assert len(sizes) >= 4
    assert sizes[-1] < longest + 16 * KiB + 2 * on_device.PAGE_BYTES
    twins.train(2)
    twins.check()
    twins.ours.close()
    assert not machine.pins.ranges


@pytest.mark.thorough
def test_a_step_enters_a_lane_once_and_not_for_each_parameter(machine: Machine) -> None:
    """To enter one takes Python and the driver longer than a small copy."""

    def entered(count: int) -> int:
        shapes = [(8,)] * count
        twins = DeviceTwins(machine, [F32], shapes=shapes, subgroup_bytes=1_000_000)  # in one
        twins.train(2)
        twins.backward()
        seen = Counter[str]()
        machine.fails_at = lambda operation: bool(seen.update([operation]))
        twins.step()
        machine.fails_at = lambda operation: False
        twins.ours.close()
        return seen["cudaEventRecord"]

    assert 0 < entered(40) == entered(2)


@MODES
def test_the_host_does_not_wait_for_weights(machine: Machine, drains: bool) -> None:
    twins = DeviceTwins(machine, [BF16], drain_gradients=drains)
    twins.backward()
    twins.step()
    [side] = [each for each in machine.timeline.streams if each.queue and each.queue[-1]
              and each is not machine.default(0)]  # fmt: skip
    assert side.done < side.given
    twins.check()


@MODES
def test_parameters_on_two_devices(monkeypatch: pytest.MonkeyPatch, drains: bool) -> None:
    machine = install(monkeypatch, count=2, seed=1)
    places = itertools.cycle([0, 1])
    put = machine.put
    with machine.in_use():
        monkeypatch.setattr(machine, "put", lambda each: put(each, next(places)))
        twins = DeviceTwins(machine, [BF16], shapes=[(9000,), (5, 5)], drain_gradients=drains)
        twins.train(2)
        twins.check()
        twins.ours.close()
        assert not machine.pins.ranges


@MODES
def test_weights_that_were_changed_between_updates_count(machine: Machine, drains: bool) -> None:
    twins = DeviceTwins(machine, [BF16, F32], drain_gradients=drains)
    twins.train(1)
    with torch.no_grad():
        for param, master in zip(twins.params, twins.masters, strict=True):
            param.zero_()
            master.zero_()
    twins.train(2)
    for param, master in zip(twins.params, twins.masters, strict=True):
        assert same_bits(machine.read(param), master.detach().to(param.dtype))


def test_a_scaler_and_a_rate_on_the_device(machine: Machine) -> None:
    twins = DeviceTwins(machine, [F32], options={"lr": machine.put(torch.tensor(0.01))})
    twins.torchs.param_groups[0]["lr"] = 0.009999999776482582
    for scale, is_inf in ((4.0, False), (4.0, True), (2.0, False)):
        twins.backward(scale=scale)
        for optimizer, place in ((twins.ours, machine.put), (twins.torchs, torch.Tensor.detach)):
            optimizer.grad_scale = place(torch.tensor(scale))
            optimizer.found_inf = place(torch.tensor(float(is_inf)))
        twins.step()
    del twins.ours.grad_scale, twins.ours.found_inf
    for param, master in zip(twins.params, twins.masters, strict=True):
        assert same_bits(machine.read(param), master.detach())


@MODES
def test_clipping_by_the_norm_of_all_gradients(machine: Machine, drains: bool) -> None:
    twins = DeviceTwins(machine, [F32], drain_gradients=drains)
    for max_norm in (1e9, 0.5):
        twins.backward()
        norm = twins.ours.clip_grad_norm_(max_norm)
        expected = torch.nn.utils.clip_grad_norm_(twins.masters, max_norm)
        torch.testing.assert_close(norm if drains else machine.read(norm), expected)
        twins.step()
        for param, master in zip(twins.params, twins.masters, strict=True):
            torch.testing.assert_close(machine.read(param), master.detach())


def test_drained_gradients_that_are_discarded_have_no_effect(machine: Machine) -> None:
    twins = DeviceTwins(machine, [BF16], drain_gradients=True)
    twins.backward(scale=100)
    for each in (twins.ours, twins.torchs):
        each.zero_grad()
    twins.sums.clear()
    twins.train(2)
    twins.check()


def test_a_scaler_that_would_see_no_gradient_is_refused(machine: Machine) -> None:
    twins = DeviceTwins(machine, [BF16], drain_gradients=True)
    twins.backward()
    twins.ours.found_inf = 0
    with pytest.raises(UsageError, match="GradScaler"):
        twins.ours.step()


def test_gradients_that_others_have_to_reduce_are_not_drained(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = DeviceTwins(machine, [BF16], drain_gradients=True)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(UsageError, match="DistributedDataParallel"):
        twins.backward()
    with pytest.raises(UsageError, match="DistributedDataParallel"):
        DeviceTwins(machine, [BF16], drain_gradients=True)
    assert DeviceTwins(machine, [BF16]).ours.stats.pinned_bytes


@MODES
def test_a_device_that_fails_is_named_and_memory_stays_valid(
    machine: Machine, drains: bool
) -> None:
    twins = DeviceTwins(machine, [BF16], drain_gradients=drains)
    twins.backward()
    machine.failure = "CUDA error: an illegal memory access was encountered"
    with pytest.raises(DeviceError):
        twins.ours.step()
    twins.ours.close()
    twins.ours.close()


@pytest.mark.thorough
@MODES
def test_a_step_is_saved_and_restored(tmp_path: Path, machine: Machine, drains: bool) -> None:
    def model_of(twins: Twins) -> torch.nn.ParameterList:
        return torch.nn.ParameterList(twins.params)

    tiers = [offload.Host("200KiB" if drains else "8MiB"), offload.Path(tmp_path)]
    options = {"tiers": tiers, "drain_gradients": drains}
    twins = DeviceTwins(machine, [BF16, F32], **options)
    twins.train(2)
    others = DeviceTwins(machine, [BF16, F32], seed=9, **options)
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        ckpt.save(1, {"model": model_of(twins), "optimizer": twins.ours}).wait("committed")
        ckpt.restore({"model": model_of(others), "optimizer": others.ours})
    others.random, others.torchs, others.masters = twins.random, twins.torchs, twins.masters
    others.train(2)
    others.check()
