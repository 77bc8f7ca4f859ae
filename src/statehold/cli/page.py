"""The page of a report: one HTML file that needs no other, and loads no other.

Owns: the sections of the page, and the HTML and SVG that they are built of, from single tags to the
timeline.
Invariants: the page has no address of another file or site. A policy forbids all scripts except the
page's own, by its hash, and all loading. The page has the same content without the script. What
went wrong in a run is at the top. Text cannot become markup, even if it is the name of a tensor. A
table shows its first ROWS_SHOWN rows; the others are one click away, also without scripts.
Not here: the data (report).
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from math import isfinite
from pathlib import Path
from typing import Any

from statehold.cli.output import counted, plain, to_the_second
from statehold.cli.places import KINDS
from statehold.cli.said import LEGEND, METRICS_SHOWN, columns_of, metrics_of
from statehold.cli.traces import DrawnStage, TimelineRow, Traces
from statehold.cli.verify import cells_of
from statehold.kv.batch import COUNTED
from statehold.units import format_bytes, format_seconds

Document = Mapping[str, Any]

# -- the page --------------------------------------------------------------------------------------


_HERE = Path(__file__).parent
SAVES_SHOWN = 200


def page_of(document: Document, traces: Traces) -> str:
    """The page for the data of a report, and the traces that it was made with."""
    return whole(document, document["run"], _tiles(document), _sections(document, traces))


def whole(
    document: Document, where: str, tiles: Iterable[Markup], content: Iterable[Markup]
) -> str:
    """The page about what is at `where`: the figures at the top, and the sections below."""
    name = where.rstrip("/").rpartition("/")[2] or where  # the last part of the path
    made = f"{where}, on {to_the_second(document['created'])} UTC by {document['writer']}"
    header = [tag("p", "statehold", class_="brand"), tag("h1", name), note(made)]
    top = tag("header", *header, tag("dl", *tiles, class_="tiles"))
    style = Markup((_HERE / "report.css").read_text("utf-8"))
    script = Markup((_HERE / "report.js").read_text("utf-8"))
    policy = f"default-src 'none'; style-src {_hashed(style)}; script-src {_hashed(script)}"
    head = [
        Markup('<meta charset="utf-8">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        tag("title", f"{name} - statehold report"),
        tag("style", style),
    ]
    body = [tag("main", top, *content), tag("script", script)]
    return Markup("<!doctype html>\n") + tag(
        "html", tag("head", *head), tag("body", *body), lang="en"
    )


def _hashed(content: str) -> str:
    digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _sections(document: Document, traces: Traces) -> Iterable[Markup]:
    """Failures first; then what people look at most."""
    yield from failures(document)
    if document["costs"] is not None:
        yield section("What saving cost", _costs(document["costs"]))
    yield section("Steps", _steps(document))
    if len(document["levels"]) > 1 and document["steps"]:
        yield section("Where steps are", _where(document))
    if any(lane.marks for lane in traces.lanes):
        yield section("Timeline", timeline(traces), _left_out(document))
    if document["saves"]:
        yield section("Saves", _saves(document))
    if document["restores"]:
        yield section("Restores", _restores(document))
    if document["copies"]:
        yield section("Copies to other levels", _copies(document))
    if not document["saves"] and not document["restores"]:
        hint = (
            "No trace was given: Checkpointer(..., trace=FILE) records one, --trace FILE reads it."
        )
        yield section("Saves and restores", note(hint))
    yield section("Levels", _levels(document))
    if document["newest"] is not None:
        yield section(f"In step {document['newest']['step']}", _newest(document["newest"]))
    if document["other"]:
        yield section("Also in the run directory", _other(document["other"]))


# What a time of a save means for people.
_COSTS = {"blocked_s": "save() took", "gate_s": "optimizers waited", "committed_s": "durable after"}


# -- a store of pages ----------------------------------------------------------------------


def page_of_store(document: Document) -> str:
    """The page for the data of a report about a store of KV pages."""
    bad, counts = document["bad"], document["counts"]
    asked = counts["hit"] + counts["miss"] + counts["bad"]
    state = badge("good", "intact") if document["verified"] else badge("unknown", "not verified")
    header, rows = count_rows(counts)
    tiles = [
        tile("integrity", badge("bad", f"{len(bad)} damaged") if bad else state),
        tile("pages", str(document["pages"].total()), f"{document['geometry']['slots']} slots"),
        tile("size", format_bytes(document["file_bytes"]), "on disk"),
        tile("hits", f"{counts['hit'] / asked:.1%}" if asked else "none", f"of {asked}"),
    ]
    about = note("All processes have counted this since the index of the store was made.")
    parts = [section("Pages", table(header, rows, right=" ".join(header[1:])), about)]
    if bad:
        parts.insert(0, section("Damage", table(("slot",), [(each,) for each in bad])))
    return whole(document, document["store"], tiles, parts)


def count_rows(counts: Document) -> tuple[list[str], list[list[str]]]:
    """The header of a table of what processes have counted, and a row for each identity."""
    rows = [
        [who, *(format_bytes(n) if name.endswith("_bytes") else str(n) for name, n in each.items())]
        for who, each in counts["identities"].items()
    ]
    return ["identity", "pages", *COUNTED], rows


# -- the top -------------------------------------------------------------------------------


def _tiles(document: Document) -> Iterator[Markup]:
    steps, levels, costs = document["steps"], document["levels"], document["costs"]
    yield tile("integrity", _overall(document))
    if steps:
        created = steps[-1].get("created")
        about = to_the_second(created)[:16] if created else ""  # to the minute
        yield tile("newest step", str(steps[-1]["step"]), about)
    else:
        yield tile("newest step", "none")
    if costs is not None:
        yield from _cost_tiles(costs)
    size = format_bytes(sum(level["bytes"] for level in levels))
    places = counted(len(levels), "level") if len(levels) > 1 else "on disk"
    yield tile("size", size, f"{counted(len(steps), 'step')}, {places}")
    ranks = str(steps[-1].get("world_size", "unknown")) if steps else "none"
    yield tile("ranks", ranks)


def _cost_tiles(costs: Document) -> Iterator[Markup]:
    share, durable = costs["blocked_share"], costs["committed_s"]
    if share is not None:
        yield tile("training blocked", f"{share:.2%}", f"of {format_seconds(costs['window_s'])}")
    if durable is not None:
        about = f"99 %: {format_seconds(durable['p99'])}"
        yield tile("durable after", format_seconds(durable["median"]), about)
    failed = costs["failed"]
    value = badge("bad", f"{failed} failed") if failed else "0 failed"
    yield tile("saves", value, f"of {costs['saves']}")


def _overall(document: Document) -> Markup:
    steps = document["steps"]
    damaged = sum(step["state"] == "damaged" for step in steps)
    if damaged:
        return badge("bad", f"{damaged} damaged")
    if not document["verified"] or not steps:
        return badge("unknown", "not verified")
    parts = sum(step["state"] == "part" for step in steps)
    if parts:
        return badge("unknown", f"{counted(parts, 'step')} here in part")
    return badge("good", f"{counted(len(steps), 'step')} intact")


# -- tables --------------------------------------------------------------------------------


def _costs(costs: Document) -> Markup:
    """A row for each time that training or a step waits for."""
    whole = max([costs[name]["max"] for name in _COSTS if costs[name]] + [1e-9])
    rows = [
        (
            title,
            *(format_seconds(costs[name][key]) for key in ("median", "p99", "max")),
            bar(costs[name]["median"] / whole, costs[name]["p99"] / whole, "mark"),
        )
        for name, title in _COSTS.items()
        if costs[name] is not None
    ]
    header = ("", "median", "99th_percentile", "longest", "")
    text = "Each save counts with its slowest rank."
    if costs["blocked_share"] is not None:
        text = (
            f"Training was blocked for {costs['blocked_share']:.2%} of the "
            f"{format_seconds(costs['window_s'])} from the first save to the last: in save(), and "
            f"while optimizers waited for copies. {text}"
        )
    return join([table(header, rows, right=" ".join(header[1:4])), note(text)])


def _steps(document: Document) -> Markup:
    steps = document["steps"]
    if not steps:
        return note("No step is committed in this run.")
    largest = max(max(step["bytes"] for step in steps), 1)
    said_here = columns_of(steps)
    rows = [
        (
            step["step"],
            _integrity(step),
            *(cell(step) for _, cell in said_here),
            f"{to_the_second(step['created'])} UTC" if "created" in step else "-",
            step.get("world_size", "-"),
            step["files"],
            format_bytes(step["bytes"]),
            bar(step["bytes"] / largest),
            step.get("writer", "-"),
        )
        for step in reversed(steps)
    ]
    names = [tag("code", name) for name, _ in said_here]
    header = ("step", "integrity", *names, "committed", "ranks", "files", "bytes", "",
              "written_by")  # fmt: skip
    right = "step ranks files bytes"
    legend = [note(f"{LEGEND}.")] if names else []
    return join([table(header, rows, right=right, more="older steps"), *legend, *_plots(steps)])


def _plots(steps: Sequence[Document]) -> Iterator[Markup]:
    """A line for each metric that three steps have, over the steps."""
    for name, points in list(metrics_of(steps).items())[:METRICS_SHOWN]:
        known = [(step, value) for step, value in points if isfinite(value)]
        if len(known) >= 3:
            yield tag("figure", tag("figcaption", name), line_of(known), class_="plot")


def _integrity(step: Document) -> Piece:
    if step["state"] == "damaged":
        return badge("bad", "damaged")
    if step["state"] != "committed":
        return badge("unknown", step["state"])
    found = step.get("integrity")
    if found is None:
        return badge("unknown", "not verified")
    return badge("good", f"intact: {counted(found['pieces'], 'piece')}")


def _left_out(document: Document) -> Piece:
    count = document["left_out_events"]
    text = f"{counted(count, 'event')} not drawn: older than the newest, or not well-formed."
    return note(text) if count else ""


def _saves(document: Document) -> Markup:
    saves, limit = document["saves"], document["limit_bytes_per_s"]
    fastest = max([save["bytes_per_s"] or 0 for save in saves])
    whole = max(fastest, limit or 0, 1)
    longest = max([save["committed_s"] or save["written_s"] for save in saves]) or 1.0
    rows = [
        (
            look(save),
            _course(save, longest),
            save["ranks"],
            format_bytes(save["written_bytes"]),
            seconds(save["blocked_s"]),
            seconds(save["gate_s"]),
            seconds(save["staged_s"]),
            seconds(save["written_s"]),
            badge("bad", "failed") if save["failed"] else seconds(save["committed_s"]),
            rate(save["bytes_per_s"]),
            bar((save["bytes_per_s"] or 0) / whole, limit / whole if limit else None),
            *([f"{(save['bytes_per_s'] or 0) / limit:.0%}"] if limit else []),
        )
        for save in reversed(saves[-SAVES_SHOWN:])
    ]
    numbers = "step ranks bytes blocked gate staged written committed rate of_limit"
    header = ("step", "course", *numbers.split()[1:9], "", *(["of_limit"] if limit else []))
    text = (
        "Times since the call of save(), of several ranks the slowest; the rate is to the commit. "
        "Course, on one scale: until staged, written, committed; above it, how long save() took."
    )
    if limit:
        text += f" The line is the limit of the storage, {format_bytes(int(limit))}/s."
    if len(saves) > SAVES_SHOWN:
        text += f" The newest {SAVES_SHOWN} of {len(saves)}."
    return join([table(header, rows, right=numbers, more="earlier saves"), note(text)])


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
            look(each),
            each["rank"],
            format_bytes(each["read_bytes"]),
            seconds(each["seconds"]),
            rate(each["bytes_per_s"]),
            *([_of(each, limit)] if limit else []),
            each["passed_over"] or "-",
        )
        for each in reversed(document["restores"][-SAVES_SHOWN:])
    ]
    of_limit = ["of_limit"] if limit else []
    header = ("step", "rank", "bytes", "took", "rate", *of_limit, "damaged,_passed_over")
    return table(header, rows, right=" ".join(header), more="earlier restores")


def _copies(document: Document) -> Markup:
    known = {level["name"]: level["limit_bytes_per_s"] for level in document["levels"]}
    limits = {name: limit for name, limit in known.items() if limit}
    rows = [
        (
            look(each),
            each["level"],
            each["rank"],
            badge("bad", "failed") if each["failed"] else format_bytes(each["bytes"]),
            seconds(each["seconds"]),
            rate(each["bytes_per_s"]),
            *([_of(each, limits.get(each["level"]))] if limits else []),
            seconds(each["read_s"]),
            seconds(each["limited_s"]),
        )
        for each in reversed(document["copies"][-SAVES_SHOWN:])
    ]
    of_limit = ["of_limit"] if limits else []
    rest = ("reading", "waiting_for_its_turn")
    header = ("step", "to", "rank", "bytes", "took", "rate", *of_limit, *rest)
    numbers = " ".join(header).replace(" to ", " ")
    return table(header, rows, right=numbers, more="earlier copies")


def _of(each: Document, limit: int | None) -> str:
    """The rate as a share of the level's limit."""
    reached = each["bytes_per_s"]
    return f"{reached / limit:.0%}" if reached and limit else "-"


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
    notes = [
        note(lines(f"{level['name']}: {level['error']}")) for level in levels if level["error"]
    ]
    asked = "statehold report --levels asks object stores, too."
    if any(level["state"] == "not asked" for level in levels):
        notes.append(note(asked))
    return join([table(header, rows, right=numbers), *notes])


def _level_state(state: str) -> Piece:
    if state == "there":
        return ""
    return badge("bad" if state == "unreadable" else "unknown", state)


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
    return table(("step", *names), rows, right="step", more="older steps")


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
            bar(tensor["bytes"] / largest),
            tensor["layout"],
        )
        for tensor in shown
    ]
    header = ("tensor", "dtype", "shape", "bytes", "", "layout")
    return join([tag("p", text), table(header, rows, right="bytes", more="smaller tensors")])


def _other(found: Iterable[Document]) -> Markup:
    rows = [(each["name"], format_bytes(each["bytes"]), KINDS[each["kind"]]) for each in found]
    return table(("name", "bytes", "what_it_is"), rows, right="bytes", more="others")


# -- what went wrong -------------------------------------------------------------------------------


DAMAGE_SHOWN = 100
FAILURES_SHOWN = 100


def failures(document: Document) -> Iterator[Markup]:
    """The sections about failures; none if nothing is known to have failed."""
    if found := list(_failures(document)):
        header = ("what", "step", "where", "detail")
        rows = table(header, found[:FAILURES_SHOWN], right="step", more="more failures")
        yield section("Failures", rows, _more(len(found) - FAILURES_SHOWN, "with --json"))
    copies = [copy for step in document["steps"] for copy in step["copies"]]
    if damage := [each for copy in copies for each in _damage(copy)]:
        header2 = ("step", "level", "what", "tensor", "file", "bytes", "detail")
        rows = table(header2, damage[:DAMAGE_SHOWN], right="step", more="more findings")
        more = _more(len(damage) - DAMAGE_SHOWN, "statehold verify lists all")
        yield section("Damage", rows, more)


def _more(count: int, how: str) -> Piece:
    return note(f"{count} more: {how}.") if count > 0 else ""


def _failures(document: Document) -> Iterator[tuple[Piece, ...]]:
    """The newest first."""
    for level in document["levels"]:
        if level["state"] == "unreadable":
            yield badge("bad", "level unreadable"), "-", level["name"], lines(level["error"] or "-")
    for save in reversed(document["saves"]):
        if save["failed"]:
            detail = f"after {seconds((save['end_us'] - save['begin_us']) / 1e6)}"
            yield badge("bad", "save failed"), look(save), counted(save["ranks"], "rank"), detail
    for copy in reversed(document["copies"]):
        if copy["failed"]:
            where = f"{copy['level']}, rank {copy['rank']}"
            detail = f"after {seconds(copy['seconds'])}"
            yield badge("bad", "copy failed"), look(copy), where, detail
    for each in reversed(document["restores"]):
        if each["passed_over"]:
            detail = f"{each['passed_over']} newer were passed over"
            yield badge("bad", "damaged steps"), look(each), f"rank {each['rank']}", detail


def _damage(step: Document) -> Iterable[tuple[Piece, ...]]:
    found = step.get("integrity", {}).get("damage", [])
    if "error" in step and not found:
        about = step["step"], step["level"]
        yield *about, "manifest", "-", "-", "-", step["error"].split("\n")[0]
    for what, tensor, _, file, where, _, detail in map(cells_of, found):
        yield step["step"], step["level"], what, tensor, file, where, detail


# -- markup ----------------------------------------------------------------------------------------
# Only tag() and join() make Markup. They escape everything else, after they have made control
# characters (and those that turn the direction of text) visible.


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Piece = Markup | str | int


def tag(name: str, *children: Piece, **attributes: str | float | None) -> Markup:
    """An element. `class_` loses its underscore, others become dashes; None is left out."""
    given = "".join(
        f' {key.strip("_").replace("_", "-")}="{_safe(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{given}>{join(children)}</{name}>")


def join(pieces: Iterable[Piece]) -> Markup:
    """Pieces one after another; a piece that is not Markup is escaped."""
    return Markup("".join(p if isinstance(p, Markup) else _safe(str(p)) for p in pieces))


def lines(text: str) -> Markup:
    """Text that has lines, such as an error."""
    return Markup("<br>".join(map(_safe, text.split("\n"))))


def _safe(text: str) -> str:
    return html.escape(plain(text), quote=True)


# -- blocks ----------------------------------------------------------------------------------------


ROWS_SHOWN = 12
_NUMBERS = "num"


def section(title: str, *content: Piece) -> Markup:
    return tag("section", tag("h2", title), *content)


def note(text: Piece) -> Markup:
    """A remark in small print."""
    return tag("p", text, class_="note")


def badge(kind: str, text: str) -> Markup:
    """kind: "good", "bad" or "unknown"."""
    return tag("span", text, class_=f"badge {kind}")


def tile(name: str, value: Piece, about: str = "") -> Markup:
    """A figure at the top of the page."""
    more = [tag("dd", about, class_="about")] if about else []
    return tag("div", tag("dt", name), tag("dd", value), *more)


def table(
    header: Sequence[str], rows: Iterable[Sequence[Piece]], right: str = "", more: str = "rows"
) -> Markup:
    """`right`: the columns with numbers. `more`: what the rows are that are folded away."""
    kinds = [_NUMBERS if name in right.split() else None for name in header]
    # "_" stands for a space in the names of columns.
    head = tag("thead", tag("tr", *[
        tag("th", name if isinstance(name, Markup) else name.replace("_", " "),
            scope="col", class_=kind)
        for name, kind in zip(header, kinds, strict=True)
    ]))  # fmt: skip
    body = [
        tag("tr", *[tag("td", c, class_=k) for c, k in zip(row, kinds, strict=True)])
        for row in rows
    ]
    if len(body) <= ROWS_SHOWN + 3:  # folding a few rows hides more than it saves
        return _wide(head, body)
    shown, folded = body[:ROWS_SHOWN], body[ROWS_SHOWN:]
    label = tag("summary", f"{len(folded)} {more}")
    return join([_wide(head, shown), tag("details", label, _wide(head, folded))])


def _wide(head: Markup, body: Sequence[Markup]) -> Markup:
    return tag("div", tag("table", head, tag("tbody", *body)), class_="wide", tabindex=0)


def bar(share: float, mark: float | None = None, kind: str = "limit") -> Markup:
    """A share of the width, and a line at another one: a "limit", or only a "mark"."""
    drawn = [tag("rect", class_="track", width="100%", height=8, rx=2),
             tag("rect", class_="bar", width=f"{min(share, 1):.2%}", height=8, rx=2)]  # fmt: skip
    if mark is not None:
        drawn.append(tag("line", class_=kind, x1=f"{mark:.2%}", x2=f"{mark:.2%}", y1=0, y2=8))
    return tag("svg", *drawn, width=96, height=8, aria_hidden="true")


def line_of(points: Sequence[tuple[float, float]]) -> Markup:
    """A line through finite points, at least two, with the least and the greatest value beside."""
    (left, *_, right), values = [x for x, _ in points], [y for _, y in points]
    low, high = min(values), max(values)

    def share(value: float, begin: float, end: float) -> float:
        # In halves, because the difference of two large numbers may be infinite.
        return (value / 2 - begin / 2) / ((end / 2 - begin / 2) or 1)

    at = [(600 * share(x, left, right), 112 - 104 * share(y, low, high)) for x, y in points]
    drawn = [
        tag("polyline", class_="line", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in at)),
        *(tag("circle", tag("title", f"{step}: {value:g}"), cx=f"{x:.1f}", cy=f"{y:.1f}", r=3)
          for (x, y), (step, value) in zip(at, points, strict=True)),
        tag("text", f"{high:g}", x=610, y=14), tag("text", f"{low:g}", x=610, y=116),
        tag("text", f"{left:g}", x=0, y=136), tag("text", f"{right:g}", x=600, y=136,
                                                  text_anchor="end"),
    ]  # fmt: skip
    return tag("svg", *drawn, viewBox="-4 0 700 140", role="img")


def seconds(value: float | None) -> str:
    return format_seconds(value) if value else "-"


def rate(bytes_per_s: float | None) -> str:
    return "-" if bytes_per_s is None else f"{format_bytes(int(bytes_per_s))}/s"


def look(about: Document) -> Markup:
    """A step's number, which the script links to its place on the timeline."""
    return tag("button", about["step"], type="button", class_="look",
               data_begin=about["begin_us"], data_end=about["end_us"], disabled="")  # fmt: skip


# -- the timeline ----------------------------------------------------------------------------------
# A lane for each thread of each rank, and one below it for the engine. Positions are shares of the
# width, so the drawing follows the page. The script only moves them when a reader zooms in.


# Stages by kind, which the colours show.
STAGES: dict[str, tuple[str, ...]] = {
    "wait": ("wait", "gate", "arrive", "gather", "wait for rank 0", "meet"),
    "plan": ("save()", "capture", "plan", "open", "prepare", "discover"),
    "copy": ("stage", "copy", "place", "values"),
    "move": ("write", "upload", "transfer", "read", "verify"),
    "commit": ("commit", "seal", "publish"),
    "rest": ("retain", "restore", "promote"),
    "failed": ("failed save", "failed restore", "failed promote"),
}
_MEANING = {
    "wait": "waiting",
    "plan": "capture, plan",
    "copy": "copying",
    "move": "storage",
    "commit": "commit",
    "rest": "retain, restore, promote, other",
    "failed": "failed",
}
_KIND_OF = {name: kind for kind, names in STAGES.items() for name in names}
LANES_MAX = 64
_ROW_PX = 15
_TICKS = 4  # a quarter of the width each: report.css draws lines there


def timeline(traces: Traces) -> Markup:
    """The lanes, the axis below them, and the legend of the colours."""
    drawable = [lane for lane in traces.lanes if lane.marks]
    lanes, more = drawable[:LANES_MAX], len(drawable) - LANES_MAX
    begin = min(mark.begin for lane in lanes for mark in lane.marks)
    end = max(max(mark.end for lane in lanes for mark in lane.marks), begin + 1)
    several = len({lane.rank for lane in lanes}) > 1
    rows = [_row(lane, begin, end, several) for lane in lanes]
    body = tag("div", *rows, _axis(begin, end - begin), class_="lanes", id="lanes",
               data_begin=begin, data_end=end, data_ticks=_TICKS)  # fmt: skip
    reset = tag("button", "Whole timeline", id="whole", type="button", hidden="")
    about = tag("output", "Point at a stage to read it.", id="about")
    note = tag("p", f"{more} more lanes, of later ranks.", class_="note") if more > 0 else ""
    return join([_legend(lanes), body, tag("p", reset, about, class_="reading"), note])


def _label(lane: TimelineRow, several: bool) -> str:
    thread = lane.thread.removeprefix("statehold-").removesuffix("_0")
    return f"rank {lane.rank} · {thread}" if several else thread


def _legend(lanes: Iterable[TimelineRow]) -> Markup:
    used = {_kind(mark) for lane in lanes for mark in lane.marks}
    items = [
        tag("li", _swatch(kind), meaning) for kind, meaning in _MEANING.items() if kind in used
    ]
    return tag("ul", *items, class_="legend")


def _swatch(kind: str) -> Markup:
    return tag("svg", tag("rect", width=10, height=10, rx=2, class_=f"k-{kind}"),
               width=10, height=10, aria_hidden="true")  # fmt: skip


def _row(lane: TimelineRow, begin: int, end: int, several: bool) -> Markup:
    places = list(_stacked(lane.marks))
    height = _ROW_PX * (max(row for _, row in places) + 1)
    label = _label(lane, several)
    drawn = [_mark(mark, row, begin, end) for mark, row in places]
    drawing = tag("svg", *drawn, height=height, width="100%", role="img", aria_label=label)
    return join([tag("div", label, class_="lane"), tag("div", drawing, class_="track")])


def _stacked(marks: Iterable[DrawnStage]) -> Iterator[tuple[DrawnStage, int]]:
    """Each mark and its row: below the marks that are not over when it begins."""
    ends: list[int] = []
    for mark in marks:
        row = max([i + 1 for i, end in enumerate(ends) if end > mark.begin], default=0)
        ends[row:] = [mark.end]
        yield mark, row


def _mark(mark: DrawnStage, row: int, begin: int, end: int) -> Markup:
    span = end - begin
    text = _text(mark)
    return tag(
        "rect",
        tag("title", text),
        x=f"{(mark.begin - begin) / span:.4%}",
        width=f"{(mark.end - mark.begin) / span:.4%}",
        y=row * _ROW_PX + 1,
        height=_ROW_PX - 2,
        class_=f"k-{_kind(mark)}",
        data_begin=mark.begin - begin,
        data_end=mark.end - begin,
    )


def _text(mark: DrawnStage) -> str:
    step = mark.facts.get("step")
    of = "" if step is None else f", step {step}"
    error = mark.facts.get("error")
    ended = f", ended with {error}" if error else ""
    return f"{mark.name}{of}: {format_seconds((mark.end - mark.begin) / 1e6)}{ended}"


def _kind(mark: DrawnStage) -> str:
    return _KIND_OF.get(mark.name, "rest")


def _axis(begin: int, span: int) -> Markup:
    ticks = [
        tag("text", format_seconds(span * i / _TICKS / 1e6), x=f"{100 * i // _TICKS}%", y=14,
            text_anchor="start" if i == 0 else "end" if i == _TICKS else "middle")
        for i in range(_TICKS + 1)
    ]  # fmt: skip
    drawing = tag("svg", *ticks, id="axis", height=18, width="100%", aria_hidden="true")
    label = f"from {datetime.fromtimestamp(begin // 10**6, timezone.utc):%H:%M:%S} UTC"
    return join([tag("div", label, class_="lane"), tag("div", drawing, class_="track axis")])
