"""examples/llama as tests run it: in this process, and its programs as forks of a server.

Leaves its command as people start it to tests/packaging, which runs the demo from a wheel.
"""

from __future__ import annotations

import importlib
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, reduction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support import scripts
from support.forked import forked

LLAMA = Path(__file__).resolve().parents[2] / "examples/llama"


@contextmanager
def imported(*names: str) -> Iterator[SimpleNamespace]:
    """The example's modules, which are scripts side by side and not a package."""
    sys.path.insert(0, str(LLAMA))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(LLAMA))
        for name, module in [*sys.modules.items()]:
            if LLAMA in Path(getattr(module, "__file__", None) or "").parents:
                del sys.modules[name]


def call(program: str, words: Sequence[str]) -> int:
    """As story_alone.call."""
    path = os.pathsep.join([str(LLAMA), str(LLAMA.parents[1] / "src")])
    return scripts.start([LLAMA / program, *words], env=os.environ | {"PYTHONPATH": path}).wait()


def fork_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks and replicas are forked by the server that all tests share, and print to this test."""
    forked()
    forkserver.ensure_running()
    job = importlib.import_module("job")
    start, secret = job.start, secrets.token_hex(32)
    monkeypatch.setenv("STATEHOLD_SECRET", secret)  # the server has the environment of before
    monkeypatch.setattr(job, "start", lambda *words: start(_printing, _Output(), secret, *words))


class _Output:
    """Where this process prints. The server prints where the test did that has started it."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return _take, (reduction.DupFd(1), reduction.DupFd(2))


def _take(*outputs: Any) -> None:
    for fd, output in enumerate(outputs, 1):
        os.dup2(output.detach(), fd)


def _printing(_: None, secret: str, body: Callable[..., None], *arguments: object) -> None:
    os.environ["STATEHOLD_SECRET"] = secret
    body(*arguments)
