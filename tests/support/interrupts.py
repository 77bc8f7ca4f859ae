"""Ctrl-C at every bytecode of chosen functions, one at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any


class Interrupts:
    """Raises KeyboardInterrupt before the `at`-th bytecode of `functions`, in this thread."""

    def __init__(self, functions: list[Callable[..., Any]], at: int) -> None:
        self._codes: set[CodeType] = {function.__code__ for function in functions}
        self._left = at
        self.fired: str | None = None

    @contextmanager
    def armed(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._entered)
        try:
            yield
        finally:
            sys.settrace(before)

    def _entered(self, frame: FrameType, _event: str, _arg: Any) -> Any:
        if self.fired is not None or frame.f_code not in self._codes:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._passed

    def _passed(self, frame: FrameType, event: str, _arg: Any) -> Any:
        if event == "opcode" and self.fired is None:
            if self._left == 0:
                self.fired = f"{frame.f_code.co_name}, line {frame.f_lineno}"
                raise KeyboardInterrupt
            self._left -= 1
        return self._passed
