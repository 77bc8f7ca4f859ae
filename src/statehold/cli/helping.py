"""Parsers whose help leads: commands by what people want, examples, and near names for typos.

Owns: the form of `--help` and of errors about arguments.
Invariants: help goes to stdout and exits with 0. An error goes to stderr, and exits with 2.
Not here: which commands and options there are (cli).
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from statehold.cli import codes, output

_NAME_COLUMNS = 16


class Parser(argparse.ArgumentParser):
    """An ArgumentParser. intents: {what people want: names of commands}, in the order of the help.

    Commands that no intent names stand under "more".
    """

    def __init__(self, *args: Any, intents: dict[str, str] | None = None, **more: Any) -> None:
        more.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, **more)
        self._intents = {title: names.split() for title, names in (intents or {}).items()}
        self._words: list[str] = []
        self._commands: argparse._SubParsersAction[Any] | None = None

    def add_commands(self) -> Any:
        """The action whose add_parser() adds a command."""
        made = self.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
        self._commands = made
        return made

    # -- help ------------------------------------------------------------------------------

    def format_help(self) -> str:
        """Like that of argparse, but with commands by intent."""
        if self._commands is None:
            return super().format_help()
        formatter = argparse.RawDescriptionHelpFormatter(self.prog, max_help_position=_NAME_COLUMNS)
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for title, actions in self._by_intent(self._commands._choices_actions):
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        formatter.start_section("options")
        formatter.add_arguments(each for each in self._actions if each is not self._commands)
        formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def _by_intent(
        self, actions: Sequence[argparse.Action]
    ) -> Iterator[tuple[str, list[argparse.Action]]]:
        left = {each.dest: each for each in actions}
        for title, names in self._intents.items():
            yield title, [left.pop(name) for name in names if name in left]
        yield "more" if self._intents else "commands", list(left.values())

    # -- errors ----------------------------------------------------------------------------

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does; remembers the words, for hints."""
        self._words = list(args or ())
        return super().parse_known_args(args, namespace)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action is self._commands and value not in self._commands.choices:
            self._refuse(
                f"there is no command {value!r}", _near(value, list(self._commands.choices))
            )
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        """Exit with what is wrong, and with the options that may have been meant."""
        unknown = [f"there is no option {name}" + (f"; {near}" if near else "")
                   for name, near in self._unknown()]  # fmt: skip
        self._refuse(message, *unknown)

    def refuse_left_over(self, words: Sequence[str]) -> NoReturn:
        """Exit because nothing takes these words."""
        for name, near in self._unknown():
            self._refuse(f"there is no option {name}", near)
        self._refuse(f"nothing takes these arguments: {' '.join(words)}")

    def _refuse(self, message: str, *hints: str) -> NoReturn:
        lines = [f"hint: {hint}" for hint in hints if hint]
        output.error("\n  ".join([message, *lines, f"help: {self.prog} --help"]))
        raise SystemExit(codes.USAGE)

    def _unknown(self) -> Iterator[tuple[str, str]]:
        """Words that look like long options but do not exist, and what may have been meant."""
        known = list(self._option_string_actions)
        for word in self._words:
            name = word.partition("=")[0]
            if word == "--":
                return
            if word.startswith("--") and not any(each.startswith(name) for each in known):
                yield name, _near(name, known)


def _near(word: str, known: Sequence[str]) -> str:
    """A hint with the nearest name; "" if none is near."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else ""


def epilog(examples: Sequence[str]) -> str:
    """What stands below the options of a command."""
    lines = "".join(f"  {each}\n" for each in examples)
    return (f"examples:\n{lines}\n" if examples else "") + codes.TEXT
