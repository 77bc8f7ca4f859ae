"""The tiers of an offloaded optimizer as a user describes them, nearest first.

    offload.AdamW(params, tiers=[Host("4GiB"), Path("/nvme0/opt"), Path("/nvme1/opt")])

Invariants: a tier is a value, validated when it is made, and opens nothing. There is at most one
`Host`, and it comes first. No two paths are the same directory.
Not here: what lies on a path (store), which subgroup goes where (planners/placement).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from statehold.errors import UsageError, shown
from statehold.options.paths import check_path
from statehold.units import parse_bytes, parse_rate


@dataclass(frozen=True, slots=True)
class Host:
    """Host memory that keeps state from one update to the next.

    The buffers of the pipeline come on top of it. `optimizer.stats` has both figures.

    Args:
        nbytes: its size, in bytes; an int or "4GiB".
    """

    nbytes: int | str

    def __post_init__(self) -> None:
        parse_bytes(self.nbytes)

    @property
    def size(self) -> int:
        """nbytes, in bytes."""
        return parse_bytes(self.nbytes)


@dataclass(frozen=True, slots=True)
class Path:
    """A directory that exists, on any file system. Optimizers and ranks may share it.

    Args:
        path: the directory.
        bytes_per_s: limit of reads and writes together; an int or "500MB". None sets no limit.
        exclusive: the optimizers of this node use it one at a time, in each direction. False is
            faster on storage that serves many at once without loss.
    """

    path: str | os.PathLike[str]
    bytes_per_s: int | str | None = None
    exclusive: bool = True

    def __post_init__(self) -> None:
        check_path(self.path, "a path of an optimizer")
        try:
            parse_rate(self.bytes_per_s)
        except UsageError as error:
            raise error.with_fact("path", self.directory) from None

    @property
    def directory(self) -> str:
        """The path as a string."""
        return os.fspath(self.path)

    @property
    def rate(self) -> int | None:
        """bytes_per_s, in bytes."""
        return parse_rate(self.bytes_per_s)


Tier = Host | Path


def check_tiers(tiers: Sequence[Tier]) -> tuple[int, list[Path]]:
    """The bytes of host memory, and the paths. Raises UsageError for tiers that make no sense."""
    tiers = list(tiers)
    wrong = [tier for tier in tiers if not isinstance(tier, Tier)]
    if wrong or not tiers:
        raise UsageError(
            "tiers are Host and Path, at least one of them",
            facts={"got": shown(wrong[0]) if wrong else "no tier"},
        )
    hosts = [place for place, tier in enumerate(tiers) if isinstance(tier, Host)]
    if hosts not in ([], [0]):
        raise UsageError("Host is given once, as the first tier", facts={"got": f"{tiers}"[:200]})
    paths = [tier for tier in tiers if isinstance(tier, Path)]
    real = [os.path.realpath(path.directory) for path in paths]
    twice = {path for path in real if real.count(path) > 1}
    if twice:
        raise UsageError("two tiers are the same directory", facts={"path": min(twice)})
    return (tiers[0].size if isinstance(tiers[0], Host) else 0), paths
