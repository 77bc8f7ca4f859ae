"""Which subgroup of an offloaded state goes to which path, and how large a subgroup is.

An update reads and writes every subgroup once, on all paths at once. It takes as long as its
slowest path: the bytes there, divided by the path's bandwidth. So each path gets subgroups in
proportion to its bandwidth (largest remainders), in turns, so that all paths are busy all the time.

The bandwidth of a path is what it reads and writes again in a second. It is measured while both are
under way, because an update does both. So nobody has to know whether the path is half duplex, with
1 / (1 / read + 1 / write), or full duplex, with min(read, write).

Invariants: each subgroup has one path. A better placement replaces one only if the update becomes
faster by MOVES_PAY_AT, because measured bandwidths vary from update to update. Pure.
Not here: measuring (offload/store), moving (offload/pipeline).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from statehold.units import MiB

# So many that a path has work while some exchanges wait for a processor. Six with 128 subgroups
# keep a path busier than three with 64, and take less memory.
EXCHANGES_PER_PATH = 6
MOVES_PAY_AT = 0.05
# How much the last update counts in the bandwidth of a path.
NEWEST = 0.5
# Measuring a path that has no subgroups takes at most this share of the time.
MEASURING_SHARE = 0.01
SUBGROUPS_WANTED = 128
SUBGROUP_BYTES_MIN = 4 * MiB
SUBGROUP_BYTES_MAX = 128 * MiB


def choose_subgroup_bytes(total_bytes: int) -> int:
    """The size of a subgroup of a state of `total_bytes`.

    Enough subgroups that the buffers of a pipeline are a small part of the state. But no smaller
    than what a device transfers at full speed, and no larger than what a pipeline needs.
    """
    return min(max(total_bytes // SUBGROUPS_WANTED, SUBGROUP_BYTES_MIN), SUBGROUP_BYTES_MAX)


def buffers_in_transit(paths: int) -> int:
    """Buffers that keep all paths busy: those of the exchanges, one in use, one that has arrived.

    They are not part of the cache, although the cache gains by them.
    """
    return EXCHANGES_PER_PATH * paths + 2


@dataclass(frozen=True, slots=True)
class Moved:
    """What a path has moved, and the seconds in which it was reading, writing, or both."""

    read_bytes: int = 0
    written_bytes: int = 0
    busy_s: float = 0.0

    def __sub__(self, before: Moved) -> Moved:
        return Moved(
            self.read_bytes - before.read_bytes,
            self.written_bytes - before.written_bytes,
            self.busy_s - before.busy_s,
        )


def bandwidth(moved: Moved) -> float | None:
    """Bytes a second that were read and written again. None: too little of one of the two."""
    less, more = sorted((moved.read_bytes, moved.written_bytes))
    if less == 0 or 2 * less < more or moved.busy_s <= 0:
        return None
    return (less + more) / 2 / moved.busy_s


def averaged(before: float | None, late: float) -> float:
    """The bandwidth of a path after another measurement."""
    return late if before is None else before * (1 - NEWEST) + late * NEWEST


def is_worth_measuring(before: float | None, nbytes: int, idle_s: float) -> bool:
    """Whether a path is measured again that has moved nothing for `idle_s`.

    before: its bandwidth then. nbytes: what it would move now.
    """
    return before is None or nbytes / before <= MEASURING_SHARE * idle_s


def with_one_on(path: int, counts: Sequence[int]) -> list[int]:
    """The shares in which a path gets one subgroup from the path with most of them."""
    found = list(counts)
    found[found.index(max(found))] -= 1
    found[path] += 1
    return found


def shares(count: int, bandwidths: Sequence[float]) -> list[int]:
    """How many of `count` subgroups each path gets: largest remainders of its part of the sum.

    A path with a bandwidth of 0 gets none.
    """
    total = sum(bandwidths)
    exact = [count * each / total for each in bandwidths]
    given = [int(each) for each in exact]
    by_remainder = sorted(range(len(exact)), key=lambda path: given[path] - exact[path])
    for path in by_remainder[: count - sum(given)]:
        given[path] += 1
    return given


def in_turns(counts: Sequence[int]) -> list[int]:
    """A path for each subgroup. Every prefix has its paths in about the proportion of `counts`."""
    total, given = sum(counts), [0] * len(counts)
    order = []
    for place in range(1, total + 1):
        behind = [place * count / total - had for count, had in zip(counts, given, strict=True)]
        path = max(
            (each for each, had in enumerate(given) if had < counts[each]),
            key=lambda each: behind[each],
        )
        given[path] += 1
        order.append(path)
    return order


def slowest_s(counts: Sequence[int], bandwidths: Sequence[float]) -> float:
    """How long the path with the most work takes, in units of one subgroup's bytes."""
    return max(
        (count / each for count, each in zip(counts, bandwidths, strict=True) if count), default=0.0
    )


def replaced(counts: Sequence[int], bandwidths: Sequence[float]) -> list[int]:
    """The shares from now on: `counts`, or better ones if the difference pays."""
    best = shares(sum(counts), bandwidths)
    now_s = slowest_s(counts, bandwidths)
    gain = 1 - slowest_s(best, bandwidths) / now_s if now_s else 0
    return best if gain >= MOVES_PAY_AT else list(counts)
