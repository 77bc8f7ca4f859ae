"""`statehold show RUN[@STEP] [NAME]`: show the contents of a step, a part of it, or one tensor.

Invariants: only the whole name of a tensor makes it read data, which is verified as it is read. Of
several ranks it reads one record for each group with equal records.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
from collections.abc import Mapping
from typing import Any

from statehold._core import Fs
from statehold.cli import codes, numbers
from statehold.cli.output import (
    ProgressBar,
    age,
    counted,
    emit,
    faint,
    plain,
    say,
    sections,
    strong,
    table,
    when,
)
from statehold.cli.places import tree_bytes
from statehold.cli.said import in_words, leaves_of, said
from statehold.encoding.header import bytes_of
from statehold.errors import StateMismatchError
from statehold.format.saved import SavedStep
from statehold.format.selection import matching, nearest
from statehold.layout.layout import Layout
from statehold.layout.share import HeldTensor
from statehold.reading.places import NotFoundError, StepPlace, at_rest, file_system, load_manifest
from statehold.units import format_bytes

_VALUE_COLUMNS = 100
_FAR = 30  # rows, after which the top of the answer is out of sight


def run(args: argparse.Namespace) -> int:
    fs = file_system()
    document = at_rest(fs, args.step, lambda place: _looked_at(fs, place, args))
    if args.json:
        emit(document)
    elif "statistics" in document:
        _show_tensor(document)
    else:
        _show_step(document)
    return codes.YES


def _looked_at(fs: Fs, place: StepPlace, args: argparse.Namespace) -> dict[str, Any]:
    saved = place.open(fs, args.rank)
    if args.tensor in saved.tensors:
        return _tensor(saved, place, args.tensor)
    document = describe(fs, saved, place) | {"values": leaves_of(saved.state)}
    if args.tensor is not None:
        _keep_matching(document, args.tensor)
    if not args.values and (document["tensors"] or args.tensor is None):
        del document["values"]
    return document


def _keep_matching(document: dict[str, Any], pattern: str) -> None:
    """Of the tensors and values only those that a prefix or pattern selects."""
    names = [*(tensor["name"] for tensor in document["tensors"]), *document["values"]]
    chosen = set(matching(pattern, names))
    if not chosen:
        near = difflib.get_close_matches(pattern, names, n=3) or nearest(pattern, names)
        hint = f"did you mean {', '.join(near[:3])}?" if near else "show --values lists them"
        facts = {"step": document["path"], "name": pattern}
        raise NotFoundError("no such tensor or value in this step", facts=facts, hint=hint)
    tensors = [tensor for tensor in document["tensors"] if tensor["name"] in chosen]
    values = {name: value for name, value in document["values"].items() if name in chosen}
    document |= {"tensors": tensors, "values": values, "selected": pattern,
                 "dtypes": _by_dtype(tensors),
                 "tensor_bytes": sum(tensor["bytes"] for tensor in tensors)}  # fmt: skip


# -- a step ----------------------------------------------------------------------------------------


def describe(fs: Fs, saved: SavedStep, place: StepPlace) -> dict[str, Any]:
    """The contents of a step, without reading its data."""
    manifest = load_manifest(fs, place.directory)
    tensors = [_entry(saved, name) for name in saved.tensors]
    size, files = tree_bytes(place.directory)
    return {
        "step": place.step,
        "path": place.directory,
        **said(manifest),
        "attempt": saved.attempt,
        "files": files,
        "bytes": size,
        "tensor_bytes": sum(tensor["bytes"] for tensor in tensors),
        "dtypes": _by_dtype(tensors),
        "tensors": tensors,
    }


def _entry(saved: SavedStep, name: str) -> dict[str, Any]:
    tensor = saved.tensors[name]
    held = saved.held(name)
    return {
        "name": name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "bytes": bytes_of(tensor.dtype, tensor.shape) or 0,
        "layout": _layout(held[0][1], saved.world_size),
        "ranks": "; ".join(str(ranks) for ranks, _ in held),
        "versions": len(held),
    }


def _layout(held: HeldTensor, world_size: int) -> str:
    """How a tensor is cut, for people."""
    if held.layout is None:
        return "whole" if world_size == 1 else "each rank its own"
    if not isinstance(held.layout, Layout):
        return f"{len(held.layout.placed)} boxes"
    sizes = held.layout.mesh.shape
    cuts = ", ".join(f"dim {dim} / {sizes[axis]}" for axis, dim in held.layout.splits)
    copies = held.layout.replica_count
    return (cuts or "whole") + (f" x {copies} copies" if copies > 1 else "")


def _by_dtype(tensors: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for tensor in tensors:
        group = found.setdefault(tensor["dtype"], {"tensors": 0, "bytes": 0})
        group["tensors"] += 1
        group["bytes"] += tensor["bytes"]
    return found


def _show_step(document: Mapping[str, Any]) -> None:
    say(strong(f"step {document['step']}"), f" in {plain(document['path'])}")
    ranks = counted(document["world_size"], "rank")
    ago = age(document["created"])
    say(f"saved {when(document['created'])}", faint(f" ({ago})" if ago else ""),
        f" by {document['writer']}, {ranks}, format {document['version']}")  # fmt: skip
    if words := in_words(document["metrics"], document["tags"]):
        say(words)
    summary = _summary(document)
    if document["tensors"] or "selected" not in document:
        say(summary)
    say(f"{counted(document['files'], 'file')}, {format_bytes(document['bytes'])}")
    if document["tensors"]:
        rows = map(_row, document["tensors"])
        say()
        say(table(("TENSOR", "DTYPE", "SHAPE", "BYTES", "LAYOUT", "RANKS"), rows, right="BYTES"))
    if document.get("values"):
        values = ((name, _shortened(value)) for name, value in document["values"].items())
        say()
        say(table(("VALUE", "IS"), values))
    if len(document["tensors"]) > _FAR:
        say()
        say(summary)


def _summary(document: Mapping[str, Any]) -> str:
    dtypes = ", ".join(
        f"{group['tensors']} {dtype} ({format_bytes(group['bytes'])})"
        for dtype, group in document["dtypes"].items()
    )
    tensors = counted(len(document["tensors"]), "tensor")
    of = f" of {plain(document['selected'])}" if "selected" in document else ""
    return f"{tensors}{of}, {format_bytes(document['tensor_bytes'])}: {dtypes or 'none'}"


def _row(tensor: Mapping[str, Any]) -> tuple[object, ...]:
    size = format_bytes(tensor["bytes"])
    return (tensor["name"], tensor["dtype"], tensor["shape"], size, tensor["layout"],
            tensor["ranks"])  # fmt: skip


def _shortened(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _VALUE_COLUMNS else f"{text[: _VALUE_COLUMNS - 3]}..."


# -- a tensor --------------------------------------------------------------------------------------


def _tensor(saved: SavedStep, place: StepPlace, name: str) -> dict[str, Any]:
    content = numbers.Content(saved, place.directory)
    try:
        chunks = content.chunks(name)
    except StateMismatchError as error:
        error.hint = "--rank R shows it as one rank saved it"
        raise
    document = _entry(saved, name)
    document["chunks"] = [
        {
            "offsets": list(chunk.box.offsets),
            "shape": list(chunk.box.shape),
            "file": chunk.file,
            "begin": chunk.begin,
            "end": chunk.end,
        }
        for chunk in chunks
    ]
    document["statistics"] = _statistics(content, name, document["bytes"])
    return document


def _statistics(content: numbers.Content, name: str, nbytes: int) -> dict[str, Any] | None:
    """None for dtypes without numbers, whose bytes are still verified."""
    dtype = content.saved.tensors[name].dtype
    known = numbers.has_numbers(dtype)
    statistics = numbers.Statistics()
    if known:
        numbers.numpy()  # before anything is read
    with contextlib.closing(ProgressBar(name, nbytes)) as progress:
        for chunk in content.chunks(name):
            for raw in content.chunk_parts(name, chunk):
                if known:
                    statistics.add(numbers.numbers_of(dtype, numbers.bits_of(dtype, raw)))
                progress.advance(len(raw))
    return statistics.document() if known else None


def _show_tensor(document: Mapping[str, Any]) -> None:
    head = (
        f"{plain(document['name'])}  {document['dtype']} {document['shape']}  "
        f"{format_bytes(document['bytes'])}  {document['layout']}, ranks {document['ranks']}"
    )
    rows = [
        (each["offsets"], each["shape"], each["file"], f"[{each['begin']}, {each['end']})")
        for each in document["chunks"]
    ]
    chunks = table(("OFFSETS", "SHAPE", "FILE", "BYTES"), rows)
    found = document["statistics"]
    if found is None:
        about = f"no statistics: {document['dtype']} is not unpacked here; its bytes are intact"
        sections(head, chunks, about)
        return
    statistics = ((key, _number(found[key])) for key in found)
    sections(head, chunks, table(("STATISTIC", "IS"), statistics))


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.9g}" if isinstance(value, float) else str(value)
