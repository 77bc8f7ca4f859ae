"""The output of commands: answers on stdout; notes, errors and progress on stderr.

Invariants: all commands print through this module, and nowhere else. JSON output is one document,
with NaN and infinities as strings, because JSON has no such numbers. Text from a step (names,
values) cannot move the cursor or colour the terminal. Where stdout is not a terminal, the output
depends on the answer alone: it has no ages, it is not fitted to a width, and it has colours only if
they are asked for.
Not here: the content (the commands), when there is colour (terminal), its codes (styled), widths
(tables).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Protocol, TextIO

from statehold.cli import terminal
from statehold.cli.tables import Styled, Table
from statehold.observe.background_log import progress_text
from statehold.units import format_age

FIRST_S = 1.0
REDRAW_S = 0.2
_CLEAR = "\r\x1b[K"
_TEXT_MAX = 100

_guard = threading.RLock()
_current: ProgressBar | None = None


# -- progress --------------------------------------------------------------------------------------
# Long work has one line on stderr if that is a terminal, from the first second on. At most one line
# is there at a time, and it goes before anything else is printed. Work of less than FIRST_S, and a
# stderr that is not a terminal, get nothing. With rich the line has a bar.


class ProgressBar:
    """Bytes done of `total_bytes`, or with 0 work whose end nobody knows."""

    def __init__(self, label: str, total_bytes: int = 0) -> None:
        self._label = label
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._text, self._share = "", None if total_bytes == 0 else 0.0
        self._begin_s = self._drawn_s = time.monotonic()
        self._line: _Line | None = None
        self._is_open = terminal.is_terminal(sys.stderr)
        if self._is_open:
            _set_current(self)
            self._timer = threading.Timer(FIRST_S, self.draw)
            self._timer.daemon = True
            self._timer.start()

    def advance(self, nbytes: int) -> None:
        """Count more bytes as done; 0 only redraws."""
        self._done_bytes += nbytes
        if self._is_open:
            elapsed_s = time.monotonic() - self._begin_s
            text = progress_text(self._done_bytes, self._total_bytes, elapsed_s)
            self.tell(text, self._done_bytes / max(self._total_bytes, 1))

    def tell(self, text: str, share: float) -> None:
        """Show what is being done now, and how much of the whole is done, of 1."""
        now_s = time.monotonic()
        self._text, self._share = text[:_TEXT_MAX], min(share, 1.0)
        if now_s - self._begin_s >= FIRST_S and now_s - self._drawn_s >= REDRAW_S:
            self.draw()

    def close(self) -> None:
        """Remove the line."""
        with _guard:
            self.hide()
            if self._is_open:
                self._timer.cancel()
                self._is_open = False

    @property
    def has_end(self) -> bool:
        """Whether it is known how much is done."""
        return self._share is not None

    def hide(self) -> None:
        """Remove the line until the next advance()."""
        with _guard:
            if self._line is not None:
                self._line.close()
                self._line = None

    def draw(self) -> None:
        """Show the newest state, unless another bar is shown."""
        with _guard:
            if not self._is_open or _current is not self:
                return
            self._drawn_s = time.monotonic()
            if self._line is None:
                self._line = _line(sys.stderr, self._label, self.has_end)
            self._line.draw(self._text, self._share)


class ProgressReport:
    """Draws what a function reports: the bytes done, and those in all. A context manager."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._progress: ProgressBar | None = None
        self._done = 0

    def __call__(self, done: int, total: int) -> None:
        if self._progress is None:
            self._progress = ProgressBar(self._label, total)
        self._progress.advance(done - self._done)
        self._done = done

    def __enter__(self) -> ProgressReport:
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.close()


def hide() -> None:
    """Remove the line, because something else is printed now. That ends work without a known end:
    what is printed shows that it goes on."""
    with _guard:
        if _current is not None:
            _current.hide() if _current.has_end else _current.close()


@contextlib.contextmanager
def busy(label: str) -> Iterator[None]:
    """Show that work goes on, until other progress is shown."""
    with contextlib.closing(ProgressBar(label)):
        yield


def _set_current(progress: ProgressBar) -> None:
    global _current
    with _guard:
        hide()
        _current = progress


class _Line(Protocol):
    def draw(self, text: str, share: float | None) -> None: ...
    def close(self) -> None: ...


def _line(stream: TextIO, label: str, has_end: bool) -> _Line:
    if not terminal.has_rich():
        return _Plain(stream, label)
    from statehold.cli.styled import Bar

    return Bar(stream, label, color=terminal.wants_color(stream), has_end=has_end)


class _Plain:
    """The line without rich."""

    def __init__(self, stream: TextIO, label: str) -> None:
        self._stream = stream
        self._label = label

    def draw(self, text: str, share: float | None) -> None:
        self._put(f"{_CLEAR}{self._label}  {text}".rstrip())

    def close(self) -> None:
        self._put(_CLEAR)

    def _put(self, text: str) -> None:
        print(text, end="", file=self._stream, flush=True)


# -- answers ---------------------------------------------------------------------------------------

good = partial(Styled.of, "good")
bad = partial(Styled.of, "bad")
weak = partial(Styled.of, "weak")  # works, but less well; not known
faint = partial(Styled.of, "faint")
strong = partial(Styled.of, "strong")


# JSON takes them raw. To a reader of lines they end a line, and a terminal may obey them. UTF-8
# cannot hold the last ones, which stand for the bytes of names in another encoding.
_UNSEEN = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def emit(document: Any, *, indent: int | None = 1) -> None:
    """Print one JSON document; with indent=None on one line."""
    is_ascii = not _encoding().lower().startswith("utf")
    text = json.dumps(_finite(document), indent=indent, ensure_ascii=is_ascii, allow_nan=False)
    say(_UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


def say(*pieces: str | Table) -> None:
    """Print pieces as one line; a table as its lines. What stdout cannot encode is escaped."""
    hide()
    is_colored, encoding = terminal.wants_color(sys.stdout), _encoding()
    for line in _lines(pieces):
        text = "".join(map(_painted, line) if is_colored else line)
        print(text.encode(encoding, "backslashreplace").decode(encoding))


def _encoding() -> str:
    return getattr(sys.stdout, "encoding", None) or "utf-8"


def sections(*parts: str | Table) -> None:
    """Print parts with an empty line between them; an empty part is left out."""
    for index, part in enumerate(part for part in parts if part):
        if index:
            say()
        say(part)


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[object]],
    right: str = "",
    fixed: Sequence[str] = (),
    prose: str = "",
    foot: str = "",
) -> Table:
    """Aligned columns.

    right: the columns with numbers, separated by spaces. fixed: others that are never shortened.
    prose: the column with sentences, which may wrap in a narrow window. foot: a line below.
    """
    cells = [[_cell(each) for each in row] for row in rows]
    is_right, is_fixed, is_prose = (
        [name in names for name in header] for names in (right.split(), fixed, [prose])
    )
    return Table(header, cells, is_right, is_fixed, is_prose, foot)


def flush() -> None:
    """Hand over all that was printed. Raises OSError if stdout is closed or full."""
    try:
        if sys.stdout is not None:  # the shell closed it: >&-
            sys.stdout.flush()
    except OSError:
        _drop(sys.stdout)
        raise


# -- beside the answer -----------------------------------------------------------------------------


def note(text: str, error: object = "") -> None:
    """Print a note that is not the answer, on stderr; and an error, line by line, after it."""
    _print_beside(faint("statehold:"), f" {plain(text)}{told(error)}")


def error(found: object) -> None:
    """Print why there is no answer, on stderr."""
    first, *rest = str(found).split("\n")
    lines = [strong(first), *(f"\n{line}" for line in rest)]
    with contextlib.suppress(OSError):  # a closed stderr does not change the exit code
        _print_beside(bad("statehold:"), " ", *lines)
        return
    _drop(sys.stderr)


def _print_beside(*pieces: str) -> None:
    if sys.stderr is None:  # print() would take stdout
        return
    hide()
    is_colored = terminal.wants_color(sys.stderr)
    print("".join(map(_painted, pieces) if is_colored else pieces), file=sys.stderr)


# -- the forms of things ---------------------------------------------------------------------------


def plain(text: str) -> str:
    """`text` without control characters, because names in a step may hold anything."""
    return text if text.isprintable() else "".join(map(_escaped, text))


def told(error: object) -> str:
    """The lines of an error, each without control characters."""
    return "\n".join(map(plain, str(error).split("\n")))


def counted(count: int, what: str) -> str:
    """ "1 file", "2 files"."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def is_window() -> bool:
    """Whether a person reads stdout in a window."""
    return terminal.is_terminal(sys.stdout)


def when(iso: str) -> str:
    """A time of a manifest; in a window to the second."""
    return f"{to_the_second(iso)} UTC" if is_window() else iso


def to_the_second(iso: str) -> str:
    """ "2026-11-21 07:30:00", of a time of a manifest, which is in UTC."""
    return iso[:19].replace("T", " ")


def age(iso: str) -> str:
    """How long ago a time of a manifest was; "" where stdout is not a terminal."""
    if not is_window():
        return ""
    try:
        moment = datetime.fromisoformat(iso.replace("Z", "+00:00"))  # Python 3.10 knows no Z
    except ValueError:
        return ""
    return format_age(time.time() - moment.timestamp())


def _lines(pieces: Sequence[str | Table]) -> Iterator[Iterable[str]]:
    """The pieces of each line."""
    window = terminal.width() if is_window() else None
    tables = [each for each in pieces if isinstance(each, Table)]
    for each in tables:
        yield from each.lines(window)
    if not tables:
        yield [each for each in pieces if isinstance(each, str)]


def _cell(value: object) -> str:
    return value.like(plain(value)) if isinstance(value, Styled) else plain(str(value))


def _painted(piece: str) -> str:
    if not isinstance(piece, Styled):
        return piece
    from statehold.cli.styled import painted

    return painted(piece, piece.kind)


def _drop(stream: TextIO) -> None:
    """Let `stream` take no more, so that the interpreter's end does not fail on what it holds."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def _escaped(char: str) -> str:
    return char if char.isprintable() else char.encode("unicode_escape").decode("ascii")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
