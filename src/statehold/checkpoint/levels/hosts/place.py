"""A level that each host has for itself: all hosts together have its steps.

    HostPlace     files that the ranks of a host have saved, or copied from a nearer level
    CopiesPlace   files that a host holds for other hosts, so that the run survives the loss of one
    Scattered     the steps of all hosts, read from the shelves of the single hosts

Owns: for one level, this rank's knowledge of the hosts and the places of files; which rank copies
which files from here, or to here. Until the ranks have met (discovery), it knows only its own host.
Invariants: on one host it is a DirectoryPlace like any other, with the same cost. A step that not
all hosts have published does not count: no reader sees it, and it is removed when a later one is
there. A step that survives the loss of hosts, as any rank knows it, stays on all hosts until a
younger one does.

Not here: the meeting (discovery), which steps are whole (census), commits in two rounds
(commit_rounds, save/publishing), how bytes come from another host (remote).
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from statehold.checkpoint.levels.hosts.census import (
    Holder,
    Holding,
    PlacedFiles,
    holds_file,
    lacking_hosts,
    settled,
)
from statehold.errors import (
    CorruptionError,
    MissingFileError,
    StateholdError,
    StorageError,
    storage_error,
)
from statehold.format.entries import sha256
from statehold.format.manifest import Manifest
from statehold.format.saved import MANIFEST_NAME
from statehold.layout.layout import Ranks
from statehold.options.paths import step_name
from statehold.process.host_memory import boot_id
from statehold.process.warn import logger
from statehold.steps.directories import each_of
from statehold.steps.shelf import Ranges, Shelf, ShelfFile, Through
from statehold.steps.store import check_newest
from statehold.steps.target import Carriers, DirectoryPlace, Share, StoreSite, Target

if TYPE_CHECKING:
    from statehold._core import File
    from statehold.checkpoint.levels.hosts.remote import FarFiles
    from statehold.ranks.peers import Peers
    from statehold.steps.copying import Copy
    from statehold.steps.near_files import NearFiles
    from statehold.steps.store import Store

# -- the level -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KnownHost:
    """A host as others see it: its ranks, and how to reach its files.

    The first of the ranks leads there. `files`: place name -> source; empty for this host.
    """

    name: str
    ranks: tuple[int, ...]
    files: Mapping[str, FarFiles]


class HostPlace(DirectoryPlace):
    """A level that is spread over hosts: each has a part. Thread-safe.

    copies: where the copies of other hosts' files are on this host. wanted: the number of hosts
    with copies.
    """

    is_of_hosts = True

    def __init__(self, site: StoreSite, copies: StoreSite, wanted: int) -> None:
        super().__init__(site)
        self.wanted_copies = wanted
        self.hosts: tuple[KnownHost, ...] = ()
        self.mine = 0
        self.copies = CopiesPlace(self, copies)
        self._near: NearFiles | None = None
        self._knowing = threading.Lock()
        self._placed: dict[int, PlacedFiles] = {}  # what is whole, as far as this rank knows
        self._committed: set[int] = set()  # of it, by this job
        self._copying: Counter[int] = Counter()  # how many copies from here are under way
        self._censuses = 0  # those that this rank has begun
        self._copied_in: dict[int, int] = {}  # by step, the newest one when its last copy ended
        self._seen: dict[int, PlacedFiles] = {}  # whole at the last census, the same on all
        self._logged: set[int] = set()

    # -- what is known ---------------------------------------------------------------------

    @property
    def is_apart(self) -> bool:
        """Whether several hosts share this level, each with a part of it."""
        return len(self.hosts) > 1

    @property
    def may_be_apart(self) -> bool:
        return len(self.hosts) != 1

    def beside(self, peers: Peers | None) -> Sequence[Target]:
        return [self.copies] if peers is not None and self.wanted_copies else []

    def identity(self) -> str:
        """A key that tells this directory from one of the same name on another host or in a
        container.

        It is the same for all ranks that see the same files.
        """
        if self._fs.backend == "sim":
            return f"simulated {id(self._fs)}"
        try:
            above = Path(self._site.called)
            while not above.is_dir() and above != above.parent:
                above = above.parent
            found, below = os.stat(above), os.path.relpath(self._site.called, above)
            return f"{boot_id()} {found.st_dev} {found.st_ino} {below}"
        except OSError:  # a rank that cannot look is alone, and raises when it writes
            return f"unknown {secrets.token_hex(8)}"

    def met(self, hosts: Sequence[KnownHost], mine: int, rank: int, near: NearFiles) -> None:
        """The ranks have met: these hosts have the level, and this is the mine-th of them.

        near: the place for fetched files of other hosts.
        """
        self.hosts, self.mine, self._near = tuple(hosts), mine, near
        if hosts[mine].ranks[0] == rank and not self.store.leads:
            self.lead()
            self.copies.lead()

    def begin_census(self) -> None:
        """Every rank, before any host lists its steps for the next census."""
        with self._knowing:
            self._censuses += 1

    def take_census(
        self,
        found: Mapping[int, PlacedFiles],
        joint: Mapping[int, PlacedFiles],
        missing: Mapping[int, Ranks],
    ) -> None:
        """The result of a census over all hosts.

        These steps are whole; these are whole together with other levels; of these, files are
        missing. A step that is committed or copied meanwhile may be too late for the census.
        """
        with self._knowing:
            late = {step: self._placed[step] for step in self._committed - set(found)}
            if not self._seen and not late:
                self._warn({step: missing[step] for step in missing.keys() - joint.keys()})
            known = {step: self._with_late_copies(step, placed) for step, placed in found.items()}
            self._seen, self._placed = {**joint, **found}, {**known, **late}

    def _with_late_copies(self, step: int, placed: PlacedFiles) -> PlacedFiles:
        """What a census has found of a step, and the copies that may have been too late for it.

        When a host lists its steps for a census, all ranks have begun the census before it. So the
        list has every copy that had ended on this rank by then.
        """
        own = self._placed.get(step)
        is_late = self._copied_in.get(step, -2) >= self._censuses - 1
        return placed.with_copies_of(own) if own and is_late and own.save == placed.save else placed

    def _warn(self, missing: Mapping[int, Ranks]) -> None:
        for step, ranks in missing.items():
            if step not in self._logged:
                self._logged.add(step)
                logger.warning(
                    "step %d is not whole at level %s: no host of this job has the files of rank "
                    "%s",
                    step, self.name, ranks,
                )  # fmt: skip

    def holdings(self) -> list[list[Any]]:
        """The steps on this host, for a census; none if it cannot be read."""
        try:
            return [holding.document() for holding in self._holdings(identified=True)]
        except StorageError as error:
            logger.warning("cannot read level %s; continuing without it\n%s", self.name, error)
            return []

    def _holdings(self, *, identified: bool) -> list[Holding]:
        """The steps here; `identified`: with their manifests, which have to be read."""
        found = []
        for is_copy, store in ((False, self.store), (True, self.copies.store)):
            for step in store.steps():
                manifest = _manifest_of(store, step) if identified else ("", "")
                names = store.names(step)
                if names is not None:  # otherwise it was retired meanwhile
                    found.append(Holding.seen(step, is_copy, names, manifest))
        return [] if found and self.owned is not None and self.owned.is_anothers else found

    def placed(self, step: int) -> PlacedFiles | None:
        """The places of the files of a step, if it is whole."""
        return self.known().get(step)

    def known(self) -> dict[int, PlacedFiles]:
        """The whole steps, and the places of their files."""
        if self.is_apart:
            with self._knowing:
                return dict(self._placed)
        # Alone on one host, there is one directory of each step.
        holdings = self._holdings(identified=bool(self.copies.store.steps()))
        found, missing = settled((self.mine, holding) for holding in holdings)
        if self.hosts:  # otherwise other hosts may have the rest
            self._warn(missing)
        return found

    # -- reading ---------------------------------------------------------------------------

    def steps(self) -> list[int]:
        return sorted(self.known())

    def check_order(
        self, step: int, known: Iterable[int | None], *, may_be_unreachable: bool = False
    ) -> None:
        if not self.is_apart:
            super().check_order(step, known, may_be_unreachable=may_be_unreachable)
            return
        check_newest(self.store.root, step, (*known, *self.known()), self.known)

    def shelves(self) -> Sequence[Shelf]:
        """The files of this host, and those of others; as of the last census."""
        return self._shelves(self._seen if self.is_apart else self.known())

    def _shelves(self, placed: Mapping[int, PlacedFiles]) -> list[HostShelf]:
        hosts = range(len(self.hosts) or 1)
        around = sorted(hosts, key=lambda host: (host - self.mine) % len(hosts))
        return [
            self._shelf_of(host, is_copy, held_by(host, is_copy, placed))
            for host in around
            for is_copy in (False, True)
        ]

    def _shelf_of(self, host: int, is_copy: bool, held: Mapping[int, Holder]) -> HostShelf:
        place = self.copies if is_copy else self
        if host == self.mine or self._near is None:
            return OwnShelf(place.name, held, place.store)
        there = self.hosts[host]
        name, root = f"{place.name} of host {there.name}", f"{there.name}:{place.store.root}"
        return FarShelf(name, held, there.files[place.name], self._near, root)

    def read(self, step: int, name: str, max_bytes: int) -> bytes:
        return self.source(step).read(step, name, max_bytes)

    def source(self, step: int) -> Shelf:
        if not self.is_apart:
            return super().source(step)
        return Scattered(self.name, self._shelves(self.known()), self.store.path)

    # -- copies from here ------------------------------------------------------------------

    @contextlib.contextmanager
    def protect(self, step: int) -> Iterator[None]:
        """Keep a step, and what is known of it, while it is copied from here."""
        with self._knowing:
            self._copying[step] += 1
        try:
            with super().protect(step):
                yield
        finally:
            with self._knowing:
                self._copying -= Counter((step,))
                self._forget_retired()

    def carriers(self, step: int, ranks: int) -> Carriers:
        usual = super().carriers(step, ranks)
        placed = self.placed(step) if self.is_apart else None
        if placed is None:
            return usual
        near = [self._carrier(writer, hosts[0], ranks) for writer, hosts in enumerate(placed.hosts)]
        # Another number of ranks may have saved the step again before it is read.
        return lambda saved: near if saved == len(near) else usual(saved)

    def _carrier(self, writer: int, host: int, ranks: int) -> int:
        """The rank that copies the files of `writer` from a host: the same rank if it is still
        there."""
        there = self.hosts[host].ranks
        return writer if writer in there else there[writer % len(there)]

    # -- committing ------------------------------------------------------------------------

    def prepare(self, peers: Peers | None) -> None:
        super().prepare(peers)
        if self.copies.takes_steps or self.copies.store.steps():  # of an earlier job, perhaps
            self.copies.prepare(peers)

    def landed(self, step: int, save: str, carriers: Sequence[int]) -> None:
        self.store.committed(step)  # on ranks that do not lead, too
        at = {rank: host for host, each in enumerate(self.hosts) for rank in each.ranks}
        writers: list[list[int]] = [[] for _ in self.hosts]
        for writer, rank in enumerate(carriers):
            writers[at[rank]].append(writer)
        own = [Holder(host, False, Ranks.of(each)) for host, each in enumerate(writers)]
        with self._knowing:
            # A newer step was whole nowhere.
            self._placed = {each: at for each, at in self._placed.items() if each < step}
            self._placed[step] = PlacedFiles(len(carriers), tuple(own), save)
            self._committed.add(step)
            self._forget_retired()
        self._remove_halves(lambda each: each > step)

    def _forget_retired(self) -> None:
        """Forget the steps that every host retires, now or soon.

        A step that is being copied stays known until the copy has ended. It then is the newest one
        that survives the loss of a host, however many younger steps there are.
        """
        wanted = self.store.kept(sorted(self._placed))
        kept = {*wanted, *self._copying, self.copies.newest_of(self._placed)}
        self._placed = {step: at for step, at in self._placed.items() if step in kept}
        self._committed.intersection_update(self._placed)
        self._copied_in = {step: at for step, at in self._copied_in.items() if step in kept}

    def copied(self, step: int, save: str, copies: Mapping[int, Sequence[int]]) -> None:
        """Hosts hold these copies of this save now. Raises StorageError if it is here no more."""
        with self._knowing:
            placed = self._placed.get(step)
            if placed is None or placed.save != save:
                raise storage_error(
                    "keep copies of a step: it was retired, or saved again", errno.ESTALE, ""
                )
            self._placed[step] = placed.with_copies(copies)
            self._copied_in[step] = self._censuses

    def retire(self) -> None:
        newest = max(self.known(), default=-1) if self.is_apart else -1
        self._remove_halves(lambda each: each < newest)  # a newer one may just be on its way
        # Files that survive the loss of a host are kept until newer ones do.
        known = self.known()
        safe, among = self.copies.newest_of(known), known if self.is_apart else None
        each_of(self._prepared(), lambda store: store.retain(safe, among))

    def _prepared(self) -> list[Store]:
        return [each.store for each in (self, self.copies) if each.is_prepared]

    def _remove_halves(self, which: Callable[[int], bool]) -> None:
        """Remove steps that are known not to count, because they take the place of one that
        does."""
        if not (self.is_apart and self.leads):
            return
        try:
            for store in self._prepared():
                store.give_up(set(filter(which, store.steps())) - set(self.known()))
        except StorageError as error:  # the next save tries again
            logger.warning("cannot remove an unpublished step from level %s\n%s", self.name, error)

    def rewind(self, step: int) -> list[int]:
        given_up = set(super().rewind(step))
        if self.copies.is_prepared:
            given_up |= set(self.copies.store.rewind(step))
        return sorted(given_up)

    def quarantine(self, step: int) -> str:
        if self.copies.is_prepared:
            store = self.copies.store
            store.give_up(each for each in store.steps() if each == step)
        return super().quarantine(step)

    def forget(self, steps: Collection[int]) -> None:
        with self._knowing:
            self._placed = {each: at for each, at in self._placed.items() if each not in steps}
            self._committed.difference_update(steps)

    def close(self) -> None:
        if self._near is not None:
            self._near.close()
        try:
            self.copies.close()
        finally:
            super().close()


class CopiesPlace(DirectoryPlace):
    """The copies that the hosts of a level keep for each other, as a level to copy to.

    A step is here if it survives the loss of as many hosts as wanted.
    """

    def __init__(self, level: HostPlace, site: StoreSite) -> None:
        super().__init__(site)
        self._level = level
        self._planned: dict[int, list[int]] = {}
        self._missed: _Missed | None = None

    @property
    def is_apart(self) -> bool:
        return self._level.is_apart

    @property
    def takes_steps(self) -> bool:
        return self._level.is_apart and self._level.wanted_copies > 0

    def steps(self) -> list[int]:
        return self._whole(self._level.known()) if self.takes_steps else []

    def newest_of(self, placed: Mapping[int, PlacedFiles]) -> int | None:
        """The newest of these steps that survives the loss of hosts."""
        return max(self._whole(placed), default=None) if self.takes_steps else None

    def _whole(self, placed: Mapping[int, PlacedFiles]) -> list[int]:
        return [step for step in sorted(placed) if not self._lacking(placed[step].hosts)]

    def read(self, step: int, name: str, max_bytes: int) -> bytes:
        return self._level.read(step, name, max_bytes)

    def share(self, step: int, rank: int) -> Share:
        """The writers whose files this rank copies here. All ranks plan alike."""
        placed = self._level.placed(step)

        def plan(manifest: bytes, carriers: Sequence[int]) -> list[int]:
            # Otherwise other hosts hold copies of another save of the step.
            is_it = placed is not None and placed.save == sha256(manifest)
            self._plan(placed if is_it else None, carriers)
            mine = self._planned.get(self._level.mine, [])
            there = self._level.hosts[self._level.mine].ranks
            return mine[there.index(rank) :: len(there)]

        return plan

    def _plan(self, placed: PlacedFiles | None, carriers: Sequence[int]) -> None:
        """Which hosts get the files of which writers, of a step that is there as `placed` says."""
        hosts = self._level.hosts
        at = {each: host for host, there in enumerate(hosts) for each in there.ranks}
        having = placed.hosts if placed else [[at[carrier]] for carrier in carriers]
        self._planned = {
            host: sorted({*writers, *(placed.copied.get(host, ()) if placed else ())})
            for host, writers in self._lacking(having).items()
        }

    def _lacking(self, having: Sequence[Sequence[int]]) -> dict[int, list[int]]:
        """host -> the writers whose files it should get as copies."""
        found: dict[int, list[int]] = {}
        hosts, copies = len(self._level.hosts), self._level.wanted_copies
        for writer, each in enumerate(having):
            for host in lacking_hosts(each, hosts, copies):
                found.setdefault(host, []).append(writer)
        return found

    def take(self, copy: Copy) -> None:
        if self._level.mine in self._planned:
            super().take(copy)

    def commit(self, step: int, attempt: str | None, manifest: bytes) -> None:
        if self._level.mine in self._planned:
            super().commit(step, attempt, manifest)

    def landed(self, step: int, save: str, carriers: Sequence[int]) -> None:
        self._level.copied(step, save, self._planned)

    def missed_end(self, step: int, manifest: bytes) -> None:
        """Keep the step until the ranks meet for the next copy.

        Otherwise this host would retire files that other ranks count on.
        """
        self.learn(())
        kept = contextlib.ExitStack()
        kept.enter_context(self._level.protect(step))
        self._missed = _Missed(step, manifest, self._planned, kept)

    def learn(self, landed: Collection[str]) -> None:
        missed, self._missed = self._missed, None
        if missed is None:
            return
        with missed.kept, contextlib.suppress(StorageError):  # it may have been saved again
            save = sha256(missed.manifest)
            if save in landed:
                self._level.copied(missed.step, save, missed.planned)

    def retire(self) -> None:
        self._level.retire()


@dataclass(frozen=True, slots=True)
class _Missed:
    """A copy whose end this rank has missed, and its step, which is `kept` meanwhile."""

    step: int
    manifest: bytes
    planned: Mapping[int, Sequence[int]]
    kept: contextlib.ExitStack


def _manifest_of(store: Store, step: int) -> tuple[str, str]:
    """(sha256, created) of the manifest of a committed step; empty if it cannot be read.

    The code that opens the step finds out why.
    """
    try:
        raw = store.manifest(step)
        created = Manifest.decode(raw, MANIFEST_NAME).created
    except StateholdError:
        return "", ""
    return sha256(raw), created


# -- the shelves of the hosts ----------------------------------------------------------------------
# Readers see only steps that are whole over all hosts, under one manifest. The name of a shelf says
# which host it is. Far files are fetched before they are read.


T = TypeVar("T")

Held = Mapping[int, Holder]


def held_by(host: int, is_copy: bool, placed: Mapping[int, PlacedFiles]) -> Held:
    """What one store has of the whole steps; `placed`: the places of the files of each."""
    return {
        step: holder
        for step, each in placed.items()
        for holder in each.holders
        if (holder.host, holder.is_copy) == (host, is_copy)
    }


class HostShelf(Shelf):
    """The steps of one store of a level, as far as it has them."""

    def __init__(self, name: str, held: Held) -> None:
        self.name = name
        self._held = held

    def steps(self) -> list[int]:
        return sorted(self._held)

    def holds(self, step: int, name: str) -> bool:
        holder = self._held.get(step)
        return holder is not None and holds_file(holder, name)


class OwnShelf(HostShelf, Through):
    """Those of a store of this host."""

    def __init__(self, name: str, held: Held, store: Store) -> None:
        HostShelf.__init__(self, name, held)
        self._shelf = store


class FarShelf(HostShelf):
    """Those of a store of another host. near: where its files are fetched to."""

    def __init__(self, name: str, held: Held, files: FarFiles, near: NearFiles, root: str) -> None:
        super().__init__(name, held)
        self._files = files
        self._near = near
        self._root = root

    def path(self, step: int) -> str:
        return f"{self._root}/{step_name(step)}"

    def read(self, step: int, name: str, max_bytes: int) -> bytes:
        return self._files.read_file(f"{step_name(step)}/{name}", max_bytes)

    def find(self, step: int, name: str, nbytes: int, ranges: Ranges = None) -> str:
        fetch = partial(self._files.fetch, f"{step_name(step)}/{name}")
        return self._near.bring(step, name, nbytes, ranges, fetch)

    def open_file(self, step: int, name: str) -> ShelfFile:
        return self._files.open_read(f"{step_name(step)}/{name}")

    def protect(self, step: int) -> contextlib.AbstractContextManager[None]:
        return self._near.reading(step)  # there, its own ranks keep it, because they restore, too


class Scattered(Shelf):
    """The steps of `shelves`, each file from the first that has it. where: of a step, for
    messages."""

    def __init__(self, name: str, shelves: Sequence[Shelf], where: Callable[[int], str]) -> None:
        self.name = name
        self._shelves = shelves
        self._where = where

    def steps(self) -> list[int]:
        return sorted({step for shelf in self._shelves for step in shelf.steps()})

    def path(self, step: int) -> str:
        return self._where(step)

    def read(self, step: int, name: str, max_bytes: int) -> bytes:
        return self._first(step, name, lambda shelf: shelf.read(step, name, max_bytes))

    def find(self, step: int, name: str, nbytes: int, ranges: Ranges = None) -> str:
        return self._first(step, name, lambda shelf: shelf.find(step, name, nbytes, ranges))

    def open_file(self, step: int, name: str) -> ShelfFile:
        having = list(self._having(step, name))
        if len(having) == 1:
            return having[0].open_file(step, name)
        return _Anywhere(step, name, having)

    def open_view(self, step: int, name: str, nbytes: int) -> File | None:
        for shelf in self._having(step, name):
            return shelf.open_view(step, name, nbytes)
        return None

    def _first(self, step: int, name: str, act: Callable[[Shelf], T]) -> T:
        failure: StorageError | CorruptionError | None = None
        for shelf in self._having(step, name):
            try:
                return act(shelf)
            except (StorageError, CorruptionError) as error:
                failure = failure or error
        raise failure or _nowhere(step, name)

    def _having(self, step: int, name: str) -> Iterator[Shelf]:
        return (shelf for shelf in self._shelves if shelf.holds(step, name))


class _Anywhere:
    """A data file that several shelves have; if one cannot be read, the next is asked."""

    def __init__(self, step: int, name: str, shelves: list[Shelf]) -> None:
        self._step = step
        self._name = name
        self._shelves = shelves
        self._opened: ShelfFile | None = None

    def read_into(self, memory: memoryview, offset: int) -> None:
        failure: StorageError | CorruptionError = _nowhere(self._step, self._name)
        while self._shelves:
            try:
                if self._opened is None:
                    self._opened = self._shelves[0].open_file(self._step, self._name)
                self._opened.read_into(memory, offset)
                return
            except (StorageError, CorruptionError) as error:
                failure = error
                self.close()
                self._shelves.pop(0)
        raise failure

    def close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()


def _nowhere(step: int, name: str) -> MissingFileError:
    facts = {"file": name, "step": step}
    return MissingFileError("no host of this job has this file of the step", facts=facts)
