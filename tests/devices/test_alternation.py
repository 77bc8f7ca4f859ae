"""Subgroups that a device updates, in turn with the host: torch's bits, and nothing too early."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from statehold import offload
from statehold.errors import ChecksumError, DeviceError, StorageError, UsageError
from statehold.offload import on_device
from statehold.offload.on_device import Lanes, Mirror, OnDevice
from statehold.offload.update import OptimizerUpdate
from statehold.planners.interleaving import Device
from support.cuda import Machine, install
from support.device_twins import DeviceTwins
from support.faults import SMALL, must
from support.in_memory import SimFs
from support.seeds import SEED
from support.twins import same_bits, snapshot, state_of

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TRAININGS = int(os.environ.get("STATEHOLD_OFFLOAD", "4"))
MODES = pytest.mark.parametrize("drains", [False, True], ids=["step", "backward"])


def alternating(machine: Machine, dtypes: list[torch.dtype], **options: Any) -> DeviceTwins:
    """Every third subgroup on the device."""
    return DeviceTwins(machine, dtypes, **{"device_every": 3} | options)


# -- bits -----------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "dtypes", "every", "drains"),
    [
        ("AdamW", [BF16], 2, False),
        ("AdamW", [BF16], 3, True),
        ("AdamW", [F32], 3, False),
        ("AdamW", [F32], 2, True),
        ("AdamW", [F16, F32], 1, True),
        ("Adam", [BF16, F32], 5, False),
        ("SGD", [BF16], 2, True),
        ("SGD", [F32], 3, False),
    ],
)
def test_every_rule_dtype_and_share(
    machine: Machine, tmp_path: Path, kind: str, dtypes: list[torch.dtype], every: int, drains: bool
) -> None:
    """Several groups, gradients that are missing, and several backwards before an update."""
    options = {"momentum": 0.9} if kind == "SGD" else {"amsgrad": every == 5}
    groups = [{"lr": 0.1, "weight_decay": 0.1}, {"lr": torch.tensor(0.003)}]
    twins = alternating(machine, dtypes, kind=kind, options=options, groups=groups,
                        drain_gradients=drains, device_every=every,
                        tiers=[offload.Host("100KB"), offload.Path(tmp_path)])  # fmt: skip
    for missing in ([], [1, 4], []):
        twins.backward(skip=missing)
        twins.backward()
        twins.step()
    twins.check()
    stats = twins.ours.stats
    assert stats.device_updates >= 2 * stats.device_subgroups > 0
    assert stats.misses > 0 or kind == "SGD"  # its state is small


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(SEED, SEED + TRAININGS))
def test_whenever_the_device_works(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int
) -> None:
    """Random shapes, dtypes, groups, tiers, shares, gradients that are missing, and changes."""
    chance = random.Random(seed)
    machine = install(monkeypatch, seed=seed)
    shapes = [
        tuple(chance.choice([1, 2, 17, 64, 128]) for _ in range(chance.randint(0, 3)))
        for _ in range(chance.randint(1, 6))
    ]
    shapes.append((chance.randint(1, 100_000),))
    groups = [{}, {"lr": 0.03, "weight_decay": 0.3}, {"betas": (0.8, 0.9)}]
    with machine.in_use():
        twins = DeviceTwins(
            machine,
            chance.choice([[F32], [BF16], [F16, F32, BF16]]),
            shapes=shapes,
            seed=seed,
            groups=groups[: chance.randint(1, 3)],
            tiers=[offload.Host(chance.choice([0, 200_000])), offload.Path(tmp_path)],
            subgroup_bytes=chance.choice([None, 30_000, 66_000, 333_333]),
            drain_gradients=chance.random() < 0.5,
            device_every=chance.choice([1, 2, 3, 5]),
        )
        for _ in range(chance.randint(2, 5)):
            present = [i for i in range(len(shapes)) if chance.random() < 0.8]
            if present and chance.random() < 0.3:
                changed = chance.choice(present)
                with torch.no_grad():
                    twins.params[changed].zero_()
                    twins.masters[changed].zero_()
            for _ in range(chance.randint(1, 2)):
                twins.backward(skip=[i for i in range(len(shapes)) if i not in present])
            twins.step()
        twins.check()
        twins.ours.close()
        assert not machine.pins.ranges


def test_a_scaler_and_a_rate_on_the_device(machine: Machine) -> None:
    twins = alternating(machine, [F32], options={"lr": machine.put(torch.tensor(0.01))})
    twins.torchs.param_groups[0]["lr"] = 0.009999999776482582
    for scale, is_inf in ((4.0, False), (4.0, True), (2.0, False)):
        twins.backward(scale=scale)
        for optimizer, place in ((twins.ours, machine.put), (twins.torchs, torch.Tensor.detach)):
            optimizer.grad_scale = place(torch.tensor(scale))
            optimizer.found_inf = place(torch.tensor(float(is_inf)))
        twins.step()
    del twins.ours.grad_scale, twins.ours.found_inf
    assert twins.ours.stats.device_updates == 2 * twins.ours.stats.device_subgroups > 0
    twins.check()


@MODES
def test_clipping(machine: Machine, drains: bool) -> None:
    """The same bits as with updates on the host alone."""
    both = [
        DeviceTwins(machine, [F32, BF16], drain_gradients=drains, device_every=every)
        for every in (2, None)
    ]
    for max_norm in (1e9, 0.5):
        for each in both:
            each.backward()
            each.ours.clip_grad_norm_(max_norm)
            each.step()
    assert both[0].ours.stats.device_updates > 0 == both[1].ours.stats.device_updates
    for ours, alone in zip(*(each.params for each in both), strict=True):
        assert same_bits(machine.read(ours), machine.read(alone))


@MODES
def test_weights_that_were_changed_between_updates_count(machine: Machine, drains: bool) -> None:
    twins = alternating(machine, [BF16, F32], drain_gradients=drains, device_every=2)
    twins.train(1)
    with torch.no_grad():
        for param, master in zip(twins.params, twins.masters, strict=True):
            param.zero_()
            master.zero_()
    twins.train(2)
    twins.check()


@MODES
def test_memory_that_cannot_be_pinned(machine: Machine, drains: bool) -> None:
    machine.may_pin = False
    twins = alternating(machine, [BF16, F32], drain_gradients=drains)
    twins.train(2)
    twins.check()
    assert twins.ours.stats.device_updates > 0


@MODES
def test_parameters_on_two_devices(monkeypatch: pytest.MonkeyPatch, drains: bool) -> None:
    machine = install(monkeypatch, count=2, seed=1)
    places = itertools.cycle([0, 1])
    put = machine.put
    with machine.in_use():
        monkeypatch.setattr(machine, "put", lambda each: put(each, next(places)))
        shapes = [(9000,), (8000,), (5, 5), (5, 5)]
        twins = alternating(machine, [BF16], shapes=shapes, drain_gradients=drains,
                            device_every=1)  # fmt: skip
        twins.train(2)
        twins.check()
        stats = twins.ours.stats
        assert {str(each) for each in state_of(twins.ours).on_device.places.values()} == {
            "cuda:0", "cuda:1"}  # fmt: skip
        assert stats.device_subgroups > 1
        twins.ours.close()
        assert not machine.pins.ranges


# -- hazards --------------------------------------------------------------------------------------


def hasty(machine: Machine, folder: Path, *, drains: bool) -> bool:
    """Whether training is right on a device that does nothing before somebody waits for it."""
    twins = alternating(machine, [BF16, F32], device_every=2, drain_gradients=drains,
                        tiers=[offload.Path(folder)])  # fmt: skip
    try:
        twins.train(3)
        twins.check()
    except (AssertionError, ChecksumError):  # a file may hold what was not written to it
        return False
    finally:
        twins.ours.close()
    return True


@MODES
def test_a_hasty_device_changes_nothing(machine: Machine, tmp_path: Path, drains: bool) -> None:
    assert hasty(machine, tmp_path, drains=drains)


def _with_one_memory(self: OnDevice, *arguments: Any) -> None:
    _INIT(self, *arguments)
    for device, lanes in self.lanes.items():
        one = lanes[0]
        other = on_device.Lane(device, lanes[1].name, one.state, one.grads, one.drained,
                               one.numbers)  # fmt: skip
        self._turns[device] = itertools.cycle([one, other])


_INIT = OnDevice.__init__

# With the seeds of devices, one of which finds them. None: the device does nothing unasked. Where
# two lanes meet depends on the threads of the host, too, so a seed may find nothing.
BROKEN: dict[str, tuple[Any, str, Any, Sequence[int | None]]] = {
    "gradients are read before they are there": (Mirror, "arrive", lambda _: None, [None]),
    "state is taken before it is back": (OnDevice, "_end", lambda *_: None, [None]),
    "two lanes have one memory": (OnDevice, "__init__", _with_one_memory, range(1, 13)),
    "drained gradients are read too early": (Lanes, "wait", lambda *_: None, [None]),
}


def finds(folder: Path, seed: int | None, broken: tuple[Any, str, Any], *, drains: bool) -> bool:
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(*broken)
        machine = install(patched, seed=seed)
        with machine.in_use():
            return not hasty(machine, folder, drains=drains)


@pytest.mark.thorough
@pytest.mark.parametrize("defect", BROKEN)
def test_a_hasty_device_finds_every_defect(tmp_path: Path, defect: str) -> None:
    *broken, seeds = BROKEN[defect]
    drains = "drained" in defect
    assert any(finds(tmp_path / str(seed), seed, broken, drains=drains) for seed in seeds)


# -- memory, waits, transfers ---------------------------------------------------------------------


def test_memory_is_announced_and_given_back(machine: Machine) -> None:
    params = [torch.nn.Parameter(machine.put(torch.ones(40_000, dtype=BF16)))]
    before = machine.bytes_on()
    optimizer = offload.AdamW(
        params, tiers=[offload.Host("1MiB")], subgroup_bytes=70_000, device_every=2
    )
    announced = optimizer.stats.device_bytes
    assert machine.bytes_on() - before == announced > 2 * 60_000
    params[0].grad = machine.put(torch.ones(40_000, dtype=BF16))
    machine.reset_peak()
    peak = machine.peak_on()
    optimizer.step()
    machine.finish()
    assert machine.peak_on() == peak
    pinned = sum(machine.pins.ranges.values())
    stats = optimizer.stats
    assert pinned == stats.pinned_bytes + 8 * 61_440
    assert list(machine.pins.ranges.values()).count(61_440) == 8  # each buffer by a call of its own
    optimizer.close()
    assert not machine.pins.ranges
    assert machine.bytes_on() - before == params[0].nbytes


def test_the_device_begins_before_the_gradients_of_the_host_are_there(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = alternating(machine, [BF16])
    twins.train(1)
    stats, found = twins.ours.stats, []
    wait = Lanes.wait

    def waits(lanes: Lanes, lane: str) -> None:
        if lane == on_device.TO_HOST:
            found.append(twins.ours.stats.device_updates)
        wait(lanes, lane)

    monkeypatch.setattr(Lanes, "wait", waits)
    twins.train(1)
    assert found == [stats.device_updates, stats.device_updates + 2]  # weights; two lanes begin
    twins.check()


@MODES
def test_the_host_waits_for_no_device_while_it_has_work(machine: Machine, drains: bool) -> None:
    waits = []
    for every in (None, 2):
        twins = DeviceTwins(machine, [BF16], drain_gradients=drains, device_every=every)
        twins.backward()
        machine.timeline.host_waits.clear()
        twins.step()
        names = machine.timeline.host_waits
        waits.append(names.count(threading.current_thread().name))
        ends = sum(name.startswith("statehold-elsewhere") for name in names)
        assert ends == twins.ours.stats.device_updates
        twins.check()
    assert waits[0] == waits[1]


def test_gradients_of_the_device_stay_there(machine: Machine) -> None:
    """The host gets what it updates, and no more."""
    param = torch.nn.Parameter(machine.put(torch.ones(40_000, dtype=BF16)))
    optimizer = offload.AdamW(
        [param], tiers=[offload.Host("1MiB")], subgroup_bytes=70_000, device_every=2
    )
    state = state_of(optimizer)
    state.mirror.copies[0].grad.fill_(9)
    param.grad = machine.put(torch.ones(40_000, dtype=BF16))
    optimizer.step()
    grad = state.mirror.copies[0].grad
    there = torch.zeros(40_000, dtype=torch.bool)
    for span in state.on_device.spans()[0]:
        there[span.begin : span.end] = True
    assert 0 < there.sum() < 40_000
    assert bool((grad[there] == 9).all())
    assert bool((grad[~there] == 1).all())
    optimizer.close()


# -- the share ------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize(("host", "expected"), [(2e9, 7), (1e9, 4), (1e3, 2), (3e9, None)])
def test_the_share_comes_from_rates(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    host: float,
    expected: int | None,
) -> None:
    """1 + 12 / (B / U - 2), if the device is fast enough."""
    rates = (host, Device.full_duplex(8e9 if host == 2e9 else 6e9, 1e12))
    monkeypatch.setattr(on_device, "measure", lambda *_: rates)
    with caplog.at_level(logging.INFO, "statehold"):
        twins = DeviceTwins(machine, [BF16], device_every="auto")
    (record,) = caplog.records
    assert f"the host updates {host:.3g} parameters a second" in record.getMessage()
    share = f"one subgroup of {expected}" if expected else "no subgroup"
    assert record.getMessage().endswith(f"It updates {share}")
    count = len(state_of(twins.ours).sizes.subgroups)
    stats = twins.ours.stats
    assert stats.device_subgroups == (-(-count // expected) if expected else 0)
    assert bool(stats.device_bytes) is bool(expected)
    twins.train(2)
    twins.check()


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_rates_are_measured(machine: Machine, kind: str) -> None:
    found = []
    measure = on_device.measure
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_device, "measure", lambda *a: found.append(measure(*a)) or found[0])
        options = {"momentum": 0.9} if kind == "SGD" else {}
        twins = DeviceTwins(machine, [BF16], kind=kind, options=options, device_every="auto")
    rate, device = found[0]
    assert min(rate, device.rate, device.to_device, device.from_device, device.both) > 0
    twins.train(2)
    twins.check()


@pytest.mark.parametrize("wrong", [0, -1, True, "often", 2.0])
def test_a_wrong_share_is_refused(machine: Machine, wrong: Any) -> None:
    with pytest.raises(UsageError, match="device_every"):
        DeviceTwins(machine, [BF16], device_every=wrong)


def test_parameters_on_the_host_are_updated_there() -> None:
    params = [torch.nn.Parameter(torch.ones(100))]
    optimizer = offload.AdamW(params, tiers=[offload.Host("1MiB")], device_every=2)
    assert optimizer.stats.device_bytes == optimizer.stats.device_subgroups == 0
    optimizer.close()


def test_too_little_memory_is_refused_at_construction(machine: Machine) -> None:
    param = torch.nn.Parameter(machine.put(torch.ones(40_000, dtype=BF16)))
    machine.memory.limits[0] = machine.bytes_on() + 150_000
    with pytest.raises(UsageError, match="too little memory to update subgroups"):
        offload.AdamW([param], tiers=[offload.Host("1MiB")], subgroup_bytes=70_000, device_every=2)
    assert not machine.pins.ranges
    offload.AdamW([param], tiers=[offload.Host("1MiB")], subgroup_bytes=70_000).close()


# -- failures, saves, restores --------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize(("operation", "drains"), [("read", False), ("write", True)])
def test_a_path_that_fails_during_updates_on_the_device(
    machine: Machine, operation: str, drains: bool
) -> None:
    """A read that fails needs a load, and a write that fails goes to another path."""
    fs = SimFs(seed=1)
    fs.mkdir("one")
    fs.mkdir("two")
    twins = alternating(machine, [BF16], tiers=[offload.Path("one"), offload.Path("two")],
                        subgroup_bytes=30_000, device_every=2, drain_gradients=drains,
                        fs=fs)  # fmt: skip
    twins.train(2)
    machine.finish()
    restore = snapshot(twins)
    before = twins.ours.stats.device_updates
    fs.fail_next(operation, errno.EIO, skip=2)
    if operation == "read":
        with pytest.raises(StorageError):
            twins.train(1)
        assert twins.ours.stats.device_updates > before
        with pytest.raises(UsageError, match="earlier update"):
            twins.ours.step()
        machine.finish()
        restore()
        twins.sums.clear()
    else:
        twins.train(1)
    must(fs.fired[f"injected {operation}"] == 1)
    twins.train(2)
    twins.check()
    twins.ours.close()


@MODES
@pytest.mark.parametrize("launch", [1, 9])
def test_a_device_that_fails_in_an_update(machine: Machine, launch: int, drains: bool) -> None:
    """The error names the device, the optimizer refuses, and close() touches no memory."""
    twins = alternating(machine, [BF16], drain_gradients=drains, device_every=1)
    twins.train(1)
    twins.backward()
    launches = itertools.count()
    machine.fails_at = lambda operation: operation == "a launch" and next(launches) == launch
    with pytest.raises(DeviceError):
        twins.ours.step()
    must(next(launches) > launch)
    with pytest.raises((UsageError, DeviceError)):
        twins.ours.step()
    twins.ours.close()
    twins.ours.close()


def test_a_device_that_fails_while_others_are_updated(machine: Machine) -> None:
    """The failure is found by the thread that waits for the device."""
    twins = alternating(machine, [BF16], device_every=2)
    twins.train(1)
    twins.backward()
    machine.fails_at = lambda operation: (
        operation == "cudaEventSynchronize"
        and (threading.current_thread().name.startswith("statehold-elsewhere"))
    )
    with pytest.raises(DeviceError):
        twins.ours.step()
    with pytest.raises(UsageError, match="earlier update"):
        twins.ours.step()
    twins.ours.close()


def test_an_update_that_is_interrupted_leaves_no_work_under_way(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes in an update on the host, while the device has several subgroups."""
    twins = alternating(machine, [BF16], device_every=2)
    twins.train(1)
    machine.finish()
    twins.backward()
    uses = itertools.count()
    use = OptimizerUpdate.use

    def interrupted(self: OptimizerUpdate, *arguments: Any) -> Any:
        if next(uses) == 2:
            raise KeyboardInterrupt
        return use(self, *arguments)

    monkeypatch.setattr(OptimizerUpdate, "use", interrupted)
    there = state_of(twins.ours).on_device
    lanes = [lane for of_a_device in there.lanes.values() for lane in of_a_device]
    before = twins.ours.stats.device_updates
    with pytest.raises(KeyboardInterrupt):
        twins.ours.step()
    assert twins.ours.stats.device_updates > before + 1
    events = [there.work.newest(lane.device, lane.name) for lane in lanes]
    assert [event is not None and event.is_over for event in events] == [True, True]
    with pytest.raises(UsageError, match="earlier update"):
        twins.ours.step()
    twins.ours.close()
    assert not machine.pins.ranges


@pytest.mark.parametrize("launch", [0, 3, 8])
def test_a_device_that_fails_at_construction(machine: Machine, tmp_path: Path, launch: int) -> None:
    launches = itertools.count()
    machine.fails_at = lambda operation: operation == "a launch" and next(launches) == launch
    with pytest.raises(DeviceError):
        alternating(machine, [BF16], tiers=[offload.Path(tmp_path)])
    assert not list(tmp_path.rglob("*.state"))


def test_a_device_without_a_kernel_is_refused(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise NotImplementedError("Could not run 'aten::_fused_adamw_'")

    monkeypatch.setattr(torch, "_fused_adamw_", missing)
    with pytest.raises(UsageError, match="no fused kernel"):
        alternating(machine, [BF16])
    assert not machine.pins.ranges


@pytest.mark.thorough
@pytest.mark.parametrize(("then", "drains"), [(None, True), (3, False)])
def test_a_step_is_saved_right_after_an_update(
    tmp_path: Path, machine: Machine, drains: bool, then: int | None
) -> None:
    """Its files are linked, the next updates go on meanwhile, and any share goes on from it."""
    options = {"drain_gradients": drains, "tiers": [offload.Path(tmp_path)], "device_every": 2,
               "shapes": [(300, 128), (7,), (90_000,)]}  # fmt: skip

    def state_of(twins: DeviceTwins) -> dict[str, Any]:
        return {"model": torch.nn.ParameterList(twins.params), "optimizer": twins.ours}

    twins = alternating(machine, [BF16, F32], **options)
    twins.train(2)
    others = alternating(machine, [BF16, F32], seed=9, **options | {"device_every": then})
    masters = [each.detach().clone() for each in twins.masters]
    before = snapshot(twins)
    noise = twins.random.get_state()
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        save = ckpt.save(1, state_of(twins))
        twins.train(2)
        save.wait("committed")
        assert save.stats.linked_bytes > 0
        twins.check()
        ckpt.restore(state_of(others))
    before()
    twins.random.set_state(noise)
    others.random, others.torchs, others.masters = twins.random, twins.torchs, twins.masters
    assert all(map(torch.equal, masters, twins.masters))
    others.train(2)
    others.check()


def test_an_update_on_the_device_is_an_event(machine: Machine) -> None:
    twins = alternating(machine, [BF16])
    with twins.ours.recorded() as events:
        twins.train(1)
    paths = {each.subgroup: each.path for each in events if each.kind == "update"}
    places = state_of(twins.ours).on_device.places
    assert {index for index, path in paths.items() if path == "cuda:0"} == set(places)
    assert {index for index, path in paths.items() if path is None} == paths.keys() - set(places)
