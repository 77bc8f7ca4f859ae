"""The blocks that a page is built of: sections, tables that fold, bars, badges, tiles.

Invariants: a table shows its first ROWS_SHOWN rows; the others are one click away, also without
scripts. Text is escaped by markup.

HTML and SVG by construction: text cannot become markup, even if it is the name of a tensor.

Invariants: only tag() and join() make Markup. They escape everything else, after they have made
control characters (and those that turn the direction of text) visible.

Not here: which sections a page has (page).
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from statehold.cli.output import plain
from statehold.units import format_bytes, format_seconds

# -- markup ----------------------------------------------------------------------------------------


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
