"""Whether a committed step has all its files, as long as they were committed.

A step that has lost a file, or the end of one, or has the manifest of another step because somebody
renamed its directory, does not count as committed: no command may delete an intact step because of
it. Only names and sizes are looked at, and the documents, never data. The log names each step that
is passed over.
Not here: the bytes of the files (cli/verify, restore), which steps there are (store).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from statehold.errors import CorruptionError, FormatVersionError, MissingFileError, StorageError
from statehold.format.entries import DOCUMENT_BYTES_MAX, FileEntry
from statehold.format.manifest import Commit, Manifest
from statehold.format.record import Record
from statehold.format.saved import MANIFEST_NAME, committed_record
from statehold.layout.plan import file_name
from statehold.observe.background_log import log_once
from statehold.steps.publish import look_beside_a_writer, missing_path, read_standing

if TYPE_CHECKING:
    from statehold._core import Fs
    from statehold.steps.shelf import DirectoryShelf


def whole_steps(store: DirectoryShelf) -> list[int]:
    """The committed steps that have all their files, oldest first."""
    return list(_whole(store, store.steps()))


def newest_whole(store: DirectoryShelf) -> int | None:
    """The newest step that has all its files; the newest one if none has."""
    steps = store.steps()
    return next(_whole(store, reversed(steps)), max(steps, default=None))


def _whole(store: DirectoryShelf, steps: Iterable[int]) -> Iterator[int]:
    for step in steps:
        if is_whole(store, step):
            yield step
        else:
            log_once(f"step {step} of {store.root} has lost a file, or a part of one, or is "
                     "another step, so reading takes another one where it can; all its damage: "
                     f"statehold verify {store.root}@{step}")  # fmt: skip


def is_whole(store: DirectoryShelf, step: int, *, newer: bool = True) -> bool:
    """Whether a committed step has all its files; True if the storage does not say. newer: what a
    step is that has a newer format than this version reads."""
    look, path = partial(check_files, store.fs, step), store.path(step)
    try:
        look_beside_a_writer(
            lambda: read_standing(store.fs, path, look), lambda: store.manifest(step), path
        )
    except CorruptionError:
        return False
    except FormatVersionError:
        return newer
    except StorageError as error:
        return missing_path(error) is None
    return True


def check_files(fs: Fs, step: int, directory: str, *, is_part: bool = False) -> None:
    """Raise CorruptionError unless all files of the step are there, in `directory`.

    is_part: ranks none of whose files are here have them on other hosts. Raises what reading the
    documents raises.
    """
    names = {name for name, _ in fs.listdir(directory)}

    def is_here(rank: int, world_size: int) -> bool:
        stem = file_name(rank, world_size).partition(".")[0]
        return not is_part or any(name.startswith(stem) for name in names)

    for file in _files_of(fs, step, directory, is_here):
        path = f"{directory}/{file.name}"
        size = fs.stat_bytes(path)
        if size is None:
            raise MissingFileError("a file of a step is not there", facts={"file": path})
        if size != file.bytes:
            facts = {"file": path, "expected": f"{file.bytes} bytes", "got": f"{size} bytes"}
            raise CorruptionError("a file of a step is not as long as it was", facts=facts)


def _files_of(
    fs: Fs, step: int, directory: str, is_here: Callable[[int, int], bool]
) -> Iterator[FileEntry]:
    """The data files that the manifest lists, or the records of these ranks."""
    path = f"{directory}/{MANIFEST_NAME}"
    listed = Manifest.listed(fs.read_file(path, DOCUMENT_BYTES_MAX), path, step)
    if not isinstance(listed, Commit):
        yield from listed
        return
    for rank, entry in enumerate(listed.records):
        if is_here(rank, listed.world_size):
            path = f"{directory}/{entry.name}"
            yield from Record.listed(committed_record(fs.read_file, path, entry), path)
