"""Why a training may not go on with the same bits after all, and what to do, in words for the log.

In each of these cases the Trainer's own resume differs, too, and says nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from transformers.trainer_callback import ExportableState, TrainerCallback

_PERSISTENT = (
    "from the first epoch after a resume on, dropout will draw other random numbers: new workers "
    "draw a seed, and workers that persist draw none. Leave out "
    "dataloader_persistent_workers=True for the same bits"
)
_MODEL_ONLY = (
    "save_only_model=True: the step has no optimizer and no scheduler, so both are new, and the "
    "random generators do not go on"
)
_FORGETFUL = (
    "the step has the state of {}, and it is not restored. Pass TrainingArguments("
    "restore_callback_states_from_checkpoint=True) to go on with it"
)
_FOLDERS = (
    "{}: on_save() is called before checkpoint-N has its weights, which are written in the "
    "background. If it reads the folder, set weights_before_on_save = True in a subclass of "
    "StateholdTrainer: then each save waits for them"
)


def at_the_start(args: Any) -> Iterator[str]:
    """What the log of a run that may be killed should say. args: the TrainingArguments."""
    if args.dataloader_num_workers > 0 and args.dataloader_persistent_workers:
        yield _PERSISTENT


def before_weights(callbacks: Iterable[Any], told: set[str]) -> Iterator[str]:
    """What it should say of callbacks that get on_save. told: those that it has named."""
    own = {type(each).__name__ for each in callbacks
           if getattr(each.on_save, "__func__", None) is not TrainerCallback.on_save}  # fmt: skip
    if names := ", ".join(sorted(own - told)):
        yield _FOLDERS.format(names)
    told |= own


def at_a_resume(args: Any, callbacks: Iterable[Any]) -> Iterator[str]:
    """What the log of a run that resumes should say."""
    if args.save_only_model:
        yield _MODEL_ONLY
    if not args.restore_callback_states_from_checkpoint:
        names = [type(each).__name__ for each in callbacks if isinstance(each, ExportableState)]
        if names:
            yield _FORGETFUL.format(", ".join(names))
