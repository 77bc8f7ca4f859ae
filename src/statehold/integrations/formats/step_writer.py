"""A tree of streamed tensors -> a committed step.

Owns: the names of the tensors, the one data file, its checksums.
Invariants: the step is committed by D3 to D7 (checkpoint/store), under the lock of the run. Until
then its bytes lie in a directory that no reader takes for a step, with a journal, so a second try
goes on where the first one was killed. A job that saves into the run in between clears that
directory, and a second try begins again. Checksums are those of the bytes as they were read from
the source. Memory is one part.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from statehold import _core
from statehold.checkpoint.save.writes import now, writer_name
from statehold.checkpoint.store.lock import RunLock
from statehold.checkpoint.store.store import Store
from statehold.encoding import values
from statehold.errors import InvariantError, UnsupportedValueError, UsageError
from statehold.format.entries import record_file
from statehold.format.manifest import Manifest
from statehold.integrations.formats.partial import JOURNAL, Done, Journal, OutFile
from statehold.integrations.formats.streamed import Streamed, whole
from statehold.integrations.formats.streamed import memory_of as view_of
from statehold.layout.plan import BLOCK_BYTES, SavePlan, TensorSpec, plan_save
from statehold.reading.places import file_system
from statehold.tensors import dtypes, foreign

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
        writer=writer_name(),
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
        if isinstance(value, torch.Tensor):
            raise UnsupportedValueError(
                "a tensor that is not plain and dense cannot be imported",
                facts={"path": path, "type": type(value).__name__, "layout": str(value.layout)},
                hint="convert it with torch, and save the checkpoint again",
            )
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
