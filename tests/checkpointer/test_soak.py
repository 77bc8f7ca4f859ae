"""The soak for seconds: it runs, and notices what grows. `make soak MINUTES=n` is the long one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from soak.loop import Soak


def test_nothing_grows(tmp_path: Path) -> None:
    summary = Soak(tmp_path).run(0)
    assert "rounds" in summary


def test_a_leak_is_noticed(tmp_path: Path) -> None:
    leaked: list[int] = []

    class Leaking(Soak):
        def round(self) -> None:
            leaked.append(os.dup(0))

    try:
        with pytest.raises(AssertionError, match="descriptors"):
            Leaking(tmp_path).run(0)
    finally:
        for fd in leaked:
            os.close(fd)
