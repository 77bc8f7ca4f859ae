"""Colours and progress as rich draws them. The only module that needs rich.

Invariants: text is never read as markup, and never moves the cursor.
Not here: whether something is drawn (output), when there is colour (terminal), tables (tables).
"""

from __future__ import annotations

from functools import cache
from typing import TextIO

from rich.color import ColorSystem
from rich.style import Style

# By the kind of a text (tables.Styled).
STYLES = {"good": "green", "bad": "bold red", "weak": "yellow", "faint": "dim", "strong": "bold"}
_BAR_COLUMNS = 24


def painted(text: str, kind: str) -> str:
    """`text` with the codes of its colour."""
    return _style(kind).render(text, color_system=ColorSystem.STANDARD)


@cache
def _style(kind: str) -> Style:
    return Style.parse(STYLES[kind])


class Bar:
    """One line of progress, which disappears when it is closed."""

    def __init__(self, stream: TextIO, label: str, *, color: bool, has_end: bool) -> None:
        # rich.progress takes a quarter of a second to import, which only long work should pay.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

        console = Console(
            file=stream, force_terminal=True, color_system="standard" if color else None,
            no_color=not color, markup=False, highlight=False, emoji=False,
        )  # fmt: skip
        columns = [
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            *([BarColumn(_BAR_COLUMNS)] if has_end else []),
            TextColumn("{task.fields[text]}", markup=False),
        ]
        self._progress = Progress(
            *columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self._task = self._progress.add_task(label, total=None, text="")
        self._progress.start()

    def draw(self, text: str, share: float | None) -> None:
        """share: how much is done, of 1; None: nobody knows."""
        total = None if share is None else 1.0
        self._progress.update(self._task, completed=share or 0.0, total=total, text=text)

    def close(self) -> None:
        self._progress.stop()
