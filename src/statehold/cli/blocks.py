"""The blocks that the page of a report is built of, from single tags to the timeline.

Owns: HTML and SVG by construction: sections, tables that fold, bars, badges, tiles, and the places
of marks on the timeline.
Invariants: text cannot become markup, even if it is the name of a tensor. A table shows its first
ROWS_SHOWN rows; the others are one click away, also without scripts.
Not here: which sections a page has (page).
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone

from statehold.cli.output import plain
from statehold.cli.traces import DrawnStage, TimelineRow, Traces
from statehold.units import format_bytes, format_seconds

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


def look(step: int, begin_us: int, end_us: int) -> Markup:
    """A step's number, which the script links to its place on the timeline."""
    return tag("button", step, type="button", class_="look",
               data_begin=begin_us, data_end=end_us, disabled="")  # fmt: skip


# -- the timeline ----------------------------------------------------------------------------------
# A lane for each thread of each rank, and one below it for the engine. Positions are shares of the
# width, so the drawing follows the page. The script only moves them when a reader zooms in.


# Stages by kind, which the colours show.
KINDS: dict[str, tuple[str, ...]] = {
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
_KIND_OF = {name: kind for kind, names in KINDS.items() for name in names}
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
