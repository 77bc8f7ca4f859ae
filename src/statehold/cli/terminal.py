"""What a stream can show: whether it is a terminal, its width, and whether it gets colour.

Owns: the rules for colour. `--color always` or `never` decides. Otherwise NO_COLOR, FORCE_COLOR,
CLICOLOR_FORCE, CLICOLOR and TERM=dumb decide, in this order (no-color.org, force-color.org,
bixense.com/clicolors). Otherwise a terminal gets colour.
Invariants: without the package rich (the extra `cli`) nothing has colour.
Not here: what is printed (output), how it looks (styled).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from typing import TextIO

from statehold.errors import UsageError

CHOICES = ("auto", "always", "never")
_chosen = "auto"


def choose_color(choice: str) -> None:
    """Take one of CHOICES for this process. Raises UsageError if it is not possible here."""
    global _chosen
    if choice == "always" and not has_rich():
        hint = "pip install 'statehold[cli]'"
        raise UsageError("--color always needs the package rich, which is missing", hint=hint)
    _chosen = choice


def has_rich() -> bool:
    """Whether the package that draws is installed."""
    return importlib.util.find_spec("rich") is not None


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person sees the stream at once. False for a stream that is closed, or None."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False


def width() -> int:
    """The columns of the window: COLUMNS, or what the terminal says, or 80."""
    return shutil.get_terminal_size().columns


def wants_color(stream: TextIO | None) -> bool:
    """Whether `stream` gets colour."""
    return has_rich() and _is_wanted(stream)


def _is_wanted(stream: TextIO | None) -> bool:
    if _chosen != "auto":
        return _chosen == "always"
    if os.environ.get("NO_COLOR"):
        return False
    if any(os.environ.get(name, "0") not in ("", "0") for name in _FORCING):
        return True
    if os.environ.get("CLICOLOR") == "0" or os.environ.get("TERM") == "dumb":
        return False
    return is_terminal(stream)


_FORCING = ("FORCE_COLOR", "CLICOLOR_FORCE")
