"""HTML and SVG by construction: text cannot become markup, even if it is the name of a tensor.

Invariants: only tag() and join() make Markup. They escape everything else, after they have made
control characters (and those that turn the direction of text) visible.
Not here: the text of a page (page, timeline).
"""

from __future__ import annotations

import html
from collections.abc import Iterable

from statehold.cli.output import plain


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
