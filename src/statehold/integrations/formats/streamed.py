"""A tensor that is not in memory: its dtype, its shape, and its bytes part by part.

Owns: tensors that lie in files of others, whole, as views, or in boxes; the same of values; trees
of both, and the dotted names of their leaves.
Invariants: parts are bytes in C order, at most PART_BYTES each, and valid until the next one is
asked for. A tensor of a file takes no memory but one part: what was mapped is forgotten after each.
A chunk is verified when its bytes are used for the first time. Two places of a tree that hold one
object hold one tensor.
Not here: tensors of steps (convert), who writes the bytes (partial).
"""

from __future__ import annotations

import math
import mmap
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch

from statehold.errors import CorruptionError, MissingFileError, UnsupportedValueError, storage_error
from statehold.format.selection import Answer, Names, Selection, check_answers
from statehold.layout.flat import boxes_of_run
from statehold.layout.layout import Box
from statehold.tensors.devices.elements import host_memory
from statehold.tensors.storable import part_of
from statehold.units import MiB

# -- tensors ---------------------------------------------------------------------------------------


PART_BYTES = 16 * MiB
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Streamed:
    """A tensor and the way to its bytes.

    parts: called once for each pass over the bytes; yields flat tensors of uint8.
    chunks: where a tensor of others lies.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: Callable[[], Iterator[torch.Tensor]]
    chunks: Sequence[StreamedChunk] = ()

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def views(self) -> Iterator[memoryview]:
        """The bytes of each part, until the next one is asked for."""
        for part in self.parts():  # which lives as long as its view
            yield host_memory(part)


def grouped(items: Iterable[T], nbytes: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Items in their order, together up to `most` bytes: a larger one is alone."""
    group: list[T] = []
    size = 0
    for item in items:
        if group and size + nbytes(item) > most:
            yield group
            group, size = [], 0
        group.append(item)
        size += nbytes(item)
    if group:
        yield group


@dataclass(frozen=True, eq=False)
class StreamedValue:
    """A value that is no tensor, and is read when somebody asks for it."""

    read: Callable[[], Any]


def read_now(leaf: Any) -> Any:
    """A leaf of a tree; of a value that is not read yet, what it is."""
    return leaf.read() if isinstance(leaf, StreamedValue) else leaf


def runs(dtype: torch.dtype, shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The elements [begin, end) of each part."""
    end, size = math.prod(shape), PART_BYTES // dtype.itemsize
    for begin in range(0, end, size):
        yield begin, min(end, begin + size)


# An older Python has no name for it. Without it, the kernel counts a private map as memory that
# will be needed, and refuses a file that is larger than the host's.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


class MappedFile:
    """A file of others, mapped privately. Nobody may cut it."""

    def __init__(self, path: str) -> None:
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                flags, prot = mmap.MAP_PRIVATE | _NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
                self._map = mmap.mmap(file.fileno(), size, flags, prot) if size else None
        except FileNotFoundError as error:
            raise MissingFileError("a checkpoint lacks a file", facts={"file": path}) from error
        except OSError as error:
            raise storage_error("read a checkpoint", error.errno or 0, path) from error
        self.path, self.size = path, size

    def streamed(
        self,
        dtype: torch.dtype,
        shape: Sequence[int],
        begin: int,
        stride: Sequence[int] | None = None,
        verify: Callable[[], None] = lambda: None,
    ) -> Streamed:
        """A tensor from byte `begin` on; C order without `stride`, which counts elements.

        verify: called before the bytes are used for the first time.
        """
        values = self._view(dtype, shape, begin, stride)

        def look() -> _Place:
            verify()
            return values, self

        return assembled(dtype, shape, [StreamedChunk(Box.whole(shape), look)])

    def _view(
        self, dtype: torch.dtype, shape: Sequence[int], begin: int, stride: Sequence[int] | None
    ) -> torch.Tensor:
        dense = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        steps = dense if stride is None else stride
        if not math.prod(shape) or self._map is None:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        last = sum((size - 1) * step for size, step in zip(shape, steps, strict=True))
        nbytes = (last + 1) * dtype.itemsize
        if begin < 0 or begin + nbytes > self.size:
            got = f"a tensor at [{begin}, {begin + nbytes})"
            facts = {"file": self.path, "expected": f"at most {self.size} bytes", "got": got}
            raise CorruptionError("a tensor of a checkpoint lies outside its file", facts=facts)
        flat = torch.frombuffer(self._map, dtype=torch.uint8, count=nbytes, offset=begin)
        if begin % dtype.itemsize:  # no processor promises to read that as elements
            strides = [step * dtype.itemsize for step in steps]
            return flat.as_strided((*shape, dtype.itemsize), (*strides, 1))
        return flat.view(dtype).as_strided(tuple(shape), tuple(steps))

    def crc32(self, begin: int, nbytes: int) -> int:
        """The checksum of the bytes [begin, begin + nbytes), as archives have it."""
        crc = 0
        for at in range(begin, begin + nbytes, PART_BYTES):
            part = self._view(torch.uint8, [min(PART_BYTES, begin + nbytes - at)], at, None)
            crc = zlib.crc32(host_memory(part), crc)
            self.forget()
        return crc

    def forget(self) -> None:
        """Give the memory of all pages back; they are read again when they are used."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)


_Place = tuple[torch.Tensor, MappedFile | None]


class StreamedChunk:
    """A box of a tensor that lies in a file, or in memory (file: None).

    look: finds the values, and the file that they lie in, when they are used for the first time.
    The values have the shape of the box, or (raw) one more dimension with the bytes of each
    element.
    """

    def __init__(self, box: Box, look: Callable[[], _Place]) -> None:
        self.box = box
        self._look = look

    @cached_property
    def place(self) -> _Place:
        return self._look()

    @property
    def values(self) -> torch.Tensor:
        return self.place[0]

    @property
    def file(self) -> MappedFile | None:
        return self.place[1]

    @property
    def is_raw(self) -> bool:
        return self.values.dim() > len(self.box.shape)

    def elements(self, dtype: torch.dtype) -> torch.Tensor:
        """The values, which are of `dtype`, in the shape of the box."""
        if not self.is_raw:
            return self.values
        return self.values.contiguous().view(dtype).squeeze(-1)

    def at(self, offsets: tuple[int, ...]) -> StreamedChunk:
        """The same values as a box at `offsets`."""
        return StreamedChunk(Box(offsets, self.box.shape), self._look)

    def run(self, begin: int, end: int, at: int) -> StreamedChunk:
        """The elements [begin, end) of a chunk of one dimension, as a chunk from `at` on."""

        def look() -> _Place:
            values, file = self.place
            return values[begin:end], file

        return StreamedChunk(Box((at,), (end - begin,)), look)


def assembled(
    dtype: torch.dtype, shape: Sequence[int], chunks: Sequence[StreamedChunk]
) -> Streamed:
    """A tensor of boxes, which cover it. `shape` may differ from that of the boxes if it has as
    many elements in C order: `chunks` of one dimension are runs."""
    ordered = sorted(chunks, key=lambda chunk: chunk.box.offsets)
    are_runs = bool(ordered) and len(ordered[0].box.shape) == 1 != len(shape)
    inner = (math.prod(shape),) if are_runs else tuple(shape)

    def parts() -> Iterator[torch.Tensor]:
        memory = torch.empty(
            min(PART_BYTES, math.prod(shape) * dtype.itemsize), dtype=torch.uint8, device="cpu"
        )
        for begin, end in runs(dtype, shape):
            part = memory[: (end - begin) * dtype.itemsize]
            _fill(part.view(dtype), inner, begin, end, ordered)
            yield part

    return Streamed(dtype, tuple(shape), parts, ordered)


def _fill(
    memory: torch.Tensor,
    shape: tuple[int, ...],
    begin: int,
    end: int,
    chunks: Sequence[StreamedChunk],
) -> None:
    at, used = 0, set[MappedFile]()
    for box in boxes_of_run(shape, begin, end):
        target = memory[at : at + box.numel].view(box.shape)
        at += box.numel
        for chunk in chunks:
            if (common := chunk.box.intersection(box)) is not None:
                inner = part_of(target, common.relative_to(box))
                inner = inner.unsqueeze(-1).view(torch.uint8) if chunk.is_raw else inner
                inner.copy_(part_of(chunk.values, common.relative_to(chunk.box)))
                used |= {chunk.file} if chunk.file else set()
    for file in used:
        file.forget()


def whole(values: torch.Tensor, file: MappedFile | None = None) -> Streamed:
    """A tensor in one piece, in a file or in memory."""
    chunk = StreamedChunk(Box.whole(values.shape), lambda: (values, file))
    return assembled(values.dtype, values.shape, [chunk])


def in_memory(tensor: Streamed, done: Callable[[int], None] = lambda nbytes: None) -> torch.Tensor:
    """The tensor itself."""
    memory = torch.empty(tensor.nbytes, dtype=torch.uint8, device="cpu")
    at = 0
    for part in tensor.parts():
        memory[at : at + part.numel()] = part
        at += part.numel()
    done(tensor.nbytes)
    return memory.view(tensor.dtype).view(tensor.shape)


def converted(tensor: Streamed, dtype: torch.dtype) -> Streamed:
    """The same values in another dtype, converted as `to()` does, part by part."""
    if tensor.dtype == dtype:
        return tensor

    def parts() -> Iterator[torch.Tensor]:
        for part in tensor.parts():
            yield part.view(tensor.dtype).to(dtype).view(torch.uint8)

    return Streamed(dtype, tensor.shape, parts)


# -- trees -----------------------------------------------------------------------------------------
# Dicts are entered, and lists and tuples that hold tensors or dicts. Names are joined with dots, as
# those of a step are.


def leaves(
    tree: Any, path: str = "", lists: tuple[type, ...] = (list, tuple)
) -> Iterator[tuple[str, Any]]:
    """Every leaf by its name. An empty container is a leaf. lists: the kinds that are entered."""
    members = dict(enumerate(tree)) if is_entered(tree, lists) else tree
    if not isinstance(members, Mapping) or (not members and path):
        yield path, tree
        return
    for key, item in members.items():
        yield from leaves(item, f"{path}.{key}" if path else str(key), lists)


def without(tree: Mapping[Any, Any], skip: Sequence[str]) -> Any:
    """The same tree but for what patterns name. Raises UsageError for one that matches nothing."""
    selection, names = Selection(skip=skip), dict[str, None]()

    def kept(value: Any, path: str) -> Any:
        if not isinstance(value, Mapping):
            return value
        found = {key: (f"{path}.{key}" if path else str(key), item) for key, item in value.items()}
        names.update(dict.fromkeys(where for where, _ in found.values()))
        return type(value)({  # type: ignore[call-arg]
            key: kept(item, where) for key, (where, item) in found.items() if selection.takes(where)
        })  # fmt: skip

    made = kept(tree, "") if skip else tree
    answers = selection.answers(Names(taken=names, saved=(), live=()))
    check_answers([Answer(answers, loads=True, has_rest=True)])
    return made


def nbytes_of(tree: Any) -> int:
    """The bytes of the tensors of a tree, each counted once."""
    found = {value for _, value in leaves(tree) if isinstance(value, Streamed)}
    return sum(tensor.nbytes for tensor in found)


def replaced(tree: Any, change: Callable[[Any], Any]) -> Any:
    """The same tree with `change(leaf)` in the place of each leaf."""
    kind: Any = type(tree)
    if isinstance(tree, Mapping):
        return kind({key: replaced(item, change) for key, item in tree.items()})
    if kind in (list, tuple):
        return kind(replaced(item, change) for item in tree)
    return change(tree)


class _Open(dict[Any, Any]):
    """A container being filled, of a class that no value has: a value may be a dict, too."""


def nested(
    items: Iterable[tuple[tuple[Any, ...], Any]], mapping: Callable[[dict[Any, Any]], Any] = dict
) -> Any:
    """The tree with each value at its path: lists by the numbers from 0 on, and mappings; None
    if two paths collide."""
    tree = _Open()
    for path, value in items:
        at = tree
        for key in path[:-1]:
            at = at.setdefault(key, _Open())
            if type(at) is not _Open:
                return None
        if path[-1] in at:
            return None
        at[path[-1]] = value
    return mapping({key: _closed(item, mapping) for key, item in tree.items()})


def _closed(item: Any, mapping: Callable[[dict[Any, Any]], Any]) -> Any:
    if type(item) is not _Open:
        return item
    made = {key: _closed(member, mapping) for key, member in item.items()}
    if made.keys() == set(range(len(made))):
        return [made[index] for index in range(len(made))]
    return mapping(made)


def is_entered(value: Any, lists: tuple[type, ...] = (list, tuple)) -> bool:
    """Whether a list or tuple holds tensors or dicts."""
    members: Any = value if isinstance(value, lists) else ()
    return any(
        isinstance(item, Mapping | Streamed | torch.Tensor) or is_entered(item, lists)
        for item in members
    )


def storable(value: Any, path: str) -> Any:
    """The same leaf. Raises UnsupportedValueError for a tensor whose bytes nobody has read."""
    if isinstance(value, torch.Tensor):
        raise UnsupportedValueError(
            "a tensor that is not plain and dense cannot be read",
            facts={"path": path, "type": type(value).__name__, "layout": str(value.layout)},
            hint="convert it with torch, and save the checkpoint again",
        )
    return value
