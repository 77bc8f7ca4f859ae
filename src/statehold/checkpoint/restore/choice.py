"""Which step a restore means: a number, the newest, the best by a metric, or one with a tag.

Invariants: a choice orders steps and names one only if it has a number. So if the first one is
damaged, the next one in the order is as good an answer, but for a number.
Not here: what steps say (format/entries), reading them (call).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from statehold.errors import (
    CorruptionError,
    FormatVersionError,
    StepNotFoundError,
    StorageError,
    UsageError,
    shown,
)
from statehold.format.entries import About
from statehold.format.manifest import Manifest
from statehold.format.saved import MANIFEST_NAME
from statehold.layout.plan import step_of
from statehold.options.keep import MODES, ranked
from statehold.options.keywords import check_choice
from statehold.options.paths import NamedStep
from statehold.steps.whole import whole_steps

if TYPE_CHECKING:
    from statehold.steps.shelf import DirectoryShelf

_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Choice:
    """At most one of step, best and tag is set; without any it is the newest step."""

    step: int | None = None
    best: str | None = None
    tag: str | None = None
    mode: str | None = None

    def __post_init__(self) -> None:
        if len(self.asked) > 1:
            facts = {"got": ", ".join(self.asked)}
            raise UsageError("a restore takes only one of step, best and tag", facts=facts)
        if self.step is not None:
            object.__setattr__(self, "step", step_of(self.step))
        for name, value in (("best", self.best), ("tag", self.tag)):
            if value is not None and not (isinstance(value, str) and value):
                raise UsageError(f"{name} must be a name", facts={"got": shown(value)})
        if self.mode is not None:
            check_choice("mode", self.mode, MODES)
            if self.best is None:
                raise UsageError("mode is for best", facts={"got": f"mode={self.mode!r}"})

    @property
    def asked(self) -> list[str]:
        """What is asked for, as arguments of restore()."""
        given = ((name, getattr(self, name)) for name in ("step", "best", "tag"))
        return [f"{name}={shown(value)}" for name, value in given if value is not None]

    @classmethod
    def of(cls, named: NamedStep) -> Choice:
        """What comes after the `@` in the name of a step."""
        return cls(named.step, named.best, named.tag, named.mode)

    def ordered(self, known: Mapping[int, About], run: str) -> list[int]:
        """The steps that are meant, the first choice last. Raises StepNotFoundError."""
        if self.best is not None:
            found = ranked(known, self.best, self.mode or "min")[::-1]
        else:
            found = [step for step in sorted(known) if self.tag in known[step].tags]
        if not found:
            raise self._not_found(list(known.values()), run)
        return found

    def _not_found(self, said: Sequence[About], run: str) -> StepNotFoundError:
        if self.best is not None:
            names = sorted({name for about in said for name in about.metrics})
            summary, facts = "no step has a finite value of this metric", {"metric": self.best}
        else:
            names = sorted({tag for about in said for tag in about.tags})
            summary, facts = "no step has this tag", {"tag": str(self.tag)}
        there = ", ".join(names[:_SHOWN]) or "none"
        return StepNotFoundError(summary, facts={"run": run, **facts, "there are": there})


def chosen(store: DirectoryShelf, choice: Choice) -> int:
    """The step of a store with the best metric, or the newest one with a tag. Raises
    StepNotFoundError."""
    known = {}
    for step in whole_steps(store):
        with contextlib.suppress(CorruptionError, FormatVersionError, StorageError):
            raw = store.manifest(step)
            known[step] = Manifest.decode(raw, f"{store.where(step)}/{MANIFEST_NAME}").about
    return choice.ordered(known, store.root)[-1]
