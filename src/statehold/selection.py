"""What a restore takes of a step, and what it says it did. Pure.

Owns: the patterns on dotted names, renaming, and the report.
Holds: a pattern is a glob (`*` also matches dots); one without wildcards also stands for all that
is below it, so "model" is the whole model. `only` and `skip` are about the names of the live state,
and hold for what the step has and for what it lacks. `skip` wins.
Not here: live objects and saved trees (state/restore).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import translate
from typing import Any

from statehold.errors import UsageError

__all__ = ["EVERYTHING", "RestoreReport", "Selection"]

_WILDCARD = re.compile(r"[*?\[]")
NAMES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What a restore did, by dotted names of the live state.

    `loaded`: from the step. `missing`: not in the step. `unexpected`: in the step, without a place
    here. `kept`: left as it was, because it was not selected or because every rank has its own.
    """

    step: int
    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"step {self.step}: {len(self.loaded)} loaded"]
        for what in ("missing", "unexpected", "kept"):
            names: tuple[str, ...] = getattr(self, what)
            if names:
                more = f", and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
                lines.append(f"  {what} {len(names)}: {', '.join(names[:NAMES_SHOWN])}{more}")
        return "\n".join(lines)


class _Pattern:
    def __init__(self, text: str) -> None:
        wildcard = _WILDCARD.search(text)
        self._literal = text[: wildcard.start()] if wildcard else text
        self._is_glob = wildcard is not None
        self._matches = re.compile(translate(text)).match

    def matches(self, name: str) -> bool:
        return self.covers(name) or self._matches(name) is not None

    def covers(self, name: str) -> bool:
        """Whether the pattern stands for `name` and all that may be below it."""
        return not self._is_glob and f"{name}.".startswith(f"{self._literal}.")

    def reaches(self, name: str) -> bool:
        """Whether the pattern may match `name` or something below it."""
        below, literal = f"{name}.", self._literal if self._is_glob else f"{self._literal}."
        return not name or literal.startswith(below) or below.startswith(literal)


class Selection:
    """Which names of the live state are restored, and under which names the step has them.

    `rename` maps prefixes of saved names to prefixes of live ones. Not `strict`: what the step
    lacks keeps its live value, and what has no place here is left out.
    """

    def __init__(
        self,
        only: Iterable[str] | None = None,
        skip: Iterable[str] | None = None,
        rename: Mapping[str, str] | None = None,
        strict: bool = True,
    ) -> None:
        self._only = None if only is None else [_Pattern(each) for each in _texts(only, "only")]
        self._skip = [_Pattern(each) for each in _texts(skip or (), "skip")]
        self.rename = dict(rename or {})
        _texts([*self.rename, *self.rename.values()], "rename")
        self.strict = strict

    @property
    def is_everything(self) -> bool:
        """Whether all of a step is restored."""
        return self._only is None and not self._skip

    def takes(self, name: str) -> bool:
        """Whether `name` is to be restored."""
        if any(pattern.matches(name) for pattern in self._skip):
            return False
        return self._only is None or any(pattern.matches(name) for pattern in self._only)

    def reaches(self, name: str) -> bool:
        """Whether anything at or below `name` may be restored."""
        if any(pattern.covers(name) for pattern in self._skip):
            return False
        return self._only is None or any(pattern.reaches(name) for pattern in self._only)

    def renamed(self, name: str) -> str:
        """The live name of what was saved as `name`; the longest prefix decides."""
        for saved in sorted(self.rename, key=len, reverse=True):
            if f"{name}.".startswith(f"{saved}."):
                return self.rename[saved] + name[len(saved) :]
        return name

    def renames_below(self, name: str) -> bool:
        """Whether a name below `name` has to be renamed by a prefix of its own."""
        return any(not name or saved.startswith(f"{name}.") for saved in self.rename)


def _texts(given: Any, argument: str) -> list[str]:
    if isinstance(given, str) or not all(type(each) is str and each for each in list(given)):
        raise UsageError(
            f"{argument} is a list of names or patterns",
            facts={"expected": 'for example ["model"]', "got": repr(given)[:80]},
        )
    return list(given)


EVERYTHING = Selection()
