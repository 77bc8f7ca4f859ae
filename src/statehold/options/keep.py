"""Keep: which committed steps stay.

A step stays for as long as one of the rules names it: the newest ones, one of every so many, the
best ones by a metric, and those that are pinned.

Invariants: a Keep is valid as soon as it is made. A step that one rule has let go is never wanted
again, whatever steps follow. So a run that retires steps as it goes on ends with the same steps as
a run that retires them once at its end.
Not here: where metrics and tags come from (format/entries), retiring (steps/store).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, nan
from typing import Literal, Protocol

from statehold.errors import UsageError, shown
from statehold.options.keywords import answering, check_choice, check_number

Mode = Literal["min", "max"]
MODES = ("min", "max")
_MOST = 10**12  # steps have 12 digits
_KEEP = "keep must be a number of steps, at least 1, a statehold.Keep, or None for all"


class Described(Protocol):
    """What a step says of itself."""

    @property
    def metrics(self) -> Mapping[str, float]: ...
    @property
    def tags(self) -> Sequence[str]: ...


# What a step says; None: it cannot be read now.
Ask = Callable[[int], Described | None]


@answering()
@dataclass(frozen=True, kw_only=True, slots=True)
class Keep:
    """Which committed steps stay: `keep=Keep(last=3, every=1000, best=2, metric="val_loss")`.

    A step stays if any of these rules names it. The newest step always stays.

    Attributes:
        last: this many of the newest steps.
        every: the first step at or after each multiple of this number: with 1000 the steps 1000,
            2000 and so on. If step 2000 was not saved, the next one after it stays instead. 0 and
            None: no such steps. `every` has no bound, so a memory level does not take it.
        best: this many of the steps with the best `metric`. A step without the metric, or whose
            metric is NaN or infinite, is not among them. Of equal steps the older one is better.
        metric: the name of a metric that save() gets in `metrics`.
        mode: "min" if a smaller metric is better, "max" if a greater one is.
        pinned: steps that stay, by number, or by a tag that save() got in `tags`. A step need not
            exist yet.

    Raises:
        UsageError: a value makes no sense.
    """

    last: int = field(default=1, kw_only=False)
    every: int | None = None
    best: int = 0
    metric: str | None = None
    mode: Mode = "min"
    pinned: Sequence[int | str] = ()

    def __post_init__(self) -> None:
        check_number("last", self.last, 1, _MOST)
        check_number("every", 0 if self.every is None else self.every, 0, _MOST)
        check_number("best", self.best, 0, _MOST)
        check_choice("mode", self.mode, MODES)
        if bool(self.best) != bool(self.metric) or not isinstance(self.metric, str | None):
            raise UsageError(
                "best and metric belong together",
                facts={"got": f"best={self.best!r}, metric={self.metric!r}"[:120]},
                hint='write Keep(best=2, metric="val_loss"), or neither',
            )
        if not isinstance(self.pinned, Sequence) or isinstance(self.pinned, str):
            raise _bad_pins(self.pinned)
        if not all(_is_pin(each) for each in self.pinned):
            raise _bad_pins(self.pinned)
        object.__setattr__(self, "pinned", tuple(dict.fromkeys(self.pinned)))

    @property
    def most(self) -> int | None:
        """The most steps that can stay; None: any number."""
        has_tags = any(isinstance(each, str) for each in self.pinned)
        return None if self.every or has_tags else self.last + self.best + len(self.pinned)

    def pins(self, step: int, tags: Sequence[str]) -> bool:
        """Whether a step stays because it is pinned.

        Args:
            step: its number.
            tags: the tags that save() got for it.
        """
        return step in self.pinned or not set(tags).isdisjoint(self.pinned)

    def of(self, steps: Sequence[int], ask: Ask) -> set[int]:
        """Those of `steps`, oldest first, that stay.

        A step that cannot be read stays: it may be one of the best.

        Args:
            steps: the committed steps.
            ask: what a step says of itself. It is only asked if a rule needs it.
        """
        kept = {*steps[-self.last :]}
        if self.every:
            kept.update(_one_of_each(steps, self.every))
        kept.update(step for step in steps if step in self.pinned)
        tags = {each for each in self.pinned if isinstance(each, str)}
        if self.metric is None and not tags:
            return kept
        said = {step: ask(step) for step in steps}
        kept.update(step for step, about in said.items() if about is None)
        known = {step: about for step, about in said.items() if about is not None}
        kept.update(step for step, about in known.items() if tags.intersection(about.tags))
        if self.metric is not None:
            kept.update(ranked(known, self.metric, self.mode)[: self.best])
        return kept


def ranked(known: Mapping[int, Described], metric: str, mode: str) -> list[int]:
    """The steps that have a finite value of a metric, the best one first."""
    sign = -1 if mode == "max" else 1
    values = ((step, about.metrics.get(metric, nan)) for step, about in known.items())
    return [step for _, step in sorted((sign * it, step) for step, it in values if isfinite(it))]


def kept_of(keep: object) -> Keep | None:
    """The Keep that a user means by `keep`; None: all steps stay. Raises UsageError."""
    if keep is None or isinstance(keep, Keep):
        return keep
    if type(keep) is int and keep >= 1:
        return Keep(last=keep)
    raise UsageError(_KEEP, facts={"got": shown(keep)})


def _one_of_each(steps: Sequence[int], every: int) -> list[int]:
    """The first of the steps at or after each multiple of `every`, before the next multiple."""
    first: dict[int, int] = {}
    for step in steps:
        first.setdefault(step // every, step)
    return [step for multiple, step in first.items() if multiple]


def _is_pin(pin: object) -> bool:
    return (type(pin) is int and 0 <= pin < _MOST) or (type(pin) is str and bool(pin))


def _bad_pins(got: object) -> UsageError:
    return UsageError(
        "pinned must be a list of steps and tags",
        facts={"expected": 'such as [1000, "before-lr-drop"]', "got": shown(got)},
    )
