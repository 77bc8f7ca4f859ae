"""The examples of the frameworks: killed inside a save, resumed, and compared with a whole run.

What is compared is all of the last step: weights, optimizer, generators, position in the data.
Trainers on two ranks need `STATEHOLD_INTEGRATIONS=1`, which `make integrations` sets.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold

for needed in ("transformers", "accelerate", "peft", "torchdata"):
    pytest.importorskip(needed)

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
ALL = os.environ.get("STATEHOLD_INTEGRATIONS") == "1"
KILL = 4
NAMES = ("trainer", "adapters", "accelerated")
if importlib.util.find_spec("lightning") is not None:
    NAMES = (*NAMES, "lightning_trainer")


def ran(jobs: list[dict[str, Any]]) -> list[int]:
    done = subprocess.run(
        [sys.executable, HERE / "runs.py", json.dumps(jobs)],
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    found: list[int] = json.loads(done.stdout.splitlines()[-1])
    return found


def job(script: Path, *words: Any, **more: Any) -> dict[str, Any]:
    return {"script": str(script), "words": [str(word) for word in words], **more}


def three(script: Path, folder: Path, *words: Any, **more: Any) -> list[dict[str, Any]]:
    """A whole run, one that is killed, and the same once more."""
    return [
        job(script, *words, folder / "whole", **more),
        job(script, *words, folder / "cut", kill=KILL, **more),
        job(script, *words, folder / "cut", **more),
    ]


def check(folder: Path, codes: list[int]) -> None:
    logs = "\n".join(log.read_text() for log in sorted(folder.glob("*.log")))
    assert codes == [0, -signal.SIGKILL, 0], logs
    whole, cut = folder / "whole", folder / "cut"
    assert (whole / "losses.txt").read_text() == (cut / "losses.txt").read_text()
    manifest = json.loads((max(whole.glob("step-*")) / "manifest.json").read_text())
    for rank in range(manifest["world_size"]):
        one, other = (statehold.load(run, rank=rank) for run in (whole, cut))
        names = {"trainer", "accelerator", "lightning"}
        assert names & one.keys()
        for name in ("trainer", "lightning"):  # a log with times, and paths
            one.pop(name, None)
            other.pop(name, None)
        assert same(one, other)


def same(one: Any, other: Any) -> bool:
    """Equal bits, types and keys."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """All examples, one after the other, from one process."""
    folder = tmp_path_factory.mktemp("examples")
    jobs = []
    for script in NAMES:
        (folder / script).mkdir()
        jobs += three(EXAMPLES / f"{script}.py", folder / script)
    return folder, ran(jobs)


@pytest.mark.parametrize(("number", "name"), list(enumerate(NAMES)))
def test_an_example_goes_on_bit_for_bit(
    examples: tuple[Path, list[int]], number: int, name: str
) -> None:
    folder, codes = examples
    check(folder / name, codes[3 * number : 3 * number + 3])


@pytest.mark.skipif(not ALL, reason="two ranks take seconds: make integrations")
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_ranks_of_lightning_go_on_bit_for_bit(tmp_path: Path, kind: str) -> None:
    check(tmp_path, ran(three(HERE / "ranked_lightning.py", tmp_path, kind, ranks=2)))


@pytest.mark.skipif(not ALL, reason="several jobs of ranks take seconds: make integrations")
def test_a_warned_rank_of_lightning_leaves_with_all_and_they_go_on(tmp_path: Path) -> None:
    whole, left, again = three(HERE / "ranked_lightning.py", tmp_path, "ddp", ranks=2)
    codes = ran([whole, {**left, "kill": 0, "leave": 2}, again])
    assert codes == [0, 75, 0]
    check(tmp_path, [0, -signal.SIGKILL, 0])


@pytest.mark.skipif(not ALL, reason="several jobs of ranks take seconds: make integrations")
def test_another_number_of_ranks_of_lightning_resumes(tmp_path: Path) -> None:
    out, script = tmp_path / "out", HERE / "ranked_lightning.py"
    codes = ran([job(script, "fsdp2", out, ranks=2, kill=KILL), job(script, "fsdp2", out)])
    assert codes == [-signal.SIGKILL, 0], (tmp_path / "out.rank-0.log").read_text()
    assert (out / "losses.txt").exists()


def test_examples_are_short() -> None:
    for name in NAMES:
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 60


@pytest.mark.skipif(not ALL, reason="two ranks take seconds: make integrations")
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_ranks_go_on_bit_for_bit(tmp_path: Path, kind: str) -> None:
    check(tmp_path, ran(three(HERE / "ranked.py", tmp_path, kind, ranks=2)))


@pytest.mark.skipif(not ALL, reason="two ranks take seconds: make integrations")
def test_a_loop_of_accelerate_over_fsdp2_goes_on_bit_for_bit(tmp_path: Path) -> None:
    check(tmp_path, ran(three(HERE / "ranked_loop.py", tmp_path, ranks=2)))


@pytest.mark.skipif(not ALL, reason="several jobs of ranks take seconds: make integrations")
def test_a_warned_rank_leaves_with_all_and_they_go_on(tmp_path: Path) -> None:
    script = HERE / "ranked.py"
    whole, left, again = three(script, tmp_path, "ddp", ranks=2)
    left = {**left, "kill": 0, "leave": 2}
    codes = ran([whole, left, again])
    assert codes == [0, 75, 0]
    check(tmp_path, [0, -signal.SIGKILL, 0])


@pytest.mark.skipif(not ALL, reason="several jobs of ranks take seconds: make integrations")
def test_another_number_of_ranks_resumes(tmp_path: Path) -> None:
    out = tmp_path / "out"
    script = HERE / "ranked.py"
    codes = ran([job(script, "fsdp2", out, ranks=2, kill=KILL), job(script, "ddp", out)])
    assert codes == [-signal.SIGKILL, 0]
    assert len(json.loads((out / "losses.txt").read_text())) == 6
