"""What a constructor answers to wrong arguments: checks of values, and unknown keywords.

Type checkers see the keywords of each signature. This is for what no type checker has seen: a
notebook, a configuration file.

Invariants: a constructor keeps its signature, for editors and help().
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from statehold.errors import UsageError, meant, shown

# -- checks ----------------------------------------------------------------------------------------


def check_choice(name: str, got: object, choices: tuple[str, ...]) -> None:
    """Check that `got` is one of `choices`."""
    if got not in choices:
        raise UsageError(f"not a valid {name}", facts={"expected": ", ".join(choices), "got": got})


def check_number(name: str, got: object, least: int, most: int) -> None:
    """Check that `got` is an integer from `least` to `most`."""
    if type(got) is not int or not least <= got <= most:
        text = f"{name} must be an integer from {least} to {most}"
        raise UsageError(text, facts={"got": shown(got)})


def check_count(name: str, got: object, most: int) -> None:
    """Check that `got` is None, or a number from 1 to `most`."""
    if got is not None:
        check_number(name, got, 1, most)


def check_flag(name: str, got: object) -> None:
    """Check that `got` is True or False."""
    if type(got) is not bool:
        raise UsageError(f"{name} must be True or False", facts={"got": shown(got)})


# -- names -----------------------------------------------------------------------------------------


T = TypeVar("T")


def answering(**parts: type) -> Callable[[type[T]], type[T]]:
    """Let a constructor raise UsageError for an unknown keyword, and for a value without its name.

    parts: its keywords that take a value with keywords of its own, and the classes of these values.
    """

    def decorate(cls: type[T]) -> type[T]:
        original: Any = cls.__init__
        known = _keywords(cls)
        first = _positional(cls)

        @functools.wraps(original)
        def constructor(self: T, *args: Any, **given: Any) -> None:
            if len(args) > len(first):
                raise _nameless(args[len(first)], cls.__name__, known[len(first) :])
            for name in given:
                if name not in known:
                    raise _no_such(name, cls.__name__, known, parts)
            original(self, *args, **given)

        cls.__init__ = constructor  # type: ignore[assignment]
        return cls

    return decorate


def _keywords(cls: type) -> list[str]:
    parameters = inspect.signature(cls).parameters.values()
    return [each.name for each in parameters if each.kind is not each.VAR_POSITIONAL]


def _positional(cls: type) -> list[str]:
    parameters = inspect.signature(cls).parameters.values()
    return [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]


def _nameless(got: object, called: str, named: list[str]) -> UsageError:
    return UsageError(
        f"{called} takes this value by name only",
        facts={"got": shown(got), "expected": f"one of {', '.join(named)}"},
        hint=f"write {called}({named[0]}=...)" if named else None,
    )


def _no_such(name: str, called: str, known: list[str], parts: dict[str, type]) -> UsageError:
    homes = [
        f"write {keyword}=statehold.{part.__name__}({name}=...)"
        for keyword, part in parts.items()
        if name in _keywords(part)
    ]
    return UsageError(
        f"{called} has no such keyword",
        facts={"got": name, "expected": f"one of {', '.join(known)}"},
        hint=homes[0] if homes else meant(name, known),
    )
