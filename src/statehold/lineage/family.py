"""The runs below a directory, and which of them began from which.

A run names its parent by directory, step and manifest. The directory may have moved since, so the
manifest decides: a run that has this step with this manifest is the parent, wherever it lies. If no
run has, the parent may have retired the step: then the run at its path is the parent, unless that
run has another step of this number, or has only older steps.

Invariants: only manifests and the sizes of files are read. A run whose newest manifest cannot be
read is a member with a problem, and does not hide the others. No run is its own base, directly or
through others: a step that was copied back, or a run that was forked back, closes no circle.
Not here: how a run gets a parent (checkpoint/levels/forking).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from statehold.errors import StateholdError
from statehold.format.entries import Origin, sha256
from statehold.observe.background_log import log_once
from statehold.options.paths import STEP_NAME, can_be_a_name
from statehold.reading.places import file_system, load_manifest
from statehold.reading.sizes import StepSizes, sizes
from statehold.steps.shelf import DirectoryShelf

if TYPE_CHECKING:
    from statehold._core import Fs

_NO_STEP = "what is called like a step here is a link or a file, so it does not count"


@dataclass(frozen=True)
class FamilyRun:
    """A run. steps: committed, oldest first. metrics, tags: of the newest step.

    parent: what the run says, if anything. base: the path of the parent, if it is in the family
    and does not itself descend from the run.
    sizes: of the whole run directory; shared bytes are those that other runs have, too.
    problem: why the newest manifest could not be read.
    """

    run: str
    steps: Sequence[int]
    sizes: StepSizes
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: Sequence[str] = ()
    parent: Origin | None = None
    base: str | None = None
    problem: str | None = None


def family(directory: str) -> list[FamilyRun]:
    """The runs below a directory, by path."""
    with contextlib.closing(file_system()) as fs:
        found = [_member(DirectoryShelf(fs, run)) for run in runs_below(os.path.abspath(directory))]
        return _joined(fs, found)


def runs_below(directory: str) -> list[str]:
    """The run directories below a directory, by path, each once. One behind a link has the path to
    which the link leads. No link to a directory around itself is followed. What has a name that is
    not UTF-8 is logged and passed over: neither the core nor a manifest can name it."""
    found, seen, tops = list[str](), set[str](), [directory]
    for top in tops:  # the targets of links are added
        for path, folders, _ in os.walk(top):
            here = os.path.realpath(path)
            if here in seen:
                folders.clear()
                continue
            seen.add(here)
            unnamed = [name for name in folders if not can_be_a_name(name)]
            for name in unnamed:
                log_once(f"{path}/{name!a} is passed over: its name is not UTF-8")
            steps = {name for name in folders if STEP_NAME.fullmatch(name)}
            found += [path] if steps else []
            # A run may lie in another one, but not in its steps, nor in its hidden folders.
            own = {name for name in folders if steps and (name in steps or name[0] == ".")}
            folders[:] = set(folders).difference(own, unnamed)
            links = filter(os.path.islink, (os.path.join(path, name) for name in folders))
            for to in filter(can_be_a_name, map(os.path.realpath, links)):
                tops += [] if Path(here).is_relative_to(to) else [to]
    return sorted(found, key=lambda run: run.split("/"))


def _member(store: DirectoryShelf) -> FamilyRun:
    steps, size = store.steps(), sizes([store.root])
    if not steps:
        return FamilyRun(store.root, steps, size, problem=_NO_STEP)
    try:
        about = load_manifest(store.fs, store.where(steps[-1])).about
    except StateholdError as error:
        return FamilyRun(store.root, steps, size, problem=str(error))
    return FamilyRun(store.root, steps, size, about.metrics, about.tags, about.parent)


def _joined(fs: Fs, members: Sequence[FamilyRun]) -> list[FamilyRun]:
    """The members with their bases. In a circle, the first one by path gets none: it is a root."""
    runs, bases = {each.run: each for each in members}, dict[str, str]()
    for candidates in (_by_manifest, _by_path):  # a guess gives way to what a manifest shows
        for each in reversed(members):
            if each.parent is None or each.run in bases:
                continue
            for base in candidates(fs, runs, each.parent):
                if not _descends(base, each.run, bases):
                    bases[each.run] = base
                    break
    return [replace(each, base=bases.get(each.run)) for each in members]


def _by_manifest(fs: Fs, runs: Mapping[str, FamilyRun], parent: Origin) -> Iterator[str]:
    """The runs that have the step with this manifest; the one at the parent's path comes first."""
    for run in chain(runs.keys() & {parent.run}, (run for run in runs if run != parent.run)):
        if _manifest_of(fs, runs[run], parent.step) == parent.manifest_sha256:
            yield run


def _by_path(fs: Fs, runs: Mapping[str, FamilyRun], parent: Origin) -> Iterator[str]:
    """The run at the parent's path, if it has come as far and no manifest speaks against it."""
    there = runs.get(parent.run)
    has_come_as_far = there and max(there.steps, default=-1) >= parent.step
    if there and has_come_as_far and _manifest_of(fs, there, parent.step) is None:
        yield there.run


def _manifest_of(fs: Fs, member: FamilyRun, step: int) -> str | None:
    """The SHA-256 of a step's manifest; None if the run does not have it, or cannot read it."""
    with contextlib.suppress(StateholdError):
        if step in member.steps:
            return sha256(DirectoryShelf(fs, member.run).manifest(step))
    return None


def _descends(run: str | None, other: str, bases: Mapping[str, str]) -> bool:
    """Whether a run is the other one, or began from it, or from one that did."""
    while run is not None and run != other:
        run = bases.get(run)
    return run is not None
