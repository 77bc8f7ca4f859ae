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
from typing import Any

from bench.resilience import rejoin, sums

Record = dict[str, Any]

# Name -> what is measured, and the table of it.
GROUPS: dict[
    str, tuple[Callable[[argparse.Namespace], list[Record]], Callable[[list[Record]], str]]
] = {"sums": (sums.measure, sums.table), "rejoin": (rejoin.measure, rejoin.table)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.resilience", description=__doc__)
    parser.add_argument("--only", default=",".join(GROUPS), help=f"some of {','.join(GROUPS)}")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--features", type=int, default=512, help="of a layer")
    parser.add_argument("--state-mb", type=int, default=400, help="that a joiner takes")
    parser.add_argument("--step-s", type=float, default=2.0, help="of the peers of a joiner")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="a directory for resilience-GROUP.{json,txt}")
    given = parser.parse_args(arguments)
    for name in given.only.split(","):
        measure, table = GROUPS[name]
        load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
        records = measure(given)
        command = " ".join(["python -m bench.resilience", *sys.argv[1:]])
        text = f"{name}: {given.replicas} replicas, load {load}\n$ {command}\n{table(records)}"
        print(text, flush=True)
        if given.out:
            given.out.mkdir(parents=True, exist_ok=True)
            (given.out / f"resilience-{name}.txt").write_text(text + "\n")
            (given.out / f"resilience-{name}.json").write_text(json.dumps(records, indent=1) + "\n")
    return 0
