"""Scripts of tests, forked from a server that has imported torch: each starts in milliseconds.

`start([file, word, ...])` does what subprocess.Popen([sys.executable, file, word, ...]) does, and
takes "-c" and "-m" too. A script has its own streams, environment, directory and `__main__`, and
it ends as a script does: at the end of its `__main__`, with all that the interpreter does then.

Invariants: the server has modules and nothing else, neither a thread nor a Checkpointer. It ends
with the process that has started it, or when the last script ends that still runs then.
Not here: scripts under another interpreter, or under LD_PRELOAD (victims).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from support.forked import PRELOADED

PIPE, DEVNULL = subprocess.PIPE, subprocess.DEVNULL
MESSAGE_BYTES = 1 << 17
Stream = int | IO[Any] | None


class Script:
    """A script that runs; as a subprocess.Popen with streams of text."""

    def __init__(
        self,
        words: Sequence[str | os.PathLike[str]],
        *,
        stdin: Stream = None,
        stdout: Stream = None,
        stderr: Stream = None,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
    ) -> None:
        self.args = [os.fspath(word) for word in words]
        self.returncode: int | None = None
        theirs: list[int] = []
        self.stdin = _connect(stdin, 0, theirs)
        self.stdout = _connect(stdout, 1, theirs)
        self.stderr = _connect(stderr, 2, theirs)
        self._status, status = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        order = {"words": self.args, "env": dict(env or os.environ), "cwd": str(cwd or Path.cwd())}
        message = json.dumps(order).encode()
        if len(message) > MESSAGE_BYTES:
            raise ValueError("the command and its environment are too long")
        socket.send_fds(_server(), [message], [*theirs, status.fileno()])
        status.close()
        for fd in theirs:
            os.close(fd)
        self.pid = self._told()

    def _told(self) -> int:
        told = self._status.recv(64)
        if not told:
            raise ChildProcessError("the server of scripts has ended")
        return int(told)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._status.settimeout(timeout)
            try:
                self.returncode = os.waitstatus_to_exitcode(self._told())
            except TimeoutError:
                raise subprocess.TimeoutExpired(self.args, timeout or 0) from None
            self._status.close()
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired, BlockingIOError):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(
        self, said: str | None = None, timeout: float | None = None
    ) -> tuple[str | None, str | None]:
        """Say something, and return what the script says until it has ended."""
        if self.stdin is not None:
            with contextlib.suppress(BrokenPipeError), self.stdin:
                self.stdin.write(said or "")
        with ThreadPoolExecutor(2) as pool:
            outputs = [pool.submit(_read, stream) for stream in (self.stdout, self.stderr)]
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()  # so that its streams end
                raise
            return outputs[0].result(), outputs[1].result()

    def __enter__(self) -> Script:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is not None:
            self.kill()  # nobody will say what it may wait for
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait()


start = Script


def run(
    words: Sequence[str | os.PathLike[str]], *, timeout: float = 120.0, **options: Any
) -> subprocess.CompletedProcess[str]:
    """A script to its end, with what it has said."""
    script = Script(words, **{"stdout": PIPE, "stderr": PIPE, **options})
    out, err = script.communicate(timeout=timeout)
    return subprocess.CompletedProcess(script.args, script.wait(), out, err)


def _connect(wanted: Stream, number: int, theirs: list[int]) -> IO[str] | None:
    """Add the script's end of a stream to `theirs`; our end of it, where it is a pipe."""
    if wanted == PIPE:
        read, write = os.pipe()
        theirs.append(read if number == 0 else write)
        return open(write, "w") if number == 0 else open(read)
    if wanted == DEVNULL:
        theirs.append(os.open(os.devnull, os.O_RDWR))
    elif isinstance(wanted, int):
        raise ValueError("a stream is PIPE, DEVNULL, a file or None")
    else:
        theirs.append(os.dup(number if wanted is None else wanted.fileno()))
    return None


def _read(stream: IO[str] | None) -> str | None:
    if stream is None:
        return None
    with stream:
        return stream.read()


# -- the server ----------------------------------------------------------------------------------


@functools.cache
def _server() -> socket.socket:
    """Our end of the connection to the server of this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "support.scripts", str(theirs.fileno())],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )

    def end() -> None:
        ours.close()
        process.kill()
        process.wait()

    atexit.register(end)
    return ours


class _Server:
    """Forks a child for each order, and tells its number and how it has ended."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._told: dict[int, socket.socket] = {}  # whom to tell of the end of a child
        self._wake, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def run(self) -> Callable[[], None] | None:
        """Returns in each child, with what it is to do; in the server at the end, with None."""
        while True:
            ready, _, _ = select.select([self._control, self._wake], [], [])
            if self._wake in ready:
                os.read(self._wake, 4096)
                self._reap()
            if self._control in ready:
                message, fds, _, _ = socket.recv_fds(self._control, MESSAGE_BYTES, 4)
                if not message:
                    return None
                if (script := self._fork(json.loads(message), fds)) is not None:
                    return script

    def _fork(self, order: dict[str, Any], fds: list[int]) -> Callable[[], None] | None:
        *streams, status = fds
        pid = os.fork()
        if pid == 0:
            self._forget()
            os.close(status)
            return functools.partial(_become, streams=streams, **order)
        for fd in streams:
            os.close(fd)
        self._told[pid] = socket.socket(fileno=status)
        self._tell(pid, pid)
        return None

    def _forget(self) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for each in (self._control, *self._told.values()):
            each.close()
        os.close(self._wake)

    def _reap(self) -> None:
        for pid in list(self._told):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._tell(pid, status)
                self._told.pop(pid).close()

    def _tell(self, pid: int, what: int) -> None:
        with contextlib.suppress(OSError):  # nobody waits for it any more
            self._told[pid].send(str(what).encode())


def _become(words: list[str], env: dict[str, str], cwd: str, streams: list[int]) -> None:
    """Be the script."""
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    added = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*added, *PATHS]
    what, *rest = words
    if what == "-m":
        sys.path.insert(0, cwd)
        sys.argv = rest
        _KEPT.update(runpy.run_module(rest[0], run_name="__main__", alter_sys=True))
        return
    main = type(sys)("__main__")
    if what == "-c":
        code, sys.argv = rest[0], ["-c", *rest[1:]]
        what = "<string>"
        sys.path.insert(0, "")
    else:
        code, sys.argv = Path(what).read_text(), words
        main.__file__ = what
        sys.path.insert(0, str(Path(what).parent))
    sys.modules["__main__"] = main
    exec(compile(code, what, "exec"), vars(main))


# What a module run by "-m" has in its variables lives as long as the interpreter, as it does there.
_KEPT: dict[str, Any] = {}
PATHS: list[str] = []

if __name__ == "__main__":
    own = os.environ.pop("PYTHONPATH")
    PATHS += [path for path in sys.path if path not in ("", own, os.getcwd())]
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # else a script would look at all of that again when it ends, which takes a second
    if (_script := _Server(socket.socket(fileno=int(sys.argv[1]))).run()) is not None:
        _script()
