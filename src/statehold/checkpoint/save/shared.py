"""The shared files of one save: those that it links, and those that it writes for later saves.

    training thread   start_first, start   the engine begins to copy the parts of new files, and
                                           those of linked files that it compares on their way
    stage thread      prove                other linked files: does memory still have their bytes?
                                           If it does not, those parts are copied, too, before the
                                           state may change
                      wait_copied
    commit thread     open                 D1 of new files, with the rank's own file: room for all,
                                           or none
                      finish_first, finish D2 of them, and of files instead of refuted ones
                      files                the files of the step other than the rank's own

Invariants: a file is linked only if its bytes were proven to be those in memory, in this save. If
anything fails, the save fails, and no tensor is in two files of it or in none.

Not here: which parts go where (sharing), second names (pipeline), the files' names (steps/pool).
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple, Protocol

from statehold._core import hash_memory
from statehold.checkpoint.save.writes import FileOrder, Ordered, give_back, start_write
from statehold.layout.plan import BLOCK_BYTES, SavePlan, pieces, plan_save, sum_places
from statehold.layout.share import Key, Part, Parts, RankPlan, Share, keys_of
from statehold.layout.stored import SUM_BYTES, StoredFile
from statehold.options.io import settled
from statehold.process.worker import Crew, yield_processor
from statehold.tensors.devices.jobs import JobSource

if TYPE_CHECKING:
    from statehold._core import Engine, File, WriteJob
    from statehold.io.runtime import Runtime
    from statehold.steps.store import Store
    from statehold.tensors.columns import Stamps, Tensors


# -- the files of a save ---------------------------------------------------------------------------
# A linked file is compared where the bytes lie, if that is host memory that stays as it is until
# the next update. Bytes of a device, and those that are copied before save() returns, are copied to
# staging memory as for a write. There they are hashed, and the buffer is given back. If some are
# not as in the file, they stay in their buffer, and the rest comes from the file
# (native/write_job.h).
#
# Jobs get their files in the order in which they were started (native/lending.h). What is copied
# before save() returns is started first: nothing there waits for a write that could be later.


@dataclass(eq=False, slots=True)
class SharedFile:
    """A file in the pool of `store`, durable, with parts of the state.

    plan: its parts in file order, as the last save had them. seen: their stamps, then.
    keys: what tells these parts from others. share: of the rank in the last save that linked it.
    users: saves under way that link it or have written it. steps: that hold it, or held it.
    """

    store: Store
    path: str
    plan: RankPlan
    sums: bytes
    seen: Stamps
    order: FileOrder = field(default_factory=FileOrder)
    share: Share | None = None
    users: int = 0
    steps: int = 0
    keys: tuple[Key, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.keys = keys_of(self.plan)


class Register(Protocol):
    """What gets the outcome of the shared files of saves (sharing)."""

    @property
    def runtime(self) -> Runtime: ...

    @property
    def spare_engine(self) -> Engine:
        """An engine whose buffers no save takes."""

    def made(self, file: SharedFile, replaces: FileLink | None) -> None:
        """A file is durable, and the save that has written it uses it."""

    def refused(self, paths: Collection[str]) -> None:
        """The store copied these files of its pool into a step, because it could not link them."""

    def committed(self, plan: RankPlan, sums: bytes) -> None:
        """A step is committed. plan, sums: of the rank's own file."""

    def ended(self, shared: SharedFiles, *, failed: bool) -> None:
        """A save has ended. If it failed, a shared file may be the reason: none is linked again."""


@dataclass(eq=False, slots=True)
class FileLink:
    """A shared file that a save links, and what the state has now for it.

    job: compares it, unless it is compared in place. changed: of its parts. is_replaced: the step
    has another file instead.
    """

    file: SharedFile
    ordered: Ordered | None
    changed: set[int] = field(default_factory=set)
    job: WriteJob | None = None
    is_replaced: bool = False


@dataclass(eq=False, slots=True)
class Fresh:
    """A shared file that a save writes. replaces: the link that was not proven."""

    plan: RankPlan
    ordered: Ordered | None
    seen: Stamps
    replaces: FileLink | None = None
    path: str = ""
    file: File | None = None
    job: WriteJob | None = None
    is_durable: bool = False


@dataclass(eq=False, slots=True)
class SharedFiles:
    """The shared files of one save."""

    register: Register
    links: list[FileLink]
    fresh: list[Fresh]
    written: list[SharedFile] = field(default_factory=list)
    _proven: SimpleQueue[None] = field(default_factory=lambda: SimpleQueue())  # a simulated one
    _replacing: list[Fresh] = field(default_factory=list)
    _first: list[Fresh | FileLink] = field(
        default_factory=list
    )  # whose jobs were started, in order
    _later: list[Fresh | FileLink] = field(default_factory=list)
    _store: Store | None = None
    _attempt: str | None = None

    @property
    def fresh_bytes(self) -> int:
        """What new files take on the storage."""
        return sum(each.plan.save.file_bytes for each in self.fresh)

    @property
    def compared_bytes(self) -> int:
        """What linked files take that are compared on their way through buffers."""
        links = (link for link in self.links if not _ordered(link).segments.can_be_read_in_place)
        return sum(link.file.plan.save.file_bytes for link in links)

    @property
    def _planned(self) -> list[Fresh | FileLink]:
        return [*self.fresh, *self.links]

    # -- the thread that trains, and the stage thread -------------------------------------------

    def start_first(self) -> None:
        """Begin to copy what is copied before save() returns. Before the rank's own file."""
        self._start_all(self._first, are_eager=True)

    def start(self, own: JobSource) -> list[JobSource]:
        """Begin to copy the rest. After the rank's own file. Returns all jobs of the save, in the
        order in which they were started."""
        self._start_all(self._later, are_eager=False)
        return [*map(_source, self._first), own, *map(_source, self._later)]

    def _start_all(self, started: list[Fresh | FileLink], *, are_eager: bool) -> None:
        for each in self._planned:
            if _ordered(each).segments.are_eager is are_eager:
                self._start(each, self.register.runtime.engine)
                if each.job is not None:
                    started.append(each)

    def wait_eager(self) -> None:
        """Return once the engine has copied what it copies before save() returns."""
        for each in self._first:
            _job(each).wait_eager(None)

    def prove(self) -> None:
        """Compare linked files in place. Begins to write those that differ."""
        try:
            links = [link for link in self.links if link.job is None]
            if links:
                self._compare(links)
        finally:
            self._proven.put(None)

    def _compare(self, links: Sequence[FileLink]) -> None:
        found = refuted([_claim(link) for link in links], self.register.runtime)
        for link, changed in zip(links, found, strict=True):
            link.changed = changed
            if changed:
                self._replacing.append(_replacement(link))
                # The next save may have taken all buffers for saves, and it waits for this one.
                self._start(self._replacing[-1], self.register.spare_engine)

    def wait_copied(self) -> None:
        """Return once all bytes have been copied, or compared."""
        for each in (*self._first, *self._later, *self._replacing):
            _job(each).wait_copied(None)
        self._let_go()

    def _let_go(self) -> None:
        for each in (*self._planned, *self._replacing):
            each.ordered = None

    # -- the commit thread -------------------------------------------------------------------

    def open(self, store: Store, attempt: str | None) -> None:
        """D1 of new files. Raises StorageError; then none is open."""
        self._store, self._attempt = store, attempt
        try:
            for each in self.fresh:
                self._open(each)
        except BaseException:
            self.close_files()
            raise

    def close_files(self) -> None:
        """The save goes to another level, or nowhere. Files that are not durable are removed."""
        for each in (*self.fresh, *self._replacing):
            file, each.file = each.file, None
            if file is not None:
                give_back(file)
            if self._store is not None and not each.is_durable:
                self._store.pool.drop(each.path)

    def attach(self) -> None:
        """Give new files to their jobs."""
        for each in self.fresh:
            self._attach(each)

    def finish_first(self) -> None:
        """D2 of what was started before the rank's own file. Before D2 of that one."""
        self._finish_all(self._first)

    def finish(self) -> None:
        """D2 of the others, once the stage thread has compared those that are compared in place."""
        self._finish_all(self._later)
        self._proven.put(self._proven.get())  # for another try at another level, too
        for each in self._replacing:
            if not each.is_durable:
                self._open(each)
                self._attach(each)
        for each in self._replacing:
            if not each.is_durable:
                self._finish(each)

    def _finish_all(self, started: Sequence[Fresh | FileLink]) -> None:
        for each in started:
            if isinstance(each, Fresh):
                self._finish(each)
            else:
                self._settle(each)

    def _settle(self, link: FileLink) -> None:
        """Wait for the comparison, and write the file that the step has if some bytes differ."""
        job = _job(link)
        job.wait_compared(None)
        if job.is_refuted:
            instead = Fresh(link.file.plan, None, link.file.seen, replaces=link, job=job)
            self._replacing.append(instead)
            self._open(instead)
            self._attach(instead)
            self._finish(instead)

    @property
    def used(self) -> list[SharedFile]:
        """All files of the pool that the save links or has written."""
        return [*(link.file for link in self.links), *self.written]

    def files(self) -> list[StoredFile]:
        """All shared files of the step."""
        links = [link.file for link in self.links if not link.is_replaced]
        return [_stored(file) for file in (*links, *self.written)]

    def cancel(self) -> None:
        """Stop the jobs."""
        self._proven.put(None)
        for each in (*self._planned, *self._replacing):
            if each.job is not None:
                each.job.cancel()
        self._let_go()

    def release(self, *, failed: bool) -> None:
        """The save has ended."""
        self.close_files()
        self.register.ended(self, failed=failed)
        self.links, self.fresh, self._replacing, self.written = [], [], [], []
        self._first, self._later = [], []

    # -- one file ----------------------------------------------------------------------------

    def _start(self, each: Fresh | FileLink, engine: Engine) -> None:
        ordered = _ordered(each)
        if isinstance(each, Fresh):
            each.job = start_write(engine, each.plan.save, ordered)
        elif not ordered.segments.can_be_read_in_place:
            file = each.file
            each.job = start_write(engine, file.plan.save, ordered, expected=file.sums)

    def _open(self, fresh: Fresh) -> None:
        assert self._store is not None
        nbytes = fresh.plan.save.file_bytes
        fresh.path, fresh.file = self._store.pool.open(nbytes, self._attempt)

    def _attach(self, fresh: Fresh) -> None:
        assert fresh.file is not None
        link = fresh.replaces
        before = None
        if link is not None and link.job is not None:
            before = link.file.store.fs.open_read(link.file.path)
        _job(fresh).attach(fresh.file, before)

    def _finish(self, fresh: Fresh) -> None:
        job, link = _job(fresh), fresh.replaces
        job.wait_written(None)
        job.finish()
        fresh.file, fresh.is_durable = None, True
        assert self._store is not None
        sums = job.checksums()
        if link is not None:
            # Perhaps none: the state may have changed back before it was copied. The step has one
            # file of these parts in any case.
            link.changed = differing(fresh.plan.save, sums, link.file.sums)
            link.is_replaced = True
        file = SharedFile(self._store, fresh.path, fresh.plan, sums, fresh.seen)
        self.written.append(file)
        self.register.made(file, link)


def _ordered(each: Fresh | FileLink) -> Ordered:
    assert each.ordered is not None
    return each.ordered


def _job(each: Fresh | FileLink) -> WriteJob:
    assert each.job is not None
    return each.job


def _source(each: Fresh | FileLink) -> JobSource:
    return JobSource(_job(each), _ordered(each).tensors)


def _claim(link: FileLink) -> BytesClaim:
    return BytesClaim(link.file.plan.save, _ordered(link).tensors, link.file.sums)


def _replacement(link: FileLink) -> Fresh:
    plan = link.file.plan
    again = plan_of(list(plan.share.parts), plan.save)
    return Fresh(again, link.ordered, link.file.seen, replaces=link)


def _stored(file: SharedFile) -> StoredFile:
    save = file.plan.save
    return StoredFile(
        file.path, save.file_bytes, save.data_begin, save.specs, save.begins, file.sums
    )


def plan_of(parts: Sequence[Part], of: SavePlan) -> RankPlan:
    """The plan of a shared file with these parts; the rank, its job and the step are those of
    another plan. The parts of the result are in file order."""
    save = plan_file(parts, of)
    ordered = Parts.of([parts[index] for index in save.source_index])
    return RankPlan(replace(save, source_index=tuple(range(len(parts)))), Share(ordered))


def plan_file(
    parts: Sequence[Part], of: SavePlan, frozen: tuple[str, ...] | None = None
) -> SavePlan:
    """The plan of a file with these parts, by the rank and at the step of another plan."""
    specs = [part.spec for part in parts]
    return plan_save(specs, step=of.step, world_size=of.world_size, rank=of.rank, frozen=frozen)


# -- the proof -------------------------------------------------------------------------------------
# Reads memory, and no storage. Version counters say what has probably not changed, and never that
# it has not: an extension, NumPy or `.data` may write without counting. So the bytes are hashed,
# piece by piece as those of the file were, and compared with its checksums (decision S2). The bytes
# of the header are not compared; nobody but the file has them. The threads are those of one proof,
# and leave the processor to training.


class BytesClaim(NamedTuple):
    """`tensors`, in file order and dense in host memory, have the bytes of a file.

    plan, sums: of the file.
    """

    plan: SavePlan
    tensors: Tensors
    sums: bytes


class FilePiece(NamedTuple):
    """A piece of a tensor of a file, both by number, and its checksum in the file."""

    file: int
    tensor: int
    address: int
    nbytes: int
    expected: int


def refuted(claims: Sequence[BytesClaim], runtime: Runtime) -> list[set[int]]:
    """Of each claim, the indices of tensors that differ from the file."""
    found = [piece for file, claim in enumerate(claims) for piece in _pieces(file, claim)]
    left = iter(found)  # next() takes one at a time, whichever thread asks

    def compare() -> list[FilePiece]:
        return [each for each in left if hash_memory(each.address, each.nbytes) != each.expected]

    count = min(settled(runtime.options.io).copy_threads, len(found))
    differing = [set[int]() for _ in claims]
    if count:
        with contextlib.closing(low_priority(count)) as threads:
            for task in [threads.submit(compare) for _ in range(count)]:
                for piece in task.result():
                    differing[piece.file].add(piece.tensor)
    return differing


def differing(plan: SavePlan, sums: bytes, others: bytes) -> set[int]:
    """The indices of tensors with other checksums in one file of this plan than in another."""
    places = enumerate(windows(plan))
    return {index for index, (low, high) in places if sums[low:high] != others[low:high]}


def windows(plan: SavePlan) -> list[tuple[int, int]]:
    """Where in the checksums of a file those of each tensor are: [begin, end) in bytes."""
    places = sum_places(plan.data_begin, plan.begins, plan.specs)
    return list(pairwise([SUM_BYTES * at for at in places]))


def _pieces(file: int, claim: BytesClaim) -> Iterator[FilePiece]:
    plan, tensors, sums = claim
    places = zip(plan.begins, plan.specs, tensors.live.addresses, windows(plan), strict=True)
    for index, (at, spec, address, (low, high)) in enumerate(places):
        cuts = pieces(at, spec.nbytes, BLOCK_BYTES)
        expected = struct.iter_unpack("<Q", sums[low:high])
        for (begin, end), (value,) in zip(cuts, expected, strict=True):
            yield FilePiece(file, index, address + begin - at, end - begin, value)


def low_priority(count: int) -> Crew:
    """So many threads that leave the processor to training."""
    return Crew("statehold-proof", count, yield_processor)
