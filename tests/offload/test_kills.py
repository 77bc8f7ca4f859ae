"""A trainer that is killed at any moment goes on from the last committed step, with the same bits.

One run lives through all kills. After each of them the next trainer restores, and says which step
it has found and a digest of all weights and state. Both are compared: the step with what the killed
trainer had committed, the digest with plain AdamW after as many steps.
"""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from support import scripts
from support.faults import DEADLINE_S, must
from support.offloaded import Plain
from support.seeds import SEED

KILLS = int(os.environ.get("STATEHOLD_OFFLOAD_KILLS", "5"))
LIFE_S = 0.4  # the longest from the start, or a restore, to the kill
EARLY = 0.2  # so many are killed before or while they restore

# The limits make an update last long enough to be hit. Every step is saved during the next update.
TRAINER = """
import sys, statehold
from statehold import offload
from support.offloaded import digest, gradients, network

run, folder, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
model = network()
optimizer = offload.AdamW(
    model.named_parameters(), lr=1e-2, weight_decay=0.1, subgroup_bytes=24576,
    tiers=[offload.Host("100KB"), offload.Path(folder + "/one", "40MB"),
           offload.Path(folder + "/two", "20MB")],
)
state = {"model": model, "optimizer": optimizer}
with statehold.Checkpointer(run, keep=2) as ckpt:
    begin = ckpt.restore(state) or 0
    print("restored", begin, digest(model, optimizer.state_dict()), flush=True)
    save = None
    for step in range(begin + 1, steps + 1):
        gradients(model, step)
        print("update", step, flush=True)
        optimizer.step()
        optimizer.zero_grad()
        if save is not None:
            save.wait("committed")
            print("committed", step - 1, flush=True)
        print("save", step, flush=True)
        save = ckpt.save(step, state)
optimizer.close()
"""


def trainer(folder: Path, steps: int) -> scripts.Script:
    for name in ("one", "two"):
        (folder / name).mkdir(exist_ok=True)
    words = ["-c", TRAINER, str(folder / "run"), str(folder), str(steps)]
    return scripts.start(words, stdout=scripts.PIPE, stderr=scripts.PIPE)


def lines_of(script: scripts.Script) -> Iterator[list[str]]:
    """The whole lines: a kill may cut the last one."""
    for line in script.stdout:
        if line.endswith("\n"):
            yield line.split()


def kill_soon(script: scripts.Script, chance: random.Random) -> None:
    signal.sigtimedwait([], chance.random() * LIFE_S)  # a random moment
    script.kill()


def test_no_kill_costs_a_committed_step_or_a_bit(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    plain = Plain()
    committed, hit = 0, Counter[str]()
    for kill in range(KILLS):
        with trainer(tmp_path, 10**6) as script:
            lines = lines_of(script)
            is_early = chance.random() < EARLY
            if is_early:
                kill_soon(script, chance)
            last, step, found = next(lines, ("started", "0", ""))
            assert last == "restored" or is_early, script.stderr.read()
            if last == "restored":
                assert committed <= int(step), (SEED, kill)
                assert found == plain.digest_after(int(step)), (SEED, kill)
            if not is_early:
                kill_soon(script, chance)
            for last, step, *_ in lines:
                if last == "committed":
                    committed = int(step)
            must(script.wait(DEADLINE_S) == -signal.SIGKILL, script.stderr.read)
        hit[last] += 1
    print(f"seed {SEED}: killed after {dict(hit)}, {committed} steps")
    assert sum(hit.values()) == KILLS
    if KILLS >= 100:
        assert hit.keys() >= {"started", "update", "save"}
    with trainer(tmp_path, committed + 3) as script:
        *_, (word, step) = lines_of(script)
        must(script.wait(DEADLINE_S) == 0, script.stderr.read)
        assert [word, int(step)] == ["save", committed + 3]
    with trainer(tmp_path, 0) as script:
        assert next(lines_of(script))[1:] == [step, plain.digest_after(int(step))]
        must(script.wait(DEADLINE_S) == 0)
    assert not list(tmp_path.glob("*/optimizer-*/*.state"))
