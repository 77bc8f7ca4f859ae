"""What was known when the power went off decides what must be there, and what may be."""

from __future__ import annotations

from pathlib import Path

from powerloss.history import Fact, History, known_at, oracles
from powerloss.journal import Position

RUN = ("run",)
SAVED = [
    Fact(1, "begin", RUN, 1, 1),
    Fact(5, "promise", RUN, 1, 1),
    Fact(6, "begin", RUN, 2, 2),
    Fact(9, "promise", RUN, 2, 2),
]


def judged(facts: list[Fact], cut: int, visible: list[int], keep: int | None = None) -> list[str]:
    return oracles(known_at(facts, cut), {"run": keep})["run"].judge(visible)


def test_facts_are_noted_with_the_position_of_the_log(tmp_path: Path) -> None:
    position = Position()
    history = History(tmp_path / "notes", position)
    history.note("begin", RUN, 1, 1)
    position.set(5)
    history.note("promise", RUN, 1, 1)
    assert history.facts() == [Fact(0, "begin", RUN, 1, 1), Fact(5, "promise", RUN, 1, 1)]


def test_what_was_reported_before_the_power_went_off_must_be_there() -> None:
    assert judged(SAVED, 9, [1, 2]) == []
    assert judged(SAVED, 9, [1]) == ["step 2 was committed and is not there"]
    assert judged(SAVED, 8, [1]) == []


def test_what_was_begun_may_be_there_and_nothing_else() -> None:
    assert judged(SAVED, 8, [1, 2]) == []
    assert judged(SAVED, 5, [1, 2]) == ["step 2 was never saved"]


def test_what_is_no_longer_kept_may_be_gone() -> None:
    assert judged(SAVED, 9, [2], keep=1) == []
    assert judged(SAVED, 8, [2], keep=1) == []
    assert judged(SAVED, 8, [], keep=1) == ["step 1 was committed and is not there"]


def test_what_a_rewind_gives_up_may_be_there_until_it_has_ended() -> None:
    rewound = [*SAVED, Fact(10, "doubt", RUN, 1, 3), Fact(12, "forget", RUN, 1, 3)]
    assert judged(rewound, 11, [1, 2]) == []
    assert judged(rewound, 11, [1]) == []
    assert judged(rewound, 12, [1, 2]) == ["step 2 was never saved"]
