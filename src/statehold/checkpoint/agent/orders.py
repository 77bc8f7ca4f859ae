"""The orders of a trainer to its agent, as one line of JSON through a pipe.

    {"format": "statehold-agent", "trainer": 4711, "pidfd": 12, "path": [...], "run": ..., ...}

Invariants: no secrets; credentials are in the environment, which the agent inherits. The orders are
checked as strictly as any file.
Not here: how they get there (starting), how they are carried out (process).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from statehold.checkpoint.levels.specs import Directory, Level, Memory, ObjectStore, check_levels
from statehold.encoding.strictjson import Checker
from statehold.errors import CorruptionError, UsageError
from statehold.options.keep import Keep

# How often a failing level is tried again, and how long after the trainer's death.
RETRY_S = 10.0
GIVE_UP_S = 600.0

_FORMAT = "statehold-agent"
_DEPTH_MAX = 8
_KINDS: dict[str, type[Level]] = {kind.__name__: kind for kind in (Memory, Directory, ObjectStore)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Orders:
    """trainer, pidfd: the process to watch, by its number for people and its descriptor in the
        agent.
    path: where modules are found. run, levels: those of the trainer.
    backend, queue_depth, buffer_bytes: how bytes move.
    """

    trainer: int
    pidfd: int
    path: Sequence[str]
    run: str
    levels: Sequence[Level]
    backend: str
    queue_depth: int
    buffer_bytes: int
    retry_s: float = RETRY_S
    give_up_s: float = GIVE_UP_S

    def encode(self) -> bytes:
        """One line. Raises UsageError if JSON cannot hold an option of a level."""
        orders = {each.name: getattr(self, each.name) for each in fields(self)}
        orders["levels"] = [_said(level) for level in self.levels]
        try:
            return json.dumps({"format": _FORMAT, **orders}, allow_nan=False).encode() + b"\n"
        except (TypeError, ValueError) as error:
            raise UsageError(
                "a level cannot be described to the agent", facts={"reason": str(error)}
            ) from error

    @classmethod
    def decode(cls, line: bytes) -> Orders:
        check = Checker(CorruptionError, "the orders of an agent cannot be read", "")
        orders = check.parse(line, "orders", _DEPTH_MAX)
        names = [each.name for each in fields(cls)]
        found = dict(check.members(orders, "orders", ["format", *names]))
        if found.pop("format") != _FORMAT:
            check.fail("format", _FORMAT, "another one")
        levels = check.array(found["levels"], "levels")
        found["levels"] = check_levels([_level(check, each) for each in levels])
        return cls(**found)


def _said(level: Level) -> dict[str, Any]:
    described = {each.name: getattr(level, each.name) for each in fields(level)}
    if isinstance(level.keep, Keep):
        described["keep"] = asdict(level.keep)
    if isinstance(level, ObjectStore):
        described["options"] = dict(level.options)
    if isinstance(level, Directory | Memory) and level.path is not None:
        described["path"] = os.path.abspath(os.fspath(level.path))  # the agent is elsewhere
    return {"kind": type(level).__name__, **described}


def _level(check: Checker, document: Any) -> Level:
    described = dict(check.object(document, "level"))
    kind = _KINDS.get(str(described.pop("kind", None)))
    if kind is None:
        check.fail("level", f"one of {', '.join(_KINDS)}", "another kind")
    members = dict(check.members(described, "level", [each.name for each in fields(kind)]))
    if type(members["keep"]) is dict:
        names = [each.name for each in fields(Keep)]
        members["keep"] = Keep(**check.members(members["keep"], "keep", names))
    return kind(**members)
