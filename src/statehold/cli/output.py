"""The output of commands: tables and JSON on stdout, progress on stderr.

Invariants: JSON output is one document, with NaN and infinities as strings, because JSON has no
such numbers. Text from a step (names, values) cannot move the cursor or colour the terminal.
Not here: the content (the commands).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from statehold.observe.progress import progress_text

_REDRAW_S = 0.2
_CLEAR = "\r\x1b[K"


def emit(document: Any) -> None:
    """Print one JSON document."""
    print(json.dumps(_finite(document), indent=1, ensure_ascii=False, allow_nan=False))


def note(text: str) -> None:
    """Print a note that is not the answer, on stderr."""
    print(f"statehold: {plain(text)}", file=sys.stderr)


def error(text: object) -> None:
    """Print why there is no answer, on stderr."""
    with contextlib.suppress(OSError):  # a closed stderr does not change the exit code
        print(f"statehold: {text}", file=sys.stderr)
        return
    _drop(sys.stderr)


def flush() -> None:
    """Hand over all that was printed. Raises OSError if stdout is closed or full."""
    try:
        sys.stdout.flush()
    except OSError:
        _drop(sys.stdout)
        raise


def _drop(stream: TextIO) -> None:
    """Let `stream` take no more, so that the interpreter's end does not fail on what it holds."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def plain(text: str) -> str:
    """`text` without control characters, because names in a step may hold anything."""
    return text if text.isprintable() else "".join(map(_escaped, text))


def counted(count: int, what: str) -> str:
    """ "1 file", "2 files"."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def table(header: Sequence[str], rows: Iterable[Sequence[object]], right: str = "") -> str:
    """Aligned columns. `right` names the columns with numbers, separated by spaces."""
    lines = [list(header), *([plain(str(cell)) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    to_right = [name in right.split() for name in header]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(line, widths, to_right, strict=True)
        ).rstrip()
        for line in lines
    )


class Progress:
    """Bytes done of `total_bytes`, drawn on stderr if that is a terminal."""

    def __init__(self, label: str, total_bytes: int) -> None:
        self._label = label
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._begin_s = self._drawn_s = time.monotonic()
        self._is_drawn = sys.stderr.isatty()

    def advance(self, nbytes: int) -> None:
        """Count more bytes as done; 0 only redraws."""
        self._done_bytes += nbytes
        now_s = time.monotonic()
        if self._is_drawn and now_s - self._drawn_s >= _REDRAW_S:
            self._drawn_s = now_s
            print(f"{_CLEAR}{self._line(now_s)}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Remove the line."""
        if self._is_drawn:
            print(_CLEAR, end="", file=sys.stderr, flush=True)

    def _line(self, now_s: float) -> str:
        text = progress_text(self._done_bytes, self._total_bytes, now_s - self._begin_s)
        return f"{self._label}  {text}"


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
