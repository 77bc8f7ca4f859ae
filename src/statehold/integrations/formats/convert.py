"""export_step() and import_step(): steps and checkpoints of other libraries, one into the other.

Owns: a step as a tree of streamed tensors and values, and such a tree as a committed step.
Invariants: the source is never changed. A destination appears whole or not at all, and a second
call goes on where the first one was killed. What the format of the destination cannot hold is named
in a warning, or in an error if it is a tensor.
Not here: the formats (one module each), which format a path has, and the table of all
(recognition).
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from statehold import _core
from statehold._core import Engine, Fs
from statehold.checkpoint.restore.read_plan import ReadPlan
from statehold.checkpoint.save.writes import account, build_manifest
from statehold.encoding import values
from statehold.encoding.strictjson import show
from statehold.errors import (
    CorruptionError,
    NoSpaceError,
    UnsupportedValueError,
    UsageError,
    some,
    storing,
)
from statehold.format.entries import DOCUMENT_BYTES_MAX, sha256
from statehold.format.saved import MANIFEST_NAME, SavedStep
from statehold.integrations.formats import hf, untrusted
from statehold.integrations.formats.partial import (
    JOURNAL,
    Done,
    Journal,
    OutFile,
    identity_of,
    work_on,
)
from statehold.integrations.formats.recognition import FORMATS, check_names, recognised
from statehold.integrations.formats.streamed import (
    PART_BYTES,
    Streamed,
    nbytes_of,
    read_now,
    replaced,
    runs,
    storable,
    whole,
    without,
)
from statehold.io.clients import engine_alone
from statehold.layout.flat import boxes_of_run
from statehold.layout.layout import Box
from statehold.layout.plan import BLOCK_BYTES, SavePlan, TensorSpec, plan_save
from statehold.observe.background_log import counted
from statehold.options.paths import absolute, absolute_outside, check_path
from statehold.process.warn import warn_caller
from statehold.reading.load import part_of as node_of
from statehold.reading.places import StepPlace, at_rest, file_system, step_in
from statehold.steps.lock import RunLock
from statehold.steps.owners import begin_run
from statehold.steps.store import Store
from statehold.tensors import dtypes, nodes
from statehold.tensors.destinations import Destination
from statehold.units import MiB

_SHOWN = 12
# (bytes done, bytes in all) -> nothing.
Report = Callable[[int, int], None]
Path = str | os.PathLike[str]


def export_step(
    step: Path,
    destination: Path,
    to: str,
    *,
    name: str | None = None,
    config: Path | None = None,
    report: Report | None = None,
) -> tuple[str, ...]:
    """Write a step as a checkpoint of another library; returns the names of what was left out.

    Args:
        step: "RUN@STEP", the run directory (its newest step), or the directory of a step.
        destination: a directory that does not exist; for "torch" a file.
        to: "hf" (safetensors of Hugging Face), "torch" (one file of torch.save), "dcp"
            (torch.distributed.checkpoint), or "deepspeed-universal".
        name: the part of the state to export, such as "model"; "" is all of it. None: "model" for
            "hf", if the state has it, and else all.
        config: for "hf", a directory of Hugging Face whose config.json, tokenizer and other small
            text files go with the weights, or a config.json alone. from_pretrained() needs it.
        report: called with the bytes done and in all, from time to time.

    Raises:
        UsageError: the destination exists, or an argument is not valid.
        UnsupportedValueError: the format cannot hold a tensor; the error names it.
        CorruptionError: bytes of the step are damaged.
    """
    kind = FORMATS.get(to)
    if kind is None or kind.export is None:
        known = ", ".join(name for name, each in FORMATS.items() if each.export)
        raise UsageError("no such format", facts={"expected": known, "got": show(to)})
    with contextlib.closing(file_system()) as fs:
        beside = {} if config is None else hf.texts_of(os.fspath(config), to)
        target = absolute_outside(destination, "the destination")
        write = partial(_exported, fs, target, to, name, beside, report)
        left_out = at_rest(fs, check_path(step, "the step"), write)
    if left_out:
        names = some(left_out, _SHOWN)
        warn_caller(f"the format {to} does not hold these as they were: {names}")
    return tuple(left_out)


def _exported(
    fs: Fs,
    destination: str,
    to: str,
    name: str | None,
    beside: Mapping[str, bytes],
    report: Report | None,
    place: StepPlace,
) -> list[str]:
    """Write the step at `place`; returns the names of what was left out, or is something else."""
    kind = FORMATS[to]
    assert kind.export is not None  # export_step() has looked
    saved = place.open(fs)
    raw = fs.read_file(f"{place.directory}/{MANIFEST_NAME}", DOCUMENT_BYTES_MAX)
    if name is None:
        has_it = isinstance(saved.state, dict) and kind.name in saved.state
        name = kind.name if has_it else ""
    with engine_alone(STAGING_BYTES, BUFFER_BYTES, 2) as engine:
        found = StepTree(saved, place.directory, engine, name)
        if not isinstance(found.root, Mapping):
            found.root = {name.rpartition(".")[2]: found.root}
        texts = {file: sha256(text) for file, text in beside.items()}
        identity = identity_of(export=to, name=name, manifest=sha256(raw), beside=texts)
        with (
            counted(f"exporting step {saved.step}", nbytes_of(found.root), report) as done,
            work_on(destination, identity, is_file=kind.is_file, done=done) as work,
        ):
            for file, text in beside.items():
                work.put(file, text)
            return [*dict.fromkeys([*kind.export(found.root, work), *found.arrays])]


def import_step(
    source: Path,
    step: str,
    *,
    name: str | None = None,
    skip: Iterable[str] | None = None,
    report: Report | None = None,
) -> str:
    """Make a checkpoint of another library a step of a run; returns the directory of the step.

    The files of the source show its format: one file of torch.save or safetensors, or a directory
    of safetensors, of pytorch_model.bin, of torch.distributed.checkpoint, of DeepSpeed's ZeRO or of
    its universal checkpoints. No pickle is trusted.

    Args:
        source: the checkpoint.
        step: "RUN@STEP". The run is made if it does not exist; the step must not exist.
        name: the name in the state below which all of the source is put. None: "model" for
            safetensors and pytorch_model.bin, and "" for all others.
        skip: names or patterns in the state of what is left out ("args", "*.bias").
        report: called with the bytes done and in all, from time to time.

    Raises:
        UsageError: the source is no checkpoint, or the run has the step.
        UnsupportedValueError: the source holds what a step cannot hold; the error names it.
        CorruptionError: the source is damaged.
    """
    path = absolute(source, "the source")
    run, number = step_in(step)
    kind, place = recognised(path)
    _check_apart(run, place)
    before = _stamps(place)
    below = kind.name if name is None else name
    tree = replaced(kind.read(place), read_now)
    for part in reversed(below.split(".") if below else []):
        tree = {part: tree}
    try:
        check_names(tree, path)
    except UsageError as error:
        error.hint = error.hint or 'name="model" puts it into one'
        raise
    patterns = list(skip or ())
    tree = without(tree, patterns)
    for where, unknown in untrusted.foreign_in(tree):
        raise untrusted.untrusted(path, unknown, where, f'leave it out with skip=["{where}"]')
    identity = identity_of(source=place, stamps=before, name=below, skip=sorted(patterns))
    with counted(f"importing {path}", nbytes_of(tree), report) as done:
        check = partial(_check_unchanged, place, before)
        return write_step(run, number, tree, identity, done, check)


def _check_apart(run: str, source: str) -> None:
    """Raise if an import would write among the files that it reads."""
    if pathlib.Path(os.path.realpath(run)).is_relative_to(os.path.realpath(source)):
        raise UsageError(
            "the run would lie among the files of the source",
            facts={"expected": "a run outside of the source", "run": run, "source": source},
        )


def _stamps(path: str) -> list[list[Any]]:
    """The files of a source as they are now: an import goes on only with the same ones."""
    walked = sorted(os.walk(path))
    inside = [os.path.join(parent, name) for parent, _, names in walked for name in sorted(names)]
    files = inside or [path] * os.path.isfile(path)
    found = [(file, os.stat(file)) for file in files]
    return [[file, stat.st_size, stat.st_mtime_ns] for file, stat in found]


def _check_unchanged(path: str, before: list[list[Any]]) -> None:
    """Raise if the files of a source are others than before: the step would be a mixture."""
    if _stamps(path) != before:
        raise CorruptionError(
            "the source has changed while it was read",
            facts={"source": path},
            hint="import it again when nothing writes to it; no step was committed",
        )


# -- the tensors of a step -------------------------------------------------------------------------
# Every byte was verified before it is handed out. Memory is the engine's buffers and one part.


BUFFER_BYTES = 4 * MiB
STAGING_BYTES = 4 * BUFFER_BYTES


class StepTree:
    """The part of a step that `name` means: `root`, and what became something else.

    arrays: the names of NumPy arrays, which are tensors here.
    """

    def __init__(self, saved: SavedStep, directory: str, engine: Engine, name: str) -> None:
        self._saved = saved
        self._directory = directory
        self._engine = engine
        self._made: dict[str, Streamed] = {}
        self.arrays: list[str] = []
        node = node_of(saved.state, name, directory)
        hint = "name=... exports a part; statehold.load(..., rank=R) takes the values of a rank"
        nodes.check_same(node, hint, step=directory)
        self.root = values.decode(node, self._leaf)

    def _leaf(self, tag: str, payload: Any) -> Any:
        if tag == "$tensor":
            return self._streamed(payload)
        if tag == "$ndarray":
            self.arrays.append(payload)
            return self._streamed(payload)
        if tag == "$complex128":
            return Streamed(torch.complex128, payload.shape[:-1], payload.parts)
        if tag == "$subclass":
            names = sorted(payload["tensors"])
            facts = {"class": payload["class"], "inner tensors": ", ".join(names)}
            hint = "export a part of the step without it, with name=..."
            raise UnsupportedValueError(
                "a tensor that consists of others cannot be exported", facts=facts, hint=hint
            )
        return nodes.value_of(tag, payload)

    def _streamed(self, name: str) -> Streamed:
        if name not in self._made:
            saved = self._saved.tensors[name]
            dtype = dtypes.dtype_of(saved.dtype, name)
            shape = dtypes.torch_shape(dtype, saved.shape)
            self._saved.chunks(name, Box.whole(saved.shape))  # raises where ranks differ
            self._made[name] = Streamed(dtype, shape, partial(self._parts, name, dtype, shape))
        return self._made[name]

    def _parts(
        self, name: str, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> Iterator[torch.Tensor]:
        memory = torch.empty(PART_BYTES, dtype=torch.uint8, device="cpu")
        for begin, end in runs(dtype, shape):
            part = memory[: (end - begin) * dtype.itemsize]
            plan = ReadPlan(self._saved, hint="statehold verify lists all damage")
            at, flat = 0, part.view(dtype)
            for box in boxes_of_run(shape, begin, end):
                target = flat[at : at + box.numel].view(box.shape)
                stored = dtypes.stored_box(dtype, box, name)
                plan.fill(Destination(name, target, False, stored, shared=False))
                at += box.numel
            plan.start(self._engine, lambda file, *_: f"{self._directory}/{file}").finish()
            yield part


# -- writing a step --------------------------------------------------------------------------------
# The step is committed by D3 to D7 (steps/store), under the lock of the run. Until then its bytes
# lie in a directory that no reader takes for a step, with a journal, so a second try goes on where
# the first one was killed. A job that saves into the run in between clears that directory, and a
# second try begins again. Checksums are those of the bytes as they were read from the source.
# Memory is one part.


_SUM_BYTES = 8


def write_step(
    run: str, step: int, tree: Any, identity: str, done: Done, check: Callable[[], None]
) -> str:
    """Commit `tree` as a step of a run; returns its directory.

    check: called when all is written; the step is not committed if it raises.
    """
    node, tensors = _encoded(tree)
    plan = plan_save([_spec(name, tensor) for name, tensor in tensors.items()], step=step)
    with contextlib.closing(file_system()) as fs:
        store = Store(fs, run, reuse=False)
        store.create()
        lock = RunLock(store.root, passes=True)
        try:
            begin_run(store, run)
            if step in store.steps():
                raise UsageError("the run has this step already", facts={"run": run, "step": step})
            partial = store.partial(step)
            with storing("write a step", run):
                with contextlib.closing(_begun(store, step, identity)) as journal:
                    sums = _write(f"{partial}/{plan.file_name}", plan, tensors, journal, done)
                check()
            fs.unlink(f"{partial}/{JOURNAL}")
            store.commit(step, build_manifest(plan, node, *account(plan, sums)).encode())
        except NoSpaceError:  # others need the room; after other errors the work is resumed
            store.abandon(step)
            raise
        finally:
            lock.release()
        return store.path(step)


def _begun(store: Store, step: int, identity: str) -> Journal:
    """The journal of the step in the making; the directory is cleared if it is of other work."""
    partial = store.partial(step)
    if os.path.isdir(partial):
        journal = Journal(partial, identity)
        if not journal.is_fresh:
            return journal
        journal.close()
    store.begin(step)
    journal = Journal(partial, identity)
    journal.begin()
    return journal


# -- the tree ------------------------------------------------------------------------------------


def _encoded(tree: Any) -> tuple[Any, dict[str, Streamed]]:
    """The nodes of a tree, and its tensors by name: the first one that a tensor has."""
    names: dict[Streamed, str] = {}

    def leaf(value: Any, path: str) -> Any:
        if isinstance(value, Streamed):
            name = names.setdefault(value, path)
            is_wide = value.dtype == torch.complex128
            return {"$complex128": {"$tensor": name}} if is_wide else {"$tensor": name}
        storable(value, path)
        return nodes.torch_node(value) or nodes.numpy_node(value, path, placed)

    def placed(tensor: torch.Tensor, path: str) -> str:
        return names.setdefault(whole(tensor), path)

    node = values.encode(tree, "", leaf)
    found = {name: tensor for tensor, name in names.items()}
    if len(found) != len(names):
        raise UnsupportedValueError("two tensors of the checkpoint have the same dotted name")
    return node, found


def _spec(name: str, tensor: Streamed) -> TensorSpec:
    dtype, shape = tensor.dtype, tensor.shape
    if dtype == torch.complex128:
        dtype, shape = torch.float64, (*shape, 2)
    code = dtypes.code_of(dtype, name)
    return TensorSpec(name, code, dtypes.stored_shape(dtype, shape, name), tensor.nbytes)


# -- the file ------------------------------------------------------------------------------------


def _write(
    path: str, plan: SavePlan, tensors: Mapping[str, Streamed], journal: Journal, done: Done
) -> bytes:
    """Write the data file; returns the checksums of its pieces."""
    with contextlib.closing(OutFile(path, journal)) as out:
        out.size(plan.file_bytes)
        out.write(plan.header, 0)
        of_header = _Sums(0)
        of_header.add(memoryview(plan.header))
        sums = of_header.end()
        for spec, begin in zip(plan.specs, plan.begins, strict=True):
            views = tensors[spec.name].views()
            sums += out.put(spec.name, spec.nbytes, views, begin, done, _Sums(begin))
        out.sync()
    return bytes.fromhex(sums)


class _Sums:
    """The checksums of bytes from `at` on, by the pieces of the grid."""

    def __init__(self, at: int) -> None:
        self.at = at
        self._piece = bytearray()  # the beginning of one that is not complete
        self._sums = bytearray()

    def add(self, view: memoryview) -> None:
        while view:
            room = BLOCK_BYTES - self.at % BLOCK_BYTES
            cut, view = view[:room], view[room:]
            self.at += len(cut)
            self._piece += cut
            if len(cut) == room:
                self._complete()

    def end(self) -> str:
        if self._piece:
            self._complete()
        return self._sums.hex()

    def _complete(self) -> None:
        self._sums += _core.xxh3_64(bytes(self._piece)).to_bytes(_SUM_BYTES, "little")
        self._piece.clear()
