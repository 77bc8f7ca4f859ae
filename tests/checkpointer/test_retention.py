"""Retention, reuse of retired files, order of steps, and the lock of a run directory."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import statehold
from statehold.checkpoint.checkpointer import give_way
from statehold.errors import (
    RunBusyError,
    StepNotFoundError,
    StepOrderError,
    StorageError,
    storage_error,
)
from support import scripts
from support.faults import DEADLINE_S, SMALL, Holdup, small, spy_on
from support.in_memory import SimFs
from support.inside import inside
from support.ranks import Ranks
from support.training import Training, bits

DATA = "rank-00000-of-00001.safetensors"


def save_steps(ckpt: statehold.Checkpointer, training: Training, steps: range) -> list[bool]:
    reused = []
    for step in steps:
        training.step()
        save = ckpt.save(step, training.state).wait("committed", DEADLINE_S)
        reused.append(save.stats.reused)
    inside(ckpt).pipeline.drain()
    return reused


def hold(ckpt: statehold.Checkpointer, operation: str, *held: str) -> list[str]:
    """Have an operation fail on these paths in the run; returns the paths, as they are refused."""
    refused = list[str]()

    def refuse(called: str, args: tuple) -> None:
        if called == operation and args[0].endswith(held):
            refused.append(args[0])
            raise storage_error(called, errno.EPERM, args[0])

    spy_on(ckpt, refuse)
    return refused


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_keep_holds_the_newest(run, keep: int) -> None:
    training = Training()
    with statehold.Checkpointer(run, keep=keep, **SMALL) as ckpt:
        save_steps(ckpt, training, range(1, 7))
        assert ckpt.steps() == list(range(7 - keep, 7))
        live = Training(seed=3)
        got = ckpt.restore(live.state)
        assert got == 6
        assert bits(live) == bits(training)
    assert sorted(os.listdir(run)) == [".lock"] + [f"step-{s:012d}" for s in range(7 - keep, 7)]


def test_without_keep_everything_stays(run) -> None:
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        save_steps(ckpt, Training(), range(1, 6))
        assert ckpt.steps() == [1, 2, 3, 4, 5]


def test_retired_files_are_overwritten(run) -> None:
    with statehold.Checkpointer(run, keep=1, **SMALL) as ckpt:
        reused = save_steps(ckpt, Training(), range(1, 6))
        assert reused == [False, False, True, True, True]
    with statehold.Checkpointer(run, keep=1, **small(reuse_files=False)) as ckpt:
        reused = save_steps(ckpt, Training(), range(6, 10))
        assert reused == [False] * 4


def test_a_file_that_somebody_maps_is_never_overwritten(run) -> None:
    training = Training()
    with statehold.Checkpointer(run, keep=1, **SMALL) as ckpt:
        save_steps(ckpt, training, range(1, 3))
        expected = training.model.hidden.weight.detach().clone()
        with safe_open(run / "step-000000000002" / DATA, "pt") as file:
            reused = save_steps(ckpt, training, range(3, 5))
            assert reused == [True, False]
            assert torch.equal(file.get_tensor("model.hidden.weight"), expected)


def test_a_file_with_a_second_name_is_never_overwritten(run, tmp_path: Path) -> None:
    training = Training()
    with statehold.Checkpointer(run, keep=1, **SMALL) as ckpt:
        save_steps(ckpt, training, range(1, 3))
        os.link(run / "step-000000000002" / DATA, tmp_path / "copy")
        raw = (tmp_path / "copy").read_bytes()
        reused = save_steps(ckpt, training, range(3, 5))
        assert reused == [True, False]
        assert (tmp_path / "copy").read_bytes() == raw


def test_a_state_of_another_size_reuses_files_and_restores(run) -> None:
    with statehold.Checkpointer(run, keep=1, **SMALL) as ckpt:
        for step, numel in enumerate([5000, 900_000, 3, 70_000, 1_000_000, 0], 1):
            state = {"w": torch.arange(numel, dtype=torch.int32)}
            ckpt.save(step, state).wait("committed", DEADLINE_S)
            inside(ckpt).pipeline.drain()
            live = {"w": torch.zeros(numel, dtype=torch.int32)}
            ckpt.restore(live)
            assert torch.equal(live["w"], state["w"])


def test_a_step_being_restored_is_not_retired(run) -> None:
    with statehold.Checkpointer(run, keep=1, **SMALL) as ckpt:
        save_steps(ckpt, Training(), range(1, 2))
        with inside(ckpt).levels.store.protect(1):
            save_steps(ckpt, Training(), range(2, 4))
            assert ckpt.steps() == [1, 3]
        save_steps(ckpt, Training(), range(4, 5))
        assert ckpt.steps() == [4]


def test_older_steps_are_refused_until_the_newer_are_given_up(run) -> None:
    training = Training()
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        save_steps(ckpt, training, range(1, 5))
        ckpt.restore(training.state, 2)
        with pytest.raises(StepOrderError) as caught:
            ckpt.save(3, training.state)
        assert "rewind(2)" in str(caught.value)
        assert ckpt.rewind(2) == [3, 4]
        save_steps(ckpt, training, range(3, 4))
        assert ckpt.steps() == [1, 2, 3]


def test_a_forgotten_restore_is_asked_for_and_no_hint_empties_the_run(run) -> None:
    training = Training()
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        save_steps(ckpt, training, range(90, 101, 10))
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        for step, target in ((1, None), (89, None), (91, 90), (99, 90)):
            with pytest.raises(StepOrderError) as caught:
                ckpt.save(step, training.state)
            assert "did you forget restore()?" in caught.value.hint
            assert "loads step 100" in caught.value.hint
            told = re.findall(r"rewind\((\d+)\)", str(caught.value))
            assert told == ([] if target is None else [str(target)])
        assert ckpt.steps() == [90, 100]


def test_steps_under_way_count_as_saved(run) -> None:
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        holdup = Holdup(ckpt)
        save = ckpt.save(5, {"x": 1})
        with pytest.raises(StepOrderError):
            ckpt.save(4, {"x": 2})
        holdup.release()
        save.wait("committed", DEADLINE_S)
        assert ckpt.steps() == [5]


def test_leftovers_of_a_crash_are_cleared(run) -> None:
    training = Training()
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        save_steps(ckpt, training, range(1, 2))
    for name in ("step-000000000002.partial", "step-000000000000.retired", ".spare"):
        (run / name).mkdir()
        (run / name / DATA).write_bytes(b"half")
    (run / "notes").mkdir()
    with statehold.Checkpointer(run, keep=2, **SMALL) as ckpt:
        assert ckpt.steps() == [1]
        save_steps(ckpt, training, range(2, 4))
        assert ckpt.steps() == [2, 3]
    assert sorted(os.listdir(run)) == [
        ".lock", "notes", "step-000000000002", "step-000000000003"
    ]  # fmt: skip


def test_one_checkpointer_saves_at_a_time(run) -> None:
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        ckpt.save(1, {"x": 1})
        with statehold.Checkpointer(run, **SMALL) as other:
            with pytest.raises(RunBusyError):
                other.save(2, {"x": 2})
            ckpt.save(2, {"x": 2}).wait("committed", DEADLINE_S)
            live = {"x": 0}
            got = other.restore(live)
            assert got == 2, "reading needs no lock"
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        ckpt.save(3, {"x": 3})


def test_another_process_is_kept_out_and_told_who_holds_the_run(run) -> None:
    code = (
        "import statehold, sys\n"
        f"ckpt = statehold.Checkpointer({str(run)!r}, staging_bytes='2MiB', "
        "io=statehold.Io(buffer_bytes='1MiB'))\n"
        "try:\n    ckpt.save(2, {'x': 2})\n"
        "except statehold.errors.RunBusyError as error:\n    print(error); sys.exit(7)\n"
    )
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        ckpt.save(1, {"x": 1})
        result = scripts.run(["-c", code])
    assert result.returncode == 7, result.stderr
    assert f"process {os.getpid()} on" in result.stdout


def test_a_checkpointer_that_gives_way_saves_again_when_the_run_is_free(tmp_path: Path) -> None:
    net = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.ones(4)).sum().backward()
    state = {"net": net}
    with statehold.Checkpointer(tmp_path) as first:
        give_way(first)  # nothing is open, or saved
        first.save(1, state)
        give_way(first)
        give_way(first)
        with statehold.Checkpointer(tmp_path) as second:
            second.save(2, state).wait("committed")
            optimizer.step()
            with pytest.raises(RunBusyError):
                first.save(3, state)
        for step in (3, 4):
            first.save(step, state)
            optimizer.step()  # waits until the weights are copied
    with statehold.Checkpointer(tmp_path) as after:
        assert after.steps() == [1, 2, 3, 4]
        after.restore(state, 3)
        found = net.weight.detach().clone()
        after.restore(state, 4)
        assert not torch.equal(found, net.weight)


def test_a_rewind_to_a_step_that_is_not_there_discards_nothing(run) -> None:
    training = Training()
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        save_steps(ckpt, training, range(10, 31, 10))
        (run / "step-000000000020" / "rank-00000-of-00001.safetensors").unlink()
        assert ckpt.steps() == [10, 30]
        for step in (5, 15, 20, 31):
            with pytest.raises(StepNotFoundError, match="is not committed") as caught:
                ckpt.rewind(step)
            assert "nothing was discarded" in caught.value.hint
        assert ckpt.steps() == [10, 30]
        assert ckpt.rewind(10) == [20, 30]
        assert ckpt.steps() == [10]


def test_a_rewind_keeps_its_step_from_a_save_that_is_under_way(
    run, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    with statehold.Checkpointer(run, keep=2, **SMALL) as ckpt:
        save_steps(ckpt, training, range(1, 3))
        holdup = Holdup(ckpt)
        under_way = ckpt.save(3, training.state)
        pipeline = inside(ckpt).pipeline
        drain = pipeline.drain

        def released(timeout_s: float | None = None) -> None:
            holdup.release()  # its commit now retires step 1, unless that is kept
            drain(timeout_s)

        monkeypatch.setattr(pipeline, "drain", released)
        assert ckpt.rewind(1) == [2, 3]
        assert under_way.done("committed")
        assert ckpt.steps() == [1]


def test_a_step_that_cannot_be_removed_keeps_no_other_one(run, caplog) -> None:
    with statehold.Checkpointer(run, keep=2, **SMALL) as ckpt:
        save_steps(ckpt, Training(), range(1, 4))
        refused = hold(ckpt, "rename", "/step-000000000002", "/step-000000000003")
        save_steps(ckpt, Training(), range(4, 9))
        assert ckpt.steps() == [2, 3, 7, 8]
    assert refused[-2:] == [f"{run}/step-{step:012d}" for step in (2, 3)]
    told = [each for each in caplog.text.splitlines() if "/step-000000000002" in each]
    assert len(told) == 5
    assert "/step-000000000003" not in caplog.text  # one error says enough


def test_a_step_that_cannot_be_discarded_keeps_no_other_one(run) -> None:
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        save_steps(ckpt, Training(), range(1, 8))
        hold(ckpt, "rename", "/step-000000000004", "/step-000000000006")
        with pytest.raises(StorageError, match="step-000000000004"):
            ckpt.rewind(2)
        assert ckpt.steps() == [1, 2, 4, 6]


def test_a_file_that_cannot_be_deleted_keeps_no_other_one(run) -> None:
    with statehold.Checkpointer(run, keep=1, **small(reuse_files=False)) as ckpt:
        save_steps(ckpt, Training(), range(1, 3))
        retired = run / "step-000000000002.retired"
        assert hold(ckpt, "unlink", f"{retired}/{DATA}", f"{retired}/manifest.json") == []
        (run / "step-000000000002" / "aa").write_bytes(b"")
        (run / "step-000000000002" / "zz").write_bytes(b"")
        save_steps(ckpt, Training(), range(3, 6))
        assert ckpt.steps() == [5]
    assert sorted(os.listdir(retired)) == ["manifest.json", DATA]


@pytest.mark.parametrize("ranks", [1, 2])
def test_files_that_stay_in_spare_keep_no_retired_step(ranks: int) -> None:
    """As on NFS, where a file that somebody reads has a name until that ends."""
    fs = SimFs(seed=1)
    for begin in (1, 6):  # a job that leaves such a file there, and one that finds it
        with Ranks(fs, ranks, keep=1) as job:
            held = f"{job.run}/.spare/held"
            refused = [hold(ckpt, "unlink", held) for ckpt in job.ckpts]
            for step in range(begin, begin + 5):
                job.save(step, lambda rank, step=step: {"w": torch.arange(99) + step + rank})
                job.each(lambda rank: inside(job.ckpts[rank]).pipeline.drain())
                if step == 2:
                    fs.write_file(held, b"")
        assert refused[0]
        left = [name for name, _ in fs.listdir(job.run) if name.startswith("step-")]
        assert left == [f"step-{begin + 4:012d}"]
        assert fs.stat_bytes(held) == 0
