"""StorageWriter: dcp.save and dcp.async_save into one committed step directory.

    prepare_global_plan    the coordinator makes `<checkpoint_id>.<attempt>.partial`; the name
                           travels to the ranks in their plans
    write_data             every rank writes its files there
    finish                 the coordinator writes the manifest and renames the directory

Invariants: if a save fails or dies on any rank, the checkpoint at checkpoint_id stays as it was. An
error on any rank reaches the caller of save through torch. Nothing is pickled. A writer holds no
memory, file or thread between two calls, so it can be pickled at any time. torch runs each save on
one thread. A writer may run several saves at once, each into its own directory.
Not here: which rank writes what (the planner), the bytes (writing), the renames (publish).
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import re
import secrets
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import StorageWriter as _StorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.distributed_c10d import _get_default_store
from torch.futures import Future

from statehold._core import Fs
from statehold.checkpoint.save.writes import WRITER, now
from statehold.errors import (
    CorruptionError,
    InvariantError,
    PeerFailedError,
    PeerLostError,
    StateholdError,
    StorageError,
    UsageError,
    named,
)
from statehold.format.entries import DOCUMENT_BYTES_MAX, TensorEntry, sha256
from statehold.format.manifest import Commit, Manifest, RecordEntry, groups_of, record_name
from statehold.format.record import Record
from statehold.format.saved import MANIFEST_NAME, open_step
from statehold.format.trees import tensors_of
from statehold.integrations.dcp.machine import SaveWatch, StepEndpoint, rank_and_world
from statehold.integrations.dcp.tree import Path, nest
from statehold.integrations.dcp.writing import SaveDestination, Written, WrittenBox, write_items
from statehold.layout.layout import Box, ExplicitLayout
from statehold.layout.plan import BLOCK_BYTES, STEP_MAX
from statehold.layout.share import HeldTensor
from statehold.options import Options, check_peer_timeout
from statehold.options.io import Io
from statehold.options.keywords import answering
from statehold.process.warn import logger
from statehold.ranks.board import StoreBoard
from statehold.ranks.membership import Membership
from statehold.ranks.peers import Peers
from statehold.ranks.rounds import Round
from statehold.steps.directories import delete, make_directories, parent_of, unless
from statehold.steps.publish import Replaced, make_durable, publish, settle
from statehold.tensors.devices.graphs import refuse_in_capture
from statehold.tensors.nodes import value_of

# -- the writer ------------------------------------------------------------------------------------
# A rank that fails removes the directory with the files of all ranks at once: then nobody publishes
# it. What other ranks write from then on fails, or goes when they close it.


_PARTIAL = r"\.[0-9a-f]{16}\.partial"
_OURS = re.compile(r"manifest\.json|rank-[0-9]{5}-of-[0-9]{5}(-[0-9]+)?\.(safetensors|json)")
_RESULT = MetadataIndex("statehold")
_LAST_NUMBER = re.compile(r"([0-9]+)\D*$")


class _Save(threading.local):
    """The save that this thread runs."""

    path: str | None = None
    use_collectives = True
    save_round: SaveRound | None = None
    watch: SaveWatch | None = None


@answering(io=Io)
class StorageWriter(StepEndpoint, _StorageWriter, AsyncStager):
    """Writes a checkpoint as a step of statehold; for torch.distributed.checkpoint.

    As the `AsyncStager` of dcp.async_save it copies the state into host memory that it reuses.

    Args:
        path: the directory of the checkpoint; the `checkpoint_id` of a save replaces it. The last
            number in its name is the step.
        overwrite: replace an existing checkpoint once the new one is complete. A whole checkpoint
            exists at every moment. False raises an error if there is a checkpoint.
        staging_bytes: as for a Checkpointer. Each save allocates its staging memory, never more
            than the rank writes.
        io: as for a Checkpointer.
        trace: a file for a trace, written at the end of each save.
        timeout_s: with use_collectives=False, how long ranks wait for each other.
    """

    _call = "save"

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        overwrite: bool = True,
        staging_bytes: int | str = "256MiB",
        io: Io | None = None,
        trace: str | os.PathLike[str] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        settings = Options(staging_bytes=staging_bytes, io=Io() if io is None else io, trace=trace)
        super().__init__(path, settings)
        self._timeout_s = check_peer_timeout("timeout_s", timeout_s)
        self._overwrite = overwrite
        self._staging = StagingPool()
        self._save = _Save()

    # -- torch.distributed.checkpoint.StorageWriter ------------------------------------------

    @property
    def checkpoint_id(self) -> str | None:
        """The directory that the save of this thread makes, or the next one."""
        return self._save.path or self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in os.fspath(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset(checkpoint_id)
        self._save.path = self._path
        self._save.watch = SaveWatch()

    # torch passes rank and use_collectives only to a parameter of this very name.
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._save.use_collectives = kwargs.get("use_collectives", True)

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if not self._save.use_collectives and rank_and_world()[1] > 1:
            save_round = SaveRound(self._directory(), self._timeout_s)
            self._save.save_round = save_round
            places = [save_round.begin(lambda: self._begin(save_round.world_size))]
        else:
            self._save.save_round = None
            place = self._begin(len(plans))
            places = [dataclasses.replace(place, rank=rank) for rank in range(len(plans))]
        return [
            dataclasses.replace(plan, storage_data=place)
            for plan, place in zip(plans, places, strict=True)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with self._reported():
            refuse_in_capture("dcp.save()")
            result = self._write(plan, planner)
        future: Future[list[WriteResult]] = Future()
        future.set_result([result])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        found = [each.storage_data for result in results for each in result]
        paths = _paths(metadata)
        machine = self._machine.at(self._directory())
        commit = self._watch().stage(
            machine.watch, "commit", _step(self._directory()), is_last=True
        )
        with commit, machine.storage() as fs:
            save_round = self._save.save_round
            if save_round is None:
                self._publish(fs, found[0].place, found, paths, alone=False)
                return
            place, written = found[0]
            with self._given_back(fs, place):
                sent = hand_over(fs, place, written, paths)
            save_round.end(
                sent,
                publish=lambda sents: self._publish(fs, place, sents, paths, alone=True),
                is_there=lambda: is_published(fs, place),
            )

    def _write(self, plan: SavePlan, planner: SavePlanner) -> WriteResult:
        """The files of this rank. Without collectives, a rank learns its tree only in finish()."""
        place, alone = self._place_of(plan), self._save.save_round is not None
        machine, watch = self._machine.at(place.final), self._watch()
        write = watch.stage(machine.watch, "write", place.step, is_last=False)
        with write, machine.storage() as fs, self._given_back(fs, place):
            written = write_items(machine, fs, place, plan, planner, alone)
            nbytes = sum(file.bytes for file in written.files)
            watch.wrote(nbytes, len(written.chunks))
            sent = (place, written) if alone else hand_over(fs, place, written)
        return WriteResult(_RESULT, nbytes, sent)

    def _publish(
        self, fs: Fs, place: SaveDestination, sents: Iterable[Sent], paths: Mapping[str, Path],
        *, alone: bool,
    ) -> None:  # fmt: skip
        manifest = b""
        with self._given_back(fs, place, lambda: _is_at(fs, place.final, manifest)):
            manifest = complete(fs, [*sents], paths, alone=alone)
            replaced = publish(fs, place.partial, place.final, manifest)
        if replaced is Replaced.HIDDEN:
            try:
                delete(fs, place.partial)
            except StateholdError as error:  # it may stay until the next save
                logger.warning(
                    "the checkpoint at %s is committed; what it replaced was not removed\n%s",
                    place.final, error,
                )  # fmt: skip

    def _watch(self) -> SaveWatch:
        """The watch of this thread's save; without a reset() it begins now."""
        self._save.watch = self._save.watch or SaveWatch()
        return self._save.watch

    # -- torch.distributed.checkpoint.staging.AsyncStager --------------------------------------

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return self._staging.stage(state_dict)

    @property
    def should_synchronize_after_execute(self) -> bool:
        return False

    def synchronize_staging(self) -> None:
        """Nothing: the copy is complete when `stage` returns."""

    def close(self) -> None:
        """Free the memory of staged copies. The writer can be used again."""
        self._staging.close()

    # -- pickling, for the process checkpointer ------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_path": self.checkpoint_id, "_staging": None, "_save": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._staging = StagingPool()
        self._save = _Save()

    # -- the attempt ---------------------------------------------------------------------------

    def _begin(self, world_size: int) -> SaveDestination:
        """An empty directory for the files of all ranks; clears the leftovers of a failed attempt.

        A link to the checkpoint stays a link: its target is replaced.
        """
        final = os.path.realpath(self._directory())
        attempt = secrets.token_hex(8)
        place = SaveDestination(
            final, f"{final}.{attempt}.partial", _step(final), 0, world_size, attempt
        )
        with self._machine.storage() as fs:
            settle(fs, final)
            self._check_replaceable(fs, final)
            make_directories(fs, parent_of(final))
            leftovers = _partials(fs, final)
            if leftovers:  # first, make sure that `final` does not need them
                fs.sync_dir(parent_of(final))
            for leftover in leftovers:
                delete(fs, leftover)
            fs.mkdir(place.partial)
        return place

    def _check_replaceable(self, fs: Fs, final: str) -> None:
        """Check that the directory at `final` may be replaced once the new checkpoint is
        complete."""
        if not fs.is_dir(final):
            return
        names = [name for name, _ in fs.listdir(final)]
        foreign = [name for name in names if not _OURS.fullmatch(name)]
        if foreign:
            raise UsageError(
                "the directory of a checkpoint holds files that are not of a checkpoint",
                facts={"directory": final, "for example": foreign[0]},
                hint="a checkpoint replaces the whole directory: save it into one of its own",
            )
        if names and not self._overwrite:
            raise UsageError(
                "there is a checkpoint already, and overwrite is False", facts={"directory": final}
            )

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        """Tell the ranks that meet without collectives that this one fails."""
        try:
            yield
        except BaseException as error:
            if self._save.save_round is not None:
                raise self._save.save_round.failed(error) from None
            raise

    @contextlib.contextmanager
    def _given_back(
        self, fs: Fs, place: SaveDestination, is_needed: Callable[[], bool] = lambda: False
    ) -> Iterator[None]:
        """Remove the directory of an attempt that fails, with the files of all ranks, unless it is
        needed: nobody publishes it, and the next attempt may be at another directory."""
        try:
            with self._reported():
                yield
        except BaseException as error:
            with contextlib.suppress(StateholdError):
                if is_missing(error) and not fs.is_dir(place.partial):
                    error.with_fact("removed", "by another rank that failed, or by a person")
                while not is_needed() and fs.is_dir(place.partial):
                    with unless(errno.ENOTEMPTY):  # another rank has made a file meanwhile
                        delete(fs, place.partial)
            raise

    def _place_of(self, plan: SavePlan) -> SaveDestination:
        """The directory for this rank's files. A plan that the planner cached names an earlier
        attempt."""
        place = plan.storage_data
        if not isinstance(place, SaveDestination):
            raise UsageError(
                "a planner dropped the storage_data of a plan",
                facts={"got": type(place).__name__},
                hint="keep it in finish_plan: dataclasses.replace(plan, items=...)",
            )
        final = os.path.realpath(self._directory())
        with self._machine.storage() as fs:
            # The leftovers of a failed save to another directory still exist.
            if place.final == final and fs.is_dir(place.partial):
                return place
            found = _partials(fs, final)
        if not found and self._save.save_round is not None:
            return place  # a rank that failed removed it; the write fails, and SaveRound says why
        if len(found) != 1:
            facts = {"checkpoint": final, "expected": "one", "got": len(found)}
            raise UsageError("the directory of this save does not exist", facts=facts)
        attempt = found[0].split(".")[-2]
        return dataclasses.replace(
            place, final=final, partial=found[0], step=_step(final), attempt=attempt
        )


def _is_at(fs: Fs, final: str, manifest: bytes) -> bool:
    """Whether the checkpoint at `final` has this manifest. A power cut may undo its exchange until
    it is durable, so what it has replaced is needed."""
    try:
        return fs.read_file(f"{final}/{MANIFEST_NAME}", DOCUMENT_BYTES_MAX) == manifest
    except StorageError as error:
        return error.errno != errno.ENOENT


def _step(path: str) -> int:
    """The last number in the name of a directory; 0 without one."""
    found = _LAST_NUMBER.search(os.path.basename(path))
    return min(int(found[1]), STEP_MAX) if found else 0


def _partials(fs: Fs, final: str) -> list[str]:
    parent, _, name = final.rpartition("/")
    pattern = re.compile(re.escape(name) + _PARTIAL)
    return [
        f"{parent}/{entry}"
        for entry, is_dir in fs.listdir(parent_of(final))
        if is_dir and pattern.fullmatch(entry)
    ]


def _paths(metadata: Metadata) -> Mapping[str, Path]:
    """The places of the items in the state dict, as far as the planner knows them."""
    data = metadata.planner_data
    if not isinstance(data, Mapping):
        return {}
    return {name: path for name, path in data.items() if type(path) is tuple and path}


# -- copies for dcp.async_save ---------------------------------------------------------------------
# torch's default makes a new copy in host memory for every save, whose pages have to be faulted in
# each time. Here a copy goes back to a pool once torch has dropped its state dict. A save that
# begins earlier gets memory of its own. So memory is never written while a save still reads it, and
# nothing depends on the order in which saves end, or on whether they fail.


class Staged(dict[str, Any]):
    """A state dict in staging memory; a subclass, because a dict cannot be watched."""

    __slots__ = ("__weakref__",)

    # for the process checkpointer, which needs only a dict
    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class StagingPool:
    """Stagers of torch, each with the memory of one copy."""

    def __init__(self) -> None:
        # No lock: the collector appends, on any thread, whatever that is doing.
        self._idle: deque[DefaultStager] = deque()

    def stage(self, state: dict[str, Any]) -> dict[str, Any]:
        """A copy that no later change of `state` reaches; complete when this returns."""
        try:
            stager = self._idle.pop()
        except IndexError:
            stager = _new_stager()
        copied = stager.stage(state)
        assert isinstance(copied, dict)  # a Future only if it were asynchronous
        staged = Staged(copied)
        weakref.finalize(staged, self._idle.append, stager).atexit = False
        return staged

    def close(self) -> None:
        """Free the memory of unused copies."""
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().close()


def _new_stager() -> DefaultStager:
    """Each copy waits for its own device. After non-blocking copies torch waits only for the
    current device, and tensors of another one might not be complete."""
    pinned = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=pinned,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
    )


# -- ranks without collectives ---------------------------------------------------------------------
# With use_collectives=False torch runs the whole save on each rank by itself. Every planner makes a
# "global" plan of its own rank, and every rank calls finish(). The ranks have not shared out the
# writing. So a plain tensor or a value belongs to the rank that saved it, as with the stock writer,
# and a box of a DTensor to the lowest rank that wrote it.
#
# The ranks meet in the store of the process group. There is one attempt, made by rank 0 before any
# rank writes. The step is published once every rank has written all of its part, or not at all. If
# a rank fails, or does not come within `timeout_s`, the save fails on all ranks, with the number of
# that rank.
#
# The n-th save of a rank to one place pairs with the n-th of the others. Nothing tells a rank that
# has missed a save from one that is late for it, and a step must not mix two saves.


_SAVE = 1  # the only round of its Peers
_APART = (
    "every rank has to call dcp.save() with this checkpoint_id, within timeout_s of the others. If "
    "a rank has missed a save, the ranks no longer pair there: go on with another checkpoint_id on "
    "all ranks, such as RUN/step-N"
)


def is_missing(error: BaseException) -> TypeGuard[StorageError]:
    """Whether a file or the directory that it is in does not exist."""
    return isinstance(error, StorageError) and error.errno == errno.ENOENT


class SaveRound:
    """The ranks of one save, from its begin to its end."""

    def __init__(self, final: str, timeout_s: float) -> None:
        self.rank, self.world_size = rank_and_world()
        self._board = StoreBoard(_get_default_store(), f"dcp:{final}")
        self._peers = Peers(self._board, Membership(self.rank, self.world_size), timeout_s)

    def begin(self, make: Callable[[], SaveDestination]) -> SaveDestination:
        """The result of `make` on rank 0, on every rank."""
        try:
            made = Round("begin").hold(self._peers, None, lambda _: dataclasses.asdict(make()))
        except PeerLostError as error:
            error.hint = _APART
            raise
        return dataclasses.replace(SaveDestination(**made), rank=self.rank)

    def failed(self, error: BaseException) -> BaseException:
        """Report to the others that this rank will not come. Returns the error that ends the save:
        a rank that fails removes the files of the others, who then miss them."""
        first = self._peers.failure(_SAVE) if is_missing(error) else None
        if first is None:
            self._peers.fail(_SAVE, named(error, "while saving a checkpoint"))
        return first or error

    def end(
        self, sent: Sent, publish: Callable[[Iterator[Sent]], None], is_there: Callable[[], bool]
    ) -> None:
        """Hand over the files of this rank; returns once rank 0 has published them with the rest.

        is_there: whether the checkpoint is published, for a rank that gets no outcome from rank 0.
        """
        try:
            self._peers.arrive(_SAVE, json.dumps(_sent_to(sent)).encode())
            if self.rank:
                self._wait(is_there)
            else:
                self._conclude(sent, publish)
        finally:
            self._board.close()

    def _wait(self, is_there: Callable[[], bool]) -> None:
        try:
            self._peers.outcome(_SAVE)
        except StateholdError as error:
            # Rank 0 may have been lost after it committed, before it could announce the outcome.
            if isinstance(error, PeerFailedError) or not is_there():
                raise

    def _sents(self, own: Sent) -> Iterator[Sent]:
        """Of all ranks, once all have arrived. Raises if one does not."""
        others = self._peers.gather(_SAVE)[1:]
        yield own
        yield from (_sent_from(own.place, raw) for raw in others)

    def _conclude(self, own: Sent, publish: Callable[[Iterator[Sent]], None]) -> None:
        try:
            publish(self._sents(own))
        except BaseException as error:
            self._peers.conclude(_SAVE, named(error, "while publishing a checkpoint"))
            raise
        try:
            self._peers.conclude(_SAVE, b"")
        except StateholdError as error:  # the others check for themselves
            logger.warning("the checkpoint is committed; could not tell the other ranks\n%s", error)


# -- notes -----------------------------------------------------------------------------------------


def _sent_to(sent: Sent) -> dict[str, Any]:
    """The part without files and values, which a rank leaves in its own record."""
    entry = sent.entry and [sent.entry.name, sent.entry.bytes, sent.entry.sha256]
    pieces = [dataclasses.astuple(piece) for piece in sent.pieces if not piece.local]
    return {"rank": sent.place.rank, "pieces": pieces, "entry": entry, "digests": {**sent.digests}}


def _sent_from(place: SaveDestination, raw: bytes) -> Sent:
    note = json.loads(raw)
    pieces = tuple(
        WrittenBox(name, dtype, tuple(shape), Box(tuple(offsets), tuple(sizes)), local=False)
        for name, dtype, shape, (offsets, sizes), _ in note["pieces"]
    )
    own = dataclasses.replace(place, rank=note["rank"])
    return Sent(own, pieces, {}, RecordEntry(*note["entry"]), note["digests"], None)


# -- the round of a commit -------------------------------------------------------------------------
# Records and a manifest, which make a directory of the ranks' files a step.
#
# A step of one rank whose tensors are whole is version 1, as a Checkpointer writes it.
# Any other step is version 2. Rank 0's record has the whole tree and, for every tensor, the rank of
# each box. The other records have their own chunks.

Placed = tuple[WrittenBox, int]  # and the rank that wrote it


@dataclass(frozen=True, slots=True)
class Sent:
    """The message of one rank to the committer: its record, or its files if it is rank 0."""

    place: SaveDestination
    pieces: tuple[WrittenBox, ...]
    values: dict[str, Any]
    entry: RecordEntry | None
    digests: Mapping[str, str]
    own: Written | None


def hand_over(
    fs: Fs, place: SaveDestination, written: Written, paths: Mapping[str, Path] | None = None
) -> Sent:
    """Leave the record of this rank next to its files (D4), unless it is rank 0, which writes its
    last.

    With `paths` a rank has a tree of its own, because the ranks did not share out the saving.
    """
    if place.rank == 0:
        return Sent(place, written.pieces, written.values, None, {}, written)
    local = [piece for piece in written.pieces if piece.local]
    state = {} if paths is None else tree(local, written.values, paths)
    record = _record(place, written, state, [(piece, place.rank) for piece in written.pieces])
    entry = _leave(fs, place, record)
    return Sent(place, written.pieces, written.values, entry, record.group_digests(), None)


def complete(
    fs: Fs, sents: Sequence[Sent], paths: Mapping[str, Path], *, alone: bool = False
) -> bytes:
    """The manifest of the files of all ranks, by rank."""
    place, own = sents[0].place, sents[0].own
    if own is None:
        raise InvariantError("the first rank of a save is not the one that commits")
    placed = [
        (piece, sent.place.rank)
        for sent in sents
        for piece in sent.pieces
        if sent.place.rank == 0 or not piece.local
    ]
    values = own.values
    if not alone:
        values = {name: node for sent in sents for name, node in sent.values.items()}
    state = tree((piece for piece, _ in placed), values, paths)
    if _is_simple(place, own):
        return _manifest(place, own, state).encode(value_of=value_of)
    record = _record(place, own, state, placed)
    entries = [_leave(fs, place, record), *(sent.entry for sent in sents[1:] if sent.entry)]
    digests = [record.group_digests(), *(sent.digests for sent in sents[1:])]
    return Commit(
        step=place.step,
        world_size=place.world_size,
        created=now(),
        writer=WRITER,
        attempt=place.attempt,
        records=tuple(entries),
        state=groups_of(digests),
    ).encode()


def is_published(fs: Fs, place: SaveDestination) -> bool:
    """Whether the checkpoint of several ranks is the one at its final place; if so, D7 is done."""
    try:
        found = open_step(fs.read_file, place.final, place.step, place.rank, place.world_size)
    except (CorruptionError, StorageError):
        return False
    is_ours = found.attempt == place.attempt
    if is_ours:
        make_durable(fs, parent_of(place.final))
    return is_ours


def _is_simple(place: SaveDestination, written: Written) -> bool:
    """Whether version 1 can hold the step."""
    is_whole = all(piece.box == Box.whole(piece.shape) for piece in written.pieces)
    return place.world_size == 1 and len(written.files) == 1 and is_whole


def _manifest(place: SaveDestination, written: Written, state: Any) -> Manifest:
    """The manifest of a step of one rank."""
    pieces = {piece.name: piece for piece in written.pieces}
    return Manifest(
        step=place.step,
        world_size=1,
        created=now(),
        writer=WRITER,
        block_bytes=BLOCK_BYTES,
        files=written.files,
        tensors={
            name: TensorEntry(pieces[name].dtype, pieces[name].shape, chunks)
            for name, chunks in written.chunks.items()
        },
        state=state,
    )


def _record(
    place: SaveDestination, written: Written, state: Any, placed: Sequence[Placed]
) -> Record:
    """The record of one rank, with the rank of each box for the tensors in `placed`."""
    boxes: defaultdict[str, dict[Box, int]] = defaultdict(dict)
    pieces: dict[str, WrittenBox] = {}
    for piece, rank in placed:
        _check_alike(pieces.setdefault(piece.name, piece), piece)
        if piece.box.numel and boxes[piece.name].setdefault(piece.box, rank) == rank:
            _check_once(piece, written, rank == place.rank)
    held = [
        HeldTensor(
            piece.name,
            piece.dtype,
            piece.shape,
            None if piece.local else ExplicitLayout(tuple(boxes[piece.name].items())),
        )
        for piece in pieces.values()
    ]
    return Record(
        step=place.step,
        world_size=place.world_size,
        rank=place.rank,
        attempt=place.attempt,
        block_bytes=BLOCK_BYTES,
        files=written.files,
        held=tuple(held),
        chunks={
            name: kept
            for name, chunks in written.chunks.items()
            if (kept := tuple(chunk for chunk in chunks if chunk.box.numel))
        },
        state=state,
    )


def _leave(fs: Fs, place: SaveDestination, record: Record) -> RecordEntry:
    """Write a record next to the files of its rank, durably."""
    raw, name = record.encode(value_of=value_of), record_name(place.rank, place.world_size)
    fs.write_file(f"{place.partial}/{name}", raw)
    fs.sync_dir(place.partial)
    return RecordEntry(name, len(raw), sha256(raw))


def tree(pieces: Iterable[WrittenBox], nodes: Mapping[str, Any], paths: Mapping[str, Path]) -> Any:
    """The state: the tensors that a planner named, and the values, nested as they were saved."""
    inside = {name for node in nodes.values() for name in tensors_of(node)}
    named = dict.fromkeys(piece.name for piece in pieces if piece.name not in inside)
    return nest({**{name: {"$tensor": name} for name in named}, **nodes}, paths)


def _check_alike(one: WrittenBox, other: WrittenBox) -> None:
    if (one.dtype, one.shape, one.local) != (other.dtype, other.shape, other.local):
        raise UsageError(
            "two ranks save different tensors under one name",
            facts={
                "name": one.name,
                "one": f"{one.dtype} {list(one.shape)}",
                "other": f"{other.dtype} {list(other.shape)}",
            },
        )


def _check_once(piece: WrittenBox, written: Written, is_own: bool) -> None:
    boxes = [chunk.box for chunk in written.chunks.get(piece.name, ())] if is_own else []
    if boxes.count(piece.box) > 1:
        raise UsageError(
            "a rank saves two tensors under one name",
            facts={"name": piece.name, "box": str(piece.box)},
            hint="names are joined with dots: rename a key of the dicts on the way",
        )
