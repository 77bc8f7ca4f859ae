"""Tables as lines of text: aligned columns, and in a window columns that fit it.

rich.table does more, but takes a millisecond for each cell: seconds for a step of 3000 tensors.

Invariants: without a window nothing is shortened, so programs and diffs see all. In a window, text
is shortened in its middle, because names differ at both ends. Numbers are never shortened, and
prose is wrapped inside its column. No line is longer than the window.
Not here: colours (styled), printing (output).
"""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from operator import or_

GAP = "  "
_LEAST = 8  # columns that a shortened text keeps
_LEAST_PROSE = 24
_MARK = "…"


class Styled(str):
    """Text of a kind, which has a colour where there are colours (styled.STYLES)."""

    __slots__ = ("kind",)
    kind: str

    @classmethod
    def of(cls, kind: str, text: str) -> Styled:
        made = cls(text)
        made.kind = kind
        return made

    def like(self, text: str) -> Styled:
        """Another text of the same kind."""
        return Styled.of(self.kind, text)


@dataclass(frozen=True)
class Table:
    """right: the columns with numbers. fixed: others that are never shortened, such as times.
    prose: the columns with sentences. foot: a line below it.

    str() has no window.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Sequence[bool]
    fixed: Sequence[bool]
    prose: Sequence[bool]
    foot: str = ""

    def __str__(self) -> str:
        return "\n".join("".join(line) for line in self.lines())

    def lines(self, window: int | None = None) -> Iterator[list[str]]:
        """The pieces of each line, which may be Styled. window: its width in columns."""
        head = [Styled.of("strong", name) for name in self.header]
        widths = [max(map(width, column)) for column in zip(head, *self.rows, strict=True)]
        if window is not None:
            widths = self._fitted(widths, window)
        for row in (head, *self.rows):
            cells = [self._cell(*each) for each in zip(row, widths, self.prose, strict=True)]
            for line in zip_longest(*cells, fillvalue=""):
                pieces = _joined(line, widths, self.right)
                yield pieces if window is None else _cropped(pieces, window)
        if self.foot:
            yield [Styled.of("faint", self.foot)]

    def _fitted(self, widths: Sequence[int], window: int) -> list[int]:
        """Widths that fit the window: the widest columns give way, down to the least."""
        found = list(widths)
        least = [
            size if keeps else min(size, max(_LEAST_PROSE if is_prose else _LEAST, len(name)))
            for size, keeps, is_prose, name in zip(
                widths, map(or_, self.right, self.fixed), self.prose, self.header, strict=True
            )
        ]
        excess = sum(found) + len(GAP) * (len(found) - 1) - window
        while excess > 0:
            can = [index for index in range(len(found)) if found[index] > least[index]]
            if not can:
                break
            widest = max(can, key=lambda index: found[index])
            found[widest] -= 1
            excess -= 1
        return found

    @staticmethod
    def _cell(cell: str, size: int, is_prose: bool) -> list[str]:
        """The lines of one cell."""
        if width(cell) <= size:
            return [cell]
        lines = textwrap.wrap(cell, size) if is_prose else [shortened(cell, size)]
        return [_like(cell, line) for line in lines]


def _joined(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> list[str]:
    """Cells with the spaces between them, and none at the end of the line."""
    pieces: list[str] = []
    blank = ""
    for cell, size, is_right in zip(cells, widths, right, strict=True):
        space = " " * (size - width(cell))
        before, after = (space, "") if is_right else ("", space)
        if cell:
            pieces += [blank + before, cell]
            blank = after + GAP
        else:
            blank += space + GAP
    return pieces


def _cropped(pieces: Sequence[str], window: int) -> list[str]:
    """A line, cut at the edge of a window that is too narrow for all columns."""
    kept: list[str] = []
    left = window
    for piece in pieces:
        size = width(piece)
        if size > left:
            kept.append(_like(piece, f"{_start(piece, left - 1)}{_MARK}" if left else ""))
            break
        kept.append(piece)
        left -= size
    return kept


def _like(cell: str, text: str) -> str:
    return cell.like(text) if isinstance(cell, Styled) else text


def width(text: str) -> int:
    """The columns that a terminal takes for `text`."""
    return len(text) if text.isascii() else sum(map(_width, text))


def _width(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def shortened(text: str, size: int) -> str:
    """`text` in at most `size` columns: "model.layers…bias"."""
    if width(text) <= size:
        return text
    tail = max(size - 1, 0) // 2
    head = max(size - 1 - tail, 0)
    return f"{_start(text, head)}{_MARK}{_start(text[::-1], tail)[::-1]}"


def _start(text: Iterable[str], size: int) -> str:
    """As much of the beginning as fits."""
    kept = []
    for char in text:
        size -= _width(char)
        if size < 0:
            break
        kept.append(char)
    return "".join(kept)
