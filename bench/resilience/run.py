"""Runs the groups of bench.resilience, and shows them.

`python -m bench.resilience [--only GROUP,GROUP]`. Replicas are processes on this machine, with Gloo
and one torch thread each.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from bench.resilience import alike, come_back, kill, rejoin, sums

Record = dict[str, Any]


class Group(NamedTuple):
    """What is measured, and its table; how many replicas and rounds if nobody says it."""

    measure: Callable[[argparse.Namespace], list[Record]]
    table: Callable[[list[Record]], str]
    replicas: int
    rounds: int


GROUPS = {
    "sums": Group(sums.measure, sums.table, 2, 15),
    "alike": Group(alike.measure, alike.table, 1, 9),
    "rejoin": Group(rejoin.measure, rejoin.table, 3, 15),
    "kill": Group(kill.measure, kill.table, 4, 5),
    "come-back": Group(come_back.measure, come_back.table, 3, 6),
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.resilience", description=__doc__)
    parser.add_argument("--only", default=",".join(GROUPS), help=f"some of {','.join(GROUPS)}")
    parser.add_argument("--replicas", type=int)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--features", type=int, default=512, help="of a layer")
    parser.add_argument("--state-mb", type=int, default=400, help="that a joiner takes")
    parser.add_argument("--step-s", type=float, default=2.0, help="of the peers of a joiner")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--peers", default=".venv-peers/bin/python", metavar="PYTHON",
                        help="with the peers of kill; tools/requirements-peers.txt")  # fmt: skip
    parser.add_argument("--out", type=Path, help="a directory for resilience-GROUP.{json,txt}")
    asked = parser.parse_args(arguments)
    for name in asked.only.split(","):
        group, given = GROUPS[name], argparse.Namespace(**vars(asked))
        given.replicas = asked.replicas or group.replicas
        given.rounds = asked.rounds or group.rounds
        before = _load()
        records = group.measure(given)
        command = " ".join(["python -m bench.resilience", *sys.argv[1:]])
        load = f"load {before} before, {_load()} after, nice {os.nice(0)}"
        text = f"{name}: {given.replicas} replicas, {load}\n$ {command}\n{group.table(records)}"
        print(text, flush=True)
        if asked.out:
            asked.out.mkdir(parents=True, exist_ok=True)
            (asked.out / f"resilience-{name}.txt").write_text(text + "\n")
            (asked.out / f"resilience-{name}.json").write_text(json.dumps(records, indent=1) + "\n")
    return 0


def _load() -> str:
    return ", ".join(f"{each:.1f}" for each in os.getloadavg())
