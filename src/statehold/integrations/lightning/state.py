"""What a step holds of a Lightning Trainer, made from the checkpoint that Lightning has dumped.

    model, optimizer, optimizer_1, ...   the objects themselves, so that they are copied lazily
    lightning                            everything else of the checkpoint, by rank 0
    logged                               what was logged in the epoch, by each rank
    data                                 positions of the loaders, and the rest of each rank
    rng                                  the generators of each rank

So the hooks on_save_checkpoint decide what is saved, as ever. Weights or optimizer states that a
hook has replaced are saved as it left them.

Invariants: the names are those of a state written by hand, so a step restores without Lightning.
Not here: which step (strategy), where checkpoints are (checkpoints).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from statehold.integrations.lightning import moments
from statehold.integrations.lightning.logged import results_of, shown
from statehold.integrations.trained import persistent_buffers
from statehold.reading.load import load
from statehold.tensors.marks import Volatile
from statehold.tensors.rng import Rng


class LiveOptimizers(list[Any]):
    """Stands for optimizer states in a checkpoint, where the optimizers themselves are meant."""


def live(module: nn.Module, wrapped: nn.Module, weights: Any) -> Any:
    """The module, if `weights` is its state dict; else the weights, which a hook has replaced."""
    tensors = {**dict(module.named_parameters(remove_duplicate=False)),
               **persistent_buffers(module)}  # fmt: skip
    is_whole = weights.keys() == tensors.keys()
    if is_whole and all(_place(weights[name]) == _place(each) for name, each in tensors.items()):
        return wrapped
    return Volatile(dict(weights))


def _place(value: Any) -> Any:
    """Equal for two tensors only if they are the same memory in the same form."""
    if not isinstance(value, torch.Tensor):
        return value
    local = value.to_local() if hasattr(value, "to_local") else value
    return local.data_ptr(), local.shape, local.stride(), local.dtype


def optimizers_of(trainer: Any) -> dict[str, Any]:
    return {f"optimizer_{i}" if i else "optimizer": each
            for i, each in enumerate(trainer.optimizers)}  # fmt: skip


def taken(trainer: Any, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The state to save for a checkpoint; all ranks call this."""
    rest = dict(checkpoint)
    weights = rest.pop("state_dict")
    model = live(trainer.lightning_module, trainer.strategy.model, weights)
    state = {"model": model}
    if isinstance(rest.get("optimizer_states"), LiveOptimizers):
        del rest["optimizer_states"]
        state.update(optimizers_of(trainer))
    _without_loaders(rest)
    data = stateful(trainer.train_dataloader)
    own = {
        "checkpoint": rest,
        "world": trainer.world_size,
        "optimizers": len(trainer.optimizers) if "optimizer" in state else 0,
        "is_module": not isinstance(model, Volatile),
        "reloaded": moments.reloaded(trainer),
    }
    # Any number of ranks may resume, so what is the same for all is saved by one.
    own = own if trainer.is_global_zero else {}
    logged = {"shown": shown(trainer), "results": results_of(trainer)}
    return {**state, "lightning": own, "logged": logged, "data": data, "rng": Rng()}


def stateful(loaders: Any) -> list[Any]:
    """The loaders in a collection that know their position."""
    return [each for each in tree_leaves(loaders) if hasattr(each, "load_state_dict")]


def _without_loaders(rest: dict[str, Any]) -> None:
    """Take the positions of the loaders out of a checkpoint: each rank saves its own."""
    rest["loops"] = loops = dict(rest["loops"])
    fit = loops["fit_loop"] = dict(loops["fit_loop"])
    inner = fit["state_dict"] = dict(fit["state_dict"])
    inner.pop("combined_loader", None)


def values(run: str, step: int, rank: int, world: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The checkpoint of a step without weights and optimizer states, and what is known of it.

    The latter has "world", "optimizers", "is_module", "epoch", "moment" and what was "shown". If as
    many ranks saved the step, it also has "results", "data" and "rng" of this rank.
    """
    known = load(run, "lightning", step=step, rank=0)
    checkpoint = known.pop("checkpoint")
    fit = checkpoint["loops"]["fit_loop"]
    known["epoch"] = max(fit["epoch_progress"]["current"]["ready"] - 1, 0)
    known["moment"] = moments.moment_of(fit)
    moments.adjust(fit, known["moment"])
    is_same_world = known["world"] == world
    logged = load(run, "logged", step=step, rank=rank if is_same_world else 0)
    known["shown"] = logged["shown"]
    if is_same_world:
        known["results"] = logged["results"]
        known["data"] = load(run, "data", step=step, rank=rank)
        known["rng"] = load(run, "rng", step=step, rank=rank)
    return checkpoint, known
