"""Weights of a run while an engine serves: vLLM's weight transfer, backend "statehold".

    weight_transfer_config={"backend": "statehold"}
    init_weight_transfer_engine({"run": "runs/llama", "name": "model"})
    start_weight_update(); update_weights({"step": 1000, "ahead": True})
    update_weights({"step": 1000}); finish_weight_update("1000")

The caller names the step, so all ranks take the same one. A rank reads the layers in which a tensor
has other checksums than the one that is served. With `ahead`, a thread reads them while the engine
answers, and the update has only copies left. Without it, the update reads them.
Invariants: all that changes is read and verified by all ranks before any of it reaches the model on
one. So a step that a rank finds damaged or retired, or that was saved again between the reads of
two ranks, changes nothing, and the error says so. What was read ahead is only taken
by the next update, of the same save of the same step. It is the one read under way, and has room in
the spare memory of the host. What pages depend on changes in the same call as the weights: nothing
that was computed with those before is found after it. The model has a whole step before the call
and behind it, because requests run between calls. If the call fails on the way into the model, it
has none. Then the next one reads all tensors, as it does behind another loader of vLLM, and always
with sleep mode.
Not here: who decides that a step is taken, and pauses the engine (the caller), the reads (loader),
what becomes of promises and of vLLM's own prefix cache (connector).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from statehold.errors import UsageError, refused
from statehold.io.memory_room import spare_memory
from statehold.kv.identity import content_of
from statehold.kv.vllm.loader import StepReader
from statehold.kv.vllm.opening import Sums, agree, all_ranks, made_when_asked, serve, served
from statehold.options.paths import NamedStep
from statehold.process.warn import logger
from statehold.process.worker import Crew, Task, yield_processor
from statehold.reading.places import StepPlace, at_rest, file_system, run_of
from statehold.steps.publish import directory_id


@dataclass(frozen=True, slots=True)
class OtherWeights:
    """What a step has that differs from what is served. save: tells it from a later one."""

    save: Hashable
    tensors: dict[str, torch.Tensor]
    sums: Sums
    content: Any


def other_weights(
    run: str, step: int, name: str, known: Sums, ahead: OtherWeights | None = None,
    room: float = math.inf,
) -> OtherWeights:  # fmt: skip
    """Read what differs from `known`, unless `ahead` is of this save. room: bytes that it may take;
    else it has no save.

    Raises StepNotFoundError, CorruptionError, StateMismatchError.
    """

    def read(place: StepPlace) -> OtherWeights:
        save = directory_id(place.directory)
        if ahead is not None and ahead.save == save:
            return ahead
        with contextlib.closing(StepReader(place, name)) as reader:
            sums = reader.sums()
            other = _other_layers(sums, known, place.label)
            parts = {name: part for name, part in reader.parts.items() if layer_of(name) in other}
            if (nbytes := sum(each.nbytes for each in parts.values())) > room:
                logger.warning("%s: no memory to read %d bytes ahead", place.label, nbytes)
                save, parts = None, {}
            return OtherWeights(save, reader.read(parts), sums, content_of(place.directory))

    with contextlib.closing(file_system()) as fs:
        return at_rest(fs, NamedStep(run_of(run), step), read)


def _other_layers(sums: Sums, known: Sums, step: str) -> set[str]:
    if known and known.keys() != sums.keys():
        summary = "the step has other tensors than the one that is served"
        raise refused(summary, f"{len(known)} tensors", min(known.keys() ^ sums.keys()), step=step)
    return {layer_of(each) for each in sums if sums[each] != known.get(each)}


def check_tiers(kv_transfer: Any) -> None:
    """Raise UsageError if pages lie below vLLM's own offloading. kv_transfer: its configuration."""
    extra = getattr(kv_transfer, "kv_connector_extra_config", None) or {}
    if extra.get("secondary_tiers"):
        summary = "vLLM does not tell the tiers below its offloading of other weights"
        hint = "take the StateholdConnector, which learns of them"
        raise refused(summary, "no secondary_tiers", extra["secondary_tiers"], hint)


def layer_of(name: str) -> str:
    """What vLLM packs together: a layer with a number, or one tensor."""
    parts = name.split(".")
    at = next((at for at, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: at + 1])


class StepWeights:
    """The methods of vLLM's WeightTransferEngine. model: what takes the weights."""

    model: Any
    model_config: Any
    ranks = 1  # that share the memory of the host
    _info: Any = None
    _ahead: tuple[int, Task[OtherWeights]] | None = None

    def watch_loads(self) -> None:
        """From now on, what loads weights into the model makes the next update bring all tensors.

        Each reload of vLLM calls the load_weights() of the model.
        """
        self.model.load_weights = partial(self._watched, self.model.load_weights)

    def _watched(self, load: Callable[..., Any], *given: Any, **named: Any) -> Any:
        self._ahead = None
        served().update(dict.fromkeys(served()))
        return load(*given, **named)

    def init_transfer_engine(self, init_info: Any) -> None:
        """The run whose steps are taken."""
        run_of(init_info.run)
        self._info = init_info
        self._reads = Crew("statehold-kv-weights", begin=yield_processor)

    def receive_weights(self, update_info: Any) -> None:
        """Take a step, or read it ahead.

        Raises as other_weights() does, or has done ahead, and PeerFailedError if only another rank
        does. Then nothing has changed on any rank.
        """
        before, self._ahead, step = self._ahead, None, update_info.step
        # A sleep may have discarded weights, and nobody says so.
        known = dict.fromkeys(served()) if self.model_config.enable_sleep_mode else dict(served())
        read = partial(other_weights, self._info.run, step, self._info.name, known)
        if update_info.ahead:
            self._ahead = step, self._reads.submit(read, None, spare_memory().nbytes // self.ranks)
            return
        ahead = before[1] if before is not None and before[0] == step else None
        found: OtherWeights = self._together(lambda: read(ahead.result() if ahead else None))
        self._together(lambda: self._load(found))
        self._serve(found.content, found.sums)

    def _load(self, found: OtherWeights) -> None:
        if not found.tensors:
            return
        self._serve([found.content, "not whole"], dict.fromkeys(found.sums))
        self._begin()
        self.model.load_weights(iter(found.tensors.items()))
        self._end()

    def start_weight_update(self) -> None:
        """Raises UsageError if no run was given. The model is touched when a step was verified."""
        if self._info is None:
            raise UsageError("an update needs a run", hint="call init_weight_transfer_engine first")

    def finish_weight_update(self) -> None:
        """An update that has returned has ended: requests may run before this call."""

    def _together(self, call: Callable[[], Any]) -> Any:
        """What the call returns, once all ranks have made it."""
        task = Task(call)
        task.make()
        error = task.error()
        agree(error, None if error else getattr(task.result(), "content", None), self._told)
        return task.result()

    def _serve(self, content: Any, sums: Sums) -> None:
        serve(content, sums)
        for connector in self._connectors():
            connector.weights_changed()

    def shutdown(self) -> None:
        """What was read ahead is not needed."""
        self._ahead = None

    @staticmethod
    def _told(mine: Any) -> list[Any]:
        return [mine]

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
    """Of update_weights. ahead: only read it, in the background."""

    step: int
    ahead: bool = False

    def __post_init__(self) -> None:
        if type(self.step) is not int or type(self.ahead) is not bool:
            raise refused("an update takes the number of a step", '{"step": 1000}', vars(self))


@cache
def _derived() -> type[Any]:
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.model_executor.model_loader import reload

    class StateholdWeights(StepWeights, WeightTransferEngine):
        """The engine that vLLM makes in each worker."""

        init_info_cls, update_info_cls = RunInfo, StepInfo
        supports_draft_weight_update = False
        _told = staticmethod(all_ranks)

        def __init__(self, config: Any, vllm_config: Any, *device_and_model: Any) -> None:
            check_tiers(vllm_config.kv_transfer_config)
            super().__init__(config, vllm_config, *device_and_model)
            self.watch_loads()
            self.ranks = vllm_config.parallel_config.world_size

        def _begin(self) -> None:
            reload.initialize_layerwise_reload(self.model)

        def _end(self) -> None:
            reload.finalize_layerwise_reload(self.model, self.model_config)

        def _connectors(self) -> Iterator[Any]:
            found = get_kv_transfer_group() if has_kv_transfer_group() else None
            if hasattr(found, "weights_changed"):
                yield found

    return StateholdWeights


__getattr__ = made_when_asked("StateholdWeights", _derived)
