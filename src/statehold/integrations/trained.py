"""Which tensors of a model go into a step: all of them, or all but the frozen base of a peft model.

Owns: that choice; the names that an object of a framework has, against those of a step. When a
training that goes back to an older step discards the newer ones. A step that stays after its run
has retired it.
Invariants: a step holds every adapter of a peft model, and any other model as a whole. The frozen
base comes from where the script takes it, so a step does not hold it. Any other frozen parameter
may exist nowhere else: a frozen adapter was perhaps trained in an earlier run.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from statehold.checkpoint.checkpointer import Checkpointer, go_on_from
from statehold.errors import StateMismatchError
from statehold.process.warn import logger


def trained_part(
    bare: nn.Module, wrapped: nn.Module | None = None
) -> nn.Module | dict[str, torch.Tensor]:
    """What a state holds of a model: of a peft model, all but the frozen parameters of its base.

    wrapped: the model as it trains, such as under DistributedDataParallel.
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


def step_name(step: int) -> str:
    """The name of the directory of a step in its run."""
    return f"step-{step:012d}"


def give_second_names(step: Path, folder: Path) -> None:
    """Make the directory `folder`, in which the files of the committed `step` have second names."""
    folder.mkdir()
    for path in step.iterdir():
        target = folder / path.name
        try:
            os.link(path, target)
        except OSError:  # a file system without second names
            shutil.copyfile(path, target)
