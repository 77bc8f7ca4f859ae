"""Test bodies that run in processes of their own, because they take away what a process needs.

A fork server is started once, with torch imported and libc under faulty.c. Each body is a function
of a test module; it runs in a fork, in a session of its own, and gets an empty folder. What it
raises is the failure of the test, and one that hangs ends with the tracebacks of its threads.
The fork ends at once after the body, except where the body raises SystemExit: then the interpreter
ends as that of a script does.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from support.faults import DEADLINE_S

OK = "ok"


class Victims:
    """The fork server, as a test sees it."""

    def __init__(self, library: Path) -> None:
        paths = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.victims"],
            env={**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": paths},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, body: Callable[..., None], folder: Path, *arguments: Any) -> None:
        """Run `body(folder, *arguments)` in a fork; raises what it raised."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order = {
            "module": body.__code__.co_filename,
            "name": body.__name__,
            "folder": str(folder),
            "arguments": arguments,
        }
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        status = json.loads(self._process.stdout.readline())["exit"]
        outcome, errors = _text(folder / "outcome"), _text(folder / "errors")
        if outcome != OK:
            raise AssertionError(f"wait status {status}\n{outcome}\n{errors}")

    def close(self) -> None:
        self._process.communicate(timeout=DEADLINE_S)


def _text(path: Path) -> str:
    return path.read_text("utf-8") if path.exists() else "(nothing)"


def _module(file: str, loaded: dict[str, ModuleType]) -> ModuleType:
    if file not in loaded:
        spec = importlib.util.spec_from_file_location(f"victim_{len(loaded)}", file)
        assert spec is not None
        assert spec.loader is not None
        loaded[file] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded[file])
    return loaded[file]


def _child(body: Callable[..., None], folder: Path, arguments: list[Any]) -> None:
    pid = os.getpid()
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    with (folder / "errors").open("w", encoding="utf-8") as errors:
        os.dup2(errors.fileno(), 2)
    # Not a timer of faulthandler's: a fork of the body would wait at its end for that thread.
    faulthandler.register(signal.SIGUSR1, (folder / "errors").open("a"), all_threads=True)
    outcome = OK
    try:
        body(folder, *arguments)
    except SystemExit:
        raise
    except BaseException:
        outcome = traceback.format_exc()
    if os.getpid() == pid:  # else it is a fork of the body, and has fallen through
        (folder / "outcome").write_text(outcome, "utf-8")
    os._exit(0 if outcome == OK else 1)


def _ended(pid: int) -> int:
    """The wait status of a body, once it and all its forks are gone; one that hangs is ended."""
    in_time = signal.sigtimedwait([signal.SIGCHLD], DEADLINE_S)
    with contextlib.suppress(ProcessLookupError):
        if in_time is None:
            os.killpg(pid, signal.SIGUSR1)
            signal.sigtimedwait([signal.SIGCHLD], 1)  # for the tracebacks
        os.killpg(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    signal.sigtimedwait([signal.SIGCHLD], 0)  # not to be taken for the next one's
    return status


def main() -> None:
    import torch

    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])

    torch.set_num_threads(1)
    # Imports what the first optimizer needs, which takes seconds: once here, not in each fork.
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    loaded: dict[str, ModuleType] = {}
    for line in sys.stdin:
        order = json.loads(line)
        body = getattr(_module(order["module"], loaded), order["name"])
        pid = os.fork()
        if pid == 0:
            _child(body, Path(order["folder"]), order["arguments"])
        status = _ended(pid)
        print(json.dumps({"exit": status}), flush=True)


if __name__ == "__main__":
    main()
