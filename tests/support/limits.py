"""Every phase of a test ends in time; one that hangs fails, and says where.

A phase is the setup, the call or the teardown of a test. After `time_limit` seconds an exception
in the main thread ends it. It has the stacks of the other threads and the processes that the test
has started; its own traceback is that of the main thread. The next test runs. Where the main
thread is not in Python for GRACE_S seconds more, all stacks go to the output, and the worker ends
with the processes below it. pytest-xdist names the test, and goes on with a new worker.

Invariant: a fork of a worker has neither the limit nor the worker's connection to the controller,
which else would wait for the end of the worker for as long as the fork lives.
Not here: a limit of the whole run, and processes that have left their parents.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Generator, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import pytest

GRACE_S = 30.0
POLL_S = 1.0
HELP = "seconds that the setup, the call or the teardown of a test may take; 0: for ever"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("time_limit", HELP, default="0")


def pytest_configure(config: pytest.Config) -> None:
    if (limit_s := float(config.getini("time_limit"))) > 0:
        config.pluginmanager.register(Limit(limit_s, os.dup(2)))  # 2: not captured yet


def pytest_sessionstart(session: pytest.Session) -> None:
    for plugin in session.config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "WorkerInteractor":
            _connection.append(plugin.channel.gateway._io)
    os.register_at_fork(after_in_child=_forget)


_connection: list[Any] = []  # of execnet's, to the controller, where this is a worker


def _forget() -> None:
    """In a fork: neither the handler of the limit nor the connection."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    _disconnect()


def _disconnect() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for each in _connection:
        os.dup2(null, each.infile.fileno(), inheritable=False)
        os.dup2(null, each.outfile.fileno(), inheritable=False)
    os.close(null)


class Limit:
    """The limit of the phase that runs. `errors`: where the stacks go before the worker ends."""

    def __init__(self, limit_s: float, errors: int) -> None:
        self._limit_s, self._errors = limit_s, errors
        self._phase: tuple[str, float] | None = None  # its name, and when its time is over
        signal.signal(signal.SIGALRM, self._interrupt)
        threading.Thread(target=self._watch, name="time limit", daemon=True).start()

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        with self._limited(f"the setup of {item.nodeid}"):
            return (yield)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        with self._limited(item.nodeid):
            return (yield)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        with self._limited(f"the teardown of {item.nodeid}"):
            return (yield)

    @contextlib.contextmanager
    def _limited(self, name: str) -> Iterator[None]:
        self._phase = name, time.monotonic() + self._limit_s
        signal.setitimer(signal.ITIMER_REAL, self._limit_s)
        # What keeps all threads from running Python, also the one that watches.
        faulthandler.dump_traceback_later(self._limit_s + 2 * GRACE_S, exit=True, file=self._errors)
        try:
            yield
        finally:
            self._phase = None
            signal.setitimer(signal.ITIMER_REAL, 0)
            faulthandler.cancel_dump_traceback_later()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if (phase := self._phase) is not None:
            raise pytest.fail.Exception(
                f"{phase[0]} has not ended after {self._limit_s:g} s.\n\n{_threads()}{_processes()}"
            )

    def _watch(self) -> None:
        while True:
            time.sleep(POLL_S)
            phase = self._phase
            if phase is not None and time.monotonic() > phase[1] + GRACE_S:
                self._end(phase[0])

    def _end(self, name: str) -> NoReturn:
        os.write(self._errors, f"\n{name} hangs: its worker ends.\n{_processes()}".encode())
        faulthandler.dump_traceback(self._errors, all_threads=True)
        for pid in _below(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _disconnect()  # the kernel may keep a process with operations that hang
        os._exit(1)


def _threads() -> str:
    """The stacks of the threads besides this one."""
    names = {each.ident: each.name for each in threading.enumerate()}
    return "".join(
        f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}\n"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    )


def _processes() -> str:
    """The processes below this one, with what they do."""
    return "".join(f"Process {pid}: {_described(pid)}\n" for pid in _below(os.getpid()))


def _described(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
        return f"{_fields(pid)[0]} {words[:300].decode(errors='replace')}"
    except OSError:
        return "has ended"


def _fields(pid: int) -> list[str]:
    """What the kernel says of a process, from its state on."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def _below(root: int) -> list[int]:
    """The processes that a process has started, that these have started, and so on."""
    parents: dict[int, int] = {}
    for each in Path("/proc").iterdir():
        if each.name.isdecimal():
            with contextlib.suppress(OSError):
                parents[int(each.name)] = int(_fields(int(each.name))[1])
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]
