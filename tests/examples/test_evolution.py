"""examples/evolution.py in seconds: both searches, what a restart finds, and the family."""

from __future__ import annotations

import importlib
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from statehold.cli import main

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MODULES = "evolution_space", "evolution"


@pytest.fixture(scope="module")
def evolution() -> Iterator[ModuleType]:
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield [importlib.import_module(name) for name in MODULES][1]
    finally:
        sys.path.remove(str(EXAMPLES))
        for name in MODULES:
            sys.modules.pop(name, None)


@pytest.mark.thorough
def test_searches_and_their_family(
    evolution: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(evolution, "POPULATION", 2)
    monkeypatch.setattr(evolution, "SAMPLE", 2)
    words = ["--runs", str(tmp_path), "--seeds", "1", "--candidates", "4", "--steps", "2"]
    evolution.main(words)
    first = capsys.readouterr().out
    assert "each search: 4 candidates of 2 training steps" in first
    monkeypatch.setattr(evolution.Task, "train", None)  # a restart trains nothing again
    evolution.main(words)
    assert capsys.readouterr().out == first
    assert main(["tree", str(tmp_path / "0-transfer"), "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert len(runs) == 4
    assert any(each["base"] for each in runs)
    assert main(["tree", str(tmp_path / "0-scratch"), "--json"]) == 0
    assert not any(each["parent"] for each in json.loads(capsys.readouterr().out)["runs"])


@pytest.mark.thorough
def test_mutations_stay_in_the_space(evolution: ModuleType) -> None:
    space, rng = sys.modules["evolution_space"], random.Random(7)
    genes = space.random_genes(rng)
    depths = set()
    for _ in range(300):
        child = space.mutated(genes, rng)
        assert abs(len(child) - len(genes)) <= 1
        assert len(space.network(child)) == 2 * len(child) + 1
        genes = child
        depths.add(len(genes))
    assert depths == set(range(space.DEPTHS[0], space.DEPTHS[1] + 1))


def test_the_oldest_one_dies_and_the_best_of_a_sample_is_changed(
    evolution: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The algorithm alone: a score that only depends on the depth drives the search to depth."""
    monkeypatch.setattr(
        evolution,
        "candidate",
        lambda run, genes, *_, transfer: evolution.Candidate(genes, len(genes) / 10, 0),
    )
    found = evolution.search(tmp_path, 1, 80, 1, transfer=False)
    assert evolution.best_so_far(found)[-1] == 0.6
    last = [each.score for each in found[-evolution.POPULATION :]]
    assert sum(last) / len(last) > 0.5
