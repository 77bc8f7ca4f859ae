"""open(): the steps of a run, and what each holds. load(): tensors and values of one step.

Neither needs a live state to put them into.

Owns: which part of a step's tree a dotted name means; what is mapped and what is copied.
Invariants: every byte that is returned was verified, unless verify=False says not to. Only the
files that hold what was asked for are read. Tensors that were tied in the state are one tensor.
Nothing is changed on disk, and no lock is taken: a job may save meanwhile. A Step describes one
save, and reads no data. If a job saves the step again, the description does not change, and load()
returns the newer save.
Not here: which step a name means (places), restores into a live state (Checkpointer.restore),
levels other than the run directory.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from statehold._core import Fs, ReadJob
from statehold.checkpoint.restore.read_plan import ReadPlan
from statehold.encoding import values
from statehold.encoding.header import bytes_of
from statehold.errors import (
    StateMismatchError,
    StepNotFoundError,
    TruncatedFileError,
    UsageError,
    refused,
    shown,
    storage_error,
    storing,
)
from statehold.format.saved import PlacedChunk, SavedStep
from statehold.format.selection import nearest
from statehold.format.trees import tensors_of
from statehold.io.clients import engine_alone
from statehold.layout.layout import Box
from statehold.layout.plan import step_of
from statehold.observe.background_log import Progress
from statehold.options.paths import NamedStep, check_path
from statehold.process.whole_files import open_regular
from statehold.reading.places import (
    StepPlace,
    asked_of,
    at_rest,
    file_system,
    load_manifest,
    run_of,
    tell_misnamed,
)
from statehold.steps.publish import directory_id
from statehold.steps.shelf import DirectoryShelf
from statehold.steps.whole import whole_steps
from statehold.tensors import dtypes, nodes
from statehold.tensors.composed import value_of
from statehold.tensors.destinations import Destination
from statehold.tensors.devices import Devices
from statehold.tensors.storable import is_external
from statehold.units import MiB, format_bytes

# -- loading it ------------------------------------------------------------------------------------
# With `mapped`, a tensor that one file holds as a whole is mapped privately, so that a change of it
# does not reach the file. The kernel loads its pages when they are used. statehold does not
# overwrite files that a process of this host has mapped. A tensor that is cut over several files,
# or that begins at an address that its elements cannot have, is copied.


BUFFER_BYTES = 16 * MiB
STAGING_BYTES = 8 * BUFFER_BYTES
COPY_THREADS = 2
_HINT = "load an older step; statehold verify lists all damage"


def load(
    run: str | os.PathLike[str],
    name: str = "",
    *,
    step: int | None = None,
    mapped: bool = False,
    verify: bool = True,
    device: str | torch.device = "cpu",
    rank: int | None = None,
) -> Any:
    """The tensors and values of one step that have `name`: the whole state for "".

    A dict of the state comes back as a dict, a module as its state dict, a tensor as a tensor.

        model.load_state_dict(statehold.load("runs/llama", "model"))

    Args:
        run: the run directory, "RUN@STEP", or the directory of a step.
        name: a dotted name in the state, such as "model" or "model.layers.0".
        step: the step; None means the one in `run`, or the newest.
        mapped: map the files instead of copying them, which takes no memory until it is used.
        verify: compare all bytes with their checksums. False is for mapped=True only.
        device: where tensors are made.
        rank: of a step that several ranks saved, the rank whose own values are meant.

    Raises:
        StepNotFoundError: there is no such step.
        StateMismatchError: the step has nothing of this name, or its ranks saved different things.
        CorruptionError: bytes are damaged.
        UsageError: an argument is not valid.
    """
    if not verify and not mapped:
        raise UsageError(
            "verify=False is for mapped=True", hint="what is copied is verified anyway"
        )
    if not isinstance(name, str):
        raise UsageError("a name is a text", facts={"expected": "a str", "got": shown(name)})
    target = _device_of(device, mapped)
    fs = file_system()
    with contextlib.closing(fs):
        wanted = _Wanted(name, mapped, verify, target)
        return at_rest(fs, named(run, step), lambda place: _loaded(fs, place, rank, wanted))


def named(run: str | os.PathLike[str], step: int | None) -> str | NamedStep:
    """A step of a run, as places.find takes it."""
    text = check_path(run, "the run")
    if step is None:
        return text
    path, in_name = asked_of(text)
    if in_name is not None:
        facts = {"run": text, "step": step}
        raise UsageError("a step is given twice", facts=facts, hint="leave one of them out")
    return NamedStep(path, step_of(step))


def _device_of(device: str | torch.device, mapped: bool) -> torch.device:
    """A device on which tensors can be made, or into which files are mapped. Raises UsageError."""
    try:
        target = torch.device(device)
        if mapped and target.type != "cpu":
            facts = {"expected": "device='cpu' with mapped=True", "got": str(target)}
            raise UsageError("a file can be mapped into host memory only", facts=facts)
        torch.empty(1, device=target).cpu()  # raises on the meta device
    except (RuntimeError, TypeError, AssertionError):  # AssertionError: torch was built without it
        text = "no tensor with values can be made on this device"
        raise refused(text, 'a device of this host, such as "cpu"', shown(device)) from None
    return target


class _Wanted(NamedTuple):
    name: str
    mapped: bool
    verify: bool
    device: torch.device


def _loaded(fs: Fs, place: StepPlace, rank: int | None, wanted: _Wanted) -> Any:
    before = directory_id(place.directory)
    saved = place.open(fs, rank)
    node = part_of(saved.state, wanted.name, place.label)
    hint = "rank=R takes the values of one rank"
    nodes.check_same(node, hint, step=place.label, name=wanted.name)
    tensors = _Tensors(saved, place, wanted)
    value = values.decode(node, lambda tag, payload: value_of(tag, payload, tensors.made))
    tensors.read()
    if not wanted.verify and directory_id(place.directory) != before:
        # Its bytes may be of two saves. With checksums, that would be known.
        raise storage_error("map a step: it was saved again", errno.ESTALE, place.directory)
    return value


class _Tensors:
    """The tensors of one load: made first, and then filled together."""

    def __init__(self, saved: SavedStep, place: StepPlace, wanted: _Wanted) -> None:
        self._saved = saved
        self._directory = place.directory
        self._wanted = wanted
        self._plan = ReadPlan(saved, hint=_HINT)
        self._nbytes = 0
        self._made: dict[str, torch.Tensor] = {}
        self._files: dict[str, torch.Tensor] = {}

    def made(self, name: str) -> torch.Tensor:
        """The tensor of a name; ties are one tensor."""
        if name not in self._made:
            self._made[name] = self._new(name)
        return self._made[name]

    def _new(self, name: str) -> torch.Tensor:
        saved = self._saved.tensors[name]
        dtype = dtypes.dtype_of(saved.dtype, name)
        shape = dtypes.torch_shape(dtype, saved.shape)
        box = Box.whole(saved.shape)
        if self._wanted.mapped:
            chunks = self._saved.chunks(name, box)
            if _is_mappable(chunks, saved.shape, dtype):
                return self._map(name, chunks[0], dtype, shape)
        made = torch.empty(shape, dtype=dtype, device=self._wanted.device)
        self._plan.fill(Destination(name, made, is_external(made), box, shared=False))
        self._nbytes += made.nbytes
        return made

    def _map(
        self, name: str, chunk: PlacedChunk, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> torch.Tensor:
        if self._wanted.verify:
            self._plan.verify(name, chunk)
            self._nbytes += chunk.end - chunk.begin
        if chunk.file not in self._files:
            path = f"{self._directory}/{chunk.file}"
            self._files[chunk.file] = _mapped(path, chunk.file_bytes)
        return self._files[chunk.file][chunk.begin : chunk.end].view(dtype).view(shape)

    def read(self) -> None:
        """Fill and verify all that was made."""
        if not self._nbytes:
            return
        staging = min(STAGING_BYTES, (self._nbytes // BUFFER_BYTES + 2) * BUFFER_BYTES)
        with contextlib.ExitStack() as opened:
            engine = opened.enter_context(engine_alone(staging, BUFFER_BYTES, COPY_THREADS))
            devices = opened.enter_context(contextlib.closing(Devices()))
            reading = self._plan.start(engine, lambda name, *_: f"{self._directory}/{name}")
            with Progress(f"loading step {self._saved.step}", partial(_counts, reading.job)):
                reading.finish(devices.load)


def _counts(job: ReadJob) -> tuple[int, int]:
    stats = job.stats
    return stats["cached_bytes"] + stats["direct_bytes"], stats["bytes"]


def _mapped(path: str, nbytes: int) -> torch.Tensor:
    """The bytes of a file. Torch knows no error but RuntimeError, so it opens nothing by name."""
    with storing("map a file", path):
        fd = open_regular(path, os.O_RDONLY)
    try:
        opened = f"/proc/self/fd/{fd}"
        return torch.from_file(opened, shared=False, size=nbytes, dtype=torch.uint8)
    except RuntimeError as error:
        facts = {"file": path, "expected": f"{nbytes} bytes", "got": f"{os.fstat(fd).st_size}"}
        raise TruncatedFileError("a file cannot be mapped", facts=facts) from error
    finally:
        os.close(fd)


def _is_mappable(chunks: Sequence[PlacedChunk], shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    if len(chunks) != 1 or chunks[0].box.shape != shape:
        return False
    is_complex = dtype == torch.float64 and shape[-1:] == (2,)  # it may be: pairs
    unit = dtype.itemsize * (2 if is_complex else 1)
    return chunks[0].begin < chunks[0].end and not chunks[0].begin % unit


# -- the part that a name means --------------------------------------------------------------------
# A name means an entry of the tree, or all entries whose names begin with it: modules have flat
# names, dicts and lists nested ones. The longest key that fits is entered first.


def part_of(tree: Any, name: str, where: str) -> Any:
    """The node that `name` means; the whole tree for "". Raises StateMismatchError; `where` is for
    the message."""
    found = _below(tree, name) if name else [tree]
    if not found:
        known = sorted({*_names(tree, "")})
        facts = {"step": where, "expected": "a name in the step", "got": name}
        if near := nearest(name, known):
            facts["near"] = ", ".join(near)
        hint = f"its names begin with {', '.join(sorted({each.split('.')[0] for each in known}))}"
        raise StateMismatchError("the step has nothing of this name", facts=facts, hint=hint)
    return found[0]


def _below(node: Any, name: str) -> list[Any]:
    """The node of `name`, or nothing."""
    members = _members(node)
    for key in sorted(members, key=len, reverse=True):
        if name == key:
            return [members[key]]
        if name.startswith(f"{key}.") and (found := _below(members[key], name[len(key) + 1 :])):
            return found
    inner = {
        key[len(name) + 1 :]: item for key, item in members.items() if key.startswith(f"{name}.")
    }
    return [values.mapping_of(inner)] if inner else []


def _members(node: Any) -> dict[str, Any]:
    """The members of a dict, a list or a tuple, by their keys as text."""
    items = nodes.payload(node, "$tuple") if type(node) is dict else node
    if type(items) is list:
        return {str(index): item for index, item in enumerate(items)}
    return {str(key): item for key, item in (nodes.members(node) or {}).items()}


def _names(node: Any, path: str) -> Iterator[str]:
    if path:
        yield path
    for key, item in _members(node).items():
        yield from _names(item, f"{path}.{key}" if path else key)


# -- the steps of a run ----------------------------------------------------------------------------


def open(run: str | os.PathLike[str]) -> Run:
    """The steps of a run, for looking at.

    Args:
        run: the run directory.

    Raises:
        UsageError: there is no such directory.
    """
    path = run_of(check_path(run, "the run"))
    tell_misnamed(path)
    return Run(path)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a step: its global shape, and the dtype as safetensors calls it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, repr=False)
class Step:
    """A committed step.

    Attributes:
        step: its number.
        path: its directory.
        created: in UTC, ISO 8601.
        writer: the program and version that saved it.
        version: of the format.
        world_size: how many ranks saved it.
        tensors: every tensor by its name.
        metrics, tags: what it says of itself, as save() got it.
        values: everything else by its name, as it was saved; a value on which ranks differ is
            missing.
    """

    step: int
    path: str
    created: str
    writer: str
    version: int
    world_size: int
    tensors: Mapping[str, TensorInfo]
    values: Mapping[str, Any]
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def __repr__(self) -> str:  # a large model has thousands of tensors
        return f"<Step {self.path}: {len(self.tensors)} tensors, {format_bytes(self.nbytes)}>"

    def load(self, name: str = "", **options: Any) -> Any:
        """What statehold.load() returns of this step.

        Args:
            name: as for load().
            options: as for load().
        """
        return load(os.path.dirname(self.path), name, step=self.step, **options)


class Run:
    """The steps of a run: `run.steps()`, `run[100]`, `run.newest()`, and a loop over them."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._store = DirectoryShelf(file_system(), path)

    def steps(self) -> list[int]:
        """The committed steps that have all their files, oldest first, as they are now."""
        return whole_steps(self._store)

    def newest(self) -> Step | None:
        """The newest step; None if there is none."""
        with contextlib.suppress(StepNotFoundError):
            return at_rest(self._store.fs, NamedStep(self.path), self._described)
        return None

    def __getitem__(self, step: int) -> Step:
        return at_rest(self._store.fs, NamedStep(self.path, step_of(step)), self._described)

    def __iter__(self) -> Iterator[Step]:
        for step in self.steps():
            with contextlib.suppress(StepNotFoundError):  # its job has retired it since
                yield self[step]

    def __len__(self) -> int:
        return len(self.steps())

    def __repr__(self) -> str:
        return f"<Run {self.path}: {len(self)} steps>"

    def _described(self, place: StepPlace) -> Step:
        manifest = load_manifest(self._store.fs, place.directory)
        saved = place.open(self._store.fs)
        tensors = {
            name: TensorInfo(name, each.dtype, each.shape, bytes_of(each.dtype, each.shape) or 0)
            for name, each in saved.tensors.items()
        }
        return Step(
            step=place.step,
            path=self._store.path(place.step),
            created=manifest.created,
            writer=manifest.writer,
            version=manifest.version,
            world_size=saved.world_size,
            tensors=tensors,
            values=dict(_values(saved.state, "")),
            metrics=dict(manifest.about.metrics),
            tags=manifest.about.tags,
        )


def _values(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    """What is no tensor, by dotted names."""
    if nodes.differing(node) is None and next(tensors_of(node), None) is None:
        yield path, values.decode(node, lambda tag, payload: value_of(tag, payload, _no_tensor))
        return
    for key, item in _members(node).items():
        yield from _values(item, f"{path}.{key}" if path else key)


def _no_tensor(name: str) -> Any:
    raise KeyError(name)
