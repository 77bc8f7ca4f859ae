"""The examples of the frameworks: killed inside a save, resumed, and compared with a whole run.

What is compared is all of the last step: weights, optimizer, generators, position in the data.
Trainers on two ranks need `STATEHOLD_INTEGRATIONS=1`, which `make integrations` sets.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from pathlib import Path

import pytest

from support.resumed import FRAMEWORKS as HERE
from support.resumed import KILL, check, job, ran, three

for needed in ("transformers", "accelerate", "peft", "torchdata"):
    pytest.importorskip(needed)

EXAMPLES = HERE.parents[1] / "examples"
ALL = os.environ.get("STATEHOLD_INTEGRATIONS") == "1"
NAMES = ("trainer", "adapters", "accelerated")
if importlib.util.find_spec("lightning") is not None:
    NAMES = (*NAMES, "lightning_trainer")


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
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_another_number_of_ranks_of_lightning_resumes(tmp_path: Path, kind: str) -> None:
    out, script = tmp_path / "out", HERE / "ranked_lightning.py"
    codes = ran([job(script, kind, out, ranks=2, kill=KILL), job(script, kind, out)])
    log = (tmp_path / "out.rank-0.log").read_text()
    assert codes == [-signal.SIGKILL, 0], log
    assert "2 ranks and is resumed on 1: the random generators" in log
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
