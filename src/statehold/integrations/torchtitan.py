"""The checkpointer of torchtitan, with steps of statehold.

    checkpoint=StateholdCheckpointManager.Config(enable=True, interval=100)   # in a config function
    --override.imports statehold.integrations.torchtitan.statehold_steps      # or by name alone

It writes into DUMP_FOLDER/FOLDER, keeps `keep_latest_k` steps, and finds the newest intact one.
Invariants: the options mean what they mean in torchtitan. What is in the folder as a checkpoint of
torchtitan's own, or behind initial_load_path, loads as ever; the next save is a step. A step also
holds the random generators.
Not here: weights in the form of Hugging Face, which torchtitan reads and writes itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torchtitan.components.checkpointer import MODEL, CheckpointManager
from torchtitan.config.override import derive, override
from torchtitan.tools import filesystem
from torchtitan.tools.logging import logger

from statehold.checkpoint.checkpointer import Checkpointer
from statehold.errors import UsageError
from statehold.integrations.trained import check_names, discard_newer
from statehold.tensors.kinds.rng import Rng
from statehold.tensors.marks import Gated

RNG = "rng"


class StateholdCheckpointManager(CheckpointManager):
    """Saves in the background; the update waits only until its memory is copied."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """The options of torchtitan's own. `async_mode` changes nothing here."""

    def __init__(self, config: Any, **built: Any) -> None:
        # None of its threads and groups: the Checkpointer removes old steps, after a commit.
        super().__init__(replace(config, keep_latest_k=0, async_mode="disabled"), **built)
        if self.enable:
            self._rng = Rng()
            self._loaded: int | None = None  # until the first save
            self._ckpt = self.checkpointer(self.folder, config.keep_latest_k or None)
            self._model = _Model(self.states[MODEL].model)

    def checkpointer(self, folder: str, keep: int | None) -> Checkpointer:
        """Open the run. Override it for levels or other options; pass `keep` on."""
        if filesystem.is_remote(folder):
            raise UsageError(
                "a run directory is a local path",
                facts={"checkpoint.folder": folder},
                hint="give levels with an ObjectStore to a Checkpointer in a subclass",
            )
        return Checkpointer(folder, keep=keep)

    # -- saving ----------------------------------------------------------------------------

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if not self._should_save(curr_step, last_step):
            return False
        discard_newer(self._ckpt, self._loaded)
        self._loaded = None
        if last_step and self.last_save_model_only:
            self._save_last_step(curr_step)  # calls dcp_save()
        else:
            save = self._ckpt.save(curr_step, self._state())
            if last_step:
                save.wait("committed")
        return True

    def dcp_save(
        self, state_dict: dict[str, Any], checkpoint_id: str, *args: Any, **options: Any
    ) -> Any:
        """The last step, if it has weights only."""
        if options.get("to_hf"):
            return super().dcp_save(state_dict, checkpoint_id, *args, **options)
        step = int(os.path.basename(checkpoint_id).removeprefix("step-"))
        self._ckpt.save(step, {MODEL: state_dict}).wait("committed")
        return None

    def _maybe_wait_for_staging(self) -> None:
        self._ckpt.gate()

    def _close(self) -> None:
        super()._close()
        if hasattr(self, "_ckpt"):
            self._ckpt.close()

    # -- loading ---------------------------------------------------------------------------

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        steps = self._ckpt.steps()
        if not steps or step not in (-1, *steps):
            return self._load_initially(step)
        is_seed = (steps[-1] if step == -1 else step) == 0
        wanted = None if step == -1 else step
        # Without a step, so that a damaged one is set aside, and the one before it is loaded.
        found = self._ckpt.restore(self._state(), wanted, **self._chosen(is_seed))
        logger.info("Loaded step %s of %s.", found, self.folder)
        self._loaded = wanted
        return True

    def _load_initially(self, step: int) -> bool:
        """From initial_load_path, from torchtitan's own checkpoints, or not at all."""
        path = self.initial_load_path
        is_local = path is not None and not filesystem.is_remote(path)
        if step == -1 and path is not None and is_local and not self.initial_load_in_hf:
            with Checkpointer(path) as source:
                if source.steps():
                    source.restore(self._state(), **self._chosen(self.initial_load_model_only))
                    return True
        loaded: bool = super()._load(step)
        return loaded

    def _chosen(self, model_only: bool) -> dict[str, Any]:
        if model_only:
            return {"only": [MODEL]}
        return {"skip": self.exclude_from_loading or None}

    def _state(self) -> dict[str, Any]:
        others = {name: each for name, each in self.states.items() if name != MODEL}
        return {MODEL: self._model, **others, RNG: self._rng}


class _Model:
    """The parts of a model under one set of names.

    Hooks of torchtitan make tensors for state_dict(), such as the three of a fused projection.
    These are copied at once. Parameters are copied lazily: they change in step() only.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self._parts = parts

    def state_dict(self) -> dict[str, Any]:
        found = self._entries(keep_vars=True).items()
        return {k: Gated(each) if isinstance(each, nn.Parameter) else each for k, each in found}

    def state_to_fill(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """See Pieced. Raises StateMismatchError for a step of another model."""
        entries = self._entries(keep_vars=False)
        # Under pipeline parallelism a step also has the parts of other ranks.
        check_names(MODEL, entries, entries.keys() & saved.keys())
        return entries

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for part in self._parts:
            part.load_state_dict(state, strict=False)  # it has the names of all parts

    def _entries(self, *, keep_vars: bool) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for part in self._parts:
            found |= part.state_dict(keep_vars=keep_vars)
        return found


@override(  # type: ignore[untyped-decorator]
    target=CheckpointManager.Config, description="checkpoints as steps of statehold"
)
def statehold_steps(config: Any) -> Any:
    """The same options for the manager of this module: --override.imports names it."""
    return derive(config, StateholdCheckpointManager.Config)
