"""From the user's levels to places that can be read and written.

Invariants: no two levels use one place.
Not here: the options of a level (specs), its directory (memory), its work (steps/target).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from statehold._core import Fs
from statehold.checkpoint.levels.memory import COPIES_SUFFIX, directory_of, make_private
from statehold.checkpoint.levels.object_place import ObjectPlace
from statehold.checkpoint.levels.specs import Directory, Level, Memory, ObjectStore
from statehold.errors import UsageError
from statehold.io.memory_room import is_memory
from statehold.io.mounts import mount_of
from statehold.observe.background_log import log_once
from statehold.process.host_memory import SHARED_MEMORY
from statehold.ranks.membership import ALONE, Membership
from statehold.steps.objects import ObjectSteps
from statehold.steps.owners import DirectoryNotes, Identity, OwnedSteps
from statehold.steps.store import Store
from statehold.steps.target import CopyEngine, DirectoryPlace, StoreSite, Target


def open_places(
    levels: Sequence[Level],
    run: str,
    fs: Fs,
    buffer_bytes: int,
    *,
    reuse: bool,
    membership: Membership = ALONE,
    yields: bool = False,
    identity: Identity | None = None,
) -> list[Target]:
    """The levels of the run directory `run`, the nearest first; nothing is created yet.

    yields: an agent opens them. A trainer that wants them then waits for it instead of giving up.
        The agent copies to one level after the other, so one engine is enough for all.
    identity: of the run.
    """
    only = CopyEngine(fs, buffer_bytes) if yields else None
    identity = identity or Identity(run, draws=False)
    places: list[Target] = []
    roots: list[str] = []
    for level in levels:
        if isinstance(level, ObjectStore):
            objects = ObjectSteps(level.url, options=level.options, near=(SHARED_MEMORY, run))
            owned = OwnedSteps(level.name, objects, identity, leads=membership.leads, yields=yields)
            places.append(ObjectPlace(level.name, objects, keep=level.keep, owned=owned))
            continue
        called = directory_of(level, run)
        # Its path may have links. Below it, nothing is a link.
        root = os.path.realpath(called)
        _check_own(level, root, roots)
        store_at = partial(
            Store,
            fs,
            keep=level.keep,
            reuse=reuse,
            rank=membership.rank,
            world_size=membership.world,
            mapped=isinstance(level, Memory) and fs.backend != "sim" and is_memory(root),
        )

        if membership.leads and not yields and fs.backend != "sim":
            _warn_of_a_disk(level, called, root)

        def engine_of() -> CopyEngine:
            return only or CopyEngine(fs, buffer_bytes)

        site = StoreSite(level.name, store_at(root), called, engine_of(), yields, bool(places))
        if fs.backend != "sim" and root != os.path.realpath(run):
            notes = DirectoryNotes(root)
            owned = OwnedSteps(level.name, notes, identity, leads=site.store.leads, yields=yields)
            site = replace(site, owned=owned)
        if isinstance(level, Memory) and fs.backend != "sim":
            site = replace(site, make_home=make_private)
        if isinstance(level, Directory) and not level.per_host:
            places.append(DirectoryPlace(site))
        else:
            from statehold.checkpoint.levels.hosts.place import HostPlace

            copies = _of_copies(site, store_at(root + COPIES_SUFFIX), engine_of())
            wanted = level.copies if isinstance(level, Memory | Directory) else 0
            places.append(HostPlace(site, copies, wanted))
    return places


def _of_copies(site: StoreSite, store: Store, engine: CopyEngine) -> StoreSite:
    """Where the copies of other hosts' files are, beside a level."""
    return replace(
        site,
        name=f"{site.name}.copies",
        store=store,
        called=site.called + COPIES_SUFFIX,
        engine=engine,
        takes_copies=True,
        owned=None,
    )


def storage_of(levels: Sequence[Level], run: str) -> str:
    """The destination of most bytes of a run that need a disk: its nearest directory.

    The profile of this storage counts. A memory level before it has no queue, and needs no buffers.
    """
    return next((directory_of(level, run) for level in levels if isinstance(level, Directory)), run)


def _warn_of_a_disk(level: Level, called: str, root: str) -> None:
    if isinstance(level, Memory) and level.path is not None and not is_memory(root):
        log_once(
            f"level {level.name} is not in memory: {called} is on {mount_of(root).kind}, and saves "
            "take as long as that storage takes. Give Memory a path on a tmpfs, such as below "
            "/dev/shm, or use Directory for a disk"
        )


def _check_own(level: Level, root: str, roots: list[str]) -> None:
    """Check that no two levels use one directory: their steps would mix."""
    if root in roots:
        raise UsageError(
            "two levels use the same directory",
            facts={"level": level.name, "directory": root},
            hint="give one of them a path of its own",
        )
    roots.append(root)
