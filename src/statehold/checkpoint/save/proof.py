"""The proof that tensors have the bytes of a file, where they lie: reads memory, and no storage.

Version counters say what has probably not changed, and never that it has not: an extension, NumPy
or `.data` may write without counting. So the bytes are hashed, piece by piece as those of the file
were, and compared with its checksums (decision S2).

Invariants: the bytes of the header are not compared; nobody but the file has them. The threads are
those of one proof, and leave the processor to training.
Not here: bytes that are copied first, from a device or before save() returns. The engine compares
these on their way (native/write_job.h).
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from statehold.layout.plan import BLOCK_BYTES, SavePlan, piece_count, pieces
from statehold.layout.stored import SUM_BYTES

if TYPE_CHECKING:
    from statehold.io.runtime import Runtime
    from statehold.tensors.columns import Tensors

_NICENESS = 5  # like the threads that copy


class BytesClaim(NamedTuple):
    """`tensors`, in file order and dense in host memory, have the bytes of a file.

    plan, sums: of the file.
    """

    plan: SavePlan
    tensors: Tensors
    sums: bytes


class FilePiece(NamedTuple):
    """A piece of a tensor of a file, both by number, and its checksum in the file."""

    file: int
    tensor: int
    address: int
    nbytes: int
    expected: int


def refuted(claims: Sequence[BytesClaim], runtime: Runtime) -> list[set[int]]:
    """Of each claim, the indices of tensors that differ from the file."""
    found = [piece for file, claim in enumerate(claims) for piece in _pieces(file, claim)]
    left = iter(found)  # next() takes one at a time, whichever thread asks

    def compare(_: int) -> list[FilePiece]:
        return [
            each for each in left if runtime.hash_memory(each.address, each.nbytes) != each.expected
        ]

    count = min(runtime.options.io.copy_thread_count, len(found))
    differing = [set[int]() for _ in claims]
    if count:
        with low_priority(count) as threads:
            for piece in chain.from_iterable(threads.map(compare, range(count))):
                differing[piece.file].add(piece.tensor)
    return differing


def differing(plan: SavePlan, sums: bytes, others: bytes) -> set[int]:
    """The indices of tensors with other checksums in one file of this plan than in another."""
    places = enumerate(windows(plan))
    return {index for index, (low, high) in places if sums[low:high] != others[low:high]}


def windows(plan: SavePlan) -> list[tuple[int, int]]:
    """Where in the checksums of a file those of each tensor are: [begin, end) in bytes."""
    at = SUM_BYTES * piece_count(0, plan.data_begin, BLOCK_BYTES)
    found = []
    for spec, begin in zip(plan.specs, plan.begins, strict=True):
        end = at + SUM_BYTES * piece_count(begin, spec.nbytes, BLOCK_BYTES)
        found.append((at, end))
        at = end
    return found


def _pieces(file: int, claim: BytesClaim) -> Iterator[FilePiece]:
    plan, tensors, sums = claim
    places = zip(plan.begins, plan.specs, tensors.addresses, windows(plan), strict=True)
    for index, (at, spec, address, (low, high)) in enumerate(places):
        cuts = pieces(at, spec.nbytes, BLOCK_BYTES)
        expected = struct.iter_unpack("<Q", sums[low:high])
        for (begin, end), (value,) in zip(cuts, expected, strict=True):
            yield FilePiece(file, index, address + begin - at, end - begin, value)


def low_priority(count: int) -> ThreadPoolExecutor:
    """So many threads that leave the processor to training."""
    return ThreadPoolExecutor(count, "statehold-proof", initializer=_yield)


def _yield() -> None:
    with contextlib.suppress(OSError):  # of this thread alone
        os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
