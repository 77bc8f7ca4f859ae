"""The examples of the frameworks: killed inside a save, resumed, and compared with a whole run.

What is compared is all of the last step: weights, optimizer, generators, position in the data.
Trainers and low-rank pairs on two ranks need `STATEHOLD_INTEGRATIONS=1`, which
`make integrations` sets.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from pathlib import Path

import pytest

import statehold
from support.resumed import EXAMPLES, KILL, check, job, ran, three
from support.resumed import FRAMEWORKS as HERE

pytestmark = pytest.mark.thorough

for needed in ("transformers", "accelerate", "peft", "torchdata"):
    pytest.importorskip(needed)

ALL = os.environ.get("STATEHOLD_INTEGRATIONS") == "1"
# The examples of this file, and the package that each is about.
ABOUT = {
    "trainer": "transformers", "adapters": "peft", "accelerated": "accelerate",
    "loader_workers": "torchdata", "lightning_trainer": "lightning", "fabric_loop": "lightning",
    "streaming": "datasets", "sft": "trl", "lowrank": "transformers",
}  # fmt: skip
NAMES = [
    name
    for name, package in ABOUT.items()
    if importlib.util.find_spec(package) is not None and (ALL or name != "lowrank")
]
RANKS = {"streaming": 2, "lowrank": 2}
# These examples run in test_zero_state.py, test_torchtitan.py and tests/infra/launchers.
ELSEWHERE = {"zero", "titan", "elastic", "ray_train"}
OF_NO_FRAMEWORK = {"minimal", "serving", "evolution", "evolution_space"}

Ran = tuple[Path, dict[str, list[int]]]


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """All examples, one after the other, from one process: where they ran, and their exit codes."""
    folder = tmp_path_factory.mktemp("examples")
    jobs = []
    for name in NAMES:
        (folder / name).mkdir()
        jobs += three(EXAMPLES / f"{name}.py", folder / name, ranks=RANKS.get(name, 1))
    codes = ran(jobs)
    return folder, {name: codes[3 * at : 3 * at + 3] for at, name in enumerate(NAMES)}


@pytest.mark.parametrize("name", ABOUT)
def test_an_example_goes_on_bit_for_bit(examples: Ran, name: str) -> None:
    folder, codes = examples
    if name not in codes:
        pytest.skip(f"{ABOUT[name]} is not installed, or only make integrations runs it")
    check(folder / name, codes[name])


def test_a_resumed_loader_uses_each_sample_once(examples: Ran) -> None:
    used = statehold.load(examples[0] / "loader_workers/cut", "samples")
    assert [sorted(used[:40]), sorted(used[40:])] == [list(range(40))] * 2


@pytest.mark.skipif("streaming" not in NAMES, reason="datasets is not installed")
def test_a_resumed_stream_uses_each_sample_once_on_all_ranks(examples: Ran) -> None:
    run = examples[0] / "streaming/cut"
    used = [statehold.load(run, "samples", rank=rank) for rank in range(2)]
    every = sorted(100 * shard + text for shard in range(4) for text in range(13))
    assert [sorted(used[0][:26] + used[1][:26]), sorted(used[0][26:] + used[1][26:])] == [every] * 2


@pytest.mark.skipif(not ALL, reason="two ranks take seconds: make integrations")
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_ranks_of_lightning_go_on_bit_for_bit(tmp_path: Path, kind: str) -> None:
    check(tmp_path, ran(three(HERE / "ranked_lightning.py", tmp_path, kind, ranks=2)))


@pytest.mark.skipif(not ALL, reason="two ranks take seconds: make integrations")
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_ranks_of_fabric_go_on_bit_for_bit(tmp_path: Path, kind: str) -> None:
    check(tmp_path, ran(three(HERE / "ranked_fabric.py", tmp_path, kind, ranks=2)))


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
    assert "2 ranks and is resumed on 1. Not restored: the random generators" in log
    assert (out / "losses.txt").exists()


def test_the_example_of_every_framework_is_short() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")} - OF_NO_FRAMEWORK
    assert names == {*ABOUT, *ELSEWHERE}
    for name in names:
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 60, name


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


@pytest.mark.skipif(not ALL, reason="several jobs of ranks take seconds: make integrations")
def test_ranks_go_on_before_a_step_whose_manifest_is_damaged(tmp_path: Path) -> None:
    script = HERE / "ranked.py"
    whole, cut, again = three(script, tmp_path, "ddp", ranks=2)
    killed = ran([whole, cut])
    newest = max((tmp_path / "cut").glob("step-*[0-9]"))
    manifest = newest / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"sha256", b"sha257"))
    check(tmp_path, [*killed, *ran([again])])
    assert newest.with_suffix(".corrupt").is_dir()
