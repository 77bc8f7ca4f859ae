"""Optimizers that share a path: each has a folder of its own, and dead ones leave nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from statehold import offload
from statehold.errors import StorageError
from support import scripts
from support.faults import DEADLINE_S, must
from support.twins import Twins

SMALL = 49_152
SHAPES = [(40_000,), (129, 65)]

# Trains a little, prints its sums, and waits for a word before it ends.
TRAINER = """
import sys, torch
from statehold import offload
torch.manual_seed(int(sys.argv[2]))
weight = torch.nn.Parameter(torch.randn(100_000))
optimizer = offload.AdamW([weight], tiers=[offload.Path(sys.argv[1])], subgroup_bytes=49152)
for _ in range(5):
    weight.grad = weight.detach() * 2
    optimizer.step()
print("trained", weight.double().sum().item(), flush=True)
sys.stdin.readline()
optimizer.step()
print("again", weight.double().sum().item(), flush=True)
"""


def twins_on(path: Path, seed: int) -> Twins:
    tiers = [offload.Path(path)]
    return Twins(SHAPES, [torch.bfloat16], seed=seed, tiers=tiers, subgroup_bytes=SMALL)


def test_optimizers_of_a_process_share_a_path(tmp_path: Path) -> None:
    twins = [twins_on(tmp_path, seed) for seed in range(3)]
    for _ in range(3):
        for each in twins:
            each.train(1)
    for each in twins:
        each.check()
    twins[0].ours.close()
    for each in twins[1:]:
        each.train(1)
        each.check()
    assert {file.parent.name for file in tmp_path.rglob("*.state")} == {
        "optimizer-1",
        "optimizer-2",
    }


def trainer(path: Path, seed: int) -> scripts.Script:
    words = ["-c", TRAINER, str(path), str(seed)]
    return scripts.start(words, stdin=scripts.PIPE, stdout=scripts.PIPE, stderr=scripts.PIPE)


def test_a_dead_job_leaves_nothing_and_living_ones_lose_nothing(tmp_path: Path) -> None:
    with trainer(tmp_path, 1) as living, trainer(tmp_path, 2) as dying:
        lines = [script.stdout.readline() for script in (living, dying)]
        assert all(line.startswith("trained") for line in lines)
        folders = {file.parent for file in tmp_path.rglob("*.state")}
        assert folders == {tmp_path / "optimizer-0", tmp_path / "optimizer-1"}
        owner = {int((each / ".lock").read_text().split()[1]): each for each in folders}
        dying.kill()
        must(dying.wait(DEADLINE_S) == -9)
        stale = list(owner[dying.pid].glob("*.state"))
        kept = {file: file.stat().st_ino for file in owner[living.pid].glob("*.state")}
        assert stale
        assert kept
        foreign = owner[dying.pid] / "subgroup-notes.state"
        foreign.write_text("mine")
        stale[0].rename(owner[dying.pid] / "subgroup-99999999.state")
        # A sweep also reaches folders that the new optimizer does not take for itself.
        higher = tmp_path / "optimizer-7"
        higher.mkdir()
        (higher / "subgroup-00000001.state").write_bytes(b"stale")
        newcomer = twins_on(tmp_path, 3)
        newcomer.ours.close()
        left = set(tmp_path.rglob("*.state"))
        assert left == {*kept, foreign}
        assert {file: file.stat().st_ino for file in kept} == kept
        living.stdin.write("go on\n")
        living.stdin.flush()
        must(living.stdout.readline().startswith("again"))
        must(living.wait(DEADLINE_S) == 0, living.stderr.read)
    assert list(tmp_path.rglob("*.state")) == [foreign]


def test_a_warning_names_a_folder_that_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where every folder is everybody's (CIFS with dir_mode=0777), what a dead job left stays."""
    for name in ("optimizer-0", "optimizer-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(0o777)
    left = tmp_path / "optimizer-0" / "subgroup-00000001.state"
    left.write_bytes(b"left")
    twins = twins_on(tmp_path, seed=1)
    twins.train(1)
    assert {file.parent.name for file in tmp_path.rglob("*.state")} == {
        "optimizer-0",
        "optimizer-2",
    }
    twins.ours.close()
    assert list(tmp_path.rglob("*.state")) == [left]
    said = [
        record.getMessage() for record in caplog.records if "passes over" in record.getMessage()
    ]
    assert len(said) == 1
    assert f"{tmp_path / 'optimizer-0'} (mode 777)" in said[0]


def test_a_fork_keeps_no_folder_of_its_dead_parent(tmp_path: Path) -> None:
    """A data loader's worker may outlive its trainer."""
    code = (
        "import os, signal, time, torch; from statehold import offload\n"
        "weight = torch.nn.Parameter(torch.ones(100_000))\n"
        f"optimizer = offload.AdamW([weight], tiers=[offload.Path({str(tmp_path)!r})])\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    time.sleep(600)\n"
        "print(child, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    with scripts.start(["-c", code], stdout=scripts.PIPE) as script:
        child = int(script.stdout.readline())
        try:
            must(script.wait(DEADLINE_S) == -9)
            optimizer = offload.AdamW([torch.nn.Parameter(torch.ones(3))],
                                      tiers=[offload.Path(tmp_path)])  # fmt: skip
            optimizer.close()
        finally:
            os.kill(child, 9)
    assert [each.name for each in tmp_path.iterdir()] == ["optimizer-0"]


def test_an_optimizer_that_is_dropped_gives_its_folder_up(tmp_path: Path) -> None:
    for _ in range(2):
        optimizer = twins_on(tmp_path, 0).ours
        del optimizer
    assert [each.name for each in tmp_path.iterdir()] == ["optimizer-0"]


def test_a_folder_that_cannot_be_locked_is_refused(tmp_path: Path) -> None:
    (tmp_path / "optimizer-0").mkdir()
    (tmp_path / "optimizer-0" / ".lock").symlink_to("elsewhere")
    with pytest.raises(StorageError, match="lock the folder"):
        twins_on(tmp_path, 0)
