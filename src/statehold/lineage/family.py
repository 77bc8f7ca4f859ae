"""The runs below a directory, and which of them began from which.

A run names its parent by directory, step and manifest. The directory may have moved since, so the
manifest decides: a run that has this step with this manifest is the parent, wherever it lies.

Invariants: only manifests and the sizes of files are read. A run whose newest manifest cannot be
read is a member with a problem, and does not hide the others.
Not here: how a run gets a parent (checkpoint/levels/forking).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from statehold.checkpoint.store.store import Store
from statehold.errors import StateholdError
from statehold.format.about import Origin
from statehold.format.entries import DOCUMENT_BYTES_MAX, sha256
from statehold.format.saved import MANIFEST_NAME
from statehold.reading.places import file_system, load_manifest
from statehold.reading.sizes import Sizes, sizes

if TYPE_CHECKING:
    from statehold._core import Fs

_STEP = re.compile(r"step-\d{12}")


@dataclass(frozen=True)
class Member:
    """A run. steps: committed, oldest first. metrics, tags: of the newest step.

    parent: what the run says, if anything. base: the path of the parent, if it is in the family.
    sizes: of the whole run directory; shared bytes are those that other runs have, too.
    problem: why the newest manifest could not be read.
    """

    run: str
    steps: Sequence[int]
    sizes: Sizes
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: Sequence[str] = ()
    parent: Origin | None = None
    base: str | None = None
    problem: str | None = None


def family(directory: str) -> list[Member]:
    """The runs below a directory, by path."""
    with contextlib.closing(file_system()) as fs:
        found = [_member(Store(fs, run)) for run in runs_below(os.path.abspath(directory))]
        by_path = {each.run: each for each in found}
        return [_with_base(fs, each, by_path) for each in found]


def runs_below(directory: str) -> Iterator[str]:
    """The run directories below a directory, by path."""
    for path, folders, _ in os.walk(directory):
        if any(map(_STEP.fullmatch, folders)):
            yield path
            folders.clear()
        folders.sort()


def _member(store: Store) -> Member:
    steps, size = store.steps(), sizes([store.root])
    try:
        about = load_manifest(store.fs, store.where(steps[-1])).about
    except (StateholdError, IndexError) as error:
        return Member(store.root, steps, size, problem=str(error))
    return Member(store.root, steps, size, about.metrics, about.tags, about.parent)


def _with_base(fs: Fs, member: Member, members: Mapping[str, Member]) -> Member:
    parent = member.parent
    if parent is None:
        return member
    nearest = sorted(members.values(), key=lambda each: each.run != parent.run)
    for each in nearest:
        if each.run != member.run and _is_it(Store(fs, each.run), each, parent):
            return replace(member, base=each.run)
    return replace(member, base=parent.run if parent.run in members else None)


def _is_it(store: Store, member: Member, parent: Origin) -> bool:
    """Whether the run has the step with this manifest."""
    with contextlib.suppress(StateholdError):
        if parent.step in member.steps:
            raw = store.read(parent.step, MANIFEST_NAME, DOCUMENT_BYTES_MAX)
            return sha256(raw) == parent.manifest_sha256
    return False
