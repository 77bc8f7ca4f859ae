"""The state of an Accelerator, for a Checkpointer: what save_state() would save, and more.

    state = accelerator_state(accelerator)      # after prepare()
    step = ckpt.restore(state) or 0             # for accelerator.load_state()
    ckpt.save(step, state)                      # for accelerator.save_state()

It holds every prepared model, optimizer, scheduler and loader, the scaler, the objects of
register_for_checkpointing(), the count of accumulate(), and the random generators. save_state()
forgets the position inside an accumulation; here it is the entry "accelerator". That entry also
says which other loaders have begun, because only their first iterator draws no random number:
prepare() has made it before.

Invariants: the names are those of a state written by hand: "model", "optimizer", "scheduler",
"data", "rng". A second object of a kind is "model_1". So a step restores with Accelerate and
without.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from accelerate import Accelerator

from statehold.errors import UsageError
from statehold.integrations.trained import trained_part
from statehold.tensors.kinds.rng import Rng


def accelerator_state(
    accelerator: Accelerator, *, loaders: Iterable[Any] | None = None
) -> dict[str, Any]:
    """A state for Checkpointer.save() and restore(); call it after the last prepare().

    Of a peft model it has what trains now: call it again when more of the base begins to train.

    Args:
        accelerator: the Accelerator that has prepared the model and the rest.
        loaders: the prepared loaders whose position counts; None takes all. Pass [train_loader] if
            a loader of an evaluation was prepared, too: each evaluation begins at its first batch.
            Pass [] if the loop finds its position itself.

    Raises:
        UsageError: a loader does not know its position.
    """
    prepared = accelerator._dataloaders
    chosen = list(prepared if loaders is None else loaders)
    for loader in chosen:
        _check_position(loader)
    state: dict[str, Any] = {
        **_numbered("model", [_part(accelerator, model) for model in accelerator._models]),
        **_numbered("optimizer", accelerator._optimizers),
        **_numbered("scheduler", accelerator._schedulers),
        **_numbered("custom", accelerator._custom_objects),
        "accelerator": _Progress(accelerator, prepared, chosen),
    }
    if accelerator.scaler is not None:
        state["scaler"] = accelerator.scaler
    return {**state, **_numbered("data", chosen), "rng": Rng()}


def _numbered(name: str, objects: Sequence[Any]) -> dict[str, Any]:
    return {f"{name}_{i}" if i else name: each for i, each in enumerate(objects)}


def _part(accelerator: Accelerator, model: Any) -> Any:
    return trained_part(accelerator.unwrap_model(model, keep_torch_compile=False), model)


def _check_position(loader: Any) -> None:
    if not getattr(loader, "use_stateful_dataloader", False):
        raise UsageError(
            "a prepared loader does not know its position, so a restore would begin at batch 0",
            facts={"loader": type(loader).__name__},
            hint="pass Accelerator(dataloader_config=DataLoaderConfiguration("
            "use_stateful_dataloader=True)) and prepare a StatefulDataLoader; or leave the loader "
            "out with accelerator_state(accelerator, loaders=[])",
        )


# Of torchdata's loader: its iterator was made by state_dict(), and its first loop takes that one.
_IS_UNTOUCHED = "_initial_iter_for_state_dict"


class _Progress:
    """What the Accelerator counts itself, and which loaders without a position have begun."""

    def __init__(self, accelerator: Accelerator, prepared: list[Any], loaders: list[Any]) -> None:
        self._accelerator = accelerator
        with_position = {id(each) for each in loaders}
        others = [each for each in prepared if id(each) not in with_position]
        self._others = [getattr(each, "base_dataloader", None) for each in others]

    def state_dict(self) -> dict[str, Any]:
        begun = [not getattr(each, _IS_UNTOUCHED, False) for each in self._others]
        return {"step": self._accelerator.step, "begun": begun}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._accelerator.step = state["step"]
        for loader, has_begun in zip(self._others, state.get("begun", []), strict=False):
            if has_begun and getattr(loader, _IS_UNTOUCHED, False):
                setattr(loader, _IS_UNTOUCHED, False)
