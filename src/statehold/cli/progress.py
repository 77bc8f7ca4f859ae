"""Progress of long work: one line on stderr if that is a terminal, from the first second on.

Invariants: at most one line is there at a time, and it goes before anything else is printed. Work
of less than FIRST_S, and a stderr that is not a terminal, get nothing. With rich the line has a
bar.
Not here: how the bar looks (styled), answers and notes (output).
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Protocol, TextIO

from statehold.cli import terminal
from statehold.observe.progress import progress_text

FIRST_S = 1.0
REDRAW_S = 0.2
_CLEAR = "\r\x1b[K"
_TEXT_MAX = 100

_guard = threading.RLock()
_current: ProgressBar | None = None


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
            self._timer = threading.Timer(FIRST_S, self._draw)
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
            self._draw()

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

    def _draw(self) -> None:
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
    progress = ProgressBar(label)
    try:
        yield
    finally:
        progress.close()


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
