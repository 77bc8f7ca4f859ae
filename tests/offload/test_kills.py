"""A trainer that is killed in the middle of an update goes on from the last committed step."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch

from support import scripts
from support.seeds import seed_of_today

STEPS = 8
KILLS = int(os.environ.get("STATEHOLD_OFFLOAD_KILLS", "3"))

# Every second step is saved. The limits make an update last long enough to be hit by a kill.
TRAINER = """
import sys, torch, statehold
from statehold import offload

run, path, steps, rate = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(200, 300), torch.nn.Linear(300, 50)).bfloat16()
optimizer = offload.AdamW(
    model.named_parameters(), lr=1e-2, tiers=[offload.Path(path, bytes_per_s=rate or None)],
    subgroup_bytes=49152,
)
state = {"model": model, "optimizer": optimizer}
with statehold.Checkpointer(run, keep=2) as ckpt:
    begin = ckpt.restore(state) or 0
    for step in range(begin, steps):
        torch.manual_seed(step)
        model(torch.randn(4, 200).bfloat16()).float().square().mean().backward()
        print("update", step, flush=True)
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            ckpt.save(step + 1, state).wait("committed")
torch.save([model.state_dict(), optimizer.state_dict()], run + ".pt")
optimizer.close()
"""


def trainer(folder: Path, name: str, rate: int = 0) -> scripts.Script:
    path = folder / f"{name}-opt"
    path.mkdir(exist_ok=True)
    words = ["-c", TRAINER, str(folder / name), str(path), str(STEPS), str(rate)]
    return scripts.start(words, stdout=scripts.PIPE, stderr=scripts.PIPE)


def to_the_end(folder: Path, name: str) -> tuple[list[str], list[dict]]:
    with trainer(folder, name) as script:
        out, err = script.communicate(timeout=120)
        assert script.wait() == 0, err
    assert not list((folder / f"{name}-opt").rglob("*.state"))
    return (out or "").splitlines(), torch.load(folder / f"{name}.pt")


def assert_same(one: object, other: object) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
    else:
        assert one == other


@pytest.mark.parametrize("seed", range(seed_of_today(), seed_of_today() + KILLS))
def test_nothing_is_lost_by_a_kill_in_an_update(tmp_path: Path, seed: int) -> None:
    _, wanted = to_the_end(tmp_path, "whole")
    chance = random.Random(seed)
    killed_at = chance.sample(range(2, STEPS), 2)
    for update in sorted(killed_at):
        with trainer(tmp_path, "killed", rate=20 << 20) as script:
            for line in script.stdout:
                if line.strip() == f"update {update}":
                    break
            script.kill()
            assert script.wait() == -9
        assert list((tmp_path / "killed-opt").rglob("*.state"))
    lines, found = to_the_end(tmp_path, "killed")
    assert lines[0] == f"update {max(killed_at) // 2 * 2}"
    assert_same(found, wanted)
