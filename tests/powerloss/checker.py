"""Answers what a disk holds after the power went off, and whether a run goes on from it (looking).

A process that serves many states, one after the other: a request is a JSON line, and so is the
answer. It holds nothing of a state when it has answered, so that the disk can be unmounted.

    request  {"plan", "root", "memory", "facts": what was known, "first": serials count from there}
    answer   {"wrong": [violations], "facts": what is known from now on}
"""

from __future__ import annotations

import gc
import json
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from powerloss.history import History, facts_of
from powerloss.jobs import Where
from powerloss.journal import Position
from powerloss.looking import Look
from powerloss.plans import Plan
from statehold.cli.checking import SpanReader
from statehold.reading.places import file_system


class Checker:
    """position: of the log of the disk, where there is one."""

    def __init__(self, position: Position, notes: Path) -> None:
        self._position = position
        self._notes = notes
        self._fs = file_system()
        self._reader = SpanReader()

    def serve(self, requests: TextIO, answers: TextIO) -> None:
        gc.freeze()  # modules, which are most of what there is
        with self._reader:
            for line in requests:
                answers.write(json.dumps(self._answer(json.loads(line))) + "\n")
                answers.flush()

    def _answer(self, told: dict[str, Any]) -> dict[str, Any]:
        told["plan"]["numels"] = tuple(told["plan"]["numels"])
        plan = Plan(**told["plan"])
        where = Where(plan, Path(told["root"]), Path(told["memory"]))
        look = Look(self._fs, self._reader, plan, where, facts_of(told["facts"]))
        history = History(self._notes, self._position)
        try:
            look.judge()
            look.go_on(history, told["first"])
        except Exception as error:
            look.wrong.append(_story(error))
        gc.collect()  # an error holds what was open when it was raised
        facts = [*look.found, *history.facts()]
        return {"wrong": look.wrong, "facts": [asdict(fact) for fact in facts]}


def _story(error: Exception) -> str:
    return "".join(traceback.format_exception(error))
