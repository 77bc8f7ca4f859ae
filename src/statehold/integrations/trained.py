"""Which tensors of a model go into a step: all of them, or all but the frozen base of a peft model.

Owns: that choice; the names that an object of a framework has, against those of a step. When a
training that goes back to an older step discards the newer ones. A step that stays after its run
has retired it. Also what follows a save, in the background.
Invariants: a step holds every adapter of a peft model, and any other model as a whole. The frozen
base comes from where the script takes it, so a step does not hold it. Any other frozen parameter
may exist nowhere else: a frozen adapter was perhaps trained in an earlier run.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from itertools import takewhile
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn

from statehold.checkpoint.checkpointer import Checkpointer, go_on_from
from statehold.checkpoint.save.handle import Save
from statehold.errors import StateholdError, StateMismatchError
from statehold.process.warn import logger
from statehold.process.whole_files import sync_files
from statehold.process.worker import Thread


def trained_part(
    bare: nn.Module, wrapped: nn.Module | None = None, late: Collection[str] = ()
) -> nn.Module | dict[str, torch.Tensor]:
    """What a state holds of a model: of a peft model, all but the frozen parameters of its base.

    wrapped: the model as it trains, such as under DistributedDataParallel. late: other parameters
    that steps hold, because they have trained.
    """
    if not _is_peft(bare):
        return bare if wrapped is None else wrapped
    adapters: dict[str, Any] = bare.peft_config  # type: ignore[assignment]
    # The biases of the base belong to an adapter that trains them.
    has_biases = any(getattr(each, "bias", "none") != "none" for each in adapters.values())
    kept = {
        name: each
        for name, each in bare.named_parameters()
        if each.requires_grad
        or name in late
        or _is_of_adapter(bare, name, adapters)
        or (has_biases and name.endswith("bias"))
    }
    return {**kept, **persistent_buffers(bare)}


def _is_of_adapter(model: nn.Module, name: str, adapters: Collection[str]) -> bool:
    """Whether a parameter belongs to one of the adapters: peft has each thing of an adapter in a
    dict by the name of the adapter, or in a module of its own."""
    words = name.split(".")
    inside = [model.get_submodule(".".join(words[:i])) for i in range(len(words))]
    in_a_dict = any(
        word in adapters and isinstance(module, nn.ModuleDict | nn.ParameterDict)
        for word, module in zip(words, inside, strict=True)
    )
    return in_a_dict or type(inside[-1]).__module__.startswith("peft.")


def _is_peft(model: nn.Module) -> bool:
    """Whether a class of peft wraps the base; without importing peft."""
    return any(each.__name__ == "PeftModel" and each.__module__.startswith("peft.")
               for each in type(model).__mro__)  # fmt: skip


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers of a model that its state_dict() has, by name."""
    found = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if name not in module._non_persistent_buffers_set:
                found[f"{path}.{name}" if path else name] = buffer
    return found


# -- names -----------------------------------------------------------------------------------------


def check_names(where: str, expected: Iterable[str], got: Iterable[Any]) -> None:
    """Raise StateMismatchError unless a step has the same names."""
    here, there = set(expected), set(got)
    if here == there:
        return
    facts = {
        "where": where,
        "only in this process": ", ".join(sorted(here - there)[:5]) or "nothing",
        "only in the step": ", ".join(sorted(there - here)[:5]) or "nothing",
    }
    raise StateMismatchError("the state and the step differ; nothing was changed", facts=facts)


# -- an older step ---------------------------------------------------------------------------------
# The newer steps go when the first save comes, and not when the older step is loaded. It may turn
# out to be damaged, or not to fit, and a training that saves nothing discards nothing.


def discard_newer(ckpt: Checkpointer, step: int | None) -> None:
    """All ranks, before a save: discard what is newer than the step that was loaded, if one was."""
    newer = [] if step is None else [each for each in ckpt.steps() if each > step]
    if step is not None and newer:
        logger.warning("step %d is resumed, and %d newer steps are discarded", step, len(newer))
        go_on_from(ckpt, step)


# -- the end of a process --------------------------------------------------------------------------


def leave_on_signals(ckpt: Checkpointer, within_s: float | None) -> None:
    """Save once more and exit after SIGTERM or SIGUSR1, where a handler of signals can be set."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and within_s is not None:
        ckpt.leave_on(signal.SIGTERM, signal.SIGUSR1, within_s=within_s)


# -- a step that stays -----------------------------------------------------------------------------
# Its files get second names in another folder. A file with several names is never written again
# (docs/incremental.md), so the folder is a run of its own with one step, and takes no space while
# the run has the step, too.


def give_second_names(step: Path, folder: Path) -> None:
    """Make the directory `folder`, in which the files of the committed `step` have second names.

    They are durable on return. The caller syncs the directories that have the name of the folder,
    or of one above it, before the run can retire the step.
    """
    folder.mkdir()
    for path in step.iterdir():
        target = folder / path.name
        try:
            os.link(path, target)
        except OSError:  # a file system without second names
            shutil.copyfile(path, target)
            sync_files([target])
    sync_files([folder])


# -- what follows a save ---------------------------------------------------------------------------
# A thread of rank 0 waits for each save, in order, until the step is committed, and gives it to its
# path. It removes a path only then, so that no older one goes before a newer one is there. A path
# that goes after the next save gets no step of its own: the run has it until then. The thread also
# writes the weights there that the framework loads. The newest is next, and after each the thread
# rests nine times as long as it wrote, so that it takes a tenth of the disk at most.
#
# After a save that failed nothing is removed any more, and a path that was to go gets its step.
# Weights that cannot be written are logged, and fail no training: the step has everything. They are
# read from the committed step, never from the model that trains.


REST = 9


class SavedPath(Protocol):
    """What a framework calls a checkpoint, at `path`. is_ours: False once it was removed."""

    @property
    def path(self) -> object: ...
    @property
    def is_ours(self) -> bool: ...
    def hold(self, step: int) -> object: ...
    def remove(self) -> None: ...


P = TypeVar("P", bound=SavedPath)


class Finisher(Generic[P]):
    """write: fills a path with the weights of its step. reader: what loads them, for the log.

    An exception may come between any two instructions of a caller, as after Ctrl-C. So a caller
    takes no lock that the thread needs: what it calls there is written in C.
    """

    def __init__(self, write: Callable[[P], None], reader: str) -> None:
        self._write = write
        self._reader = reader
        # The lock of a job is free once it is done.
        self._jobs: deque[tuple[Save | None, P, threading.Lock]] = deque()
        self._woken: SimpleQueue[None] = SimpleQueue()
        self._unwritten: dict[str, P] = {}
        self._going: tuple[P, int] | None = None  # a path that goes after the next save; its step
        self._rested_at = 0.0
        self._has_failed = self._is_ending = False
        self._thread: Thread | None = None

    def hold(self, save: Save | None, path: P) -> None:
        """Give the path its step once it is committed."""
        if self._thread is None:
            self._thread = Thread(self._run, "statehold-weights")
            self._thread.start()
        done = threading.Lock()
        done.acquire()
        self._jobs.append((save, path, done))
        self._woken.put(None)

    def remove(self, path: P) -> None:
        """Remove the path once all saves so far are committed."""
        self.hold(None, path)

    def owe(self, paths: Iterable[P]) -> None:
        """Write the weights of these, too, which an earlier process has left. Before hold()."""
        self._unwritten.update((str(each.path), each) for each in paths)

    def wait(self, left: int = 0) -> None:
        """Return once at most so many saves wait for their turn."""
        self._woken.put(None)  # a job whose caller was interrupted may have woken nobody
        saves = [done for save, _, done in tuple(self._jobs) if save is not None]
        for done in saves[: max(0, len(saves) - left)]:
            with done:
                pass

    def write(self, path: P) -> None:
        """Write the weights of a committed step now."""
        try:
            self._write(path)
        except Exception as error:  # code of frameworks runs here, over values of any class
            if path.is_ours:  # otherwise it was removed meanwhile
                logger.warning("%s has no weights for %s: %s", path.path, self._reader, error)

    def finish(self, *, write: bool) -> None:
        """Do everything, and write all weights if `write`. All saves have ended."""
        self._is_ending = True
        self._woken.put(None)
        if self._thread is not None:
            self._thread.join()
        if write:
            for path in reversed(self._unwritten.values()):
                self.write(path)

    def _run(self) -> None:
        while self._jobs or not self._is_ending:
            rest = max(0.0, self._rested_at - time.monotonic()) if self._unwritten else None
            if self._jobs:
                save, path, done = self._jobs[0]
                try:
                    self._do(save, path)
                except OSError as error:
                    self._has_failed = True
                    logger.warning("%s was not finished: %s", path.path, error)
                self._jobs.popleft()
                done.release()
            elif rest == 0.0:
                begun = time.monotonic()
                self.write(self._unwritten.popitem()[1])
                self._rested_at = begun + (1 + REST) * (time.monotonic() - begun)
            else:
                with contextlib.suppress(Empty):
                    self._woken.get(timeout=rest)

    def _do(self, save: Save | None, path: P) -> None:
        if save is None:
            if not self._has_failed and not any(self._later(path)):
                self._unwritten.pop(str(path.path), None)
                path.remove()
            return
        going, self._going = self._going, None
        try:
            save.wait("committed")
        except StateholdError:  # the next save() raises it
            self._has_failed = True
            if going is not None and going[0].is_ours:
                self._hold(*going)
            return
        first = takewhile(lambda job: job[1].path != path.path, tuple(self._jobs)[1:])
        saves = sum(each is not None for each, _, _ in first)
        # No third save begins before the next one has ended, so the run has the step if that fails.
        if not self._has_failed and saves < 2 and self._later(path) == [None]:
            self._going = path, save.step
        else:
            self._hold(path, save.step)

    def _hold(self, path: P, step: int) -> None:
        path.hold(step)
        self._unwritten.pop(str(path.path), None)
        self._unwritten[str(path.path)] = path

    def _later(self, path: P) -> list[Save | None]:
        """What waits for the path: saves, and None for a removal."""
        return [save for save, each, _ in tuple(self._jobs)[1:] if each.path == path.path]
