"""Which subgroup of an offloaded state goes to which path, and how large a subgroup is.

An update reads and writes every subgroup once, on all paths at once. It takes as long as its
slowest path: the bytes there, divided by the path's bandwidth. So each path gets subgroups in
proportion to its bandwidth (largest remainders), in turns, so that all paths are busy all the time.

Invariants: each subgroup has one path. A better placement replaces one only if the update becomes
faster by MOVES_PAY_AT, because measured bandwidths vary from update to update. Pure.
Not here: measuring (offload/store), moving (offload/pipeline).
"""

from __future__ import annotations

from collections.abc import Sequence

from statehold.units import MiB

EXCHANGES_PER_PATH = 3
MOVES_PAY_AT = 0.05
SUBGROUPS_WANTED = 64
SUBGROUP_BYTES_MIN = 4 * MiB
SUBGROUP_BYTES_MAX = 256 * MiB


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


def shares(count: int, bandwidths: Sequence[float]) -> list[int]:
    """How many of `count` subgroups each path gets: largest remainders of its part of the sum."""
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
    return max(count / each for count, each in zip(counts, bandwidths, strict=True))


def replaced(counts: Sequence[int], bandwidths: Sequence[float]) -> list[int]:
    """The shares from now on: `counts`, or better ones if the difference pays."""
    best = shares(sum(counts), bandwidths)
    gain = 1 - slowest_s(best, bandwidths) / slowest_s(counts, bandwidths) if sum(counts) else 0
    return best if gain >= MOVES_PAY_AT else list(counts)
