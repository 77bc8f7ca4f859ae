"""Which parts of a state lie in files that several steps share: decided from save to save.

    split       for a save: the files to link, the parts to write to new shared files, and the rest,
                which the rank writes to its own file as ever
    made        a shared file is durable, so the next save may link it
    committed   what this step and the one before have alike, by their checksums: parts that stay
                the same are written to a shared file with the next save
    ended       nobody links a file any more that was given up meanwhile: its name in the pool goes

Invariants: at most one file that may be linked has a part. A part is in a shared file, or in the
one that the rank writes, and never in both. While nothing stays the same, a save does nothing here
but compare checksums after its commit.

Not here: the proof that a part is as in its file, and the files of one save (shared).
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING

from statehold.checkpoint.save.shared import (
    FileLink,
    Fresh,
    SharedFile,
    SharedFiles,
    plan_file,
    plan_of,
    windows,
)
from statehold.checkpoint.save.writes import FileOrder
from statehold.errors import StateholdError, StorageError
from statehold.format.entries import sums_to_bytes
from statehold.format.saved import PlacedChunk, SavedStep
from statehold.layout.share import Key, Part, Parts, RankPlan, Share, key_of, keys_of
from statehold.process.warn import logger
from statehold.steps.copying import is_shared
from statehold.units import MiB

if TYPE_CHECKING:
    from statehold._core import Engine, Fs
    from statehold.io.runtime import Runtime
    from statehold.ranks.peers import Peers
    from statehold.steps.store import Store
    from statehold.steps.target import DirectoryPlace
    from statehold.tensors.columns import Tensors

# -- from save to save -----------------------------------------------------------------------------
# A part is expected to stay the same if it did so in the last saves, or at first if it is a
# parameter that needs no gradient. Whether it did is proven in each save.


class Sharing:
    """The shared files of a rank in the store of `place`, the level that saves go to first.

    peers: None for a process that is alone. Thread-safe: the training thread splits, and the commit
    thread reports.
    """

    def __init__(self, place: DirectoryPlace, runtime: Runtime, peers: Peers | None) -> None:
        self.runtime = runtime
        self._place = place
        self._peers = peers
        # A step that the job has restored. The next save looks at it, and links its shared files.
        self.restored: int | None = None
        self._resumed: list[KnownFile] = []  # its files that are not in the pool
        self._resumed_step: int | None = None
        self._is_new = False  # the structure of the state
        self._guard = threading.Lock()
        self._is_off = not runtime.options.io.share_files
        self._history: History = History()
        self._files: list[SharedFile] = []
        self._making: set[Key] = set()
        # Of the structure of the state:
        self._share: Share | None = None
        self._parts: dict[Key, Part] = {}  # those that may be shared, in the order of the state
        self._own: tuple[set[int], RankPlan] | None = None  # the own file without these sources
        # Those of the own file that may be shared, and where their checksums are.
        self._windows: tuple[Share, list[tuple[Key, int, int]]] | None = None
        self._sums: tuple[Share, bytes] | None = None  # of the own file in the last step

    @property
    def spare_engine(self) -> Engine:
        """The engine of copies to the level."""
        return self._place.engine

    # -- the thread that trains ----------------------------------------------------------------

    def split(self, plan: RankPlan, captured: Tensors) -> tuple[RankPlan, SharedFiles | None]:
        """The plan of the rank's own file in this save, and the shared files, if there are any."""
        with self._guard:
            if self._is_off:
                return plan, None
            if plan.share is not self._share:
                self._look(plan)
                self._is_new = True
            if self._is_new or self.restored is not None:
                self._is_new = False
                self._take_over(plan, captured)
            if plan.save.step == self._resumed_step:
                self._resumed = []  # their names lead to the files of this save from now on
            if not (self._files or self._history.same):
                return plan, None
            links = self._links(captured)
            linked = {key for link in links for key in link.file.keys}
            fresh = self._fresh(plan, captured, linked)
            made = {key for each in fresh for key in keys_of(each.plan)}
            if not (links or fresh):
                return plan, None
            self._making |= made
            own = self._rest(plan, {self._parts[key].source for key in linked | made})
            return own, SharedFiles(self, links, fresh)

    def _look(self, plan: RankPlan) -> None:
        """The state has another structure, or this rank another share of it."""
        self._share, self._own = plan.share, None
        large = [part for part in plan.share.parts if part.spec.nbytes >= PART_BYTES_MIN]
        self._parts = {key_of(part.spec): part for part in large}
        self._history.keep(self._parts)
        frozen = frozenset(plan.save.frozen or ())
        self._history.predict(key for key in self._parts if key[0] in frozen)

    def _take_over(self, plan: RankPlan, captured: Tensors) -> None:
        """Name the files of the restored step in the pool, if the state has exactly their parts.

        In the first saves of a job, ranks may write other parts than later: the rest waits.
        """
        left = self._files_of_restored()
        taken = self._making.union(*(file.keys for file in self._files))
        self._resumed = [each for each in left if not self._parts.keys() >= set(each.keys)]
        for known in left:
            if known not in self._resumed and taken.isdisjoint(known.keys):
                self._name(known, plan, captured)

    def _files_of_restored(self) -> list[KnownFile]:
        step, self.restored = self.restored, None
        if step is not None and not self._place.is_apart:
            rank, world = (self._peers.rank, self._peers.world_size) if self._peers else (None, 1)
            self._resumed = known_files(self._place.store, step, rank, world)
            self._resumed_step = step
        return self._resumed

    def _name(self, known: KnownFile, plan: RankPlan, captured: Tensors) -> None:
        its = plan_of([self._parts[key] for key in known.keys], plan.save)
        save = its.save.as_written(known.header)
        if save is None or (save.begins, save.file_bytes) != (known.begins, known.file_bytes):
            return  # written with another header
        store = self._place.store
        token = None if self._peers is None else self._peers.token
        path = store.pool.take(known.path, token)
        if path is not None:
            seen = captured.stamps(its.share.parts.sources)
            written = RankPlan(save, its.share)
            self._files.append(SharedFile(store, path, written, known.sums, seen, steps=1))

    def _links(self, captured: Tensors) -> list[FileLink]:
        links = []
        for file in list(self._files):
            link = self._link(file, captured)
            if link is None:
                self._give_up(file)
            else:
                file.users += 1
                links.append(link)
        return links

    def _link(self, file: SharedFile, captured: Tensors) -> FileLink | None:
        """None if the state has not all parts of the file, or if some have changed."""
        if file.share is not self._share and not self._fit(file):
            return None
        seen = captured.stamps(file.plan.share.parts.sources)
        changed = [file.keys[index] for index in seen.changed_since(file.seen)]
        if changed:
            self._history.broke(changed)
            return None
        file.seen = seen
        return FileLink(file, file.order.ordered(file.plan, captured))

    def _fit(self, file: SharedFile) -> bool:
        """Let the plan of the file have its parts as the state has them now, if it has them all."""
        if any(key not in self._parts for key in file.keys):
            return False
        parts = Parts.of([self._parts[key] for key in file.keys])
        if parts != file.plan.share.parts:
            save = replace(file.plan.save, specs=tuple(parts.specs))
            file.plan, file.order = RankPlan(save, Share(parts)), FileOrder()
        file.share = self._share
        return True

    def _fresh(self, plan: RankPlan, captured: Tensors, linked: Set[Key]) -> list[Fresh]:
        """New files for the parts that have stayed the same and are in no file."""
        taken = linked | self._making
        if self._history.same.keys() <= taken:
            return []
        wanted = [
            part
            for key, part in self._parts.items()
            if key not in taken and self._history.is_quiet(key)
        ]
        found = []
        for some in _alike(wanted, captured):
            for run in grouped([part.spec.nbytes for part in some]):
                its = plan_of(some[run.start : run.stop], plan.save)
                seen = captured.stamps(its.share.parts.sources)
                found.append(Fresh(its, FileOrder().ordered(its, captured), seen))
        return found

    def _rest(self, plan: RankPlan, away: set[int]) -> RankPlan:
        """The plan of the rank's own file, without the parts from these sources."""
        if self._own is None or self._own[0] != away:
            parts = [part for part in plan.share.parts if part.source not in away]
            found = plan_file(parts, plan.save, plan.save.frozen)
            self._own = away, RankPlan(found, replace(plan.share, parts=Parts.of(parts)))
        own = self._own[1]
        return RankPlan(own.save.at_step(plan.save.step), own.share)

    # -- the thread that commits ---------------------------------------------------------------

    def made(self, file: SharedFile, replaces: FileLink | None) -> None:
        with self._guard:
            file.users += 1
            if replaces is not None:
                # What changed without being counted may do so again: no later save takes the file.
                keys = replaces.file.keys
                self._history.broke([keys[index] for index in replaces.changed])
                self._give_up(replaces.file)
            elif file.store is self._place.store and not self._is_off:
                self._files.append(file)

    def refused(self, paths: Collection[str]) -> None:
        with self._guard:
            found = [file for file in self._files if file.path in paths]
            for file in found:
                self._give_up(file)
            # A file that steps hold already has as many names as it can get: another may be linked.
            if any(not file.steps for file in found):
                self._is_off = True
                logger.warning(
                    "steps in %s share no files from now on, because the file system gives a file "
                    "no second name: saves write the whole state",
                    self._place.store.root,
                )

    def committed(self, plan: RankPlan, sums: bytes) -> None:
        with self._guard:
            before, self._sums = self._sums, (plan.share, sums)
            if self._is_off or before is None or before[0] is not plan.share:
                return  # other places in the file: the next step tells
            if self._windows is None or self._windows[0] is not plan.share:
                found = zip(keys_of(plan), windows(plan.save), strict=True)
                known = [(key, *place) for key, place in found if key in self._parts]
                self._windows = plan.share, known
            same, changed = list[Key](), list[Key]()
            for key, low, high in self._windows[1]:
                is_same = sums[low:high] == before[1][low:high]
                (same if is_same else changed).append(key)
            self._history.saved(same, changed)

    def ended(self, shared: SharedFiles, *, failed: bool) -> None:
        with self._guard:
            for each in shared.fresh:
                self._making.difference_update(keys_of(each.plan))
            for file in shared.used:
                file.users -= 1
                if failed:
                    self._give_up(file)
                else:
                    file.steps += 1
                self._drop(file)

    def _give_up(self, file: SharedFile) -> None:
        """No later save links the file."""
        if file in self._files:
            self._files.remove(file)
            self._drop(file)

    def _drop(self, file: SharedFile) -> None:
        if not file.users and file not in self._files:
            file.store.pool.drop(file.path)


def _alike(parts: Sequence[Part], captured: Tensors) -> Iterable[list[Part]]:
    """These parts by when they are copied, and from where. So all bytes of a file are compared in
    one way."""
    structure = captured.structure
    eager = set(structure.eager)
    found: defaultdict[tuple[bool, bool], list[Part]] = defaultdict(list)
    for part in parts:
        found[part.source in eager, structure.external[part.source]].append(part)
    return found.values()


# -- the step that the job goes on from ------------------------------------------------------------
# The first save of a job links the shared files of the step that it goes on from. Without this, a
# job that is started again, or a child that has just begun from a step of its parent, would write
# all that never changes once more.
#
# The step that wrote such a file is in its header, and in no document. So the header is read, too:
# the file is compared with a plan of that step. This only reads. The save that links a file
# compares it with memory, so a state that was changed since the restore is no danger.


@dataclass(frozen=True, slots=True)
class KnownFile:
    """A shared file of a committed step. keys, begins: of its parts, in file order. sums: of all
    its pieces, as a save has them. header: as it is in the file; nobody has compared it."""

    path: str
    header: bytes
    keys: tuple[Key, ...]
    begins: tuple[int, ...]
    file_bytes: int
    sums: bytes


def known_files(store: Store, step: int, rank: int | None, world: int) -> list[KnownFile]:
    """The shared files that `rank` of `world` ranks (None: the only one) has written of a step.

    Nothing if the step cannot be read, or if another number of ranks has saved it.
    """
    with contextlib.suppress(StateholdError):
        if step in store.steps() and _shares(store, step):
            saved = store.open(step, rank, world)
            if saved.world_size == world:
                return _files(store.fs, saved, store.path(step))
    return []


def _shares(store: Store, step: int) -> bool:
    """Whether any file of the step may be shared. Most steps need no look at their documents."""
    return any(is_shared(name) for name, _ in store.fs.listdir(store.where(step)))


def _files(fs: Fs, saved: SavedStep, directory: str) -> list[KnownFile]:
    held: dict[str, list[tuple[Key, PlacedChunk]]] = {}
    foreign = set()  # files of an optimizer on tiers, whose padding is no tensor of the state
    for name, chunks in saved.own_chunks():
        tensor = saved.tensors.get(name)
        for chunk in chunks:
            if tensor is None:
                foreign.add(chunk.file)
                continue
            key = name, tensor.dtype, chunk.box.shape, chunk.box.offsets
            held.setdefault(chunk.file, []).append((key, chunk))
    headers = {file.name: file.header_sums for file in saved.files}
    known = (
        _known(fs, f"{directory}/{name}", headers[name], sorted(found, key=_begin))
        for name, found in held.items()
        if is_shared(name) and name not in foreign
    )
    return [each for each in known if each is not None]


def _begin(each: tuple[Key, PlacedChunk]) -> int:
    return each[1].begin


def _known(
    fs: Fs, path: str, header_sums: str, found: Sequence[tuple[Key, PlacedChunk]]
) -> KnownFile | None:
    chunks = [chunk for _, chunk in found]
    header = _header(fs, path, chunks[0].begin, chunks[0].file_bytes)
    if header is None:
        return None
    return KnownFile(
        path=path,
        header=header,
        keys=tuple(key for key, _ in found),
        begins=tuple(map(attrgetter("begin"), chunks)),
        file_bytes=chunks[0].file_bytes,
        sums=sums_to_bytes("".join((header_sums, *(chunk.sums for chunk in chunks)))),
    )


def _header(fs: Fs, path: str, nbytes: int, file_bytes: int) -> bytes | None:
    """None if the file is gone, or cut: a restore of other parts has not looked at it."""
    raw = bytearray(nbytes)
    with contextlib.suppress(StorageError), contextlib.closing(fs.open_read(path)) as file:
        if file.size_bytes() == file_bytes:
            file.read_into(raw, 0)
            return bytes(raw)
    return None


# -- how parts become files ------------------------------------------------------------------------
# Pure arithmetic on sizes and on history. No file is made smaller than FILE_BYTES_MIN, and a rank
# has few of them however large its state is. A part that keeps changing is written to shared files
# ever more rarely.


# A smaller tensor is written with what changes: a checksum, a name and a place cost as much.
PART_BYTES_MIN = 64 << 10
FILE_BYTES_MIN = 8 * MiB
FILE_BYTES = 64 * MiB
# With more files, their names and syncs would take longer than what they save.
FILES_MAX = 64
_SAVES_MAX = 64


def grouped(sizes: Sequence[int]) -> list[range]:
    """Runs of neighbouring parts, each for one file; parts that make no file are in no run."""
    total = sum(sizes)
    if total < FILE_BYTES_MIN:
        return []
    wanted = max(FILE_BYTES, -(-total // FILES_MAX))
    groups, begin, nbytes = list[range](), 0, 0
    for index, size in enumerate(sizes):
        nbytes += size
        if nbytes >= wanted:
            groups.append(range(begin, index + 1))
            begin, nbytes = index + 1, 0
    if nbytes >= FILE_BYTES_MIN or not groups:
        groups.append(range(begin, len(sizes)))
    elif nbytes:
        groups[-1] = range(groups[-1].start, len(sizes))
    return groups


class History:
    """For how many saves each part has been the same, and for how many it has to be.

    That is one, at first. It doubles each time that a part changes which was in a shared file.
    """

    def __init__(self) -> None:
        self.same: dict[Key, int] = {}  # no other part may be quiet
        self._needed: dict[Key, int] = {}

    def saved(self, same: Iterable[Key], changed: Iterable[Key]) -> None:
        """A save has compared these with the save before."""
        for key in same:
            self.same[key] = self.same.get(key, 0) + 1
        for key in changed:
            self.same.pop(key, None)

    def predict(self, keys: Iterable[Key]) -> None:
        """Nothing is known of these yet, and nobody is expected to change them."""
        for key in keys:
            if key not in self._needed:
                self.same.setdefault(key, 1)

    def broke(self, keys: Iterable[Key]) -> None:
        """These were in a shared file, and have changed."""
        for key in keys:
            self.same.pop(key, None)
            self._needed[key] = min(_SAVES_MAX, 2 * self._needed.get(key, 1))

    def keep(self, keys: Collection[Key]) -> None:
        """The state has only these parts from now on."""
        self.same = {key: count for key, count in self.same.items() if key in keys}
        self._needed = {key: count for key, count in self._needed.items() if key in keys}

    def is_quiet(self, key: Key) -> bool:
        """Whether the part may go to a shared file."""
        return self.same.get(key, 0) >= self._needed.get(key, 1)
