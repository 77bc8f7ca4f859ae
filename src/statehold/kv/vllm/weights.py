"""Weights of a run while an engine serves: vLLM's weight transfer, backend "statehold".

    weight_transfer_config={"backend": "statehold"}
    init_weight_transfer_engine({"run": "runs/llama", "name": "model"})
    start_weight_update(); update_weights({"step": 1000}); finish_weight_update("1000")

The caller names the step, so all ranks take the same one. A rank reads the layers in which a tensor
has other checksums than the one that is served.
Invariants: all that changes is read and verified before any of it reaches the model, so a step that
is damaged or was retired changes nothing, and the error says so. What pages depend on changes in
the same call as the weights: nothing that was computed with those before is found after it. From
the first tensor to the end of an update the model has no whole step. If it does not end, the next
one reads these tensors again.
Not here: who decides that a step is taken, and pauses the engine (the caller), the reads (loader),
what becomes of promises and of vLLM's own prefix cache (connector).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from statehold.errors import UsageError, refused
from statehold.kv.identity import content_of
from statehold.kv.vllm.loader import StepReader
from statehold.kv.vllm.opening import Sums, serve, served
from statehold.options.paths import NamedStep
from statehold.reading.places import StepPlace, at_rest, file_system, run_of


@dataclass(frozen=True, slots=True)
class OtherWeights:
    """What a step has that differs from what is served."""

    tensors: dict[str, torch.Tensor]
    sums: Sums
    content: Any


def other_weights(run: str, step: int, name: str) -> OtherWeights:
    """Read what differs. Raises StepNotFoundError, CorruptionError, StateMismatchError."""
    with contextlib.closing(file_system()) as fs:
        return at_rest(fs, NamedStep(run_of(run), step), lambda place: _read(place, name))


def _read(place: StepPlace, name: str) -> OtherWeights:
    with contextlib.closing(StepReader(place, name)) as reader:
        sums, known = reader.sums(), served()
        if known and known.keys() != sums.keys():
            summary = "the step has other tensors than the one that is served"
            got = min(known.keys() ^ sums.keys())
            raise refused(summary, f"{len(known)} tensors", got, step=place.label)
        changed = {layer_of(each) for each in sums if sums[each] != known.get(each)}
        names = [each for each in sums if layer_of(each) in changed]
        read = reader.read([reader.parts[each] for each in names])
        tensors = dict(zip(names, read, strict=True))
        return OtherWeights(tensors, sums, content_of(place.directory))


def check_tiers(kv_transfer: Any) -> None:
    """Raise UsageError if pages lie below vLLM's own offloading. kv_transfer: its configuration."""
    extra = getattr(kv_transfer, "kv_connector_extra_config", None) or {}
    if extra.get("secondary_tiers"):
        raise UsageError(
            "vLLM does not tell the tiers below its offloading of other weights",
            facts={"secondary_tiers": extra["secondary_tiers"]},
            hint="take the StateholdConnector, which learns of them",
        )


def layer_of(name: str) -> str:
    """What vLLM packs together: a layer with a number, or one tensor."""
    parts = name.split(".")
    at = next((at for at, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: at + 1])


class StepWeights:
    """The methods of vLLM's WeightTransferEngine. model: what takes the weights."""

    model: Any
    model_config: Any
    _next: OtherWeights | None = None

    def init_transfer_engine(self, init_info: Any) -> None:
        """The run whose steps are taken."""
        self._info = init_info
        run_of(init_info.run)

    def receive_weights(self, update_info: Any) -> None:
        """Take a step. Raises as other_weights() does, and then nothing has changed."""
        found = other_weights(self._info.run, update_info.step, self._info.name)
        if found.tensors:
            self._serve([found.content, "not whole"], {**served(), **dict.fromkeys(found.tensors)})
        self._begin()
        self.model.load_weights(iter(found.tensors.items()))
        self._next = found

    def start_weight_update(self) -> None:
        """The model is only touched once a step was verified."""
        self._next = None

    def finish_weight_update(self) -> None:
        """From now on the engine serves the step."""
        if self._next is None:
            return
        self._end()
        self._serve(self._next.content, self._next.sums)
        self._next = None

    def _serve(self, content: Any, sums: Sums) -> None:
        serve(content, sums)
        for connector in self._connectors():
            connector.weights_changed()

    def shutdown(self) -> None:
        """Nothing is open between two updates."""

    def _begin(self) -> None: ...

    def _end(self) -> None: ...

    def _connectors(self) -> Iterator[Any]:
        return iter(())


@dataclass
class RunInfo:
    """Of init_weight_transfer_engine."""

    run: str
    name: str = ""


@dataclass
class StepInfo:
    """Of update_weights."""

    step: int


@functools.cache
def _derived() -> type[Any]:
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    class StateholdWeights(StepWeights, WeightTransferEngine):
        """The engine that vLLM makes in each worker."""

        init_info_cls, update_info_cls = RunInfo, StepInfo
        supports_draft_weight_update = False

        def __init__(self, config: Any, vllm_config: Any, *device_and_model: Any) -> None:
            check_tiers(vllm_config.kv_transfer_config)
            super().__init__(config, vllm_config, *device_and_model)

        def _begin(self) -> None:
            initialize_layerwise_reload(self.model)

        def _end(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)

        def _connectors(self) -> Iterator[Any]:
            found = get_kv_transfer_group() if has_kv_transfer_group() else None
            if hasattr(found, "weights_changed"):
                yield found

    return StateholdWeights


def __getattr__(name: str) -> Any:
    if name == "StateholdWeights":
        return _derived()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
