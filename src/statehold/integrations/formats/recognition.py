"""The formats of other libraries: which one a path has, how it is read, and how it is written.

Owns: the table of formats. A path is of the first one that finds itself in it.
Invariants: restore_stock and import_step ask here, so both take the same paths. For a path that is
no checkpoint, the error says what was expected and what was found. Tensors and values are read when
they are used.
Not here: the bytes of a format (one module each).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from statehold.errors import UsageError, some, storing
from statehold.format.saved import MANIFEST_NAME
from statehold.integrations.formats import archives, dcp_folders, deepspeed, hf, untrusted
from statehold.integrations.formats.partial import PartialExport
from statehold.integrations.formats.streamed import Streamed
from statehold.options.paths import STEP_NAME
from statehold.reading.places import NotFoundError

_EXPECTED = (
    "a file of torch.save or safetensors, or a directory with *.safetensors or its index, "
    "pytorch_model.bin or its index, .metadata (torch.distributed.checkpoint), zero/ (DeepSpeed "
    "universal), or *_optim_states.pt (DeepSpeed ZeRO)"
)
_OURS = (
    "a step of statehold needs no import: restore it with Checkpointer(RUN).restore(state), or "
    "with StorageReader"
)
_SHOWN = 12


class PathContent(NamedTuple):
    """What is at a path: the names in a directory, or the beginning of a file."""

    path: str
    names: frozenset[str]
    head: bytes
    nbytes: int


class Format(NamedTuple):
    """How a path shows this format, and how it is read and written.

    find: the path to read, or None. name: the part of a state that a checkpoint of this format is.
    export: writes a tree, and returns the names of what the format cannot hold; to one file
    (is_file), or to a directory.
    """

    find: Callable[[PathContent], str | None]
    read: Callable[[str], Any]
    name: str = ""
    export: Callable[[Any, PartialExport], list[str]] | None = None
    is_file: bool = False


def _with(is_it: Callable[[PathContent], bool]) -> Callable[[PathContent], str | None]:
    return lambda seen: seen.path if is_it(seen) else None


def _is_safetensors(seen: PathContent) -> bool:
    if seen.names:
        return hf.INDEX in seen.names or any(n.endswith(".safetensors") for n in seen.names)
    return seen.head[8:9] == b"{" and int.from_bytes(seen.head[:8], "little") < seen.nbytes


FORMATS = {
    "dcp": Format(
        _with(lambda seen: dcp_folders.METADATA in seen.names),
        dcp_folders.read,
        export=dcp_folders.export,
    ),
    "hf": Format(_with(_is_safetensors), hf.read, "model", hf.export),
    "pytorch_model": Format(
        _with(lambda seen: not seen.names.isdisjoint((archives.WHOLE, archives.INDEX))),
        archives.read_shards,
        "model",
    ),
    "torch": Format(
        _with(lambda seen: archives.is_head(seen.head)),
        archives.read,
        export=archives.export,
        is_file=True,
    ),
    "deepspeed-universal": Format(
        lambda seen: deepspeed.universal_directory(seen.path, seen.names),
        deepspeed.read_universal,
        export=deepspeed.export,
    ),
    "deepspeed-zero": Format(
        lambda seen: deepspeed.zero_directory(seen.path, seen.names), deepspeed.read_zero
    ),
}


def recognised(path: str) -> tuple[Format, str]:
    """The format of a path, and the path to read. Raises NotFoundError if nothing is there,
    UsageError if it is not a checkpoint."""
    if not os.path.lexists(path):
        raise NotFoundError("no such checkpoint", facts={"path": path, "expected": _EXPECTED})
    with storing("read a checkpoint", path):
        seen = _seen(path)
        if MANIFEST_NAME not in seen.names:
            for format_ in FORMATS.values():
                if found := format_.find(seen):
                    return format_, found
    raise _no_checkpoint(seen)


def _seen(path: str) -> PathContent:
    if os.path.isdir(path):
        return PathContent(path, frozenset(os.listdir(path)), b"", 0)
    if not os.path.isfile(path):
        return PathContent(path, frozenset(), b"", 0)
    with open(path, "rb") as file:
        return PathContent(path, frozenset(), file.read(16), os.path.getsize(path))


def _no_checkpoint(seen: PathContent) -> UsageError:
    names, hint = sorted(seen.names), None
    if MANIFEST_NAME in names or any(map(STEP_NAME.fullmatch, names)):
        hint = _OURS
    elif others := [name for name in names if name.endswith((".pt", ".pth", ".bin"))]:
        hint = f"name the file that is meant: {', '.join(others[:_SHOWN])}"
    if os.path.isfile(seen.path):
        there = f"a file of {seen.nbytes} bytes that begins with {seen.head!r}"
    elif MANIFEST_NAME in names:
        there = "a step of statehold"
    elif os.path.isdir(seen.path):
        there = f"a directory with {some(names, _SHOWN) or 'nothing in it'}"
    else:
        there = "neither a file nor a directory"
    facts = {"path": seen.path, "expected": _EXPECTED, "there": there}
    return UsageError("this is not a checkpoint of another library", facts=facts, hint=hint)


def check_names(tree: Any, path: str) -> None:
    """Raise UsageError for a tree without names."""
    if not isinstance(tree, Mapping):
        untrusted.check_data(tree, "", path, "")
        got = "Tensor" if isinstance(tree, Streamed) else type(tree).__name__
        facts = {"source": path, "expected": "a dict", "got": got}
        raise UsageError("the source has no names", facts=facts)
