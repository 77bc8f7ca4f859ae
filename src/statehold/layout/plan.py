"""The place of every byte of a data file: pure arithmetic.

Owns: the order of tensors in a data file, their offsets, the header with the step in it, and the
grid of checksummed pieces.
Invariants: the same specs give the same plan. Tensors tile [data_begin, file_bytes) in file order,
each aligned to its dtype. Two plans that differ only in the step have the same size and offsets. A
piece lies in one tensor (or the header) and in one grid block.
Not here: who writes what (share), the bytes, the disk, the checksums' values (manifest), the reads
(read_plan).
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

from statehold.encoding import header
from statehold.errors import InvariantError, UsageError, refused, shown
from statehold.layout.layout import AnyLayout
from statehold.units import MiB

BLOCK_BYTES = 1 * MiB
# The step has twelve digits in directory names and in headers. So a name or a header never changes
# its size, and names sort as numbers do.
STEP_DIGITS = 12
STEP_MAX = 10**STEP_DIGITS - 1
WORLD_MAX = 99_999
# The step comes first in every header, so its place needs no search in names that users chose.
_STEP_KEY = "statehold.step"
FROZEN_KEY = "statehold.frozen"
_FILE_NAME = re.compile(r"rank-([0-9]{5})-of-([0-9]{5})(?:-([1-9][0-9]{0,8}))?\.safetensors")
_STEP_AT = header.LENGTH_BYTES + len(f'{{"{header.METADATA}":{{"{_STEP_KEY}":"')


class TensorSpec(NamedTuple):
    """A tensor to save, or the box of one. `eager`: it may change soon, so it is copied first.

    `shape` and `nbytes` are those of the box. `layout` is None for a tensor of this rank alone.
    `global_shape` is None if it equals `shape`, and `offsets` is None for zeros.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    eager: bool = False
    layout: AnyLayout | None = None
    global_shape: tuple[int, ...] | None = None
    offsets: tuple[int, ...] | None = None


@dataclass(frozen=True)
class SavePlan:
    """One data file. `specs` and `begins` (absolute offsets) are in file order.

    `source_index[i]` is the index of `specs[i]` in the input.
    """

    step: int
    world_size: int
    rank: int
    file_name: str
    specs: tuple[TensorSpec, ...]
    source_index: tuple[int, ...]
    begins: tuple[int, ...]
    header: bytes
    data_begin: int
    file_bytes: int
    frozen: tuple[str, ...] | None = None  # the parameters that need no gradient, if that is known

    def at_step(self, step: int) -> SavePlan:
        """The same plan at another step: only twelve digits of the header differ."""
        old = memoryview(self.header)  # there may be megabytes of it
        digits = _digits(step).encode("ascii")
        header = b"".join((old[:_STEP_AT], digits, old[_STEP_AT + STEP_DIGITS :]))
        return replace(self, step=step, header=header)

    def as_written(self, header: bytes) -> SavePlan | None:
        """The same plan at the step of a file with this header. None if more than the step
        differs."""
        digits = header[_STEP_AT : _STEP_AT + STEP_DIGITS]
        if len(digits) != STEP_DIGITS or not digits.isdigit():
            return None
        plan = self.at_step(int(digits))
        return plan if plan.header == header else None


def file_name(rank: int, world_size: int, part: int = 0) -> str:
    """A file holds a name once. A rank with several boxes of one tensor has more files, with a
    number."""
    number = f"-{part}" if part else ""
    return f"rank-{rank:05d}-of-{world_size:05d}{number}.safetensors"


def file_of(name: str) -> tuple[int, int, int] | None:
    """(rank, world size, part) of the data file with this name; None for any other name."""
    found = _FILE_NAME.fullmatch(name)
    return None if found is None else (int(found[1]), int(found[2]), int(found[3] or 0))


def piece_count(begin: int, nbytes: int, block_bytes: int) -> int:
    """How many grid blocks the bytes [begin, begin + nbytes) of a file touch."""
    if nbytes == 0:
        return 0
    return (begin + nbytes - 1) // block_bytes - begin // block_bytes + 1


def pieces(begin: int, nbytes: int, block_bytes: int) -> Iterator[tuple[int, int]]:
    """[begin, begin + nbytes) cut at every multiple of `block_bytes`, as (begin, end)."""
    end = begin + nbytes
    while begin < end:
        cut = min(end, (begin // block_bytes + 1) * block_bytes)
        yield begin, cut
        begin = cut


def sum_places(data_begin: int, begins: Sequence[int], specs: Sequence[TensorSpec]) -> list[int]:
    """Where in the checksums of a file those of each tensor begin, in pieces; and where all end.

    Those of the header come first."""
    places = zip(begins, specs, strict=True)
    counts = [piece_count(begin, spec.nbytes, BLOCK_BYTES) for begin, spec in places]
    return list(accumulate(counts, initial=piece_count(0, data_begin, BLOCK_BYTES)))


def plan_save(
    specs: Sequence[TensorSpec],
    *,
    step: int,
    world_size: int = 1,
    rank: int = 0,
    part: int = 0,
    frozen: tuple[str, ...] | None = None,
) -> SavePlan:
    """Plan the data file of `rank`, or number `part` of its files.

    The widest dtypes come first, so that every tensor is aligned to its dtype without holes. Among
    these, eager tensors come first, so that they share blocks. The rest follows the input, but
    single numbers come last: an optimizer's `step` would part tensors of a device, which are copied
    together if they follow each other. Raises UsageError for a step out of range, InvariantError
    for specs that contradict themselves.
    """
    check_specs(specs)
    bits = header.DTYPE_BITS
    # As numbers: Python's collector would look at tens of thousands of tuples.
    keys = [-4 * bits[each.dtype] - 2 * each.eager + (not each.shape) for each in specs]
    order = sorted(range(len(specs)), key=keys.__getitem__)
    placed = tuple([specs[i] for i in order])
    *begins, data_bytes = accumulate([spec.nbytes for spec in placed], initial=0)
    entries = (
        header.Entry(spec.name, spec.dtype, spec.shape, at, at + spec.nbytes)
        for spec, at in zip(placed, begins, strict=True)
    )
    raw = header.encode(entries, metadata_of(placed, step, world_size, frozen))
    return SavePlan(
        step=step,
        world_size=world_size,
        rank=rank,
        file_name=file_name(rank, world_size, part),
        specs=placed,
        source_index=tuple(order),
        begins=tuple([len(raw) + at for at in begins]),
        header=raw,
        data_begin=len(raw),
        file_bytes=len(raw) + data_bytes,
        frozen=frozen,
    )


def check_specs(specs: Sequence[TensorSpec]) -> None:
    """Raise InvariantError for specs that cannot be in one file, or that contradict themselves."""
    if not header.are_names([spec.name for spec in specs]):
        raise InvariantError("tensor names must be distinct, and names that a header can hold")
    for spec in specs:
        if spec.dtype not in header.DTYPE_BITS:
            facts = {"tensor": spec.name, "dtype": spec.dtype}
            raise InvariantError("safetensors cannot hold this dtype", facts=facts)
        expected = header.bytes_of(spec.dtype, spec.shape)
        if expected != spec.nbytes:
            facts = {"tensor": spec.name, "expected": str(expected), "got": str(spec.nbytes)}
            raise InvariantError("the size of a tensor contradicts its shape", facts=facts)


def step_of(given: Any) -> int:
    """A step from a user: an int, or a value that equals one exactly, such as a NumPy integer."""
    is_bool = isinstance(given, bool) or str(getattr(given, "dtype", "")).endswith("bool")
    try:
        step = -1 if is_bool else operator.index(given)
    except (TypeError, ValueError):  # a float, a text, a tensor of several numbers
        step = -1
    if not 0 <= step <= STEP_MAX:
        hint = "the step comes first in save(step, state), and second in restore(state, step)"
        raise refused("a step is a whole number", f"0 to {STEP_MAX}", shown(given), hint)
    return step


def _digits(step: int) -> str:
    if type(step) is not int or not 0 <= step <= STEP_MAX:
        facts = {"expected": f"an int from 0 to {STEP_MAX}", "got": shown(step)}
        raise UsageError("a step number is out of range", facts=facts)
    return f"{step:0{STEP_DIGITS}d}"


def metadata_of(
    specs: Sequence[TensorSpec], step: int, world_size: int, frozen: tuple[str, ...] | None = None
) -> dict[str, str]:
    """The strings of `__metadata__`: ours, and those that the stock DCP reader needs.

    DCP takes the box of a chunk from `saved_offsets` and from the shape in the header. It guesses
    the global shape from the existing files, so we record that, too.
    """
    names = [spec.name for spec in specs]
    offsets = [header.sizes(spec.offsets or (0,) * len(spec.shape)) for spec in specs]
    shapes = [spec.shape if spec.global_shape is None else spec.global_shape for spec in specs]
    return {
        _STEP_KEY: _digits(step),
        **({} if frozen is None else {FROZEN_KEY: _compact(frozen)}),
        "statehold.world_size": str(world_size),
        "statehold.global_shapes": header.members(names, map(header.sizes, shapes)),
        "DCP_SHARDING_INFO": header.members(names, map('{{"saved_offsets":{}}}'.format, offsets)),
        "DCP_VERSION": "1.0",
        "format": "pt",
    }


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
