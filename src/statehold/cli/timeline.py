"""The timeline of a report: a lane for each thread of each rank, and one below it for the engine.

Owns: the place of a mark. Positions are shares of the width, so the drawing follows the page. The
script only moves them when a reader zooms in.
Not here: the marks (traces), colours (report.css).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime, timezone

from statehold.cli.blocks import Markup, join, tag
from statehold.cli.traces import DrawnStage, TimelineRow, Traces
from statehold.units import format_seconds

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
