"""The progress display: one updating line on a terminal, one plain line a step elsewhere.

Owns what is printed while a run trains. Invariants: whatever else is printed goes through `note`,
so the updating line never swallows it.
"""

from __future__ import annotations

import shutil
import sys
from typing import TextIO


class Display:
    """Shows where a run is. `label` names the run at the left of the line.

    Of several ranks one is enough to be seen: a quiet display shows nothing.
    """

    def __init__(
        self, label: str, steps: int, output: TextIO | None = None, *, quiet: bool = False
    ) -> None:
        self._label = label
        self._steps = steps
        self._quiet = quiet
        self._output = output or sys.stdout
        self._updates = self._output.isatty()
        self._line_open = False

    def step(self, step: int, loss: float, tokens: int, seconds: float, saves: str) -> None:
        """Show a finished step: its loss, its tokens and seconds, and where the saves are."""
        line = (
            f"{self._label}  step {step:>{len(str(self._steps))}}/{self._steps}  loss {loss:.4f}  "
            f"{tokens / seconds:,.0f} tokens/s  {seconds:.3f} s/step"
        )
        if saves:
            line += f"  {saves}"
        if not self._updates:
            self._print(line + "\n")
            return
        width = shutil.get_terminal_size().columns - 1
        self._print("\r\033[K" + line[:width])
        self._line_open = True

    def note(self, text: str) -> None:
        """Print a line that stays."""
        self.finish()
        self._print(f"{self._label}  {text}\n")

    def finish(self) -> None:
        """End the updating line."""
        if self._line_open:
            self._print("\n")
        self._line_open = False

    def _print(self, text: str) -> None:
        if self._quiet:
            return
        self._output.write(text)
        self._output.flush()
