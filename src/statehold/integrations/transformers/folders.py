"""The folders checkpoint-N beside the steps of a run, as other code of transformers expects them.

    OUT/step-000000000100/                      the step, with everything
    OUT/checkpoint-100/trainer_state.json       from the moment of the save
    OUT/checkpoint-100/model.safetensors, ...   for from_pretrained (exporting)
    OUT/checkpoint-100/step-000000000100/       the files of the step once more, if it is the best

Invariants: a folder is made before its step is saved, so a step without a folder was given up: by
save_total_limit, or by a person who has deleted the folder. The files of the best step get second
names in its folder; so they stay when the run retires the step, and need no second space.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from statehold.errors import UsageError
from statehold.integrations.second_names import give_second_names, step_name
from statehold.reading.places import file_system, find

STATE = "trainer_state.json"
STOCK = ("optimizer.pt", "optimizer.bin", "optimizer_0", "scheduler.pt")
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_FOLDER = re.compile(r"checkpoint-(\d+)")


def step_named(path: str) -> tuple[str, int] | None:
    """The run that has the step of a folder checkpoint-N, and its number; None without a step.

    The path may also name the step itself, as for statehold.load().
    """
    real = os.path.realpath(path)
    match = _FOLDER.fullmatch(os.path.basename(real))
    meant = [f"{os.path.dirname(real)}@{match[1]}"] if match else []
    with contextlib.closing(file_system()) as fs:
        for each in (*meant, real):
            with contextlib.suppress(UsageError):
                place = find(fs, each)
                return os.path.dirname(place.directory), place.step
    return None


class Folders:
    """The folders of the run in `run`."""

    def __init__(self, run: str) -> None:
        self._run = Path(run)

    def path(self, step: int) -> str:
        return str(self._run / f"checkpoint-{step}")

    def steps(self) -> list[int]:
        """The steps that have a folder, oldest first."""
        with contextlib.suppress(FileNotFoundError):
            names = map(_FOLDER.fullmatch, os.listdir(self._run))
            return sorted(int(match[1]) for match in names if match)
        return []

    def has(self, step: int) -> bool:
        return os.path.isdir(self.path(step))

    def is_here(self, run: str) -> bool:
        """Whether this is the path of the run."""
        return os.path.realpath(run) == os.path.realpath(self._run)

    def step_of(self, path: str | None) -> int | None:
        """The step whose folder has this path; None for any other path."""
        if not path:
            return None
        real = Path(path).resolve()
        match = _FOLDER.fullmatch(real.name)
        return int(match[1]) if match and self.is_here(str(real.parent)) else None

    def is_stock(self, path: str) -> bool:
        """Whether the Trainer itself has saved the folder: it can resume there without a step."""
        return any(os.path.exists(f"{path}/{name}") for name in STOCK)

    def make(self, step: int, state: str) -> None:
        """A folder with the trainer's state, written as a whole."""
        folder = self.path(step)
        os.makedirs(folder, exist_ok=True)
        new = f"{folder}/.{STATE}.{os.getpid()}"  # several ranks of a host may write it
        with open(new, "w", encoding="utf-8") as file:
            file.write(state)
        os.replace(new, f"{folder}/{STATE}")

    def has_weights(self, step: int) -> bool:
        folder = Path(self.path(step))
        return any(next(folder.glob(pattern), None) for pattern in WEIGHTS)

    # -- which folders stay ----------------------------------------------------------------

    def surplus(self, limit: int | None, best: int | None, unfinished: set[int]) -> list[int]:
        """The folders to remove, by the Trainer's rule: `limit` stay, with the newest and the best.

        Folders of saves that are not committed yet stay, too, and do not count.
        """
        steps = [step for step in self.steps() if step not in unfinished]
        if not limit or limit < 0 or not steps:
            return []
        protected = {steps[-1], best} & set(steps)
        others = [step for step in steps if step not in protected]
        return others[: max(len(steps) - max(limit, len(protected)), 0)]

    def discard_after(self, step: int) -> None:
        """Remove the folders of newer steps, unless the Trainer itself has saved them."""
        for newer in self.steps():
            if newer > step and not self.is_stock(self.path(newer)):
                self.remove(newer)

    def is_unfinished(self, step: int) -> bool:
        """Whether the folder can be that of a save which was killed before its commit."""
        path = self.path(step)
        return self.has(step) and not (self.is_stock(path) or self.has_weights(step))

    def discard_unfinished(self) -> None:
        """Remove what killed jobs have left, where no step is committed."""
        for step in filter(self.is_unfinished, self.steps()):
            self.remove(step)

    def remove(self, step: int) -> None:
        shutil.rmtree(self.path(step), ignore_errors=True)

    # -- the best step ---------------------------------------------------------------------

    def holds(self, step: int) -> bool:
        """Whether the folder has the files of the step, so that it is a run of one step."""
        return os.path.isdir(f"{self.path(step)}/{step_name(step)}")

    def hold(self, step: int) -> None:
        """Give the files of a committed step second names in its folder."""
        source = self._run / step_name(step)
        if self.holds(step) or not source.is_dir():
            return
        with self.beside(step) as new:
            give_second_names(source, new / step_name(step))

    @contextlib.contextmanager
    def beside(self, step: int) -> Iterator[Path]:
        """A new folder in that of the step; at the end of the block its entries move up, each as a
        whole."""
        folder = Path(self.path(step))
        new = Path(tempfile.mkdtemp(prefix=".new-", dir=folder))
        try:
            yield new
            for path in new.iterdir():
                os.replace(path, folder / path.name)
        finally:
            shutil.rmtree(new, ignore_errors=True)
