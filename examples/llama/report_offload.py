"""What the log of an offloaded run says: bytes, bandwidths, what was hidden, and a timeline.

Owns figures and plots; reads logs only, and measures the limit of a path that was given none.
Invariants: figures are medians over the updates of the last process, less the first ones.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from journal import read_events
from report import NO_PLOT, WARMUP_STEPS, pyplot_or_none

COLORS = {"read": "tab:blue", "update": "0.35", "write": "tab:orange"}
PROBE_BYTES, BLOCK = 256 << 20, 8 << 20


@dataclass(frozen=True, slots=True)
class Measured:
    """Updates of the last process. limits: of each path, bytes a second in both directions."""

    parameters: int
    updates: list[dict[str, Any]]
    limits: dict[str, float]
    given: frozenset[str]
    limit_bytes: int

    def of(self, key: str) -> float:
        """The median of one figure."""
        return median(update[key] for update in self.updates)


def measure(log: Path, paths: Sequence[str]) -> Measured:
    """Read the log, and measure the paths."""
    start = list(read_events(log, "start"))[-2]  # the last one only compares
    updates = [each for each in read_events(log, "update") if each["step"] > start["step"]]
    limits, given = {}, set()
    for path in paths:
        directory, _, rate = path.partition("=")
        if rate:
            given.add(directory)
        limits[directory] = _rate(rate) if rate else measured_limit(Path(directory))
    limit = max(each["nbytes"] for each in read_events(log, "limit"))
    return Measured(
        start["parameters"], updates[WARMUP_STEPS:] or updates, limits, frozenset(given), limit
    )


def _rate(text: str) -> float:
    from statehold import offload

    return float(offload.Path(".", text).rate or 0)


def measured_limit(directory: Path) -> float:
    """Bytes a second with which a path takes direct writes and gives direct reads, together."""
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        files = [os.open(f"{folder}/{n}", os.O_RDWR | os.O_CREAT | _direct()) for n in range(2)]
        try:
            for file in files:
                _write(file)
            begin = time.perf_counter()
            with ThreadPoolExecutor(2) as pool:
                for each in (pool.submit(_write, files[0]), pool.submit(_read, files[1])):
                    each.result()
            return 2 * PROBE_BYTES / (time.perf_counter() - begin)
        finally:
            for file in files:
                os.close(file)


def _direct() -> int:
    return getattr(os, "O_DIRECT", 0)


def _write(file: int) -> None:
    block = mmap.mmap(-1, BLOCK)
    for offset in range(0, PROBE_BYTES, BLOCK):
        os.pwritev(file, [block], offset)


def _read(file: int) -> None:
    block = mmap.mmap(-1, BLOCK)
    for offset in range(0, PROBE_BYTES, BLOCK):
        os.preadv(file, [block], offset)


def table(measured: Measured) -> str:
    """The figures of an update, one a line."""
    seconds, state = measured.of("seconds"), measured.of("state_bytes")
    moved = median(sum(update["paths"].values()) for update in measured.updates)
    compute, hidden = measured.of("compute_s"), measured.of("hidden_s")
    rows = [
        ("parameters", f"{measured.parameters / 1e6:.1f} million in 16 bit"),
        ("state of the optimizer", f"{state / 1e6:.0f} MB"),
        ("memory that keeps some of it", f"{measured.of('buffer_bytes') / 1e6:.0f} MB"),
        ("limit of the process", f"{measured.limit_bytes / 1e6:.0f} MB, weights and gradients too"),
        ("moved by an update", f"{moved / measured.parameters:.2f} bytes per parameter "
         f"({measured.of('device_bytes') / measured.parameters:.2f} in /proc/self/io)"),
        ("time of an update", f"{seconds:.3f} s"),
    ]  # fmt: skip
    for path, limit in measured.limits.items():
        rate = median(update["paths"][path] / update["seconds"] for update in measured.updates)
        kind = "given" if path in measured.given else "measured"
        rows.append((path[-28:], f"{rate / 1e9:.2f} GB/s, {rate / limit:.0%} of its limit "
                     f"({limit / 1e9:.2f} GB/s, {kind})"))  # fmt: skip
    share = min(1.0, hidden / compute) if compute else 0.0
    rows.append(("arithmetic", f"{compute:.3f} s, {share:.0%} of it hidden behind transfers"))
    return "\n".join(f"   {name:<29}{value}" for name, value in rows)


def save_plot(measured: Measured, path: Path) -> str:
    """Draw when the last update read, updated and wrote each subgroup, as a PNG; says where."""
    pyplot = pyplot_or_none()
    if pyplot is None:
        return NO_PLOT
    events = [tuple(event) for event in measured.updates[-1]["events"]]
    lanes = [(kind, where) for where in measured.limits for kind in ("read", "write")]
    lanes.insert(0, ("update", None))
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.5 * len(lanes)), layout="constrained")
    for place, (kind, where) in enumerate(lanes):
        bars = [(begin, end - begin) for k, w, begin, end in events if (k, w) == (kind, where)]
        axes.broken_barh(bars, (place - 0.4, 0.8), color=COLORS[kind], alpha=0.35, linewidth=0)
    names = [f"{kind} {Path(where).name}" if where else kind for kind, where in lanes]
    axes.set_yticks(range(len(lanes)), names)
    axes.invert_yaxis()
    axes.set_xlabel("s since the update began")
    axes.set_title("one update: a bar for each subgroup; darker where several are under way")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return f"   plot: {path}"
