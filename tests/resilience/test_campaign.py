"""The campaign of real processes in a small form, and a ledger that finds what is wrong."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from resilience.campaign import REPLICAS, back, many
from resilience.jobs import Log, undisturbed
from resilience.ledger import Ledger
from support.seeds import SEED

FAULTS = int(os.environ.get("STATEHOLD_REPLICA_FAULTS", "3"))
SHAPES = [(4, 2), *([(8, 5)] if FAULTS >= 100 else [])]


def test_real_replicas_under_faults(tmp_path: Path) -> None:
    """STATEHOLD_REPLICA_FAULTS=1000 for more."""
    print(f"STATEHOLD_SEED={SEED}")
    assert not many(tmp_path, FAULTS, SEED, size=REPLICAS, settle_s=5.0)


@pytest.mark.thorough
@pytest.mark.parametrize(("size", "low"), SHAPES)
def test_fewer_replicas_and_as_many_again_are_one_run(tmp_path: Path, size: int, low: int) -> None:
    print(f"STATEHOLD_SEED={SEED}")
    assert not back(tmp_path, SEED, size=size, low=low)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Log:
    return undisturbed(tmp_path_factory.mktemp("alone") / "run", 3)[0]


def other_votes(log: Log, number: int, **changes: object) -> Log:
    votes = list(log.votes)
    votes[number] = votes[number]._replace(**changes)
    return replace(log, votes=votes)


def other_commits(log: Log, number: int, **changes: object) -> Log:
    commits = list(log.commits)
    commits[number] = commits[number]._replace(**changes)
    return replace(log, commits=commits)


def taken_again(log: Log) -> Log:
    """A member commits a step under one epoch, and once more under a later one."""
    vote, commit = log.votes[2], log.commits[2]
    return replace(
        log,
        votes=[*log.votes, vote._replace(epoch=9)],
        commits=[*log.commits, commit._replace(epoch=9)],
    )


def drawn_otherwise(log: Log) -> Log:
    return replace(log, samples={**log.samples, (1, 0): [0, 0]})


# What a ledger has to find, and what it says then.
BROKEN: dict[str, tuple[Callable[[Log], Log], str]] = {
    "lost": (lambda log: other_votes(log, 1, share=[0, 1, 2, 3, 4, 5, 6]), "counts"),
    "repeated": (lambda log: other_votes(log, 1, share=[0, *range(8)]), "counts"),
    "silent": (lambda log: other_votes(log, 1, members=["a", log.votes[1].name]), "vote"),
    "two memberships": (lambda log: other_votes(log, 1, members=["a"]), "two memberships"),
    "loss": (lambda log: other_commits(log, 1, loss="0x1p-1"), "undisturbed"),
    "weights": (lambda log: other_commits(log, 1, state=1), "undisturbed"),
    "again": (taken_again, "takes it again"),
    "samples": (drawn_otherwise, "draws other samples"),
    "computed": (lambda log: replace(log, computed=Counter({(1, 0): 2})), "computes"),
}


def test_a_ledger_of_an_undisturbed_run_finds_nothing(alone: Log) -> None:
    ledger = Ledger([alone], alone)
    assert not ledger.violations
    assert (ledger.steps, ledger.lost, ledger.repeated) == (3, 0, 0)
    assert ledger.counted.total() == 3 * 8 * 2


@pytest.mark.parametrize("name", BROKEN)
def test_a_ledger_finds_what_is_wrong(alone: Log, name: str) -> None:
    broken, says = BROKEN[name]
    ledger = Ledger([broken(alone)], alone)
    assert any(says in each for each in ledger.violations), ledger.violations
    assert (ledger.lost > 0, ledger.repeated > 0) == (name == "lost", name == "repeated")
