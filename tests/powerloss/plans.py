"""What a session does, drawn from its seed: its file system, workload, sizes and options."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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
)
_SIZES = (1, 700, 4096, 20_000, 60_000, 150_000)


@dataclass(frozen=True, slots=True)
class Plan:
    """One session. numels: of the tensors of a state. keep: of each place; see `keeps`.
    has_neighbour: another program writes to the disk meanwhile."""

    seed: int
    file_system: str
    kind: str
    keep: int | None
    reuse: bool
    backend: str
    numels: tuple[int, ...]
    saves: int
    has_neighbour: bool

    @property
    def ranks(self) -> int:
        several = self.kind.startswith("ranks") or self.kind == "processes"
        return 2 + (self.seed % 4 == 0) if several else 1

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
    pairs = [(name, kind) for name in file_systems for kind in kinds]
    random.Random(0).shuffle(pairs)
    name, kind = pairs[seed % len(pairs)]
    return Plan(
        seed=seed,
        file_system=name,
        kind=kind,
        keep=chance.choice([1, 2, 2, 3, None]),
        reuse=chance.random() < 0.8,
        backend=chance.choice(["auto", "auto", "threads"]),
        numels=tuple(chance.choice(_SIZES) for _ in range(chance.randint(2, 5))),
        saves=chance.randint(4, 9),
        has_neighbour=chance.random() < 0.4,
    )
