"""What a path is: the format of a checkpoint, by its files.

Not here: reading a format (one module each).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from statehold.errors import UsageError, storage_error
from statehold.format.saved import MANIFEST_NAME
from statehold.integrations.dcp.torch_save import is_head
from statehold.integrations.formats import archives, dcp_folders, hf, torch_files, universal, zero
from statehold.integrations.formats.archives import indexed
from statehold.reading.places import NotFoundError

_EXPECTED = (
    "a file of torch.save or safetensors, or a directory with *.safetensors or its index, "
    "pytorch_model.bin or its index, .metadata (torch.distributed.checkpoint), zero/ (DeepSpeed "
    "universal), or *_optim_states.pt (DeepSpeed ZeRO)"
)
_SHOWN = 12


class ImportSource(NamedTuple):
    """A checkpoint: its tree, and the name below which an import puts it."""

    read: Callable[[], Any]
    name: str = ""

    @contextlib.contextmanager
    def opened(self) -> Iterator[Any]:
        yield self.read()


def recognised(path: str) -> ImportSource:
    """The source at a path. Raises NotFoundError if nothing is there, UsageError for the rest."""
    try:
        if os.path.isdir(path):
            return _of_directory(path, sorted(os.listdir(path)))
        if os.path.isfile(path):
            return _of_file(path)
    except OSError as error:
        raise storage_error("read a checkpoint", error.errno or 0, path) from error
    if not os.path.lexists(path):
        raise NotFoundError("no such checkpoint", facts={"path": path})
    raise no_checkpoint(path, "neither a file nor a directory")


def _of_file(path: str) -> ImportSource:
    with open(path, "rb") as file:
        head = file.read(16)
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < os.path.getsize(path):
        return ImportSource(lambda: hf.read([path], {}), "model")
    if is_head(head):
        return ImportSource(lambda: archives.read(path))
    raise no_checkpoint(path, f"a file that begins with {head!r}")


def _of_directory(path: str, names: list[str]) -> ImportSource:
    if MANIFEST_NAME in names:
        raise no_checkpoint(path, "a step of statehold, which needs no import")
    if dcp_folders.METADATA in names:
        return ImportSource(lambda: dcp_folders.read(path))
    if any(name.endswith(".safetensors") for name in names):
        return ImportSource(lambda: hf.read(*indexed(path, hf.INDEX, ".safetensors")), "model")
    if torch_files.WHOLE in names or torch_files.INDEX in names:
        return ImportSource(lambda: torch_files.read(path), "model")
    if (directory := universal.directory_of(path, names)) is not None:
        return ImportSource(partial(universal.read, directory))
    if (directory := zero.directory_of(path, names)) is not None:
        return ImportSource(partial(zero.read, directory))
    more = ", ..." if len(names) > _SHOWN else ""
    raise no_checkpoint(path, f"a directory with {', '.join(names[:_SHOWN]) or 'nothing'}{more}")


def no_checkpoint(path: str, there: str) -> UsageError:
    facts = {"path": path, "expected": _EXPECTED, "there": there}
    return UsageError("this is no checkpoint that can be imported", facts=facts)


def stamps(path: str) -> list[list[Any]]:
    """The files of a source as they are now: an import goes on only with the same ones."""
    if not os.path.exists(path):
        return []
    if not os.path.isdir(path):
        return [_stamp(path, os.path.basename(path))]
    return [
        _stamp(os.path.join(parent, name), os.path.relpath(os.path.join(parent, name), path))
        for parent, _, names in sorted(os.walk(path))
        for name in sorted(names)
    ]


def _stamp(path: str, name: str) -> list[Any]:
    found = os.stat(path)
    return [name, found.st_size, found.st_mtime_ns]
