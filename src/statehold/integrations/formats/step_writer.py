"""A tree of streamed tensors -> a committed step.

Owns: the names of the tensors, the one data file, its checksums.
Invariants: the step is committed by D3 to D7 (checkpoint/store), under the lock of the run. Until
then its bytes lie in a directory that no reader takes for a step, with a journal, so a second try
goes on where the first one was killed. A job that saves into the run in between clears that
directory, and a second try begins again. Checksums are those of the bytes as they were read from
the source. Memory is one part.

A step as a tree of streamed tensors and values, for exports.

Invariants: every byte was verified before it is handed out. A tensor that no other format can hold
as a tensor is an error with its name. Memory is the engine's buffers and one part.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from statehold import _core
from statehold.checkpoint.restore.read_plan import ReadPlan
from statehold.checkpoint.save.writes import WRITER, now
from statehold.checkpoint.store.lock import RunLock
from statehold.checkpoint.store.store import Store
from statehold.encoding import values
from statehold.errors import InvariantError, StateMismatchError, UnsupportedValueError, UsageError
from statehold.format.entries import record_file
from statehold.format.manifest import Manifest
from statehold.integrations.formats.partial import JOURNAL, Done, Journal, OutFile
from statehold.integrations.formats.streamed import PART_BYTES, Streamed, part_of, runs, whole
from statehold.integrations.formats.streamed import memory_of as view_of
from statehold.integrations.formats.trees import storable
from statehold.io.clients import open_engine
from statehold.layout.flat import boxes_of_run
from statehold.layout.layout import Box
from statehold.layout.plan import BLOCK_BYTES, SavePlan, TensorSpec, plan_save
from statehold.reading.load import part_of as node_of
from statehold.reading.places import file_system
from statehold.tensors import dtypes, foreign, nodes
from statehold.units import MiB

if TYPE_CHECKING:
    from statehold._core import Engine
    from statehold.format.saved import SavedStep


# -- the tensors of a step -------------------------------------------------------------------------


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
        if (differing := nodes.differing(node)) is not None:
            facts = {"step": directory, "saved": str(differing)}
            hint = "name=... exports a part; statehold.load(..., rank=R) takes the values of a rank"
            raise StateMismatchError("ranks saved different values", facts=facts, hint=hint)
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
        return foreign.value_of(tag, payload)

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
                self._place(plan, name, box, flat[at : at + box.numel].view(box.shape))
                at += box.numel
            plan.start(self._engine, lambda file, *_: f"{self._directory}/{file}").finish()
            yield part

    def _place(self, plan: ReadPlan, name: str, box: Box, target: torch.Tensor) -> None:
        stored = dtypes.stored_shape(target.dtype, box.shape, name)
        offsets = dtypes.stored_shape(target.dtype, box.offsets, name)
        for chunk in self._saved.chunks(name, Box(offsets, stored)):
            held = dtypes.torch_box(target.dtype, chunk.box)
            common = held if not box.shape else held.intersection(box)
            if common is not None:
                inner = part_of(target, common.relative_to(box))
                plan.place(name, chunk, common.relative_to(held), inner)


@contextlib.contextmanager
def engine_for_parts() -> Iterator[Engine]:
    """An engine whose memory does not depend on the step."""
    with contextlib.closing(_core.open_fs()) as fs:
        engine = open_engine(fs, STAGING_BYTES, BUFFER_BYTES, 2)
        with contextlib.closing(engine):
            yield engine


# -- writing a step --------------------------------------------------------------------------------


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
        store = Store(fs, run)
        store.create()
        lock = RunLock(store.root)
        try:
            if step in store.steps():
                facts = {"run": run, "step": step}
                raise UsageError("the run has this step already", facts=facts)
            partial = store.partial(step)
            journal = _begun(store, step, identity)
            try:
                sums = _write(f"{partial}/{plan.file_name}", plan, tensors, journal, done)
            finally:
                journal.close()
            check()
            fs.unlink(f"{partial}/{JOURNAL}")
            store.commit(_manifest(plan, sums, node))
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
    return Journal(partial, identity)


def _manifest(plan: SavePlan, sums: bytes, node: Any) -> Manifest:
    file, entries = record_file(plan, sums)
    return Manifest(
        step=plan.step,
        world_size=1,
        created=now(),
        writer=WRITER,
        block_bytes=BLOCK_BYTES,
        files=(file,),
        tensors=entries,
        state=node,
    )


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
        return foreign.torch_node(value) or foreign.numpy_node(value, path, placed)

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
    out, sums = OutFile(path, journal), []
    try:
        out.size(plan.file_bytes)
        out.write(plan.header, 0)
        of_header = _Sums(0)
        of_header.add(memoryview(plan.header))
        sums.append(of_header.end())
        for spec, begin in zip(plan.specs, plan.begins, strict=True):
            known = journal.get(spec.name)
            if known is None:
                known = _write_tensor(out, tensors[spec.name], begin, done).hex()
                out.note(spec.name, known)
            else:
                done(spec.nbytes)
            sums.append(bytes.fromhex(known))
        out.sync()
    finally:
        out.close()
    return b"".join(sums)


def _write_tensor(out: OutFile, tensor: Streamed, begin: int, done: Done) -> bytes:
    sums = _Sums(begin)
    for part in tensor.parts():
        view = view_of(part)
        out.write(view, sums.at)
        sums.add(view)
        done(len(view))
    if sums.at != begin + tensor.nbytes:
        facts = {"expected": tensor.nbytes, "got": sums.at - begin}
        raise InvariantError("a tensor has another number of bytes than it said", facts=facts)
    return sums.end()


class _Sums:
    """The checksums of bytes from `at` on, by the pieces of the grid."""

    def __init__(self, at: int) -> None:
        self.at = at
        self._piece = bytearray()  # the beginning of one that is not complete
        self._sums: list[bytes] = []

    def add(self, view: memoryview) -> None:
        while view:
            room = BLOCK_BYTES - self.at % BLOCK_BYTES
            cut, view = view[:room], view[room:]
            self.at += len(cut)
            self._piece += cut
            if len(cut) == room:
                self._complete()

    def end(self) -> bytes:
        if self._piece:
            self._complete()
        return b"".join(self._sums)

    def _complete(self) -> None:
        self._sums.append(_core.xxh3_64(bytes(self._piece)).to_bytes(_SUM_BYTES, "little"))
        self._piece.clear()
