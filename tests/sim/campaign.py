"""Many seeds of the simulation, on all processors: python tests/sim/campaign.py --seeds 10000

Prints how many crashes, faults of each kind, steps and restores there were, and every violation
with its seed and trace. Fails if there is one, or if a kind of fault never fired.
`--first N --seeds 1` runs one seed again, exactly as before, and prints what happens in it; with
`--schedule` also whose turn it was when, and every operation on the disk. `--shared` runs only jobs
whose steps share files. `--offloaded` runs seeds of a trainer with an offloaded optimizer instead;
`--replicas`, of replicas that train together.
"""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from sim import offloaded, replicated
from sim.seeds import FAULTS, Report, run_seed, run_shared

BATCH = 500
Run = Callable[[int], Report]


def quiet() -> None:
    """Faults are many, and every one would be logged; threads are for ranks, not for tensors."""
    logging.getLogger("statehold").setLevel(logging.CRITICAL + 1)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


def summary(reports: Iterable[Report]) -> tuple[Counter[str], list[Report]]:
    """All counts together, and the reports with violations."""
    counts: Counter[str] = Counter()
    failed = []
    for report in reports:
        counts.update(report.counts)
        if report.violations:
            failed.append(report)
            print(report, flush=True)
    return counts, failed


def reports(seeds: range, processes: int, run: Run) -> Iterator[Report]:
    """What became of each seed. Processes are new for every batch: what leaks is kept apart from
    what a seed does. Raises BrokenProcessPool where one of them dies."""
    context = multiprocessing.get_context("spawn")
    for first in seeds[::BATCH]:
        batch = range(first, min(first + BATCH, seeds.stop))
        with ProcessPoolExecutor(processes, context, quiet) as pool:
            yield from pool.map(partial(_run, run), batch, chunksize=10)
        print(f"seeds {batch.start} to {batch.stop - 1}: done", flush=True)


def _run(run: Run, seed: int) -> Report:
    report = run(seed)
    report.schedule.clear()  # long
    gc.collect()  # the disk of a seed is large, but few objects: nothing else makes Python look
    return report


def missing(counts: Counter[str], faults: Iterable[str] = FAULTS) -> list[str]:
    """The faults that never fired."""
    return [fault for fault in faults if not counts[fault]]


def replay(run: Run, seed: int, *, schedule: bool) -> int:
    quiet()
    report = run(seed)
    print("\n".join(report.schedule * schedule))
    print(report)
    return 1 if report.violations else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--schedule", action="store_true")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--shared", action="store_true")
    kinds.add_argument("--offloaded", action="store_true")
    kinds.add_argument("--replicas", action="store_true")
    options = parser.parse_args()
    run, faults = run_shared if options.shared else run_seed, FAULTS
    if options.offloaded:
        run, faults = offloaded.run_offloaded, offloaded.FAULTS
    if options.replicas:
        run, faults = replicated.run_replicated, replicated.FAULTS
    if options.seeds == 1:
        return replay(run, options.first, schedule=options.schedule)
    begin = time.monotonic()
    seeds = range(options.first, options.first + options.seeds)
    counts, failed = summary(reports(seeds, options.processes, run))
    for what, count in sorted(counts.items()):
        print(f"{count:9} {what}")
    never = missing(counts, faults) if len(seeds) >= 1000 else []
    if never:
        print(f"these faults never fired: {', '.join(never)}")
    print(
        f"{len(seeds)} seeds from {options.first} in {time.monotonic() - begin:.0f} s: "
        f"{len(failed)} with violations {sorted(report.seed for report in failed)}"
    )
    return 1 if failed or never else 0


if __name__ == "__main__":
    sys.exit(main())
