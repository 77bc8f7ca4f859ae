"""How a directory of finished files becomes visible: the second half of the commit protocol.

Owns: D3 and D5 to D7 of docs/durability.md. The caller has written the files (D1, D2) and knows the
content of the manifest (D4). Callers are the steps of a run (store) and one checkpoint (dcp).
Invariants: a crash at any point leaves `final` as it was, or whole and new; one rename decides. The
old directory is exchanged in one operation, or keeps a name that counts (replacing).
Not here: which directories exist, and when they are deleted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from statehold.checkpoint.store.directories import parent_of
from statehold.checkpoint.store.replacing import Replaced, came_back, exchanged, hidden, set_aside
from statehold.errors import PUBLISHED, named
from statehold.format.saved import MANIFEST_NAME

if TYPE_CHECKING:
    from statehold._core import Fs


def publish(fs: Fs, partial: str, final: str, manifest: bytes) -> Replaced:
    """D3 and D5 to D7. Returns what became of the old directory `final`."""
    fs.sync_dir(partial)  # D3
    fs.write_file(f"{partial}/{MANIFEST_NAME}", manifest)  # D5
    fs.sync_dir(partial)  # D5: the manifest's name as well
    is_there = fs.is_dir(final)
    if is_there and exchanged(fs, partial, final):  # D6: both names change at once
        make_durable(fs, parent_of(final))  # D7
        # A file system that ignores the flag may have renamed over the old directory.
        return Replaced.HIDDEN if fs.is_dir(partial) else Replaced.NOTHING
    with came_back(fs, final):
        is_aside = set_aside(fs, final, is_there=is_there)  # E1, E2
        fs.rename(partial, final)  # D6
    make_durable(fs, parent_of(final))  # D7
    return hidden(fs, final, partial) if is_aside else Replaced.NOTHING  # E3, E4


def make_durable(fs: Fs, directory: str) -> None:
    """D7: sync the directory that has the name of a published step. An error has the fact
    PUBLISHED."""
    try:
        fs.sync_dir(directory)
    except Exception as error:
        failed = named(error, "while the name of a published step was made durable")
        raise failed.with_fact(PUBLISHED, "yes, and whole, but a power cut may undo it") from None
