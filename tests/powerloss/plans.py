"""What a session does, drawn from its seed: its file system, workload, sizes and options."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

KINDS = (
    "keep",  # saves one after the other, with files of retired steps overwritten
    "resave",  # steps that are saved again
    "rewind",  # and given up, and saved anew
    "overlap",  # two saves under way
    "ranks",  # threads that meet in memory
    "ranks-store",  # through a store as that of torch.distributed
    "ranks-directory",  # through files on the disk that loses power
    "processes",  # ranks that are processes, through files on that disk
    "levels",  # two directories on the disk, the run's own and another
    "memory",  # a level in memory, which is lost, before the run directory
    "memory-path",  # the same before a directory of its own
    "agent",  # the trainer is killed; its agent brings the step from memory to the disk
    "offload",  # steps that share files with an optimizer, whose paths are on the disk
    "shared",  # steps that share files: most of the state changes rarely
)
_LATER = ("offload", "shared")  # came later: all other kinds keep the seeds that they had before
_SIZES = (1, 700, 4096, 20_000, 60_000, 150_000)


@dataclass(frozen=True, slots=True)
class Plan:
    """One session. numels: of the tensors of a state, unless a trainer makes it. keep: of each
    place; see `keeps`. has_neighbour: another program writes to the disk meanwhile. has_overlap:
    two saves are under way at the same time. paths, has_host: the tiers of an offloaded optimizer.
    """

    seed: int
    file_system: str
    kind: str
    keep: int | None
    reuse: bool
    backend: str
    numels: tuple[int, ...]
    saves: int
    has_neighbour: bool
    has_overlap: bool
    paths: int = 0
    has_host: bool = False

    @property
    def ranks(self) -> int:
        several = self.kind.startswith("ranks") or self.kind == "processes"
        return 2 + (self.seed % 4 == 0) if several else 1

    @property
    def has_resaves(self) -> bool:
        """Whether steps are saved again."""
        return self.kind in ("resave", "offload", "shared")

    @property
    def shares(self) -> bool:
        """Whether steps share files because little changes."""
        return self.kind == "shared"

    @property
    def is_in_memory(self) -> bool:
        """Whether saves go to a level in memory first."""
        return self.kind in ("memory", "memory-path", "agent")

    @property
    def has_levels(self) -> bool:
        return self.is_in_memory or self.kind == "levels"

    @property
    def keeps(self) -> dict[str, int | None]:
        """The places on the disk, and how many steps each keeps."""
        if self.kind == "levels":
            return {"run": self.keep, "far": 2}
        return {"far": self.keep} if self.kind == "memory-path" else {"run": self.keep}

    def document(self) -> dict[str, Any]:
        return asdict(self)


def draw(seed: int, file_systems: Sequence[str], kinds: Sequence[str]) -> Plan:
    """The plan of a session: `seed` counts through all pairs of file system and kind."""
    chance = random.Random(seed)
    pairs = _pairs(file_systems, [kind for kind in kinds if kind not in _LATER])
    for later in _LATER:
        pairs += _pairs(file_systems, [later] if later in kinds else [])
    name, kind = pairs[seed % len(pairs)]
    plan = Plan(
        seed=seed,
        file_system=name,
        kind=kind,
        keep=chance.choice([1, 2, 2, 3, None]),
        reuse=chance.random() < 0.8,
        backend=chance.choice(["auto", "auto", "threads"]),
        numels=tuple(chance.choice(_SIZES) for _ in range(chance.randint(2, 5))),
        saves=chance.randint(4, 9),
        has_neighbour=chance.random() < 0.4,
        has_overlap=kind == "overlap",
    )
    if kind == "shared":  # two saves are the same before the third one shares
        return replace(plan, saves=2 * plan.saves, keep=chance.choice([1, 2, 3]))
    return _offloaded(plan, chance) if kind == "offload" else plan


def _offloaded(plan: Plan, chance: random.Random) -> Plan:
    return replace(
        plan,
        keep=chance.choice([1, 2]),
        numels=(),
        has_overlap=chance.random() < 0.5,
        paths=chance.choice([1, 2]),
        has_host=chance.random() < 0.3,
    )


def _pairs(names: Sequence[str], kinds: Sequence[str]) -> list[tuple[str, str]]:
    pairs = [(name, kind) for name in names for kind in kinds]
    random.Random(0).shuffle(pairs)
    return pairs
