"""`statehold completions SHELL`: a script that makes a shell complete commands, options and paths.

Invariants: the script is made from the parser itself, so it has every command and option.
Not here: the script, which is that of shtab.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from typing import Any

from statehold.cli import codes
from statehold.cli.output import emit, say
from statehold.errors import UsageError, refused

SHELLS = ("bash", "zsh", "fish")
_DIRECTORIES = {"RUN", "RUN[@STEP]", "RUN@STEP", "BASE[@STEP]", "CHILD", "DIR", "PATH", "A", "B"}
_FILES = {"FILE", "SRC", "DST"}


def run(args: argparse.Namespace) -> int:
    if args.shell not in SHELLS:
        expected = ", ".join(SHELLS)
        raise refused("there are no completions for this shell", expected, args.shell)
    try:
        shtab: Any = importlib.import_module("shtab")
    except ImportError as error:
        hint = "pip install 'statehold[cli]'"
        raise UsageError("completions need shtab, which is missing", hint=hint) from error
    for action in _actions(args.whole):
        if action.metavar in _DIRECTORIES:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif action.metavar in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    script = shtab.complete(args.whole, shell=args.shell)
    emit({"shell": args.shell, "script": script}) if args.json else say(script)
    return codes.YES


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """All arguments of a parser and of its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
