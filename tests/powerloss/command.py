"""Loss of power on a real block device, in thousands of ways: python -m powerloss --states 5000

Prints the number of checked states by kind, and every violation with its seed. Fails if there
is one, or if a control, which breaks the commit protocol on purpose, is not noticed.
`--seed N --states 1` runs one session again.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from powerloss import campaign, controls, filesystems, plans
from powerloss.campaign import Orders
from powerloss.linux import die_with_parent

_SAYS_S = 60.0  # how often it says how far it is


def main() -> int:
    given = _parsed()
    die_with_parent()
    names = _usable(given.file_systems)
    if not names:
        print("no file system can be mounted here")
        return 1
    orders = Orders(
        states=given.states,
        seed=given.seed,
        file_systems=names,
        kinds=tuple(given.kinds),
        processes=given.processes,
        per_session=given.per_session,
    )
    wrong, is_whole = _run(orders)
    noticed = [_is_noticed(control, orders, given.controls) for control in controls.ALL]
    return 0 if is_whole and all(noticed) and not wrong else 1


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="powerloss", description=__doc__.partition("\n")[0])
    parser.add_argument("--states", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--per-session", type=int, default=40, help="states of each workload")
    parser.add_argument("--file-systems", nargs="*", default=sorted(filesystems.BY_NAME))
    parser.add_argument("--kinds", nargs="*", choices=plans.KINDS, default=plans.KINDS)
    parser.add_argument("--controls", type=int, default=80, help="states of each; 0: none")
    return parser.parse_args()


def _usable(names: Iterable[str]) -> tuple[str, ...]:
    """Those that can be used here; says why others cannot."""
    found = []
    for name in names:
        why = filesystems.why_not(filesystems.BY_NAME[name])
        if why:
            print(f"{name} is left out: {why}")
        else:
            found.append(name)
    return tuple(found)


def _is_noticed(control: controls.Control, orders: Orders, states: int) -> bool:
    """Run a control; whether it was noticed, or could not be run."""
    names = tuple(name for name in orders.file_systems if name in control.file_systems)
    why = controls.why_not() if names else f"it shows on {' and '.join(control.file_systems)} only"
    if why or not states:
        print(f"control {control.name} is left out: {why or 'nobody wants it'}")
        return True
    changed = replace(
        orders, states=states, file_systems=names, kinds=(control.kind,), before=control.before
    )
    reports = list(campaign.run(changed))
    wrong = sum(len(report["wrong"]) for report in reports)
    states = campaign.total(reports).total()
    told = "noticed" if wrong else "NOT NOTICED"
    print(f"control {control.name}: {told}, {wrong} violations in {states} states", flush=True)
    return wrong > 0


def _run(orders: Orders) -> tuple[int, bool]:
    """The campaign: how many violations it has found, and whether all sessions have ended."""
    begin = time.monotonic()
    reports = list(_shown(campaign.run(orders), begin))
    wrong = _summary(reports, time.monotonic() - begin)
    missing = len(orders.sessions) - sum(report["failed"] is None for report in reports)
    if missing:
        print(f"{missing} sessions did not come to their end")
    return wrong, missing == 0


def _shown(reports: Iterable[dict[str, Any]], begin: float) -> Iterator[dict[str, Any]]:
    """Says what is wrong at once, and how far it is from time to time."""
    states, said = 0, begin
    for report in reports:
        for each in [*report["wrong"], *filter(None, [report["failed"]])]:
            print(f"seed {report['seed']}: {each}", flush=True)
        states += campaign.total([report]).total()
        now = time.monotonic()
        if now - said > _SAYS_S:
            said = now
            print(f"{states} states in {now - begin:.0f} s", flush=True)
        yield report


def _summary(reports: list[dict[str, Any]], seconds: float) -> int:
    """Print what was done; returns the number of violations."""
    counts = campaign.total(reports)
    for index in range(4):
        parts: Counter[str] = Counter()
        for key, count in counts.items():
            parts[key[index]] += count
        print(", ".join(f"{name} {count}" for name, count in sorted(parts.items())))
    wrong, overlapped, flushes = (
        sum(number(report) for report in reports)
        for number in (
            lambda report: len(report["wrong"]),
            lambda report: report["overlapped"],
            lambda report: report["flushes"],
        )
    )
    print(f"{overlapped} of {flushes} flushes came while writes were under way")
    print(
        f"{counts.total()} states of {len(reports)} sessions in {seconds:.0f} s, "
        f"{counts.total() / max(seconds, 1e-9):.1f} a second: {wrong} violations",
        flush=True,
    )
    return wrong


if __name__ == "__main__":
    sys.exit(main())
