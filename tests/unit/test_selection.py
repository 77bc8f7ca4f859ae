"""Patterns on names: what they match, reach and rename; the report."""

from __future__ import annotations

from typing import Any

import pytest

from statehold.errors import StateMismatchError, UsageError
from statehold.format.selection import (
    Answer,
    Names,
    RestoreReport,
    Selection,
    check_answers,
    nearest,
)


@pytest.mark.parametrize(
    ("options", "taken", "left"),
    [
        ({}, ["a", "a.b"], []),
        ({"only": ["model"]}, ["model", "model.a.weight"], ["models", "optimizer.state.model.a"]),
        ({"only": ["model.*.weight"]}, ["model.a.b.weight"], ["model.weight", "model.a.weight.x"]),
        ({"only": ["a.b", "c?"]}, ["a.b.c", "cd"], ["a", "a.bc", "cd.e"]),
        ({"skip": ["model.head"]}, ["model.header", "model"], ["model.head", "model.head.bias"]),
        ({"only": ["m"], "skip": ["*.bias"]}, ["m.a.weight"], ["m.a.bias", "n.weight"]),
        ({"skip": ["[ab].x"]}, ["c.x"], ["a.x", "b.x"]),
    ],
)
def test_what_is_taken(options: dict[str, Any], taken: list[str], left: list[str]) -> None:
    selection = Selection(**options)
    assert [name for name in taken + left if selection.takes(name)] == taken
    for name in taken:  # whoever descends to it passes all that is above
        parts = name.split(".")
        above = [".".join(parts[:count]) for count in range(len(parts) + 1)]
        assert all(map(selection.reaches, above))


def test_whole_branches_are_not_reached() -> None:
    selection = Selection(only=["model.layers.*.weight", "data"], skip=["model.layers.0"])
    assert not selection.reaches("optimizer")
    assert not selection.reaches("model.head")
    assert not selection.reaches("model.layers.0.weight")
    assert selection.reaches("model.layers.1")
    assert selection.reaches("data.position")


def test_the_longest_prefix_renames() -> None:
    selection = Selection(rename={"ema": "model", "ema.old": "model.new"})
    assert selection.renamed("ema") == "model"
    assert selection.renamed("ema.a.weight") == "model.a.weight"
    assert selection.renamed("ema.old.weight") == "model.new.weight"
    assert selection.renamed("emac.weight") == "emac.weight"
    assert selection.renames_below("ema")
    assert not selection.renames_below("ema.old")


@pytest.mark.parametrize(
    "options",
    [
        {"only": "model"},
        {"skip": [1]},
        {"rename": {"": "a"}},
        {"rename": str.lower},
        {"rename": "ab"},
        {"only": 5},
        {"only": []},
        {"only": (name for name in ())},
        {"strict": "no"},
    ],
)
def test_what_is_no_list_of_names_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Selection(**options)


def test_names_may_come_from_a_generator() -> None:
    selection = Selection(name for name in ("model", "rng"))
    assert selection.takes("rng")
    assert not selection.takes("data")


NAMES = ["model.layers.0.weight", "model.layers.0.bias", "model.norm", "optimizer.lr", "rng"]


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("modle", ["model"]),
        ("model.layer.0", ["model.layers"]),
        ("layers.0", ["model.layers.0"]),
        ("weight", ["model.layers.0.weight"]),
        ("xyz", ["model", "optimizer", "rng"]),
        ("rng.x", []),
    ],
)
def test_the_nearest_names(text: str, near: list[str]) -> None:
    assert nearest(text, NAMES) == near


def test_every_pattern_is_answered() -> None:
    selection = Selection(["model", "model.norm", "*.lrr"], ["rgn"], {"ema": "model", "rng": "r"})
    live = [name for name in NAMES if name != "rng"]
    assert selection.answers(Names(NAMES, NAMES, live)) == {
        'only "model"': None,
        'only "model.norm"': None,
        'only "*.lrr"': ["*.lr"],
        'skip "rgn"': ["rng"],
        'rename from "ema"': ["model", "optimizer", "rng"],
        'rename to "model"': None,
        'rename from "rng"': None,
        'rename to "r"': ["model", "optimizer"],
    }
    assert selection.answers(Names(NAMES, NAMES, live, ["r"]))['rename to "r"'] is None


def test_what_one_rank_matches_is_matched() -> None:
    here, there = ({'only "a"': near} for near in (None, ["b"]))
    check_answers([Answer(here, True, False), Answer(there, True, False)])
    with pytest.raises(UsageError, match="a pattern matches nothing"):
        check_answers([Answer(there, True, False), Answer(there, True, False)])
    with pytest.raises(StateMismatchError, match="nothing of the step would be restored"):
        check_answers([Answer({}, False, True), Answer({}, False, False)])
    check_answers([Answer({}, False, True), Answer({}, True, False)])
    check_answers([Answer({}, False, False)])


def test_a_report_can_be_read() -> None:
    names = tuple(f"n{index}" for index in range(10))
    text = str(RestoreReport(7, loaded=names, kept=("rng",), unexpected=names))
    assert text.splitlines() == [
        "step 7: 10 loaded",
        "  unexpected 10: n0, n1, n2, n3, n4, n5, n6, n7, and 2 more",
        "  kept 1: rng",
    ]
