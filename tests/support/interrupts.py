"""Ctrl-C at every bytecode of chosen functions, one at a time, and what still has to end then."""

from __future__ import annotations

import dis
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import CodeType, FrameType
from typing import Any

from support.faults import DEADLINE_S, must

# The locks of the standard library that Python code takes: what comes inside leaves them taken.
LOCKS: list[Callable[..., Any]] = [
    threading.Condition.__enter__,
    threading.Condition.notify,
    threading.Semaphore.acquire,
]


# After these the interpreter looks for signals. At the end of a `with` it does not.
LOOKS = ("CALL", "RESUME", "JUMP_BACKWARD")


def ctrl_c() -> None:
    raise KeyboardInterrupt


class Interrupts:
    """Calls `act` before the `at`-th bytecode of `functions`, in this thread.

    only_signals: count only the bytecodes before which a signal's handler may run.
    """

    def __init__(
        self, functions: list[Callable[..., Any]], at: int, *, only_signals: bool = False,
        act: Callable[[], object] = ctrl_c,
    ) -> None:  # fmt: skip
        self._codes: set[CodeType] = {function.__code__ for function in functions}
        self._left = at
        self._only_signals, self._act = only_signals, act
        self.fired: str | None = None

    @contextmanager
    def armed(self) -> Iterator[None]:
        before = sys.gettrace()
        sys._getframe().f_trace_opcodes = True  # 3.12: where no frame had it yet, none reports
        sys.settrace(self._entered)
        try:
            yield
        finally:
            sys.settrace(before)

    def _entered(self, frame: FrameType, _event: str, _arg: Any) -> Any:
        if self.fired is not None or frame.f_code not in self._codes:
            return None
        before = ""

        # No frame is kept: it would keep the job that it holds from being dropped.
        def passed(frame: FrameType, event: str, _arg: Any) -> Any:
            nonlocal before
            if event != "opcode" or self.fired is not None:
                return passed
            last, before = before, dis.opname[frame.f_code.co_code[frame.f_lasti]]
            # PUSH_EXC_INFO: another exception is on its way.
            if before != "PUSH_EXC_INFO" and (not self._only_signals or last.startswith(LOOKS)):
                self._count(frame)
            return passed

        frame.f_trace = passed  # first: 3.13 takes no f_trace_opcodes of a frame without it
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return passed

    def _count(self, frame: FrameType) -> None:
        if self._left == 0:
            self.fired = f"{frame.f_code.co_name}, line {frame.f_lineno}"
            self._act()
        self._left -= 1


def ends(action: Callable[[], object]) -> bool:
    """Whether a call on another thread returns."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    return not thread.is_alive()


def interrupt_everywhere(
    functions: list[Callable[..., Any]],
    make: Callable[[], Any],
    call: Callable[[Any], object],
    after: Callable[[Any], object],
) -> set[str]:
    """Interrupt `call` of what `make` has made wherever a signal may come in `functions` and LOCKS,
    and check that `after` returns on another thread. Returns what was interrupted."""
    places = set()
    for at in itertools.count():
        made, interrupts = make(), Interrupts([*functions, *LOCKS], at, only_signals=True)
        with interrupts.armed(), suppress(KeyboardInterrupt):
            call(made)
        if interrupts.fired is None:
            return places
        places.add(interrupts.fired.partition(",")[0])
        must(ends(lambda made=made: after(made)), f"a hang after Ctrl-C in {interrupts.fired}")
    raise AssertionError
