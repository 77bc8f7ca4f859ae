"""`statehold diff A B`: show which tensors and values of two steps differ, and by how much.

Owns: which bytes have to be read for the answer. Chunks with the same pieces are compared by their
checksums, and only pieces that differ are read. All others are read part by part.
Invariants: an element differs if its bits do. A tensor that cannot be compared is listed, never
reported as equal.
Not here: numbers and bytes (numbers).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from statehold._core import Fs
from statehold.cli import codes
from statehold.cli.numbers import PART_BYTES, Content, Difference, bits_of, numpy
from statehold.cli.output import ProgressBar, bad, counted, emit, good, plain, say, table, weak
from statehold.cli.said import leaves_of
from statehold.encoding.header import DTYPE_BITS, bytes_of
from statehold.encoding.strictjson import show
from statehold.errors import StateMismatchError
from statehold.format.saved import PlacedChunk
from statehold.format.selection import matching
from statehold.layout.flat import parts_of
from statehold.layout.layout import Box
from statehold.layout.ranges import summed_pieces
from statehold.options.paths import step_in_run
from statehold.reading.places import NotFoundError, StepPlace, at_rest, file_system

_LOST = object()

T = TypeVar("T")


def run(args: argparse.Namespace) -> int:
    fs = file_system()
    document = at_rest(fs, args.a, lambda first: _beside(fs, first, args))
    emit(document) if args.json else _show(document)
    if not document["equal"]:
        return codes.NO
    return codes.FAILED if document["not_compared"] else codes.YES


def _beside(fs: Fs, first: StepPlace, args: argparse.Namespace) -> dict[str, Any]:
    """The step `first` next to the other one."""
    is_in_run = args.b.startswith("@")
    other = step_in_run(os.path.dirname(first.directory), args.b) if is_in_run else args.b
    return at_rest(fs, other, lambda second: _compared(fs, first, second, args))


def _compared(
    fs: Fs, first: StepPlace, second: StepPlace, args: argparse.Namespace
) -> dict[str, Any]:
    pair = _Pair(
        Content(first.open(fs, args.rank), first.directory),
        Content(second.open(fs, args.rank), second.directory),
        args.tensor,
    )
    if args.tensor is not None and not any([*pair.tensors, *pair.values]):
        facts = {"a": first.directory, "b": second.directory, "tensor": args.tensor}
        raise NotFoundError("neither step has such a tensor or value", facts=facts)
    return {"a": first.directory, "b": second.directory, **pair.document()}


class _Pair:
    """Two steps side by side: all of them, or what a prefix or pattern selects."""

    def __init__(self, a: Content, b: Content, pattern: str | None) -> None:
        self.a = a
        self.b = b
        self.tensors = [_chosen(each.saved.tensors, pattern) for each in (a, b)]
        self.values = [_chosen(leaves_of(each.saved.state), pattern) for each in (a, b)]
        self.read_bytes = 0
        self._progress = ProgressBar("reading", 0)

    def document(self) -> dict[str, Any]:
        ours, theirs = self.tensors
        common = [name for name in ours if name in theirs]
        total = sum(bytes_of(ours[name].dtype, ours[name].shape) or 0 for name in common)
        self._progress = ProgressBar("comparing", total)
        differing, not_compared = [], []
        try:
            for name in common:
                try:
                    found = self._tensor(name)
                except StateMismatchError as error:
                    not_compared.append({"name": name, "why": error.summary})
                    continue
                if found is not None:
                    differing.append(found)
        finally:
            self._progress.close()
        found = {
            "only_in_a": [name for name in ours if name not in theirs],
            "only_in_b": [name for name in theirs if name not in ours],
            "tensors": differing,
            "values": self._values(),
        }
        return {
            "equal": not any(found.values()),
            **found,
            "not_compared": not_compared,
            "compared": len(common) - len(not_compared),
            "compared_values": len(set.intersection(*map(set, self.values))),
            "read_bytes": self.read_bytes,
        }

    def _values(self) -> list[dict[str, Any]]:
        a, b = self.values
        found = []
        for path in dict.fromkeys((*a, *b)):
            left, right = a.get(path, _LOST), b.get(path, _LOST)
            # 1, 1.0 and True are three values.
            if (type(left), repr(left)) != (type(right), repr(right)):
                sides = {"a": left, "b": right}
                known = {key: value for key, value in sides.items() if value is not _LOST}
                found.append({"path": path, **known})
        return found

    # -- one tensor --------------------------------------------------------------------------

    def _tensor(self, name: str) -> dict[str, Any] | None:
        """The difference of a tensor that both steps have; None if there is none."""
        a, b = self.a.saved.tensors[name], self.b.saved.tensors[name]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            sides = {"a": a, "b": b}
            return {
                "name": name,
                "dtype": {side: tensor.dtype for side, tensor in sides.items()},
                "shape": {side: list(tensor.shape) for side, tensor in sides.items()},
            }
        difference = Difference()
        for left, right in self._parts(name):
            self.read_bytes += len(left) + len(right)
            self._progress.advance(0)
            difference.add(a.dtype, bits_of(a.dtype, left), bits_of(a.dtype, right))
        self._progress.advance(bytes_of(a.dtype, a.shape) or 0)
        if not difference.elements:
            return None
        numel = Box.whole(a.shape).numel
        return {
            "name": name,
            "dtype": a.dtype,
            "shape": list(a.shape),
            "elements": numel,
            "differing": difference.elements,
            "max_abs": difference.max_abs,
        }

    def _parts(self, name: str) -> Iterator[tuple[bytearray, bytearray]]:
        """The bytes of both steps to compare, in the same order."""
        ours = {chunk.box: chunk for chunk in self.a.chunks(name)}
        theirs = {chunk.box: chunk for chunk in self.b.chunks(name)}
        if ours.keys() != theirs.keys():
            yield from self._boxes(name)
            return
        for box, chunk in ours.items():
            other = theirs[box]
            if self._same_grid(chunk, other):
                yield from self._pieces(name, chunk, other)
            else:
                both = (self.a.chunk_parts(name, chunk), self.b.chunk_parts(name, other))
                yield from zip(*both, strict=True)

    def _same_grid(self, a: PlacedChunk, b: PlacedChunk) -> bool:
        block = self.a.saved.block_bytes
        return block == self.b.saved.block_bytes and a.begin % block == b.begin % block

    def _pieces(
        self, name: str, a: PlacedChunk, b: PlacedChunk
    ) -> Iterator[tuple[bytearray, bytearray]]:
        """The pieces whose checksums differ."""
        if a.sums == b.sums:
            return
        block = self.a.saved.block_bytes
        ours, theirs = (summed_pieces(c.begin, c.end, c.sums, block) for c in (a, b))
        for (*at, our_sum), (*there, their_sum) in zip(ours, theirs, strict=True):
            if our_sum != their_sum:
                yield self.a.range(name, a, *at), self.b.range(name, b, *there)

    def _boxes(self, name: str) -> Iterator[tuple[bytearray, bytearray]]:
        """For tensors that are cut in different ways: the same boxes of both."""
        tensor = self.a.saved.tensors[name]
        if DTYPE_BITS[tensor.dtype] % 8:
            raise StateMismatchError(f"{tensor.dtype} in other chunks is not unpacked here")
        numpy()
        most = PART_BYTES // (DTYPE_BITS[tensor.dtype] // 8)
        for part in parts_of(Box.whole(tensor.shape), most):
            left, right = self.a.box(name, part), self.b.box(name, part)
            yield bytearray(left.tobytes()), bytearray(right.tobytes())


def _chosen(names: Mapping[str, T], pattern: str | None) -> dict[str, T]:
    kept = names if pattern is None else matching(pattern, names)
    return {name: names[name] for name in kept}


# -- for people ------------------------------------------------------------------------------------


def _show(document: dict[str, Any]) -> None:
    for side in ("a", "b"):
        for name in document[f"only_in_{side}"]:
            say(f"only in {side.upper()}: {plain(name)}")
    if document["tensors"]:
        header = ("TENSOR", "DTYPE", "SHAPE", "DIFFERING", "OF", "MAX ABS")
        rows = map(_row, document["tensors"])
        say(table(header, rows, right="DIFFERING OF"))
    if document["values"]:
        rows2 = (
            (each["path"], *(show(each[side]) if side in each else "-" for side in "ab"))
            for each in document["values"]
        )
        if document["tensors"]:
            say()
        say(table(("VALUE", "A", "B"), rows2))
    for each in document["not_compared"]:
        say(weak("not compared"), f": {plain(each['name'])}: {each['why']}")
    verdict = good("equal") if document["equal"] else bad("different")
    of_both = _counts(document["compared"], document["compared_values"])
    say(verdict, f": {of_both} compared; different: "
        f"{_counts(len(document['tensors']), len(document['values']))}")  # fmt: skip


def _counts(tensors: int, values: int) -> str:
    return f"{counted(tensors, 'tensor')} and {counted(values, 'value')}"


def _row(tensor: dict[str, Any]) -> tuple[object, ...]:
    if "differing" not in tensor:
        dtypes, shapes = tensor["dtype"], tensor["shape"]
        sides = (f"{each['a']} / {each['b']}" for each in (dtypes, shapes))
        return tensor["name"], *sides, "-", "-", "-"
    found = tensor["max_abs"]
    largest = "-" if found is None else f"{found:.6g}"
    return (tensor["name"], tensor["dtype"], tensor["shape"], tensor["differing"],
            tensor["elements"], largest)  # fmt: skip
