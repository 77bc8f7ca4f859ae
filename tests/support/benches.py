"""Benchmarks as tests run them: their processes are forked from the server of scripts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support import scripts
from support.faults import must

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 240.0


def start(module: str, *words: object, **options: Any) -> scripts.Script:
    """As bench.harness.start."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    return scripts.start(
        ["-m", module, *map(str, words)], env=os.environ | {"PYTHONPATH": path}, cwd=ROOT, **options
    )


def run(module: str, *words: object) -> None:
    """`python -m MODULE WORDS`, which has to end well."""
    script = start(module, *words, stdout=scripts.PIPE, stderr=scripts.PIPE)
    out, err = script.communicate(timeout=DEADLINE_S)
    must(script.wait() == 0, f"{out}\n{err}")


@contextmanager
def forked_processes() -> Iterator[None]:
    """What benchmarks of this process start are forks, too."""
    from bench import harness

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "start", start)
        yield
