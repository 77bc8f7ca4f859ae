"""Offloaded optimizers give the bits of torch's, whatever the tiers, cuts and gradients."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from statehold import offload
from statehold.planners.placement import buffers_in_transit
from support.seeds import SEED
from support.twins import Twins, state_of

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SHAPES = [(3, 5000), (7,), (1,), (), (0, 4), (129, 64), (90_000,), (2, 3, 1111)]
SMALL = 70_000
TRAININGS = int(os.environ.get("STATEHOLD_OFFLOAD", "12"))


def paths(tmp_path: Path, count: int) -> list[offload.Path]:
    found = [tmp_path / str(index) for index in range(count)]
    for each in found:
        each.mkdir()
    return [offload.Path(each) for each in found]


@pytest.mark.thorough
@pytest.mark.parametrize("dtypes", [[F32], [BF16], [F16], [F32, BF16]], ids=str)
@pytest.mark.parametrize("kind", ["AdamW", "Adam", "SGD"])
def test_every_rule_and_dtype(tmp_path: Path, kind: str, dtypes: list[torch.dtype]) -> None:
    options = {"weight_decay": 0.1, **({"momentum": 0.9} if kind == "SGD" else {})}
    twins = Twins(SHAPES, dtypes, kind=kind, options=options, tiers=paths(tmp_path, 1),
                  subgroup_bytes=SMALL // 3)  # fmt: skip
    twins.train(4)
    twins.check()
    assert twins.ours.stats.misses > 0


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("AdamW", {"amsgrad": True}),
        ("AdamW", {"maximize": True, "betas": (0.5, 0.9)}),
        ("AdamW", {"lr": torch.tensor(0.01)}),
        ("SGD", {"momentum": 0.9, "dampening": 0.5}),
        ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ],
    ids=str,
)
def test_options(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    twins = Twins(SHAPES, [F32, BF16], kind=kind, options=options, tiers=paths(tmp_path, 1),
                  subgroup_bytes=SMALL)  # fmt: skip
    twins.train(3)
    twins.check()


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(SEED, SEED + TRAININGS))
def test_any_shapes_tiers_and_gradients(tmp_path: Path, seed: int) -> None:
    """Random shapes, dtypes, groups, tiers, subgroup sizes, schedules, and missing gradients."""
    chance = random.Random(seed)
    shapes = [
        tuple(chance.choice([1, 2, 17, 64, 333]) for _ in range(chance.randint(0, 3)))
        for _ in range(chance.randint(1, 8))
    ]
    shapes.append((chance.randint(1, 200_000),))
    host = [offload.Host(chance.choice([0, 100_000, 2_000_000]))] if chance.random() < 0.5 else []
    groups = [{}, {"lr": 0.03, "weight_decay": 0.3}, {"betas": (0.8, 0.9)}]
    twins = Twins(
        shapes,
        chance.choice([[F32], [BF16], [F16, F32, BF16]]),
        seed=seed,
        groups=groups[: chance.randint(1, 3)],
        tiers=[*host, *paths(tmp_path, chance.randint(1, 3))],
        subgroup_bytes=chance.choice([None, 66_000, 333_333, 1 << 20]),
    )
    schedulers = [
        torch.optim.lr_scheduler.ExponentialLR(each, 0.7) for each in (twins.ours, twins.torchs)
    ]
    for _ in range(chance.randint(1, 6)):
        missing = [i for i in range(len(shapes)) if chance.random() < 0.2]
        for _ in range(chance.randint(1, 3)):  # accumulation
            twins.backward(skip=missing)
        twins.step()
        for scheduler in schedulers:
            scheduler.step()
    twins.check()
    twins.ours.close()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads(tmp_path: Path, threads: int) -> None:
    before = torch.get_num_threads()
    twins = Twins([(1000, 333)], [BF16], tiers=paths(tmp_path, 1), subgroup_bytes=SMALL)
    try:
        for count in (threads, 1):
            torch.set_num_threads(count)
            twins.backward()
            twins.ours.step()
            torch.set_num_threads(before)
            twins.torchs.step()
    finally:
        torch.set_num_threads(before)
    twins.check()


def test_state_that_fits_into_host_never_moves(tmp_path: Path) -> None:
    twins = Twins(SHAPES, [BF16], tiers=[offload.Host("8MiB"), *paths(tmp_path, 1)],
                  subgroup_bytes=SMALL)  # fmt: skip
    twins.train(3)
    twins.check()
    assert twins.ours.stats.paths[0].written_bytes == 0
    only_host = Twins(SHAPES, [BF16], tiers=[offload.Host("8MiB")], subgroup_bytes=SMALL)
    only_host.train(3)
    only_host.check()


def test_an_update_moves_each_subgroup_that_is_not_in_memory_once(tmp_path: Path) -> None:
    """24 bytes for each parameter, less what is in memory."""
    numel, cached = 1 << 20, 6
    twins = Twins([(numel,)], [BF16], tiers=[offload.Host(cached * 196_608), *paths(tmp_path, 1)],
                  subgroup_bytes=196_608)  # fmt: skip
    subgroups = numel * 12 // 196_608
    twins.train(2)
    before = twins.ours.stats
    twins.train(1)
    after = twins.ours.stats
    in_memory = cached + buffers_in_transit(1)
    moved = (subgroups - in_memory) * 196_608
    assert after.paths[0].read_bytes - before.paths[0].read_bytes == moved
    assert after.paths[0].written_bytes - before.paths[0].written_bytes == moved
    assert after.hits - before.hits == in_memory


def test_parameters_in_other_memory_orders(tmp_path: Path) -> None:
    """Channels last and transposed, with gradients in the usual order."""
    params = [
        torch.nn.Parameter(torch.randn(8, 6, 33, 5).to(memory_format=torch.channels_last)),
        torch.nn.Parameter(torch.randn(301, 77).t()),
    ]
    masters = [torch.nn.Parameter(p.detach().clone()) for p in params]
    ours = offload.AdamW(params, tiers=paths(tmp_path, 1), subgroup_bytes=100_000)
    torchs = torch.optim.AdamW(masters, fused=True)
    for _ in range(3):
        for param, master in zip(params, masters, strict=True):
            param.grad = torch.randn(param.shape)
            master.grad = torch.empty_like(master).copy_(param.grad)
        ours.step()
        torchs.step()
    for param, master in zip(params, masters, strict=True):
        assert torch.equal(param, master)
    kept, wanted = ours.state_dict()["state"], torchs.state_dict()["state"]
    for index in range(2):
        assert torch.equal(kept[index]["exp_avg"], wanted[index]["exp_avg"])


def test_weights_loaded_before_the_first_update_are_the_masters(tmp_path: Path) -> None:
    twins = Twins([(9000,)], [BF16], tiers=paths(tmp_path, 1))
    with torch.no_grad():
        twins.params[0].fill_(0.5)
        twins.masters[0].fill_(0.5)
    twins.train(2)
    twins.check()


def test_elements_that_somebody_changes_are_taken_over(tmp_path: Path) -> None:
    """The others keep the bits that only their masters have."""
    twins = Twins([(9000,)], [BF16], tiers=paths(tmp_path, 1))
    twins.train(3)
    with torch.no_grad():
        twins.params[0][100:200] = 3.0
        twins.masters[0][100:200] = 3.0
    twins.train(1)
    twins.check()


def test_changes_that_torch_does_not_count_are_taken_over_once_they_are(tmp_path: Path) -> None:
    """Collectives in place and `.data` move no version. docs/offload.md says what to call then."""
    twins = Twins([(9000,)], [BF16], tiers=paths(tmp_path, 1))
    twins.train(3)
    twins.params[0].data[100:200] = 3.0
    torch.autograd.graph.increment_version(twins.params[0])
    twins.masters[0].data[100:200] = 3.0
    twins.train(1)
    twins.check()


def test_subgroups_move_to_the_faster_path(tmp_path: Path) -> None:
    """The placement begins equal, and the bits are the same all the while."""
    twins = Twins([(1 << 20,)], [BF16], tiers=paths(tmp_path, 2), subgroup_bytes=196_608)
    assert [path.subgroups for path in twins.ours.stats.paths] == [32, 32]
    twins.train(1)
    for meters, nbytes in zip(state_of(twins.ours).store.meters, (3, 1), strict=True):
        meters.read.nbytes += nbytes * 10**15  # what it has really moved is nothing beside this
        meters.written.nbytes += nbytes * 10**15
        meters.both.busy_s += 1e6
    twins.train(1)
    assert [path.subgroups for path in twins.ours.stats.paths] == [48, 16]
    before = twins.ours.stats.paths
    twins.train(1)
    after = twins.ours.stats.paths
    twins.check()
    read = [now.read_bytes - then.read_bytes for now, then in zip(after, before, strict=True)]
    assert read[0] > 2 * read[1]


def test_limits_decide_the_first_placement(tmp_path: Path) -> None:
    one, other = paths(tmp_path, 2)
    tiers = [offload.Path(one.directory, "200MB"), offload.Path(other.directory, "100MB")]
    twins = Twins([(1 << 20,)], [BF16], tiers=tiers, subgroup_bytes=196_608)
    assert [path.subgroups for path in twins.ours.stats.paths] == [43, 21]
