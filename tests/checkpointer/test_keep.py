"""keep=Keep(...): the steps that stay at each level, after restarts, damage and rewinds."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from statehold import Checkpointer, Directory, Keep, Memory, ObjectStore
from support.faults import DEADLINE_S, SMALL, must
from support.hosts import LOCAL, HostRanks, disks
from support.in_memory import SimFs
from support.inside import inside
from support.levels import FAR, NEAR, HeldCopy, opened_on, settle, step_path, steps_at
from support.ranks import Ranks

BEST = Keep(last=1, best=2, metric="loss")
# The best two are steps 3 and 5.
LOSSES = {1: 0.9, 2: 0.8, 3: 0.1, 4: 0.7, 5: 0.2, 6: 0.6, 7: 0.5}


def save(ckpt: Checkpointer, step: int, **said: Any) -> None:
    ckpt.save(step, {"w": torch.full((100,), step)}, **said).wait("committed", DEADLINE_S)


def save_all(ckpt: Checkpointer, losses: Mapping[int, float | None]) -> None:
    for step, loss in losses.items():
        save(ckpt, step, metrics=None if loss is None else {"loss": loss})
    settle(ckpt)


def test_each_rule_keeps_its_steps(run: Path) -> None:
    keep = Keep(last=2, every=10, best=1, metric="loss", pinned=[3, "before-lr-drop"])
    with Checkpointer(run, keep=keep, **SMALL) as ckpt:
        for step in range(1, 33):
            tags = ["before-lr-drop"] if step == 17 else []
            save(ckpt, step, metrics={"loss": abs(step - 7) + 0.5}, tags=tags)
        settle(ckpt)
        assert ckpt.steps() == [3, 7, 10, 17, 20, 30, 31, 32]


def test_after_a_restart_the_policy_goes_by_what_the_steps_say(run: Path) -> None:
    with Checkpointer(run, **SMALL) as ckpt:
        save_all(ckpt, LOSSES)
        assert ckpt.steps() == [*LOSSES]
    with Checkpointer(run, keep=BEST, **SMALL) as ckpt:
        save_all(ckpt, {8: 0.9})
        assert ckpt.steps() == [3, 5, 8]
    with Checkpointer(run, keep=Keep(best=1, metric="loss", mode="max"), **SMALL) as ckpt:
        save_all(ckpt, {9: 0.3})
        assert ckpt.steps() == [8, 9]


def test_a_step_without_the_metric_is_never_one_of_the_best(run: Path) -> None:
    with Checkpointer(run, keep=BEST, **SMALL) as ckpt:
        save_all(ckpt, {1: None, 2: 0.5, 3: math.nan, 4: -math.inf, 5: None, 6: 0.9, 7: None})
        assert ckpt.steps() == [2, 6, 7]


def test_of_equal_steps_the_older_is_the_best(run: Path) -> None:
    with Checkpointer(run, keep=Keep(best=1, metric="loss"), **SMALL) as ckpt:
        save_all(ckpt, dict.fromkeys(range(1, 6), 0.25))
        assert ckpt.steps() == [1, 5]


def test_a_step_that_is_saved_again_counts_as_it_is_now(run: Path) -> None:
    with Checkpointer(run, keep=BEST, **SMALL) as ckpt:
        save_all(ckpt, {1: 0.1, 2: 0.2, 3: 0.05})
        assert ckpt.steps() == [1, 3]
        save_all(ckpt, {3: 5.0})  # validated again
        save_all(ckpt, {4: 0.3, 5: 0.9})
        assert ckpt.steps() == [1, 4, 5]


def test_what_a_rewind_gives_up_is_gone_even_if_it_was_pinned(run: Path) -> None:
    keep = Keep(last=1, best=1, metric="loss", pinned=[4])
    with Checkpointer(run, keep=keep, **SMALL) as ckpt:
        save_all(ckpt, {1: 0.5, 2: 0.4, 3: 0.01, 4: 0.1, 5: 0.2})
        assert ckpt.steps() == [3, 4, 5]
        assert ckpt.rewind(3) == [4, 5]
        save_all(ckpt, {6: 0.8, 7: 0.9})
        assert ckpt.steps() == [3, 7]


def test_a_step_whose_manifest_cannot_be_read_stays(run: Path) -> None:
    with Checkpointer(run, **SMALL) as ckpt:
        save_all(ckpt, LOSSES)
    path = run / "step-000000000003" / "manifest.json"
    path.write_bytes(path.read_bytes()[:-10])
    with Checkpointer(run, keep=BEST, **SMALL) as ckpt:
        save_all(ckpt, {8: 0.9})
        assert ckpt.steps() == [5, 7, 8]
    there = sorted(int(each.name[5:]) for each in run.glob("step-*"))
    assert there == [3, 5, 7, 8]  # 3 may be one of the best two, and the others are, too


def test_a_step_that_is_restored_stays_meanwhile(run: Path) -> None:
    with Checkpointer(run, keep=Keep(best=1, metric="loss"), **SMALL) as ckpt:
        save_all(ckpt, {1: 0.5, 2: 0.9})
        with inside(ckpt).levels.store.protect(1):
            save_all(ckpt, {3: 0.1, 4: 0.9})
            assert ckpt.steps() == [1, 3, 4]
        save_all(ckpt, {5: 0.9})
        assert ckpt.steps() == [3, 5]


def test_a_number_of_steps_reads_no_manifest(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(run, keep=2, **SMALL) as ckpt:
        save_all(ckpt, {1: 0.1})
        store = inside(ckpt).levels.store
        monkeypatch.setattr(store.retention, "manifest", None)
        save_all(ckpt, {2: 0.2, 3: 0.3})
        assert ckpt.steps() == [2, 3]


def test_a_manifest_is_read_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(run, keep=BEST, **SMALL) as ckpt:
        save_all(ckpt, {1: 0.1})
        retention, asked = inside(ckpt).levels.store.retention, []
        manifest = retention.manifest

        def noted(step: int) -> bytes:
            asked.append(step)
            return manifest(step)

        monkeypatch.setattr(retention, "manifest", noted)
        save_all(ckpt, {2: 0.2, 3: 0.3, 4: 0.4})
        assert asked == [2, 3, 4]


def test_ranks_keep_what_rank_0_has_measured() -> None:
    with Ranks(SimFs(seed=1), 2, keep=BEST) as ranks:
        for step, loss in LOSSES.items():
            said = [{"loss": loss}, {"loss": -loss, "own": 1.0}]  # of rank 0, and of rank 1

            def begin(rank: int, step: int = step, said: list[Any] = said) -> statehold.Save:
                state = {"w": torch.full((100,), step)}
                return ranks.ckpts[rank].save(step, state, metrics=said[rank])

            for handle in ranks.each(begin):
                handle.wait("committed", DEADLINE_S)
        ranks.each(lambda rank: settle(ranks.ckpts[rank]))
        assert ranks.each(lambda rank: ranks.ckpts[rank].steps()) == [[3, 5, 7]] * 2


def test_a_metric_that_is_refused_on_one_rank_fails_the_save_on_all() -> None:
    with Ranks(SimFs(seed=1), 2) as ranks:

        def fail(rank: int) -> None:
            metrics: Any = {"loss": "low" if rank else 0.1}
            handle = ranks.ckpts[rank].save(1, {"x": 1}, metrics=metrics)
            handle.wait("committed", DEADLINE_S)

        first, second = ranks.outcomes(fail)
        assert isinstance(first, statehold.errors.PeerFailedError)
        assert "a metric is not a number" in str(first)
        assert isinstance(second, statehold.errors.UsageError)


# -- levels ----------------------------------------------------------------------------------------


def test_each_level_keeps_the_best_of_the_steps_that_it_has() -> None:
    fs = SimFs(seed=2)
    near, far = {"keep": 2}, {"keep": Keep(best=1, metric="loss"), "every": 2}
    with opened_on(fs, near, far) as ckpt:
        for step, loss in LOSSES.items():
            save_all(ckpt, {step: loss})
        assert steps_at(fs, NEAR) == [6, 7]
        # Steps 1, 2, 4 and 6 went there. It never had step 3.
        assert steps_at(fs, FAR) == [6]
    assert steps_at(fs, FAR) == [7]  # close() has copied it


def test_a_step_that_is_being_copied_stays_until_it_is_there() -> None:
    fs = SimFs(seed=3)
    with opened_on(fs, {"keep": Keep(best=1, metric="loss")}) as ckpt:
        save_all(ckpt, {1: 0.1})
        with HeldCopy(ckpt) as held:
            save(ckpt, 2, metrics={"loss": 0.9})
            must(held.waiting.wait(DEADLINE_S))
            save(ckpt, 3, metrics={"loss": 0.8})
            inside(ckpt).pipeline.drain()
            assert steps_at(fs, NEAR) == [1, 2, 3]
        settle(ckpt)
        assert steps_at(fs, NEAR) == [1, 3]


def test_the_memory_level_keeps_the_best_steps(run: Path, memory: Path) -> None:
    levels = [Memory(path=memory, keep=Keep(last=2, best=1, metric="loss")), Directory(keep=1)]
    with Checkpointer(run, levels=levels, **SMALL) as ckpt:
        save_all(ckpt, LOSSES)
        assert sorted(int(each.name[5:]) for each in memory.glob("step-*")) == [3, 6, 7]


def test_an_object_store_keeps_the_best_steps(run: Path, tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    far = ObjectStore(f"file://{tmp_path}/bucket/x", keep=Keep(every=4, best=1, metric="loss"))
    for losses in (dict(list(LOSSES.items())[:4]), dict(list(LOSSES.items())[4:])):
        with Checkpointer(run, levels=[Directory(keep=1), far], **SMALL) as ckpt:
            for step, loss in losses.items():
                save_all(ckpt, {step: loss})
    found = sorted((tmp_path / "bucket" / "x").glob("step-*.commit"))
    assert [int(each.name[5:17]) for each in found] == [3, 4, 7]


def test_hosts_keep_the_same_steps_even_if_one_cannot_read_a_manifest() -> None:
    hosts = disks(2)
    level = Directory(path=LOCAL, per_host=True, keep=Keep(last=2, best=1, metric="loss"))
    losses = {1: 0.5, 2: 0.1, 3: 0.9, 4: 0.8, 5: 0.7}

    def save_each(ranks: HostRanks, losses: dict[int, float]) -> list[list[int]]:
        for step, loss in losses.items():

            def one(rank: int, step: int = step, loss: float = loss) -> None:
                save(ranks.ckpts[rank], step, metrics={"loss": loss})

            ranks.each(one)
        ranks.each(lambda rank: settle(ranks.ckpts[rank]))
        return [steps_at(fs, LOCAL) for fs in hosts]

    with HostRanks(hosts, [level]) as ranks:
        assert save_each(ranks, losses) == [[2, 4, 5]] * 2
    name = f"{step_path(LOCAL, 2)}/manifest.json"
    raw = hosts[1].read_file(name, 1 << 20)
    with HostRanks(hosts, [level]) as ranks:
        assert ranks.each(lambda rank: ranks.ckpts[rank].steps()) == [[2, 4, 5]] * 2
        hosts[1].write_file(name, raw[:-5])
        found = save_each(ranks, {6: 0.9, 7: 0.05, 8: 0.9, 9: 0.9})
    assert found[0] == [7, 8, 9]
    assert {7, 8, 9} <= set(found[1])


def test_a_half_step_on_one_host_takes_no_whole_one_its_place() -> None:
    hosts = disks(2)
    level = Directory(path=LOCAL, per_host=True, keep=Keep(last=2, every=2))
    with HostRanks(hosts, [level]) as ranks:

        def save_each(*steps: int) -> None:
            for step in steps:
                ranks.each(lambda rank, step=step: save(ranks.ckpts[rank], step))
            ranks.each(lambda rank: settle(ranks.ckpts[rank]))

        save_each(1, 3)
        hosts[0].mkdir(step_path(LOCAL, 2))  # published here, and not on the other host
        with inside(ranks.ckpts[0]).levels.store.protect(2):
            save_each(4, 5, 6)
            assert steps_at(hosts[0], LOCAL) == [2, 3, 4, 5, 6]
            assert steps_at(hosts[1], LOCAL) == [3, 4, 5, 6]
        assert ranks.each(lambda rank: ranks.ckpts[rank].steps()) == [[3, 4, 5, 6]] * 2


# -- prune -----------------------------------------------------------------------------------------


def test_prune_takes_the_same_rules(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from statehold.cli import main

    with Checkpointer(run, **SMALL) as ckpt:
        for step, loss in LOSSES.items():
            save(ckpt, step, metrics={"loss": loss}, tags=["good"] if step == 2 else [])
    words = ["prune", str(run), "--keep", "1", "--best", "1", "--metric", "loss"]
    assert main([*words, "--every", "4", "--pin", "good", "--pin", "6"]) == 0
    assert "steps that stay: 2, 3, 4, 6, 7" in capsys.readouterr().out
    assert main([*words, "--max", "--yes"]) == 0
    assert sorted(os.listdir(run)) == [".lock", "step-000000000001", "step-000000000007"]
    assert main([*words[:-2]]) == 2
    assert "write --best 2 --metric val_loss, or neither" in capsys.readouterr().err


@pytest.mark.parametrize("yes", [[], ["--yes"]])
def test_prune_by_a_metric_that_no_step_has_deletes_nothing(
    run: Path, yes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A typing error would delete the best steps."""
    from statehold.cli import main

    with Checkpointer(run, **SMALL) as ckpt:
        for step, loss in LOSSES.items():
            save(ckpt, step, metrics={"loss": loss})
        there = ckpt.steps()
    words = ["prune", str(run), "--keep", "1", "--best", "1", "--metric", "los", *yes]
    assert main(words) == 3
    told = capsys.readouterr().err
    assert "no step has a finite value of this metric" in told
    assert "loss" in told.partition("there are")[2]
    assert statehold.open(run).steps() == there


@pytest.mark.parametrize("yes", [[], ["--yes"]])
@pytest.mark.parametrize("pin", ["4711", "wram"])
def test_prune_with_a_pin_that_no_step_has_deletes_nothing(
    run: Path, yes: list[str], capsys: pytest.CaptureFixture[str], pin: str
) -> None:
    """A typing error would delete the step that was to stay."""
    from statehold.cli import main

    with Checkpointer(run, **SMALL) as ckpt:
        for step in (1, 2, 3):
            save(ckpt, step, tags=["warm"] if step == 1 else [])
    words = ["prune", str(run), "--keep", "1", "--pin", "2", "--pin", "warm", *yes]
    assert main([*words, "--pin", pin]) == 3
    told = capsys.readouterr().err
    assert pin in told
    assert ("warm" if pin == "wram" else "1, 2, 3 (3 in all)") in told
    assert statehold.open(run).steps() == [1, 2, 3]
    assert main(words) == 0
    assert statehold.open(run).steps() == [1, 2, 3]


def test_a_pinned_step_goes_to_the_levels_that_pin_it_whatever_their_cadence() -> None:
    fs = SimFs(seed=4)
    far = {"keep": Keep(last=1, pinned=[3, "warm"]), "every": 1_000_000}
    with opened_on(fs, {"keep": 1}, far) as ckpt:
        save(ckpt, 1)  # the first step of a run goes to every level
        settle(ckpt)
        with HeldCopy(ckpt) as held:
            save(ckpt, 3)
            must(held.waiting.wait(DEADLINE_S))
            save(ckpt, 4, tags=["warm"])  # the level is busy
            save(ckpt, 5, tags=["cold"])
        settle(ckpt)
        assert steps_at(fs, FAR) == [3, 4]
    assert steps_at(fs, FAR) == [3, 4, 5]


def test_ranks_copy_a_pinned_step_together() -> None:
    fs = SimFs(seed=5)
    levels = [
        Directory(path=NEAR, keep=1, name="near"),
        Directory(path=FAR, keep=Keep(pinned=["warm"]), every=1_000_000, name="far"),
    ]
    with Ranks(fs, 2, levels=levels) as ranks:
        for step in range(1, 5):
            tags = ["warm"] if step == 3 else []

            def one(rank: int, step: int = step, tags: list[str] = tags) -> None:
                save(ranks.ckpts[rank], step, tags=tags if rank == 0 else ["other"])

            ranks.each(one)
        ranks.each(lambda rank: settle(ranks.ckpts[rank]))
        assert 3 in steps_at(fs, FAR)
