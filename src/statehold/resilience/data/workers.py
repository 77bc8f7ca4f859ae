"""Processes that draw microbatches, each one at a time, while the trainer goes on.

torch's DataLoader does not fit here. It cannot withdraw what it has asked its workers for, so a
microbatch that is suddenly needed would wait behind all of it. Its workers also outlive a killed
trainer by up to five seconds. A forked worker has copies of the trainer's sockets, so that peers
would see them open for as long.

Invariants:
- A worker ends when the trainer ends, however that happens. The worker reads a pipe that only the
  trainer can write: the kernel signals the worker when the trainer's end closes. Other children
  that the trainer forks close their copies of that end.
- Each call ends with a result or an error, also if a worker dies. After a worker has died, each
  call that has not begun fails.
- A signal to the whole process group does not end the workers. The trainer may want to end in
  good order, and needs batches until then.
Not here: what is drawn (draws), and in which order (loader).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.util import Finalize

import torch
import torch.multiprocessing  # what is sent has its tensors in shared memory from now on

from statehold.errors import ClosedError, WorkerLostError
from statehold.process.forks import forget_in_children
from statehold.process.worker import Thread
from statehold.resilience.data.draws import Draw, Drawn


@dataclass(frozen=True, slots=True)
class Failed:
    """What a worker has raised, in words. A traceback cannot go to another process, and some
    exceptions cannot."""

    error: str
    traceback: str

    @classmethod
    def of(cls, error: Exception) -> Failed:
        return cls(in_words(error), "".join(traceback.format_exception(error)))


def in_words(error: Exception) -> str:
    """One line; some errors of torch have a hundred."""
    return "".join(traceback.format_exception_only(error)).strip().split("\n")[0]


Outcome = Drawn | Failed
Prepare = Callable[[int], object]
_Call = tuple[Future[Outcome], int, int]
_Calls = queue.SimpleQueue[_Call | None]

# How long `close` waits for draws that are under way, before it kills their workers.
GRACE_S = 5.0

# Signals that go to a whole process group: from a terminal, or from a scheduler.
_OF_GROUPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

_HINT = (
    "the kernel kills processes if memory runs short, and its log says so; otherwise code of the "
    "data set has ended the process. With workers=0 that code runs in the trainer"
)


class DrawWorkers:
    """`count` processes. Each calls `prepare` with its number before it draws."""

    def __init__(
        self, draw: Draw, count: int, prepare: Prepare | None, context: BaseContext
    ) -> None:
        self._pid = os.getpid()
        self._calls: _Calls = queue.SimpleQueue()
        self._workers: list[_Worker] = []
        # The interpreter calls it as well, before multiprocessing waits for its processes.
        self._close = Finalize(self, _close, (self._calls, self._workers), exitpriority=1)
        for number in range(count):
            self._workers.append(_Worker(number, draw, prepare, context))
        lost: list[WorkerLostError] = []
        for worker in self._workers:  # after the last fork, which is safer without more threads
            worker.serve(self._calls, lost)

    def call(self, step: int, index: int) -> Future[Outcome]:
        """Ask for a microbatch, behind those that were asked for before. The future can be
        cancelled until a worker begins."""
        if os.getpid() != self._pid or not self._close.still_active():
            raise ClosedError(
                "the loader is closed, or belongs to the process that forked this one"
            )
        future: Future[Outcome] = Future()
        self._calls.put((future, step, index))
        return future

    def close(self) -> None:
        """End the processes and the threads. Draws that are under way may take GRACE_S."""
        self._close()


def _close(calls: _Calls, workers: Sequence[_Worker]) -> None:
    with contextlib.suppress(queue.Empty):
        while (call := calls.get_nowait()) is not None:
            call[0].cancel()
    for _ in workers:
        calls.put(None)
    deadline = time.monotonic() + GRACE_S
    for worker in workers:
        worker.end(deadline)


class _Worker:
    """One process, and the thread of the trainer that waits for it."""

    def __init__(
        self, number: int, draw: Draw, prepare: Prepare | None, context: BaseContext
    ) -> None:
        self._ours, theirs = context.Pipe()
        ending, self._alive = context.Pipe(duplex=False)
        forget_in_children(self)
        self._process = context.Process(  # type: ignore[attr-defined]
            target=_work,
            args=(theirs, ending, draw, prepare, number),
            name=f"statehold-loader-{number}",
            daemon=True,
        )
        self._process.start()
        theirs.close()
        ending.close()
        self._thread: Thread | None = None

    def forget(self) -> None:
        self._ours.close()
        self._alive.close()

    def serve(self, calls: _Calls, lost: list[WorkerLostError]) -> None:
        self._thread = Thread(self._serve, self._process.name, calls, lost)
        self._thread.start()

    def _serve(self, calls: _Calls, lost: list[WorkerLostError]) -> None:
        while (call := calls.get()) is not None:
            future, step, index = call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                if lost:
                    raise lost[0]
                future.set_result(self._outcome(step, index))
            except WorkerLostError as error:
                lost.append(error)
                future.set_exception(error)
            del call, future  # or the batch would live until the next call

    def _outcome(self, step: int, index: int) -> Outcome:
        try:
            self._ours.send((step, index))
            outcome: Outcome = self._ours.recv()
            return outcome
        except Exception as error:
            if isinstance(error, EOFError | OSError):
                self._process.join(GRACE_S)
                if (exitcode := self._process.exitcode) is not None:
                    raise self._lost(exitcode, step, index) from error
            return Failed.of(error)  # the batch cannot be received

    def _lost(self, exitcode: int, step: int, index: int) -> WorkerLostError:
        return WorkerLostError(
            "a process that draws samples has ended",
            facts={
                "process": f"{self._process.name}, pid {self._process.pid}",
                "ended": _ended(exitcode),
                "while it drew": f"microbatch {index} of step {step}",
            },
            hint=_HINT,
        )

    def end(self, deadline: float) -> None:
        if self._thread not in (None, threading.current_thread()):
            self._thread.join(max(0.0, deadline - time.monotonic()))
            if self._thread.is_alive():
                self._process.kill()
                self._thread.join()
        self._ours.close()  # an idle process ends by itself then, with all that is done at its end
        self._process.join(GRACE_S)
        self._process.kill()
        self._process.join()
        self._process.close()
        self._alive.close()


def _ended(exitcode: int) -> str:
    if exitcode < 0:
        return f"by signal {-exitcode} ({signal.strsignal(-exitcode)})"
    return f"with the exit status {exitcode}"


def _work(
    calls: Connection, ending: Connection, draw: Draw, prepare: Prepare | None, number: int
) -> None:
    _end_with_the_other_end_of(ending)
    for each in _OF_GROUPS:
        signal.signal(each, signal.SIG_IGN)
    torch.set_num_threads(1)  # the workers are what runs side by side
    failed: Failed | None = None
    try:
        if prepare is not None:
            prepare(number)
    except Exception as error:
        failed = Failed.of(error)
    with contextlib.suppress(EOFError):
        while True:
            _answer(calls, failed or draw, *calls.recv())


def _answer(calls: Connection, draw: Draw | Failed, step: int, index: int) -> None:
    try:
        calls.send(draw if isinstance(draw, Failed) else draw(step, index))
    except Exception as error:  # of drawing, or of pickling before anything was sent
        calls.send(Failed.of(error))


def _end_with_the_other_end_of(pipe: Connection) -> None:
    # The default action of SIGIO ends a process. No code of Python has to run for it, so it works
    # also while a data set computes in native code.
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if pipe.poll():  # the trainer has ended before
        os._exit(1)
