"""load_format="statehold": vLLM's weights from a step of a run.

    LLM(model="runs/llama/hf", load_format="statehold",
        model_loader_extra_config={"run": "runs/llama@best:loss", "name": "model"})

`run`: RUN, RUN@STEP or RUN@best:METRIC. `name`: what of the state is the model, "" for all of it.
`model`, as always: the directory with config.json and the tokenizer.
Invariants: every byte that a parameter gets was verified. With tensor parallelism a rank reads the
pieces that hold its part of a tensor, and no others: vLLM narrows a tensor to the part, and only
then are bytes read. The step that was loaded is what pages of this process depend on. All ranks
have loaded the same save of the same step, or the engine does not start.
Not here: which parameter a name means (vLLM), reads of boxes (checkpoint/restore/read_plan).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, chain, groupby
from typing import Any

import torch

from statehold.checkpoint.restore.read_plan import ReadPlan
from statehold.encoding import values
from statehold.errors import UsageError, refused
from statehold.io.clients import engine_alone
from statehold.io.segments import Reading
from statehold.kv.identity import content_of
from statehold.kv.vllm.opening import Sums, agree, all_ranks, serve, served
from statehold.layout.layout import Box
from statehold.options.paths import check_path
from statehold.reading.load import part_of
from statehold.reading.places import StepPlace, at_rest, file_system
from statehold.tensors import dtypes
from statehold.tensors.composed import value_of
from statehold.tensors.destinations import Destination
from statehold.units import MiB

_BUFFER_BYTES = 4 * MiB
_STAGING_BYTES = 16 * _BUFFER_BYTES
# Of whole tensors that are read as one. Two such groups are in memory at a time.
_GROUP_BYTES = 32 * MiB
_FACTS = {
    *(getattr(torch.Tensor, name) for name in ("size", "dim", "numel", "element_size")),
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim")),
}


@dataclass(frozen=True, slots=True)
class StepPart:
    """A box of a tensor of the step."""

    name: str
    dtype: torch.dtype
    box: Box

    @property
    def nbytes(self) -> int:
        """Of the box."""
        return self.box.numel * self.dtype.itemsize

    def narrowed(self, dim: int, start: int, length: int) -> StepPart:
        """As torch.narrow()."""
        dim %= len(self.box.shape)
        start += self.box.shape[dim] if start < 0 else 0
        offsets, shape = list(self.box.offsets), list(self.box.shape)
        if not 0 <= start <= start + length <= shape[dim]:
            raise IndexError(f"{start} to {start + length} of {shape[dim]} elements")
        offsets[dim], shape[dim] = offsets[dim] + start, length
        return StepPart(self.name, self.dtype, Box(tuple(offsets), tuple(shape)))


class StepReader:
    """Reads parts of tensors of a step, and verifies them, until close() is called."""

    def __init__(self, place: StepPlace, name: str) -> None:
        with contextlib.closing(file_system()) as fs:
            self._saved = place.open(fs)
        self._directory = place.directory
        self.parts = self._parts(part_of(self._saved.state, name, place.label), place.label)
        opened = contextlib.ExitStack()
        self._engine = opened.enter_context(engine_alone(_STAGING_BYTES, _BUFFER_BYTES, 2))
        self.close = opened.close

    def _parts(self, node: Any, where: str) -> dict[str, StepPart]:
        """All tensors below the node, by their names there."""
        made = dict[torch.Tensor, str]()  # a tensor is the same key as itself alone

        def tensor(name: str) -> torch.Tensor:
            entry = self._saved.tensors[name]
            dtype = dtypes.dtype_of(entry.dtype, name)
            shape = dtypes.torch_shape(dtype, entry.shape)
            found = torch.empty(shape, dtype=dtype, device="meta")
            made[found] = name
            return found

        tree = values.decode(node, lambda tag, payload: value_of(tag, payload, tensor))
        found = {}
        for name, value in _tensors(tree, ""):
            if value not in made:
                got, of = type(value).__name__, {"step": where, "tensor": name}
                raise refused("vLLM takes plain tensors", "a tensor", got, **of)
            found[name] = StepPart(made[value], value.dtype, Box.whole(value.shape))
        if not found:
            hint = 'say which part of the state is the model: {"name": "model"}'
            summary, got = "this part of the step has no tensors", type(tree).__name__
            raise refused(summary, "a module", got, hint, step=where)
        return found

    def sums(self) -> Sums:
        """The checksums of all tensors, by name: equal ones mean equal tensors."""
        found: Sums = {}
        for name, part in self.parts.items():
            chunks = self._saved.chunks(part.name, part.box) if part.nbytes else []
            found[name] = [part.dtype, *((each.box, each.sums) for each in chunks)]
        return found

    def begin(self, parts: Mapping[str, StepPart]) -> tuple[dict[str, torch.Tensor], Reading]:
        """Begin to read elements, into tensors of the same names."""
        plan = ReadPlan(self._saved, hint="load an older step")
        made = {}
        for name, part in parts.items():
            made[name] = target = torch.empty(part.box.shape, dtype=part.dtype, device="cpu")
            stored = dtypes.stored_box(part.dtype, part.box, part.name)
            plan.fill(Destination(part.name, target, False, stored, shared=False))
        return made, plan.start(self._engine, lambda name, *_: f"{self._directory}/{name}")

    def read(self, parts: Mapping[str, StepPart]) -> dict[str, torch.Tensor]:
        """The elements, by the same names. Raises CorruptionError."""
        made, reading = self.begin(parts)
        reading.finish()
        return made

    def whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors. While vLLM takes some, the next ones are read."""
        ends = accumulate(part.nbytes for part in self.parts.values())
        placed = zip(ends, self.parts.items(), strict=True)
        groups = groupby(placed, lambda each: each[0] // _GROUP_BYTES)
        before = self.begin({})
        for group in chain((dict(item for _, item in each) for _, each in groups), [{}]):
            now = self.begin(group)
            before[1].finish()
            yield from before[0].items()
            before = now

    def later(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors, each read when it is used, as far as it is used."""
        return ((name, Later.of(self, part)) for name, part in self.parts.items())


def _tensors(node: Any, above: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, torch.Tensor):
        yield above, node
    elif isinstance(node, Mapping):
        for key, item in node.items():
            yield from _tensors(item, f"{above}.{key}" if above else str(key))


class Later(torch.Tensor):
    """A tensor of a step that knows its shape. narrow() makes it smaller; all else reads it."""

    reader: StepReader
    part: StepPart

    @classmethod
    def of(cls, reader: StepReader, part: StepPart) -> Later:
        """A part that was not read."""
        made = torch.empty(part.box.shape, dtype=part.dtype, device="meta").as_subclass(cls)
        made.reader, made.part = reader, part
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Of narrow(), a part; of shape and dtype, what the step says; else, of the elements."""
        kwargs = kwargs or {}
        if func in (torch.Tensor.narrow, torch.narrow) and isinstance(args[0], cls):
            return cls.of(args[0].reader, args[0].part.narrowed(*args[1:], **kwargs))
        if func in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        named = {name: _read(value) for name, value in kwargs.items()}
        return func(*map(_read, args), **named)


def _read(value: Any) -> Any:
    """What is in the step for a Later; anything else as it is."""
    return value.reader.read({"": value.part})[""] if isinstance(value, Later) else value


def load_into(take: Any, options: Mapping[str, Any], ranks: int) -> None:
    """Give a step to `take`, as an iterator of names and tensors. This process serves it then.

    Raises UsageError for options that make no sense, and as statehold.load() does.
    """
    if unknown := sorted(set(options) - {"run", "name"}):
        raise refused("the loader has no such option", "run, name", ", ".join(unknown))
    if "run" not in options:
        hint = 'give model_loader_extra_config={"run": "runs/llama"}'
        raise UsageError("the loader needs a run", hint=hint)
    run = check_path(options["run"], "the run")

    def read(place: StepPlace) -> tuple[list[Any], Sums]:
        with contextlib.closing(StepReader(place, options.get("name", ""))) as reader:
            take(reader.later() if ranks > 1 else reader.whole())
            return content_of(place.directory), reader.sums()

    with contextlib.closing(file_system()) as fs:
        serve(*at_rest(fs, run, read))


@functools.cache
def register() -> None:
    """Called by vLLM, in each of its processes."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    at, connector = __package__ or "", "StateholdConnector"
    KVConnectorFactory.register_connector(connector, f"{at}.connector", connector)
    SecondaryTierFactory.register_tier("statehold", f"{at}.tier", "StateholdTier")
    WeightTransferEngineFactory.register_engine("statehold", f"{at}.weights", "StateholdWeights")

    @register_model_loader("statehold")
    class StateholdLoader(BaseModelLoader):
        """The loader that vLLM makes."""

        def download_model(self, model_config: Any) -> None:
            """A run is on this host."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            """Fill the parameters."""
            from vllm.distributed import get_tensor_model_parallel_world_size

            options = self.load_config.model_loader_extra_config
            load_into(model.load_weights, options, get_tensor_model_parallel_world_size())
            agree(None, served(), all_ranks)
