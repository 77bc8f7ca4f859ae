"""Which modules lie between save() and the disk, and between the disk and restore().

A module counts where it is on the stack when the native core is asked to move bytes, or to make,
change or look at a name: it stands between the caller and the disk. docs/architecture.md lists
these modules. What they ask on the side (which tensors there are, who writes what, how long a save
took) is no part of the way. How many files a save enters in all, tests/api/test_house.py counts.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from statehold import _core
from support.inside import borrowed, inside

PACKAGE = Path(statehold.__file__).parent
DOCUMENT = Path(__file__).parents[2] / "docs" / "architecture.md"
JOBS = (_core.WriteJob, _core.ReadJob)
STEPS = 5  # from the third on, files and threads of earlier saves are there


class Crossed:
    """Stands for an object of the core. `modules`: through which its methods have been called."""

    def __init__(self, real: Any, modules: set[str]) -> None:
        self.real, self._modules = real, modules

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.real, name)
        if not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            self._modules.update(on_stack())
            done = found(*args, **kwargs)
            return Crossed(done, self._modules) if isinstance(done, JOBS) else done

        return call


def on_stack() -> Iterator[str]:
    """The modules of the package on this thread's stack."""
    frame = sys._getframe()
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            yield path.relative_to(PACKAGE).as_posix()
        frame = frame.f_back  # type: ignore[assignment]


def listed(title: str) -> list[str]:
    """The modules that the document lists under a heading, one in each line of a list."""
    section = DOCUMENT.read_text().split(f"### {title}\n")[1].split("\n#")[0]
    return re.findall(r"^\d+\. `([\w/]+\.py)`", section, re.MULTILINE)


@pytest.fixture
def ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """The modules on the ways of a save and a restore of a run that has saved before."""
    modules: set[str] = set()
    engine, fs = _core.Engine, _core.open_fs("threads", 4)

    def crossed(each: Crossed, *args: Any, **options: Any) -> Crossed:
        return Crossed(engine(each.real, *args, **options), modules)

    monkeypatch.setattr(_core, "Engine", crossed)
    ckpt = statehold.Checkpointer(tmp_path, staging_bytes="64MiB")
    borrowed(ckpt).fs = Crossed(fs, modules)  # type: ignore[assignment]
    state = {"model": torch.nn.Linear(8, 8), "step": 0}
    found = {}
    with ckpt:
        for step in range(STEPS):
            modules.clear()
            ckpt.save(step, state).wait()
            inside(ckpt).pipeline.drain()
        found["save"] = set(modules)
        modules.clear()
        assert ckpt.restore(state) == STEPS - 1
        found["restore"] = set(modules)
    fs.close()
    return found


def test_the_ways_are_documented(ways: dict[str, set[str]]) -> None:
    for name, title in (
        ("save", "From `save()` to the disk"),
        ("restore", "From the disk back, in `restore()`"),
    ):
        assert ways[name] == set(listed(title)), name
