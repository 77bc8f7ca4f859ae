"""save_checkpoint() and load_checkpoint() of an engine, with steps of statehold.

    engine = save_into_steps(engine)      # one line; the rest of the script stays

Invariants: the directory is a run. A checkpoint counts once it is committed on all ranks, so no
file `latest` is needed: the newest step is the latest. What DeepSpeed itself has saved there loads
as before, until the first step is committed.
Not here: DeepSpeed's CheckpointEngine. It is given pickled files of a fixed number of ranks, and
the engine looks for these files on the disk before it asks for them (decision 15).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from statehold.checkpoint.checkpointer import Checkpointer
from statehold.checkpoint.save.handle import Save
from statehold.errors import StepNotFoundError, UsageError
from statehold.integrations.deepspeed.state import engine_state

log = logging.getLogger("statehold")

CLIENT, TAG = "client", "tag"
_USUAL_TAG = re.compile(r"global_step(\d+)")


def save_into_steps(engine: Any, **options: Any) -> Any:
    """Let engine.save_checkpoint() and load_checkpoint() use steps; returns the engine.

    The number of a step is engine.global_steps. Saves return at once; the error of one is raised by
    the next. A save after the load of an older step discards the newer ones.

    Args:
        engine: what deepspeed.initialize() returns.
        options: those of the Checkpointer of each directory, such as keep=3.

    Raises:
        UsageError: engine_state() refuses the engine.
    """
    methods = _Methods(engine, options)
    engine.save_checkpoint, engine.load_checkpoint = methods.save, methods.load
    return engine


class _Methods:
    def __init__(self, engine: Any, options: Mapping[str, Any]) -> None:
        self._engine = engine
        self._options = options
        self._state = engine_state(engine)
        self._stock_load = engine.load_checkpoint
        # By directory: its run, the last save, and the step that was loaded since.
        self._open: dict[str, Checkpointer] = {}
        self._last: dict[str, Save] = {}
        self._loaded: dict[str, int] = {}

    def save(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """As DeepSpeedEngine.save_checkpoint(), in the background."""
        if not save_latest or exclude_frozen_parameters:
            raise UsageError(
                "a step is always the latest, and holds all parameters",
                facts={"save_latest": save_latest, "exclude_frozen": exclude_frozen_parameters},
                hint="leave both arguments out",
            )
        key, step = str(save_dir), self._engine.global_steps
        ckpt = self._opened(key)
        if (loaded := self._loaded.pop(key, None)) is not None and ckpt.steps()[-1] > loaded:
            log.warning("training goes on from step %d: the newer steps are discarded", loaded)
            ckpt.rewind(loaded)
        name = f"global_step{step}" if tag is None else str(tag)
        state = {**self._state, CLIENT: dict(client_state or {}), TAG: name}
        self._last[key] = ckpt.save(step, state, force=True)
        return True

    def load(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """As DeepSpeedEngine.load_checkpoint(). Without a tag: the newest intact step."""
        key = str(load_dir)
        ckpt = self._opened(key)
        if (last := self._last.pop(key, None)) is not None:  # its error is raised once
            last.wait("committed")
        if not ckpt.steps():
            found: tuple[str | None, dict[str, Any] | None] = self._stock_load(
                load_dir, tag, load_module_strict, load_optimizer_states, load_lr_scheduler_states,
                load_module_only, custom_load_fn,
            )  # fmt: skip
            return found
        client: dict[str, Any] = {}
        state = {**self._state, CLIENT: client, TAG: ""}
        skip = [] if load_optimizer_states else ["optimizer"]
        if not load_lr_scheduler_states and "scheduler" in state:
            skip.append("scheduler")
        only = ["model", "fp32", CLIENT] if load_module_only else None
        chosen = None if tag is None else self._step_of(ckpt, str(tag), load_dir)
        step = ckpt.restore(state, chosen, only=only, skip=skip or None)
        if step is not None:
            self._loaded[key] = step
        return f"{load_dir}/{step}", client

    def _step_of(self, ckpt: Checkpointer, tag: str, directory: str) -> int:
        usual, steps = _USUAL_TAG.fullmatch(tag), ckpt.steps()
        if usual and int(usual[1]) in steps:
            return int(usual[1])
        for step in reversed(steps):
            found = {TAG: ""}
            ckpt.restore(found, step, only=[TAG])
            if found[TAG] == tag:
                return step
        raise StepNotFoundError(
            "no committed step has this tag",
            facts={"tag": tag, "run": directory, "steps": ", ".join(map(str, steps))},
        )

    def _opened(self, key: str) -> Checkpointer:
        if key not in self._open:
            self._open[key] = Checkpointer(key, **self._options)
        return self._open[key]
