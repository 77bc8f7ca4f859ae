"""The levels as a user describes them: where, how often, how many steps, how fast.

    Checkpointer("runs/llama", levels=[Memory(), Directory(every=10), ObjectStore("s3://b/llama")])

Invariants: a level is a value, validated when it is made, and opens nothing. Levels are in the
order in which a restore looks at them. Saves go into the first level, and copies to the others.

Not here: when a step is due (cadence), how it gets there (promoting), reading it (steps/nearest).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from statehold.checkpoint.cadence.every import parse_every
from statehold.errors import UsageError, refused, shown
from statehold.io.objects.client import check_options, check_url
from statehold.options import Options
from statehold.options.keep import Keep, kept_of
from statehold.options.keywords import answering, check_flag
from statehold.options.paths import absolute_outside
from statehold.planners.intervals import Loss
from statehold.units import parse_rate

KEEP_IN_MEMORY = 2
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """What all levels have in common.

    Args:
        every: which steps this level gets from the level before it. A number n means each time that
            another n steps have passed. A time ("30min", "90s") counts from the newest step of the
            level, over restarts, and a level without steps gets the next one. "auto" chooses the
            interval from the cost of a save and the rate of failures. At the first level, `every`
            says which calls of save() save.
        keep: which committed steps stay here: so many of the newest, or what a Keep says of the
            steps that the level has. None keeps all.
        bytes_per_s: limit of the bandwidth of copies to this level, on each rank; an int or
            "500MB". None sets no limit.
        name: the name in messages and figures, equal on all ranks.

    Raises:
        UsageError: a value is not valid; the error names the level.
    """

    every: int | str = 1
    keep: int | Keep | None = None
    bytes_per_s: int | str | None = None
    name: str = "level"

    def __post_init__(self) -> None:
        parse_every(self.every, self.name)
        if not (isinstance(self.name, str) and NAME.fullmatch(self.name)):
            raise UsageError(
                "the name of a level must be 1 to 64 letters, digits, dots, dashes and underscores",
                facts={"got": shown(self.name)},
            )
        try:
            kept_of(self.keep)
            parse_rate(self.bytes_per_s)
        except UsageError as error:
            raise error.with_fact("level", self.name) from None

    @property
    def survives(self) -> Loss:
        """The worst loss that the steps at this level survive."""
        return Loss.NODE

    @property
    def rate(self) -> int | None:
        """bytes_per_s, in bytes."""
        return parse_rate(self.bytes_per_s)


@answering()
@dataclass(frozen=True, kw_only=True, slots=True)
class Memory(Level):
    """Memory of this host that outlives the process: survives the trainer's death, not the host's.

    Takes keep + 1 times the state, because one more file waits for the next save to overwrite it.
    statehold makes that file at the first commit if half of the memory for files has room for it. A
    step goes to the next level if too little memory would stay free on the host. The
    steps stay until the run continues, until `statehold free`, or until the host restarts.

    The other arguments are those of `Level`.

    Args:
        keep: while a step is written, one more step takes memory. On several hosts at least 2.
        path: a directory on a memory file system (tmpfs). None takes one below /dev/shm that
            belongs to this user and this run.
        agent: if there is another level, start a small process that outlives the trainer. If the
            trainer dies without close(), the agent copies its newest step there.
        copies: the number of other hosts whose memory keeps a copy of this host's files. With one,
            the run survives the loss of any one host. Each copy takes the same memory again.
    """

    keep: int | Keep | None = KEEP_IN_MEMORY
    path: str | os.PathLike[str] | None = field(default=None, kw_only=False)
    agent: bool = True
    copies: int = 0
    name: str = "memory"

    def __post_init__(self) -> None:
        Level.__post_init__(self)
        check_flag("agent", self.agent)
        if self.path is not None:
            absolute_outside(self.path, f"the path of level {self.name}")
        _check_copies(self, self.copies)
        keep = kept_of(self.keep)
        if keep is None or keep.most is None:
            raise refused(
                "a memory level cannot keep all steps, or any number of them: memory is bounded",
                "a number of steps, or a Keep without every= and without tags",
                repr(self.keep)[:120],
            )

    @property
    def survives(self) -> Loss:
        return Loss.NODE if self.copies else Loss.PROCESS


@answering()
@dataclass(frozen=True, kw_only=True, slots=True)
class Directory(Level):
    """A directory: a local disk, or a parallel file system.

    The other arguments are those of `Level`.

    Args:
        path: the directory. None takes the run directory itself.
        per_host: each host has its own disk, which the others do not see. A rank saves on its own
            host, and all hosts together have the step.
        copies: as for Memory, on disks of other hosts.
    """

    path: str | os.PathLike[str] | None = field(default=None, kw_only=False)
    per_host: bool = False
    copies: int = 0
    name: str = "directory"

    def __post_init__(self) -> None:
        Level.__post_init__(self)
        if self.path is not None:
            absolute_outside(self.path, f"the path of level {self.name}")
        _check_copies(self, self.copies)
        if self.copies and not self.per_host:
            raise UsageError(
                "copies= needs per_host=True: if all hosts see the directory, it needs no copies "
                "on other hosts",
                facts={"level": self.name},
                hint="set per_host=True if this is a local disk, or leave copies= out",
            )
        if self.per_host and self.path is None:
            raise UsageError(
                "per_host=True needs a path: all hosts share the run directory",
                facts={"level": self.name},
            )
        if self.per_host and _keeps_one(self):
            raise _too_few(self)

    @property
    def survives(self) -> Loss:
        return Loss.NODE if self.copies or not self.per_host else Loss.PROCESS


def _check_copies(level: Level, copies: object) -> None:
    if type(copies) is not int or copies < 0:
        text = "copies must be a number of other hosts"
        raise refused(text, "0 or more", repr(copies), level=level.name)
    if copies and _keeps_one(level):
        raise _too_few(level)


def _keeps_one(level: Level) -> bool:
    """Whether only the newest step is sure to stay."""
    keep = kept_of(level.keep)
    return keep is not None and keep.last == 1


def _too_few(level: Level) -> UsageError:
    return UsageError(
        "a level on several hosts must keep at least 2 steps: when a step is saved again, the "
        "hosts replace it one after the other",
        facts={"level": level.name, "got": f"keep={level.keep!r}"},
    )


@answering()
@dataclass(frozen=True, slots=True)
class ObjectStore(Level):
    """An object store: s3://bucket/prefix, gs://bucket/prefix, az://container/prefix.

    Credentials come from the environment, as the providers' own tools read them. statehold never
    writes them anywhere.

    The other arguments are those of `Level`.

    Args:
        url: the bucket, and the prefix of the run in it.
        options: options of the client, such as {"endpoint": "http://127.0.0.1:9000"}; not for
            secrets.
    """

    url: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    name: str = field(default="objects", kw_only=True)

    def __post_init__(self) -> None:
        Level.__post_init__(self)
        if not isinstance(self.url, str) or "://" not in self.url:
            text = "the url of an object store must be a URL"
            raise refused(text, "such as s3://bucket/prefix", shown(self.url), level=self.name)
        check_url(self.url)
        check_options(self.options)

    @property
    def survives(self) -> Loss:
        return Loss.CLUSTER


def check_levels(levels: Sequence[Level]) -> tuple[Level, ...]:
    """The levels of a run, if they make sense together."""
    if not isinstance(levels, list | tuple):
        raise UsageError(
            "levels must be a list, with the nearest level first",
            facts={"got": shown(levels)},
            hint="write levels=[...]",
        )
    for level in levels:
        if not isinstance(level, Memory | Directory | ObjectStore):
            text = "a level must be a Memory, a Directory or an ObjectStore"
            raise refused(text, "for example Directory(every=10)", shown(level))
    if not levels:
        raise UsageError(
            "levels must not be empty: leave levels= out to use the run directory alone"
        )
    if isinstance(levels[0], ObjectStore):
        raise UsageError(
            "the first level must be a Memory or a Directory: saves go there, and statehold "
            "cannot save directly into an object store",
            hint="put Memory() or Directory() before it",
        )
    names = [level.name for level in levels]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(
                "two levels have the same name",
                facts={"name": name},
                hint='give one of them another name: name="..."',
            )
    memories = [level for level in levels if isinstance(level, Memory)]
    if len(memories) > 1 or (memories and levels[0] is not memories[0]):
        raise UsageError("there can be only one Memory level, and it must be the first")
    return tuple(levels)


def levels_of(levels: Sequence[Level] | None, options: Options) -> tuple[Level, ...]:
    """The levels that the user has given; without any, only the run directory."""
    if levels is None:
        return (Directory(keep=options.keep),)
    if options.keep is not None:
        raise UsageError(
            "with levels=, each level has a keep= of its own",
            facts={"got": f"keep={options.keep!r}"},
            hint=f"pass keep={options.keep!r} to the level that needs it",
        )
    return check_levels(levels)


# -- the same levels on all ranks ------------------------------------------------------------------
# All ranks go through the levels together, by name and in order, and would wait in vain for a rank
# with other levels. The place of a level, and its limit of bandwidth, may differ from host to host.


ROUND = "levels"
_OF_HOST = {"path", "url", "options", "bytes_per_s"}


def described(levels: Sequence[Level]) -> str:
    """The parts that must be equal on all ranks."""
    found = []
    for level in levels:
        fields = {name: each for name, each in asdict(level).items() if name not in _OF_HOST}
        found.append({"kind": type(level).__name__, **fields})
    return json.dumps(found, default=str)


def check_same(levels: Sequence[Level], of_rank_0: str) -> None:
    """Raises UsageError if these levels, of another rank, differ from those of rank 0."""
    found = _difference(json.loads(described(levels)), json.loads(of_rank_0))
    if found is not None:
        raise UsageError(
            "the levels of this rank differ from those of rank 0",
            facts={"difference": found},
            hint="give all ranks of a job the same levels",
        )


def _difference(mine: list[dict[str, object]], first: list[dict[str, object]]) -> str | None:
    if len(mine) != len(first):
        return f"{len(mine)} levels, and rank 0 has {len(first)}"
    for at, (each, expected) in enumerate(zip(mine, first, strict=True)):
        for key in {**expected, **each}:
            if each.get(key) != expected.get(key):
                values = f"{each.get(key)!r}, on rank 0 {expected.get(key)!r}"
                return f"level {at + 1} ({expected['name']}): {key} is {values}"
    return None
