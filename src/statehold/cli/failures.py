"""What went wrong in a run, at the top of its report: failed saves and copies, and damage.

Not here: what counts as damage (checking), the other sections (page).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from statehold.cli import blocks
from statehold.cli.markup import Markup, Piece, lines
from statehold.cli.output import counted

DAMAGE_SHOWN = 100
FAILURES_SHOWN = 100

Document = Mapping[str, Any]


def failures(document: Document) -> Iterator[Markup]:
    """The sections about failures; none if nothing is known to have failed."""
    if found := list(_failures(document)):
        header = ("what", "step", "where", "detail")
        table = blocks.table(header, found[:FAILURES_SHOWN], right="step", more="more failures")
        yield blocks.section("Failures", table, _more(len(found) - FAILURES_SHOWN, "with --json"))
    copies = [copy for step in document["steps"] for copy in step["copies"]]
    if damage := [each for copy in copies for each in _damage(copy)]:
        header2 = ("step", "level", "what", "tensor", "file", "bytes", "detail")
        table = blocks.table(header2, damage[:DAMAGE_SHOWN], right="step", more="more findings")
        more = _more(len(damage) - DAMAGE_SHOWN, "statehold verify lists all")
        yield blocks.section("Damage", table, more)


def _more(count: int, how: str) -> Piece:
    return blocks.note(f"{count} more: {how}.") if count > 0 else ""


def _failures(document: Document) -> Iterator[tuple[Piece, ...]]:
    """The newest first."""
    for level in document["levels"]:
        if level["state"] == "unreadable":
            yield _bad("level unreadable"), "-", level["name"], lines(level["error"] or "-")
    for save in reversed(document["saves"]):
        if save["failed"]:
            detail = f"after {blocks.seconds((save['end_us'] - save['begin_us']) / 1e6)}"
            yield _bad("save failed"), _look(save), counted(save["ranks"], "rank"), detail
    for copy in reversed(document["copies"]):
        if copy["failed"]:
            where = f"{copy['level']}, rank {copy['rank']}"
            yield (
                _bad("copy failed"),
                _look(copy),
                where,
                f"after {blocks.seconds(copy['seconds'])}",
            )
    for each in reversed(document["restores"]):
        if each["passed_over"]:
            detail = f"{each['passed_over']} newer were passed over"
            yield _bad("damaged steps"), _look(each), f"rank {each['rank']}", detail


def _bad(text: str) -> Markup:
    return blocks.badge("bad", text)


def _look(about: Document) -> Markup:
    return blocks.look(about["step"], about["begin_us"], about["end_us"])


def _damage(step: Document) -> Iterable[tuple[Piece, ...]]:
    found = step.get("integrity", {}).get("damage", [])
    if "error" in step and not found:
        about = step["step"], step["level"]
        yield *about, "manifest", "-", "-", "-", step["error"].split("\n")[0]
    for each in found:
        compared = (
            "" if each["expected"] is None else f" expected {each['expected']}, got {each['got']}"
        )
        where = "-" if each["begin"] is None else f"[{each['begin']}, {each['end']})"
        file, tensor = each["file"] or "-", each["tensor"] or "-"
        detail = f"{each['detail']}{compared}".strip()
        yield step["step"], step["level"], each["what"], tensor, file, where, detail
