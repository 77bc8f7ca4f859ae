"""Two levels on one file system, what lies there, and a way to hold up what is copied between."""

from __future__ import annotations

import threading
from typing import Any

import statehold
from statehold import Directory
from statehold._core import Fs
from statehold.checkpoint.levels.promoting import LevelStatus
from support.faults import DEADLINE_S, SMALL, must
from support.in_memory import checkpointer_on
from support.inside import inside, promoter

NEAR, FAR = "/near", "/far"


def two(near: dict[str, Any] | None = None, far: dict[str, Any] | None = None) -> list[Directory]:
    """The levels "near" and "far"."""
    return [
        Directory(path=NEAR, name="near", **(near or {})),
        Directory(path=FAR, name="far", **(far or {})),
    ]


# The first step goes on, later ones only with flush(): then nothing else is under way.
LATER = {"every": 1_000_000}


def opened_on(
    fs: Fs, near: dict[str, Any] | None = None, far: dict[str, Any] | None = None
) -> statehold.Checkpointer:
    return checkpointer_on(fs, "/run", levels=two(near, far), **SMALL)


def only(fs: Fs, root: str) -> statehold.Checkpointer:
    """A run that consists of one of the levels."""
    return checkpointer_on(fs, root, **SMALL)


def save(ckpt: statehold.Checkpointer, step: int, state: Any) -> None:
    ckpt.save(step, state).wait("committed", DEADLINE_S)


def status(ckpt: statehold.Checkpointer, name: str = "far") -> LevelStatus:
    return {each.name: each for each in ckpt.levels()}[name]


def step_path(root: str, step: int) -> str:
    return f"{root}/step-{step:012d}"


def files(fs: Fs, root: str, step: int) -> dict[str, bytes]:
    """What lies in the directory of a step."""
    folder = step_path(root, step)
    return {name: fs.read_file(f"{folder}/{name}", 1 << 30) for name, _ in fs.listdir(folder)}


def remove(fs: Fs, folder: str) -> None:
    """A directory with all that is in it."""
    for name, is_dir in fs.listdir(folder):
        path = f"{folder}/{name}"
        if is_dir:
            remove(fs, path)
        else:
            fs.unlink(path)
    fs.rmdir(folder)


def steps_at(fs: Fs, root: str) -> list[int]:
    """The committed steps of a level."""
    names = [name for name, _ in fs.listdir(root)] if fs.is_dir(root) else []
    return sorted(int(name[5:]) for name in names if name.startswith("step-") and len(name) == 17)


class HeldCopy:
    """Keeps copies to a level from going on."""

    def __init__(self, ckpt: statehold.Checkpointer, name: str = "far") -> None:
        self.waiting = threading.Event()
        self.go_on = threading.Event()
        promoter(ckpt, name).throttle.give_way = self._hold

    def _hold(self) -> None:
        self.waiting.set()
        must(self.go_on.wait(DEADLINE_S))

    def __enter__(self) -> HeldCopy:
        return self

    def __exit__(self, *_: object) -> None:
        self.go_on.set()


def settle(ckpt: statehold.Checkpointer) -> None:
    """Return once no save and no copy is under way."""
    inside(ckpt).pipeline.drain()
    inside(ckpt).levels.promotions.wait(DEADLINE_S)
