"""The places of the files of a step, on a level of several hosts: which steps are whole.

    own      files that ranks of a host have saved, in its own store
    copies   files that it holds for other hosts, in a store next to it

Pure. Invariants: a step counts if each file that its manifest names lies in some host's committed
directory, under the same manifest everywhere. All ranks compute the same plan of copies, each by
itself, because all have the same facts.
Not here: how the ranks tell each other (discovery), reading (place).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

from statehold.format.saved import MANIFEST_NAME
from statehold.layout.layout import Ranks

_WRITTEN = re.compile(r"rank-([0-9]{5,9})-of-([0-9]{5,9})[.-].*", re.DOTALL)


def writer_of(name: str) -> tuple[int, int] | None:
    """(rank, world size) of the writer of a step's file; None for its manifest, and other names."""
    match = _WRITTEN.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


@dataclass(frozen=True, slots=True)
class Holder:
    """Files in the directory of a step on one host: those of the ranks `writers`.

    manifest: whether the manifest there is that of the step; it may be damaged.
    """

    host: int
    is_copy: bool
    writers: Ranks
    manifest: bool = True


@dataclass(frozen=True, slots=True)
class Holding:
    """A committed directory, as its host has found it.

    manifest: sha256 of the manifest, "" if it cannot be read. created: from the manifest, or "".
    """

    step: int
    is_copy: bool
    manifest: str
    created: str
    world_size: int
    writers: Ranks

    def document(self) -> list[Any]:
        return [self.step, self.is_copy, self.manifest, self.created, self.world_size,
                self.writers.ranges]  # fmt: skip

    @classmethod
    def of(cls, document: Sequence[Any]) -> Holding:
        step, is_copy, manifest, created, world_size, ranges = document
        return cls(step, is_copy, manifest, created, world_size, _ranks(ranges))

    @classmethod
    def seen(
        cls, step: int, is_copy: bool, names: Iterable[str], manifest: tuple[str, str]
    ) -> Holding:
        """names: the files of the directory; manifest: (sha256, created)."""
        found = [writer for writer in map(writer_of, names) if writer]
        world_size = max((world for _, world in found), default=1)
        writers = Ranks.of({rank for rank, world in found if world == world_size})
        return cls(step, is_copy, manifest[0], manifest[1], world_size, writers)


@dataclass(frozen=True)
class PlacedFiles:
    """The places of the files of a step: `holders`, hosts with their own files first.

    save: sha256 of the manifest, which tells the saves of a step apart; "" if no host can read it.
    """

    world_size: int
    holders: tuple[Holder, ...]
    save: str

    def document(self) -> list[Any]:
        each = [[at.host, at.is_copy, at.writers.ranges, at.manifest] for at in self.holders]
        return [self.world_size, each, self.save]

    @classmethod
    def of(cls, document: Sequence[Any]) -> PlacedFiles:
        world_size, holders, save = document
        return cls(world_size, tuple(Holder(h, c, _ranks(w), m) for h, c, w, m in holders), save)

    @cached_property
    def hosts(self) -> list[list[int]]:
        """For each writer, the hosts that have its files, its own host first."""
        found: list[list[int]] = [[] for _ in range(self.world_size)]
        for holder in self.holders:
            for first, last in holder.writers.ranges:
                for writer in range(first, last + 1):
                    if holder.host not in found[writer]:
                        found[writer].append(holder.host)
        return found

    def with_copies(self, copies: Mapping[int, Iterable[int]]) -> PlacedFiles:
        """The same, with the copies that hosts hold now, which include the earlier ones."""
        kept = [at for at in self.holders if not (at.is_copy and at.host in copies)]
        more = [Holder(host, True, Ranks.of(writers)) for host, writers in copies.items()]
        return replace(self, holders=(*kept, *more))

    def with_copies_of(self, other: PlacedFiles) -> PlacedFiles:
        """The same, with the copies that hosts hold according to `other`, too."""
        return self.with_copies(
            {at: self.copied.get(at, set()) | held for at, held in other.copied.items()}
        )

    @cached_property
    def copied(self) -> dict[int, set[int]]:
        """For each host that holds copies, the writers of these files."""
        found: dict[int, set[int]] = {}
        for holder in self.holders:
            if holder.is_copy:
                for first, last in holder.writers.ranges:
                    found.setdefault(holder.host, set()).update(range(first, last + 1))
        return found


def lacking_hosts(having: Sequence[int], hosts: int, copies: int) -> list[int]:
    """The hosts that get a copy of the files of the hosts `having`.

    They are the next ones after the first of `having`, around, until there are `copies` and one.
    """
    wanted = min(copies + 1, hosts) - len(having)
    around = ((having[0] + distance) % hosts for distance in range(1, hosts))
    return list(islice((host for host in around if host not in having), max(0, wanted)))


def settled(
    holdings: Iterable[tuple[int, Holding]],
) -> tuple[dict[int, PlacedFiles], dict[int, Ranks]]:
    """From (host, what it has): the whole steps, and for all others the missing writers."""
    by_step: dict[int, list[tuple[int, Holding]]] = {}
    for host, holding in holdings:
        by_step.setdefault(holding.step, []).append((host, holding))
    whole: dict[int, PlacedFiles] = {}
    missing: dict[int, Ranks] = {}
    for step, found in by_step.items():
        saves = _saves(found)
        best = max(saves, key=lambda save: save[0])
        if best[0][0]:
            whole[step] = best[1]
        else:
            missing[step] = _missing(best[1])
    return whole, missing


def together(
    by_level: Mapping[str, Sequence[tuple[int, Holding]]],
) -> dict[str, dict[int, PlacedFiles]]:
    """By level, the parts of steps that are whole at no level, but across several.

    One host may have lost its memory, and another one its disk.
    """
    at = [(name, host, holding) for name, each in by_level.items() for host, holding in each]
    whole, _ = settled((index, holding) for index, (_, _, holding) in enumerate(at))
    alone = {step for each in by_level.values() for step in settled(each)[0]}
    found: dict[str, dict[int, PlacedFiles]] = {name: {} for name in by_level}
    for step in whole.keys() - alone:
        for name, mine in found.items():
            holders = tuple(
                replace(holder, host=at[holder.host][1])
                for holder in whole[step].holders
                if at[holder.host][0] == name
            )
            if holders:
                mine[step] = replace(whole[step], holders=holders)
    return found


def _saves(
    found: Sequence[tuple[int, Holding]],
) -> list[tuple[tuple[bool, bool, str], PlacedFiles]]:
    """The saves of a step, with their ranks in this order: whole, whole without copies, younger."""
    saves = []
    for manifest in sorted({held.manifest for _, held in found} - {""}) or [""]:
        world_size = max(held.world_size for _, held in found if held.manifest == manifest)
        # A damaged manifest does not spoil the files next to it, which have checksums.
        here = [
            (host, held)
            for host, held in found
            if held.manifest == manifest or (not held.manifest and held.world_size == world_size)
        ]
        holders = [
            Holder(host, held.is_copy, held.writers, held.manifest == manifest)
            for host, held in sorted(here, key=lambda each: (each[1].is_copy, each[0]))
        ]
        placed = PlacedFiles(world_size, tuple(holders), manifest)
        own = replace(placed, holders=tuple(each for each in holders if not each.is_copy))
        created = max(held.created for _, held in here)
        saves.append(((not _missing(placed).ranges, not _missing(own).ranges, created), placed))
    return saves


def _missing(placed: PlacedFiles) -> Ranks:
    there = Ranks.union(holder.writers for holder in placed.holders)
    return Ranks.of(rank for rank in range(placed.world_size) if rank not in there)


def _ranks(ranges: Sequence[Sequence[int]]) -> Ranks:
    return Ranks(tuple((first, last) for first, last in ranges))


def holds_file(holder: Holder, name: str) -> bool:
    """Whether a file of a step should be there."""
    if name == MANIFEST_NAME:
        return holder.manifest
    writer = writer_of(name)
    return writer is not None and writer[0] in holder.writers
