"""What the fuzzer found, the corpus it grew, and some thousand inputs of its mutator.

The campaign, guided by coverage, is `make fuzz`; here the same targets judge the same way.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fuzz import targets
from fuzz.mutate import mutate
from fuzz.targets import Targets, Wrong

FOLDER = Path(targets.__file__).parent
INPUTS = 1000


@pytest.fixture(scope="module")
def all_targets() -> Iterator[Targets]:
    found = Targets()
    yield found
    found.close()


def stored(folder: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((FOLDER / folder).iterdir())]


def test_seeds_are_accepted(all_targets: Targets) -> None:
    assert all(all_targets.check(seed) for seed in all_targets.seeds)


def test_findings_and_corpus(all_targets: Targets) -> None:
    assert stored("findings")
    for data in stored("findings") + stored("corpus"):
        all_targets.check(data)


@pytest.mark.thorough
def test_mutations(all_targets: Targets) -> None:
    pool, accepted, slowest_s = all_targets.seeds + stored("corpus"), 0, 0.0
    for seed in range(INPUTS):
        data = pool[seed % len(pool)]
        data = data[:1] + mutate(data[1:], seed)
        begin = time.process_time()
        try:
            accepted += all_targets.check(data)
        except Exception as error:
            raise Wrong(f"seed {seed}: {error!r}") from error
        slowest_s = max(slowest_s, time.process_time() - begin)
    assert 0 < accepted < INPUTS // 2, "mutations that break nothing, or everything, test little"
    assert slowest_s < 10


def test_a_lie_would_be_noticed() -> None:
    step = targets.WholeStep("/runs/lie")
    step.data = bytes(len(step.data))
    with pytest.raises(Wrong, match="wrong bytes"):
        step.check(step.seed)
    step.ckpt.close()
