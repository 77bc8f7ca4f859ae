"""follow(): which steps of a run come to an engine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import statehold
from statehold.errors import UsageError
from statehold.kv import WorthThePause, follow, following
from support.faults import DEADLINE_S, SMALL


@pytest.fixture
def ckpt(tmp_path: Path) -> Iterator[statehold.Checkpointer]:
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        yield ckpt


def save(ckpt: statehold.Checkpointer, step: int, **metrics: float) -> None:
    state = {"w": torch.full((4,), float(step))}
    ckpt.save(step, state, metrics=metrics or None).wait("committed", DEADLINE_S)


def taken(ckpt: statehold.Checkpointer, run: Path, steps: list[int], **options: Any) -> list[int]:
    """What comes of these steps, each saved when the one before was looked at."""
    found = []
    for step in follow(run, timeout_s=0, **options):
        found.append(step)
        if not steps:
            break
        save(ckpt, steps.pop(0))
    return found


def test_each_step_comes_and_the_first_one_at_once(
    ckpt: statehold.Checkpointer, tmp_path: Path
) -> None:
    save(ckpt, 1)
    assert taken(ckpt, tmp_path / "run", [2, 5]) == [1, 2, 5]


def test_a_run_that_is_not_there_yet(ckpt: statehold.Checkpointer, tmp_path: Path) -> None:
    assert list(follow(tmp_path / "none", timeout_s=0)) == []


def test_steps_come_at_a_distance(ckpt: statehold.Checkpointer, tmp_path: Path) -> None:
    steps = follow(tmp_path / "run", every=10, timeout_s=0)
    save(ckpt, 3)
    assert next(steps) == 3
    save(ckpt, 12)
    save(ckpt, 13)
    assert next(steps) == 13
    save(ckpt, 22)
    assert list(steps) == []


def test_a_run_that_goes_back_or_saves_a_step_again(
    ckpt: statehold.Checkpointer, tmp_path: Path
) -> None:
    steps = follow(tmp_path / "run", every=10, timeout_s=0)
    save(ckpt, 3)
    save(ckpt, 20)
    assert next(steps) == 20
    ckpt.save(20, {"w": torch.ones(4)}).wait("committed", DEADLINE_S)
    assert next(steps) == 20
    ckpt.rewind(3)
    assert next(steps) == 3


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ([(0.0, 5.0)], 0.0),  # nothing is known yet
        ([(0.0, 5.0), (10.0, 4.0)], math.sqrt(2 * 3 * 4.0 / 0.1)),
        ([(0.0, 4.0), (10.0, 4.0)], math.inf),
        ([(0.0, 4.0), (10.0, 5.0)], math.inf),
        ([(7.0, 4.0), (7.0, 3.0)], 0.0),
    ],
)
def test_the_distance_that_costs_least(seen: list[tuple[float, float]], expected: float) -> None:
    assert WorthThePause("loss", 3.0).interval_s(seen) == pytest.approx(expected)


def test_no_other_distance_costs_less() -> None:
    """As the class has derived it: what is lost by old weights, and by pauses, a second."""
    pause_s, fall, loss = 3.0, 0.1, 4.0
    best = WorthThePause("loss", pause_s).interval_s([(0.0, loss + 1), (10.0, loss)])

    def cost(interval_s: float) -> float:
        return fall * interval_s / 2 + loss * pause_s / interval_s

    assert all(cost(best) < cost(best * factor) for factor in (0.5, 0.9, 1.1, 2.0))


class Committed:
    """Stands in for a subscription to steps that were committed at known times."""

    def __init__(self, losses: list[float]) -> None:
        self._left = [
            SimpleNamespace(
                step=step, committed_s=10.0 * step, metrics={"loss": loss}, apply=lambda: None
            )
            for step, loss in enumerate(losses)
        ]

    def __enter__(self) -> Committed:
        return self

    def __exit__(self, *_: object) -> None: ...

    def wait(self, _: float | None) -> Any:
        return self._left.pop(0) if self._left else None


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        # A pause of 2 s is worth 61 s of a fall of 0.1 a second at 93, and 57 s at 81.
        ([100.0 - step for step in range(20)], [0, 7, 13, 19]),
        ([100.0] * 20, [0]),
        ([100.0] * 10 + [50.0] * 10, [0, 10, 12, 14]),  # the fall is seen for some steps
    ],
)
def test_a_step_comes_when_it_is_worth_the_pause(
    losses: list[float], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "Subscription", lambda *_: Committed(losses))
    assert list(follow("run", worth=WorthThePause("loss", 2.0))) == expected


def test_a_step_without_the_metric_does_not_come(
    ckpt: statehold.Checkpointer, tmp_path: Path
) -> None:
    save(ckpt, 1)
    assert list(follow(tmp_path / "run", worth=WorthThePause("loss", 1.0), timeout_s=0)) == []


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "2"])
def test_a_distance_is_a_number_of_steps(tmp_path: Path, every: Any) -> None:
    with pytest.raises(UsageError, match="every"):
        follow(tmp_path / "run", every=every)


@pytest.mark.parametrize("pause_s", [-1.0, math.inf, math.nan])
def test_a_pause_is_a_time(pause_s: float) -> None:
    with pytest.raises(UsageError, match="pause"):
        WorthThePause("loss", pause_s)
