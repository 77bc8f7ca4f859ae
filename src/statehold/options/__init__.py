"""The settings of a Checkpointer: frozen values that are validated when they are made.

    Options   all settings of a Checkpointer, validated together
    io        Io: how bytes move
    keep      Keep: which committed steps stay
    paths     which paths can be those of a run or a level
    keywords  what a constructor answers to a keyword that it does not have

Invariants: no environment variable overrides a field, and no field is ignored because of another
one.
Not here: the settings of a level (checkpoint/levels/specs).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from statehold.errors import UsageError, refused, shown
from statehold.options.io import MEMORY_BYTES_MAX, Io, Moving, filled, settled
from statehold.options.keep import Keep, kept_of
from statehold.options.keywords import check_choice, check_count
from statehold.options.paths import PATH, NamedStep, check_step
from statehold.units import format_bytes, parse_bytes, parse_seconds

Coordination = Literal["auto", "store", "directory", "none"]
COORDINATIONS = ("auto", "store", "directory", "none")

# A day: no live rank is later than that, and clocks and stores can still count it.
PEER_TIMEOUT_S_MAX = 86_400

NODES_MAX = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How a Checkpointer stages, writes and keeps steps: its keywords, which say what they mean."""

    keep: int | Keep | None = None
    parent: str | os.PathLike[str] | None = None
    staging_bytes: int | str | None = None
    coordination: Coordination = "auto"
    peer_timeout_s: float = 600.0
    node_mtbf: str | None = None
    nodes: int | None = None
    trace: str | os.PathLike[str] | None = None
    on_commit: Callable[[Any], object] | Sequence[Callable[[Any], object]] | None = None
    io: Io = field(default_factory=Io)

    def __post_init__(self) -> None:
        kept_of(self.keep)
        if self.parent is not None:
            check_step(self.parent, "the parent")
        check_choice("coordination", self.coordination, COORDINATIONS)
        check_count("nodes", self.nodes, NODES_MAX)
        if self.node_mtbf is not None and self.node_mtbf_s is None:
            raise refused("node_mtbf must be a time", 'such as "250d"', shown(self.node_mtbf))
        if self.trace is not None and not (self.trace and isinstance(self.trace, PATH)):
            raise UsageError("trace must be the path of a file", facts={"got": repr(self.trace)})
        if not all(map(callable, self.callbacks)):
            text = "on_commit must be a function, or a list of functions"
            raise UsageError(text, facts={"got": shown(self.on_commit)})
        if not isinstance(self.io, Io):
            raise refused("io must be a statehold.Io", "such as Io(queue_depth=64)", self.io)
        check_peer_timeout("peer_timeout_s", self.peer_timeout_s)
        self._check_memory()

    def _check_memory(self) -> None:
        staging, least = self.staging_size, 2 * settled(self.io).buffer_bytes
        if staging is not None and not least <= staging <= MEMORY_BYTES_MAX:
            text = "staging_bytes must hold at least two buffers"
            expected = f"at least {format_bytes(least)}, and at most 64 TiB"
            raise refused(text, expected, format_bytes(staging))

    @property
    def origin(self) -> NamedStep | None:
        """The step that the run begins from."""
        return None if self.parent is None else check_step(self.parent, "the parent")

    @property
    def callbacks(self) -> tuple[Any, ...]:
        """on_commit, as functions; they may be something else before that is checked."""
        given = self.on_commit
        if given is None:
            return ()
        return tuple(given) if isinstance(given, list | tuple) else (given,)

    @property
    def node_mtbf_s(self) -> float | None:
        """node_mtbf, in seconds."""
        return parse_seconds(self.node_mtbf)

    @property
    def staging_size(self) -> int | None:
        """staging_bytes, in bytes; None: the first save chooses it."""
        return None if self.staging_bytes is None else parse_bytes(self.staging_bytes)

    def filled(self, moving: Moving) -> Options:
        """These options, with the values of `moving` for fields of `io` that are None."""
        return replace(self, io=filled(self.io, moving, self.staging_size))


def check_peer_timeout(name: str, timeout_s: float) -> float:
    """How long ranks wait for each other. Raises UsageError."""
    number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    if not number or not 0 < timeout_s <= PEER_TIMEOUT_S_MAX:
        expected, got = f"above 0, up to {PEER_TIMEOUT_S_MAX}", shown(timeout_s)
        raise refused(f"{name} must be a number of seconds", expected, got)
    return timeout_s
