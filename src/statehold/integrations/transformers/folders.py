"""The folders checkpoint-N beside the steps of a run, as other code of transformers expects them.

    OUT/step-000000000100/                      the step, with everything
    OUT/checkpoint-100/trainer_state.json       from the moment of the save
    OUT/checkpoint-100/model.safetensors, ...   for from_pretrained
    OUT/checkpoint-100/step-000000000100/       the files of the step once more, if it is the best

Owns: the folders; which models beside the one that trains belong into a step.
Invariants: a folder is made before its step is saved, so a step without a folder was given up: by
save_total_limit, or by a person who has deleted the folder. The files of the best step get second
names in its folder; so they stay when the run retires the step, and need no second space. Those of
another level are copied.
Not here: who fills the folders, and when (transformers).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import nn

from statehold.errors import UsageError
from statehold.integrations.trained import give_second_names, persistent_buffers
from statehold.options.paths import NamedStep, step_name
from statehold.process.warn import logger
from statehold.process.whole_files import replace_file, sync_files
from statehold.reading.copying import copy_step
from statehold.reading.places import file_system, find
from statehold.subscription.levels import levels_of
from statehold.tensors.marks import Volatile

STATE = "trainer_state.json"
STOCK = ("optimizer.pt", "optimizer.bin", "optimizer_0", "scheduler.pt")
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_FOLDER = re.compile(r"checkpoint-([0-9]+)")
_NEW = ".new-"


def step_named(path: str) -> tuple[str, int] | None:
    """The run that has the step of a folder checkpoint-N, and its number; None without a step.

    The path may also name the step itself, as for statehold.load().
    """
    real = os.path.realpath(path)
    match = _FOLDER.fullmatch(os.path.basename(real))
    meant: list[str | NamedStep] = (
        [NamedStep(os.path.dirname(real), int(match[1]))] if match else []
    )
    with contextlib.closing(file_system()) as fs:
        for each in [*meant, real]:
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
        """A folder with the trainer's state, written as a whole, without what a kill has left."""
        folder = self.path(step)
        os.makedirs(folder, exist_ok=True)
        for left in Path(folder).glob(f"{_NEW}*"):
            shutil.rmtree(left, ignore_errors=True)
        replace_file(f"{folder}/{STATE}", state.encode())  # several ranks of a host may write it

    def has_weights(self, step: int) -> bool:
        return any(next(Path(self.path(step)).glob(pattern), None) for pattern in WEIGHTS)

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
        """Whether the folder can be that of a save which was killed before its commit: it has
        nothing but what make() puts there."""
        return self.has(step) and all(n.startswith(STATE) for n in os.listdir(self.path(step)))

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
        """Give the files of a committed step second names in its folder. Only another level may
        have the step, such as memory, and retire it before the run has it: then copy them."""
        run = str(self._run)
        for where in [run, *(level.where for level in levels_of(run))]:
            source = Path(where, step_name(step))
            if source.is_dir() and not self.holds(step):
                if where == run:
                    with self.beside(step) as new:
                        give_second_names(source, new / step_name(step))
                else:
                    copy_step(source, self.path(step))
                sync_files([self.path(step), self._run])

    @contextlib.contextmanager
    def beside(self, step: int) -> Iterator[Path]:
        """A new folder in that of the step; at the end of the block its entries move up, each as a
        whole."""
        folder = Path(self.path(step))
        new = Path(tempfile.mkdtemp(prefix=_NEW, dir=folder))
        try:
            yield new
            sync_files(new.rglob("*"))  # an entry that is there counts as whole
            for path in new.iterdir():
                os.replace(path, folder / path.name)
        finally:
            shutil.rmtree(new, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Folder:
    """The folder of a step, as a Finisher takes it. run: a run that has the step."""

    folders: Folders
    step: int

    @property
    def path(self) -> str:
        return self.folders.path(self.step)

    @property
    def run(self) -> str:
        return self.path if self.folders.holds(self.step) else os.path.dirname(self.path)

    @property
    def is_ours(self) -> bool:
        return self.folders.has(self.step)

    def hold(self, step: int) -> None:
        """The run keeps the step. Without its folder, the step would count as given up."""
        with contextlib.suppress(FileNotFoundError):  # it was removed
            sync_files([os.path.dirname(self.path), self.path])

    def remove(self) -> None:
        self.folders.remove(self.step)


# -- models beside the one that trains -------------------------------------------------------------
# A trainer or one of its callbacks may hold a reference, a teacher, an average. They may be modules
# or bare tensors, and lie in a container or in an object. A step holds what has changed since the
# training began. Until then it is what the script makes, and a large one that stays as it is costs
# a step nothing.
#
# All ranks decide alike. A change is seen by a sample of every tensor, because version counters
# miss `tensor.data.mul_()`, by which averages are often made. A bare tensor counts only if it has a
# public name, and keeps its shape: others are results of a step, and may be large. What is made
# later could not be restored when the training begins again, so a warning names its modules.

SAMPLED = 64  # elements of a tensor
CONTAINED_MAX = 4096  # more are data
_OF_OTHERS = ("builtins", "torch", "transformers", "accelerate")  # their objects hold no models

Held = nn.Module | torch.Tensor


class Beside:
    """The models that `holders` hold beside `model`, as the training begins."""

    def __init__(self, holders: Iterable[Any], model: nn.Module, ranks: int) -> None:
        self._holders = list(holders)
        self._model = model
        self._ranks = ranks
        self._changed: set[str] = set()
        self._late: set[str] = set()
        self.models = dict(_held(self._holders, model))
        self._shapes = {name: getattr(each, "shape", None) for name, each in self.models.items()}
        self._before = {name: _sample(each) for name, each in self.models.items()}

    def changed(self, known: Iterable[str] = ()) -> dict[str, Volatile[Held]]:
        """The models that have changed, on any rank; all ranks call this. known: more of them.

        Nobody knows when they change next, so they are copied before save() returns.
        """
        now = dict(_held(self._holders, self._model))
        self._warn_of(now)
        self.models = {name: each for name, each in now.items() if self._is_same(name, each)}
        others = self.models.keys() - self._changed
        new = [
            name for name in others if not _equal(_sample(self.models[name]), self._before[name])
        ]
        if self._ranks > 1:
            new = gather_object(new)
        if found := ", ".join(sorted(set(new))):
            logger.info("changed since the training began, so steps hold it, too: %s", found)
        self._changed.update(new, known)
        models = self.models.items()
        return {name: Volatile(each) for name, each in models if name in self._changed}

    def _is_same(self, name: str, now: Held) -> bool:
        """Whether the training began with it: with a tensor of this shape, or with a module."""
        return name in self._shapes and self._shapes[name] == getattr(now, "shape", None)

    def _warn_of(self, now: dict[str, Held]) -> None:
        modules = {name for name, each in now.items() if isinstance(each, nn.Module)}
        if late := sorted(modules - self._shapes.keys() - self._late):
            self._late.update(late)
            logger.warning(
                "made after the training began, so no step holds it: %s. Make it before, or in "
                "on_train_begin() of a callback",
                ", ".join(late),
            )


def _held(holders: Iterable[Any], model: nn.Module) -> Iterator[tuple[str, Held]]:
    """Each model once, by its name: ATTRIBUTE of the first holder, CLASS-ATTRIBUTE of others."""
    seen = set(map(id, _tensors(model)))
    for i, holder in enumerate(holders):
        for attribute, each in _parts(holder):
            tensors = set(map(id, _tensors(each)))
            if tensors - seen:  # else it is the model, or a part of it
                yield f"{type(holder).__name__}-{attribute}" if i else attribute, each
            seen |= tensors


def _parts(holder: Any, depth: int = 2) -> Iterator[tuple[str, Held]]:
    """What the attributes of an object are or contain, and those of an object of the script."""
    for attribute, value in list(getattr(holder, "__dict__", {}).items()):
        items = [("", value)]
        if isinstance(value, list | tuple | dict) and len(value) <= CONTAINED_MAX:
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            items = [(f"-{key}", each) for key, each in pairs]
        elif depth > 1 and type(value).__module__.partition(".")[0] not in _OF_OTHERS:
            items = [(f"-{name}", each) for name, each in _parts(value, depth - 1)]
        for place, each in items:
            is_bare = isinstance(each, torch.Tensor) and each.layout is torch.strided
            if isinstance(each, nn.Module) or (is_bare and not attribute.startswith("_")):
                yield f"{attribute}{place}", each


def _tensors(held: Held) -> list[torch.Tensor]:
    if isinstance(held, torch.Tensor):
        return [held]
    return [*held.parameters(), *persistent_buffers(held).values()]


def _sample(held: Held) -> list[torch.Tensor]:
    """Some elements of every tensor, on its device."""
    found: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in _tensors(held):
        local = tensor.detach()
        local = local.to_local() if hasattr(local, "to_local") else local
        if local.numel() and local.device.type != "meta":
            every = max(local.numel() // SAMPLED, 1)
            found.setdefault(local.device, []).append(local.reshape(-1)[::every].float())
    return [torch.cat(parts).nan_to_num() for parts in found.values()]


def _equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))
