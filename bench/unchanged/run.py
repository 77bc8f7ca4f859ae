"""The command line of `python -m bench.unchanged`, and its report."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import bench.unchanged
from bench import harness
from bench.report import number, table
from bench.unchanged import fork, full, lora, many, proof, sweep
from bench.unchanged.common import SIZES, Group, Row, Sizes

GROUPS: dict[str, Callable[[Sizes, Path, int], Group]] = {
    "lora": lora.measure,
    "proof": proof.measure,
    "full": full.measure,
    "many": many.measure,
    "fork": fork.measure,
    "sweep": sweep.measure,
}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.unchanged", description=bench.unchanged.__doc__
    )
    parser.add_argument("--only", choices=GROUPS, nargs="+", default=list(GROUPS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="small; its figures mean nothing")
    parser.add_argument("--dir", type=Path, help="the storage under test (default: below --out)")
    parser.add_argument("--out", type=Path, default=harness.ROOT / "bench/out/unchanged")
    return parser.parse_args(arguments)


def shown(group: Group) -> list[str]:
    lines = [f"{key}: {value}" for key, value in group.facts.items()]
    lines += ["", *_table(group.rows), ""] if group.rows else []
    for each in group.targets:
        verdict = "met" if each.is_met else "MISSED"
        lines.append(f"{verdict:>6}  {each.what}: {each.got} (wanted {each.wanted})")
    return lines


def _table(rows: list[Row]) -> list[str]:
    names = list(rows[0])
    return table(rows, [(name, lambda row, name=name: _cell(row.get(name))) for name in names])


def _cell(value: object) -> str:
    if isinstance(value, float):
        return number(value, 3 if abs(value) < 10 else 1)
    return str(value)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    where = (options.dir or options.out).resolve()
    command = " ".join(["python -m bench.unchanged", *(arguments or sys.argv[1:])])
    for name in options.only:
        facts = harness.facts(where) | {"command": command, "load before": _load()}
        group = GROUPS[name](SIZES["smoke" if options.smoke else "whole"], where, options.rounds)
        facts["load after"] = _load()
        lines = [*(f"{key}: {value}" for key, value in facts.items()), *shown(group)]
        (options.out / f"unchanged-{name}.txt").write_text("\n".join(lines) + "\n")
        whole = {"schema": 1, "facts": facts, **asdict(group)}
        (options.out / f"unchanged-{name}.json").write_text(json.dumps(whole, indent=1) + "\n")
        print(f"{name}, load {facts['load after']}", *shown(group), "", sep="\n", flush=True)
    return 0


def _load() -> str:
    return " ".join(f"{each:.1f}" for each in os.getloadavg())


if __name__ == "__main__":
    sys.exit(main())
