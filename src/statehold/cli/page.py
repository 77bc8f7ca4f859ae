"""The page of a report: one HTML file that needs no other, and loads no other.

Invariants: the page has no address of another file or site. A policy forbids all scripts except the
page's own, by its hash, and all loading. The page has the same content without the script.
Not here: the data (report), escaping (markup), the timeline.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from statehold.cli.ls import KINDS
from statehold.cli.markup import Markup, Piece, join, tag
from statehold.cli.output import counted
from statehold.cli.said import in_words
from statehold.cli.timeline import timeline
from statehold.cli.traces import Traces
from statehold.units import format_bytes, format_seconds

_HERE = Path(__file__).parent
_NUMBERS = "num"
DAMAGE_SHOWN = 100
SAVES_SHOWN = 200

Document = Mapping[str, Any]


def page_of(document: Document, traces: Traces) -> str:
    """The page for the data of a report, and the traces that it was made with."""
    style = Markup((_HERE / "report.css").read_text("utf-8"))
    script = Markup((_HERE / "report.js").read_text("utf-8"))
    policy = f"default-src 'none'; style-src {_hashed(style)}; script-src {_hashed(script)}"
    head = [
        Markup('<meta charset="utf-8">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        tag("title", f"statehold: {document['run']}"),
        tag("style", style),
    ]
    body = [tag("main", *_sections(document, traces)), tag("script", script)]
    return Markup("<!doctype html>\n") + tag(
        "html", tag("head", *head), tag("body", *body), lang="en"
    )


def _hashed(content: str) -> str:
    digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _sections(document: Document, traces: Traces) -> Iterable[Markup]:
    yield _header(document)
    yield _section("Steps", _steps(document))
    if len(document["levels"]) > 1 and document["steps"]:
        yield _section("Where steps are", _where(document))
    copies = [copy for step in document["steps"] for copy in step["copies"]]
    if damage := [each for copy in copies for each in _damage(copy)]:
        yield _section("Damage", _damage_table(damage))
    if any(lane.marks for lane in traces.lanes):
        yield _section("Timeline", timeline(traces), _left_out(document))
    if document["saves"]:
        yield _section("Saves", _saves(document))
    if document["restores"]:
        yield _section("Restores", _restores(document))
    if document["copies"]:
        yield _section("Copies to other levels", _copies(document))
    if not document["saves"] and not document["restores"]:
        hint = (
            "No trace was given: Checkpointer(..., trace=FILE) records one, --trace FILE reads it."
        )
        yield _section("Saves and restores", tag("p", hint, class_="note"))
    yield _section("Levels", _levels(document))
    if document["newest"] is not None:
        yield _section(f"In step {document['newest']['step']}", _newest(document["newest"]))
    if document["other"]:
        yield _section("Also in the run directory", _other(document["other"]))


def _section(title: str, *content: Piece) -> Markup:
    return tag("section", tag("h2", title), *content)


# -- the top -------------------------------------------------------------------------------


def _header(document: Document) -> Markup:
    steps = document["steps"]
    made = f"{_when(document['created'])}, {document['writer']}"
    figures = [
        ("newest step", str(steps[-1]["step"]) if steps else "none"),
        ("steps kept", str(len(steps))),
        (
            "at all levels" if len(document["levels"]) > 1 else "on disk",
            format_bytes(sum(level["bytes"] for level in document["levels"])),
        ),
        ("ranks", str(steps[-1].get("world_size", "unknown")) if steps else "none"),
        ("integrity", _overall(document)),
    ]
    tiles = [tag("div", tag("dt", name), tag("dd", value)) for name, value in figures]
    return tag(
        "header",
        tag("h1", document["run"]),
        tag("p", made, class_="note"),
        tag("dl", *tiles, class_="tiles"),
    )


def _overall(document: Document) -> Markup:
    steps = document["steps"]
    damaged = sum(step["state"] == "damaged" for step in steps)
    if damaged:
        return _badge("bad", f"{damaged} damaged")
    if not document["verified"] or not steps:
        return _badge("unknown", "not verified")
    parts = sum(step["state"] == "part" for step in steps)
    if parts:
        return _badge("unknown", f"{counted(parts, 'step')} here in part")
    return _badge("good", f"{counted(len(steps), 'step')} intact")


def _badge(kind: str, text: str) -> Markup:
    return tag("span", text, class_=f"badge {kind}")


# -- tables --------------------------------------------------------------------------------


def _table(header: Sequence[str], rows: Iterable[Sequence[Piece]], right: str = "") -> Markup:
    """`right`: the columns with numbers."""
    kinds = [_NUMBERS if name in right.split() else None for name in header]
    # "_" stands for a space in the names of columns.
    head = [
        tag("th", name.replace("_", " "), scope="col", class_=kind)
        for name, kind in zip(header, kinds, strict=True)
    ]
    body = [
        tag("tr", *[tag("td", c, class_=k) for c, k in zip(row, kinds, strict=True)])
        for row in rows
    ]
    inner = tag("table", tag("thead", tag("tr", *head)), tag("tbody", *body))
    return tag("div", inner, class_="wide", tabindex=0)


def _bar(share: float, mark: float | None = None) -> Markup:
    """A share of the width, and where a limit is."""
    drawn = [tag("rect", class_="track", width="100%", height=8, rx=2),
             tag("rect", class_="bar", width=f"{min(share, 1):.2%}", height=8, rx=2)]  # fmt: skip
    if mark is not None:
        drawn.append(tag("line", class_="limit", x1=f"{mark:.2%}", x2=f"{mark:.2%}", y1=0, y2=8))
    return tag("svg", *drawn, width=96, height=8, aria_hidden="true")


def _steps(document: Document) -> Markup:
    steps = document["steps"]
    if not steps:
        return tag("p", "No step is committed in this run.", class_="note")
    largest = max(max(step["bytes"] for step in steps), 1)
    rows = [
        (
            step["step"],
            _when(step["created"]) if "created" in step else "-",
            step.get("world_size", "-"),
            step["files"],
            format_bytes(step["bytes"]),
            _bar(step["bytes"] / largest),
            step.get("writer", "-"),
            in_words(step.get("metrics", {}), step.get("tags", ())),
            _integrity(step),
        )
        for step in reversed(steps)
    ]
    header = ("step", "committed", "ranks", "files", "bytes", "", "written_by", "says", "integrity")
    return _table(header, rows, right="step ranks files bytes")


def _integrity(step: Document) -> Piece:
    if step["state"] == "damaged":
        return _badge("bad", "damaged")
    if step["state"] != "committed":
        return _badge("unknown", step["state"])
    found = step.get("integrity")
    if found is None:
        return _badge("unknown", "not verified")
    return _badge("good", f"intact: {counted(found['pieces'], 'piece')}")


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


def _damage_table(damage: Sequence[Sequence[Piece]]) -> Markup:
    header = ("step", "level", "what", "tensor", "file", "bytes", "detail")
    more = len(damage) - DAMAGE_SHOWN
    note = tag("p", f"{more} more: statehold verify lists all.", class_="note") if more > 0 else ""
    return join([_table(header, damage[:DAMAGE_SHOWN], right="step"), note])


def _left_out(document: Document) -> Piece:
    count = document["left_out_events"]
    text = f"{counted(count, 'event')} not drawn: older than the newest, or not well-formed."
    return tag("p", text, class_="note") if count else ""


def _saves(document: Document) -> Markup:
    saves, limit = document["saves"], document["limit_bytes_per_s"]
    fastest = max([save["bytes_per_s"] or 0 for save in saves])
    whole = max(fastest, limit or 0, 1)
    longest = max([save["committed_s"] or save["written_s"] for save in saves]) or 1.0
    rows = [
        (
            _look(save),
            _course(save, longest),
            save["ranks"],
            format_bytes(save["written_bytes"]),
            _seconds(save["blocked_s"]),
            _seconds(save["gate_s"]),
            _seconds(save["staged_s"]),
            _seconds(save["written_s"]),
            _badge("bad", "failed") if save["failed"] else _seconds(save["committed_s"]),
            "-" if save["bytes_per_s"] is None else f"{format_bytes(int(save['bytes_per_s']))}/s",
            _bar((save["bytes_per_s"] or 0) / whole, limit / whole if limit else None),
            *([f"{(save['bytes_per_s'] or 0) / limit:.0%}"] if limit else []),
        )
        for save in reversed(saves[-SAVES_SHOWN:])
    ]
    numbers = "step ranks bytes blocked gate staged written committed rate of_limit"
    header = ("step", "course", *numbers.split()[1:9], "", *(["of_limit"] if limit else []))
    note = (
        "Times since the call of save(), of several ranks the slowest; the rate is to the commit. "
        "Course, on one scale: until staged, written, committed; above it, how long save() took."
    )
    if limit:
        note += f" The line is the limit of the storage, {format_bytes(int(limit))}/s."
    if len(saves) > SAVES_SHOWN:
        note += f" The newest {SAVES_SHOWN} of {len(saves)}."
    table = _table(header, rows, right=numbers)
    return join([table, tag("p", note, class_="note")])


def _course(save: Document, longest: float) -> Markup:
    """The course of a save, from its call to the commit, as parts of the longest."""
    ends = [save["staged_s"], save["written_s"], save["committed_s"] or 0]
    drawn = [tag("rect", class_="k-plan", width=f"{save['blocked_s'] / longest:.2%}", height=3)]
    at = 0.0
    for kind, end in zip(("copy", "move", "commit"), ends, strict=True):
        x, width = f"{at / longest:.2%}", f"{max(end - at, 0) / longest:.2%}"
        drawn.append(tag("rect", class_=f"k-{kind}", x=x, width=width, y=4, height=8))
        at = max(at, end)
    return tag("svg", *drawn, width=150, height=12, class_="course", aria_hidden="true")


def _restores(document: Document) -> Markup:
    # With several levels, a trace does not say from which level a restore read.
    levels = document["levels"]
    limit = levels[0]["read_limit_bytes_per_s"] if len(levels) == 1 else None
    rows = [
        (
            _look(each),
            each["rank"],
            format_bytes(each["read_bytes"]),
            _seconds(each["seconds"]),
            _rate(each),
            *([_of(each, limit)] if limit else []),
            each["passed_over"] or "-",
        )
        for each in reversed(document["restores"][-SAVES_SHOWN:])
    ]
    of_limit = ["of_limit"] if limit else []
    header = ("step", "rank", "bytes", "took", "rate", *of_limit, "damaged,_passed_over")
    return _table(header, rows, right=" ".join(header))


def _copies(document: Document) -> Markup:
    known = {level["name"]: level["limit_bytes_per_s"] for level in document["levels"]}
    limits = {name: limit for name, limit in known.items() if limit}
    rows = [
        (
            _look(each),
            each["level"],
            each["rank"],
            _badge("bad", "failed") if each["failed"] else format_bytes(each["bytes"]),
            _seconds(each["seconds"]),
            _rate(each),
            *([_of(each, limits.get(each["level"]))] if limits else []),
            _seconds(each["read_s"]),
            _seconds(each["limited_s"]),
        )
        for each in reversed(document["copies"][-SAVES_SHOWN:])
    ]
    of_limit = ["of_limit"] if limits else []
    rest = ("reading", "waiting_for_its_turn")
    header = ("step", "to", "rank", "bytes", "took", "rate", *of_limit, *rest)
    return _table(header, rows, right=" ".join(header).replace(" to ", " "))


def _of(each: Document, limit: int | None) -> str:
    """The rate as a share of the level's limit."""
    rate = each["bytes_per_s"]
    return f"{rate / limit:.0%}" if rate and limit else "-"


def _rate(each: Document) -> str:
    return "-" if each["bytes_per_s"] is None else f"{format_bytes(int(each['bytes_per_s']))}/s"


def _look(about: Document) -> Markup:
    """A step's number, which the script links to its place on the timeline."""
    return tag("button", about["step"], type="button", class_="look",
               data_begin=about["begin_us"], data_end=about["end_us"], disabled="")  # fmt: skip


def _levels(document: Document) -> Markup:
    levels = document["levels"]
    rows = [
        (
            level["name"],
            level["kind"],
            level["path"],
            level["file_system"] or "-",
            _level_state(level["state"]),
            len(level["steps"]),
            level["steps"][-1] if level["steps"] else "-",
            format_bytes(level["bytes"]),
            "-" if level["free_bytes"] is None else format_bytes(level["free_bytes"]),
            _limits(level),
        )
        for level in levels
    ]
    numbers = "steps newest bytes free limit"
    header = ("level", "kind", "where", "file_system", "", *numbers.split())
    notes = [tag("p", f"{level['name']}: {level['error']}", class_="note")
             for level in levels if level["error"]]  # fmt: skip
    asked = "statehold report --levels asks object stores, too."
    if any(level["state"] == "not asked" for level in levels):
        notes.append(tag("p", asked, class_="note"))
    return join([_table(header, rows, right=numbers), *notes])


def _level_state(state: str) -> Piece:
    if state == "there":
        return ""
    return _badge("bad" if state == "unreadable" else "unknown", state)


def _limits(level: Document) -> str:
    """The limits in its profile."""
    write, read = level["limit_bytes_per_s"], level["read_limit_bytes_per_s"]
    if write is None or read is None:
        return "-"
    return f"{format_bytes(write)}/s, reading {format_bytes(read)}/s"


def _where(document: Document) -> Markup:
    """A row for each step, a column for each level, with the state of each copy."""
    names = [level["name"] for level in document["levels"]]
    rows = []
    for step in reversed(document["steps"]):
        copies = {copy["level"]: copy for copy in step["copies"]}
        cells = [_integrity(copies[name]) if name in copies else "-" for name in names]
        rows.append((step["step"], *cells))
    return _table(("step", *names), rows, right="step")


def _newest(newest: Document) -> Markup:
    groups = [f"{each['tensors']} {dtype} ({format_bytes(each['bytes'])})"
              for dtype, each in newest["dtypes"].items()]  # fmt: skip
    count = counted(newest["tensor_count"], "tensor")
    text = f"{count}, {format_bytes(newest['tensor_bytes'])}: {', '.join(groups) or 'none'}."
    shown = newest["largest"]
    if newest["tensor_count"] > len(shown):
        text += f" The largest {len(shown)}:"
    largest = max([tensor["bytes"] for tensor in shown] + [1])
    rows = [
        (
            tag("code", tensor["name"]),
            tensor["dtype"],
            " x ".join(map(str, tensor["shape"])) or "scalar",
            format_bytes(tensor["bytes"]),
            _bar(tensor["bytes"] / largest),
            tensor["layout"],
        )
        for tensor in shown
    ]
    table = _table(("tensor", "dtype", "shape", "bytes", "", "layout"), rows, right="bytes")
    return join([tag("p", text), table])


def _other(found: Iterable[Document]) -> Markup:
    rows = [(each["name"], format_bytes(each["bytes"]), KINDS[each["kind"]]) for each in found]
    return _table(("name", "bytes", "what_it_is"), rows, right="bytes")


def _seconds(seconds: float | None) -> str:
    return format_seconds(seconds) if seconds else "-"


def _when(iso: str) -> str:
    """A time as a manifest records it, for people: to the second."""
    return f"{iso[:19].replace('T', ' ')} UTC"
