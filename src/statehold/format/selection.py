"""Which entries of a step a restore takes, and its report. Pure.

Owns: the patterns on dotted names, renaming, the search for patterns that match nothing, and the
report.
Invariants: a pattern is a glob (`*` also matches dots). A pattern without wildcards also matches
everything below it, so "model" is the whole model. `only` and `skip` match names of the live state,
whether the step has these names or not. `skip` wins. A pattern that matches nothing on any rank is
an error, because a typing error would otherwise be silent. A restore that would load nothing is an
error, too.
Not here: live objects, saved trees, and which names there are (tensors/kinds).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from typing import Any

from statehold.errors import StateMismatchError, UsageError, refused, shown, some

_WILDCARD = re.compile(r"[*?\[]")
_NEAR = 3


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What a restore did, by dotted names of the live state.

    loaded: entries loaded from the step.
    missing: entries that the step does not have.
    unexpected: entries of the step that the state does not have.
    kept: entries left unchanged, because they were not selected or because every rank has its own.
    cast: tensors of the step that were converted to the dtype of the live ones.
    source: the run that restore(source=...) has read; None for the run of the Checkpointer.
    """

    step: int
    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    source: str | None = None
    cast: tuple[str, ...] = ()

    def __str__(self) -> str:
        run = f" of {self.source}" if self.source else ""
        lines = [f"step {self.step}{run}: {len(self.loaded)} loaded"]
        for what in ("missing", "unexpected", "kept", "cast"):
            names: tuple[str, ...] = getattr(self, what)
            if names:
                lines.append(f"  {what} {len(names)}: {some(names)}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Names:
    """The dotted names that patterns may match.

    taken: those of the live state and, renamed, of the step. saved: those of the step, not renamed.
    live: those of the live state alone. open: its dicts, which take new names, too.
    """

    taken: Collection[str]
    saved: Collection[str]
    live: Collection[str]
    open: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of one rank about a selection.

    patterns: each given pattern -> the nearest names if it matches nothing here, else None.
    loads: whether anything is restored.
    has_rest: whether anything is not restored.
    lacks: whether the step lacks a requested entry.
    """

    patterns: Mapping[str, list[str] | None]
    loads: bool
    has_rest: bool
    lacks: bool = False


class _Pattern:
    def __init__(self, text: str, literal: bool = False) -> None:
        wildcard = None if literal else _WILDCARD.search(text)
        self.text = text
        self._literal = text[: wildcard.start()] if wildcard else text
        self._is_glob = wildcard is not None
        self._matches = re.compile(translate(text)).match

    def matches(self, name: str) -> bool:
        return self.covers(name) or bool(self._is_glob and self._matches(name))

    def covers(self, name: str) -> bool:
        """Whether the pattern matches `name` and everything below it."""
        return not self._is_glob and _is_below(name, self._literal)

    def reaches(self, name: str) -> bool:
        """Whether the pattern may match `name` or something below it."""
        below, literal = f"{name}.", self._literal if self._is_glob else f"{self._literal}."
        return not name or literal.startswith(below) or below.startswith(literal)

    def nearest(self, names: Collection[str]) -> list[str]:
        """Suggestions for a pattern that matches nothing."""
        return _nearest_glob(self.text, names) if self._is_glob else nearest(self.text, names)


class Selection:
    """Which names of the live state are restored, and under which names the step has them.

    `rename` maps prefixes of saved names to prefixes of live ones. Without `strict`, an entry that
    the step lacks keeps its live value, and an entry without a live place is left out. With `cast`,
    floats of any width are converted to the dtype of the live tensor. With `literal`, `only` has
    names that may look like globs.
    """

    def __init__(
        self,
        only: Iterable[str] | None = None,
        skip: Iterable[str] | None = None,
        rename: Mapping[str, str] | None = None,
        strict: bool = True,
        cast: bool = False,
        literal: bool = False,
    ) -> None:
        texts = None if only is None else _texts(only, "only")
        self._only = None if texts is None else [_Pattern(each, literal) for each in texts]
        if self._only == []:
            raise UsageError(
                "only is an empty list, so nothing would be restored",
                hint="leave only out to restore everything",
            )
        self._skip = [_Pattern(each) for each in _texts(skip or (), "skip")]
        self.rename = _renaming(rename)
        for argument, given in (("strict", strict), ("cast", cast)):
            if not isinstance(given, bool):
                raise UsageError(f"{argument} is True or False", facts={"got": shown(given)})
        self.strict, self.cast = strict, cast

    @property
    def is_everything(self) -> bool:
        """Whether all of a step is restored."""
        return self._only is None and not self._skip

    @property
    def has_patterns(self) -> bool:
        """Whether any pattern was given that may match nothing."""
        return not self.is_everything or bool(self.rename)

    def takes(self, name: str) -> bool:
        """Whether `name` is to be restored."""
        if self._skip and any(pattern.matches(name) for pattern in self._skip):
            return False
        return self._only is None or any(pattern.matches(name) for pattern in self._only)

    def reaches(self, name: str) -> bool:
        """Whether anything at or below `name` may be restored."""
        if any(pattern.covers(name) for pattern in self._skip):
            return False
        return self._only is None or any(pattern.reaches(name) for pattern in self._only)

    def renamed(self, name: str) -> str:
        """The live name of the saved `name`; the longest prefix decides."""
        for saved in sorted(self.rename, key=len, reverse=True):
            if _is_below(name, saved):
                return self.rename[saved] + name[len(saved) :]
        return name

    def renames_below(self, name: str) -> bool:
        """Whether a name below `name` is renamed by a prefix of its own."""
        return any(not name or saved.startswith(f"{name}.") for saved in self.rename)

    def answers(self, names: Names) -> dict[str, list[str] | None]:
        """Each given pattern -> None if it matches a name, else the nearest names."""
        found: dict[str, list[str] | None] = {}
        for argument, patterns in (("only", self._only or ()), ("skip", self._skip)):
            for pattern in patterns:
                matches = any(map(pattern.matches, names.taken))
                near = None if matches else pattern.nearest(names.taken)
                found[f'{argument} "{pattern.text}"'] = near
        for saved, live in self.rename.items():
            matches = any(_is_below(name, saved) for name in names.saved)
            found[f'rename from "{saved}"'] = None if matches else nearest(saved, names.saved)
            matches = any(_is_below(name, live) for name in names.live) or any(
                _is_below(live, name) for name in names.open
            )
            found[f'rename to "{live}"'] = None if matches else nearest(live, names.live)
        return found


def check_answers(answers: Sequence[Answer]) -> None:
    """Check the answers of all ranks. Raises the same error on all ranks.

    Raises UsageError for patterns that match nothing on any rank, and StateMismatchError if no rank
    would load anything.
    """
    unmatched: dict[str, list[str]] = {}
    matched: set[str] = set()
    for answer in answers:
        for given, near in answer.patterns.items():
            if near is None:
                matched.add(given)
            else:
                unmatched.setdefault(given, []).extend(near)
    wrong = {given: near for given, near in unmatched.items() if given not in matched}
    if wrong:
        raise UsageError(
            f"{'patterns match' if len(wrong) > 1 else 'a pattern matches'} nothing, neither in "
            f"the state nor in the step; nothing was changed",
            facts={given: suggested(near) for given, near in wrong.items()},
            hint='a pattern is a name ("model" stands for all of the model) or a glob ("*.bias")',
        )
    if any(answer.has_rest for answer in answers) and not any(each.loads for each in answers):
        hint = "the names differ: look at them with statehold show, and map them with rename="
        if any(given.startswith("skip ") for given in matched):
            hint = "skip= leaves out all that the state and the step both have: name less of it"
        text = "nothing of the step would be restored into this state; nothing was changed"
        raise StateMismatchError(text, hint=hint)


def suggested(names: Iterable[str]) -> str:
    """Suggestions, for a message."""
    near = [f'"{name}"' for name in dict.fromkeys(names)]
    return f"nearest: {', '.join(near[: 2 * _NEAR]) or 'no similar name'}"


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that a prefix such as "model.layers.3", or a pattern with wildcards, selects."""
    wanted = _Pattern(pattern)
    return [name for name in names if wanted.matches(name)]


def nearest(text: str, names: Collection[str]) -> list[str]:
    """Names, or prefixes of names, that are most like `text`."""
    below = {
        name[: f"{name}.".index(f".{text}.") + len(text) + 1]
        for name in names
        if f".{text}." in f"{name}."
    }
    if below:
        return sorted(below)[:_NEAR]
    known = ""
    for part in text.split("."):
        parts = dict.fromkeys(
            name[len(known) :].split(".")[0] for name in names if name.startswith(known)
        )
        if part not in parts:
            return [known + each for each in _close(part, parts)]
        known += f"{part}."
    return []


def _nearest_glob(text: str, names: Collection[str]) -> list[str]:
    """The glob, with a part that occurs in no name replaced by similar parts of names."""
    known = {part for name in names for part in name.split(".")}
    parts = text.split(".")
    for index, part in enumerate(parts):
        if not _WILDCARD.search(part) and part not in known:
            near = _close(part, known)
            return [".".join([*parts[:index], each, *parts[index + 1 :]]) for each in near]
    return []


def _close(part: str, known: Collection[str]) -> list[str]:
    """Parts like `part`; all parts if there are few."""
    found = difflib.get_close_matches(part, known, _NEAR, cutoff=0.5)
    return found or (sorted(known) if len(known) <= 2 * _NEAR else [])


def _is_below(name: str, prefix: str) -> bool:
    """Whether `name` is `prefix`, or below it."""
    return f"{name}.".startswith(f"{prefix}.")


def _renaming(given: Any) -> dict[str, str]:
    if given is not None and not isinstance(given, Mapping):
        expected = 'for example {"ema": "model"}'
        raise refused("rename maps saved prefixes to live ones", expected, shown(given))
    found = dict(given or {})
    _texts([*found, *found.values()], "rename")
    return found


def _texts(given: Any, argument: str) -> list[str]:
    is_list = isinstance(given, Iterable) and not isinstance(given, str)
    texts = list(given) if is_list else []  # once: it may be a generator
    if not is_list or not all(type(each) is str and each for each in texts):
        text = f"{argument} is a list of names or patterns"
        raise refused(text, 'for example ["model"]', shown(texts if is_list else given))
    return texts


EVERYTHING = Selection()
