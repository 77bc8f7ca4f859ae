"""identity(): what the pages of a KV cache depend on, as 16 bytes.

A page is right only for the weights that computed it, for what of the configuration changes keys
and values, and for its own layout. All of this is named by content: the same weights under another
path, in another process or on another host have the same identity, and other weights under the
same path have another one.

Invariants: what is not known to be harmless counts. Only names and notes of a config.json are left
out. A wrong identity costs tokens, and one that is too strict costs a cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from statehold import _core
from statehold.errors import refused, storing
from statehold.format.manifest import Manifest
from statehold.format.record import Record
from statehold.format.saved import read_record
from statehold.kv.page import IDENTITY_BYTES
from statehold.reading.places import StepPlace, at_rest, file_system, load_manifest
from statehold.units import MiB

# Of a config.json: these say where a model came from, and nothing about its numbers.
_NOTES = frozenset({"_name_or_path", "transformers_version", "_commit_hash"})
_PIECE_BYTES = 64 * MiB


def identity(
    weights: str | os.PathLike[str], config: Mapping[str, Any] | None = None, **layout: Any
) -> bytes:
    """The identity of pages that these weights compute.

    Args:
        weights: a step (RUN, RUN@STEP, RUN@best:METRIC, the directory of a step), whose manifest
            has the checksums, and all plain values; or a directory with *.safetensors, which are
            read.
        config: the configuration of the model; default: the config.json beside the weights, and the
            adapter_config.json, which has the scale of an adapter.
        layout: what else a page depends on, such as dtype, page size, the identity of an adapter.

    Raises:
        UsageError: there are no weights, or a value or the config.json is no JSON.
        StateholdError: the weights cannot be read.
    """
    found = content_of(weights)
    return folded(found, _config_of(Path(weights)) if config is None else config, layout)


def _config_of(weights: Path) -> dict[str, Any]:
    """The config.json and the adapter_config.json beside weights, as far as they are there."""
    found = dict[str, Any]()
    for path in filter(Path.exists, (weights / "adapter_config.json", weights / "config.json")):
        try:
            with storing("read a configuration", str(path)):
                found.update(json.loads(path.read_bytes()).items())
        except (ValueError, AttributeError) as error:
            summary, got = "a configuration is no JSON object", str(error)
            raise refused(summary, "a JSON object", got, file=path) from error
    return found


def content_of(weights: str | os.PathLike[str]) -> list[Any]:
    """The checksums of weights. Raises as identity() does."""
    path = Path(weights)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    is_step = (path / "manifest.json").exists() or not files
    return _of_step(os.fspath(weights)) if is_step else [_of_file(each) for each in files]


def folded(content: list[Any], config: Mapping[str, Any], layout: Mapping[str, Any]) -> bytes:
    """The identity of weights with these checksums. Raises UsageError for a value without JSON."""
    told = {name: value for name, value in config.items() if name not in _NOTES}
    try:
        raw = json.dumps([content, told, layout], sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        expected, got = "values that JSON has", str(error)
        raise refused("a value of an identity is no JSON", expected, got) from error
    return hashlib.sha256(raw.encode()).digest()[:IDENTITY_BYTES]


def _of_step(text: str) -> list[Any]:
    """The checksums of all files, and the values, of each rank that has saved the step."""

    def look(place: StepPlace) -> list[Any]:
        found = load_manifest(fs, place.directory)
        parts: list[Manifest | Record] = [found] if isinstance(found, Manifest) else [
            read_record(fs.read_file, place.directory, found, rank)
            for rank in range(found.world_size)
        ]  # fmt: skip
        return [
            [sorted([each.name, each.bytes, each.digest] for each in part.files), part.state]
            for part in parts
        ]

    with contextlib.closing(file_system()) as fs:
        return at_rest(fs, text, look)


def _of_file(path: Path) -> list[Any]:
    """The checksums of a file. Its name does not count."""
    with storing("read weights", str(path)), open(path, "rb") as file:
        if not os.fstat(file.fileno()).st_size:
            raise refused("a file of weights is empty", "a safetensors file", "0 bytes", file=path)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            pieces = (mapped[at : at + _PIECE_BYTES] for at in range(0, len(mapped), _PIECE_BYTES))
            return [f"{_core.xxh3_64(piece):016x}" for piece in pieces]
