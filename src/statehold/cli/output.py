"""The output of commands: answers on stdout; notes, errors and progress on stderr.

All commands print through this module, and nowhere else.

Invariants: JSON output is one document, with NaN and infinities as strings, because JSON has no
such numbers. Text from a step (names, values) cannot move the cursor or colour the terminal. Where
stdout is not a terminal, the output depends on the answer alone: it has no ages, it is not fitted
to a width, and it has colours only if they are asked for.
Not here: the content (the commands), when there is colour (terminal), its codes (styled), widths
(tables), progress (progress).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from functools import partial
from typing import Any, TextIO

from statehold.cli import progress, terminal
from statehold.cli.progress import ProgressBar as ProgressBar
from statehold.cli.progress import ProgressReport as ProgressReport
from statehold.cli.tables import Styled, Table
from statehold.units import format_age

# -- answers ---------------------------------------------------------------------------------------

good = partial(Styled.of, "good")
bad = partial(Styled.of, "bad")
weak = partial(Styled.of, "weak")  # works, but less well; not known
faint = partial(Styled.of, "faint")
strong = partial(Styled.of, "strong")


# JSON takes them raw. To a reader of lines they end a line, and a terminal may obey them.
_UNSEEN = re.compile("[\x7f-\x9f\u2028\u2029]")


def emit(document: Any, *, indent: int | None = 1) -> None:
    """Print one JSON document; with indent=None on one line."""
    text = json.dumps(_finite(document), indent=indent, ensure_ascii=False, allow_nan=False)
    say(_UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


def say(*pieces: str | Table) -> None:
    """Print pieces as one line; a table as its lines."""
    progress.hide()
    is_colored = terminal.wants_color(sys.stdout)
    for line in _lines(pieces):
        print("".join(map(_painted, line) if is_colored else line))


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


busy = progress.busy


def _print_beside(*pieces: str) -> None:
    if sys.stderr is None:  # print() would take stdout
        return
    progress.hide()
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
