"""Figures of this process's saves, restores and stores of pages, and their text for Prometheus.

Owns: the names (`statehold_*`), their meanings, and the text exposition format 0.0.4.
Invariants: thread-safe. Keeps the figures of the newest RUNS_MAX runs and stores. What is opened
again continues its counters, because a counter never falls.
Not here: when something counts (checkpoint/telemetry), the port that shows it (metrics).
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

RUNS_MAX = 64
BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 50.0, 100.0, 500.0, 1000.0)

# Name without "statehold_": kind and meaning, in the order of the text.
_KNOWN: dict[str, tuple[str, str]] = {
    "saves_committed_total": ("counter", "Saves that are durable on all ranks and published."),
    "saves_failed_total": ("counter", "Saves that began and failed."),
    "written_bytes_total": ("counter", "Bytes that this rank wrote for committed steps."),
    "gate_wait_seconds_total": ("counter", "Time that updates waited for copies of a save."),
    "restores_total": ("counter", "Restores of a step that have ended well."),
    "restores_failed_total": ("counter", "Restores that have raised an error."),
    "restored_bytes_total": ("counter", "Bytes that this rank read and verified in restores."),
    "steps_passed_over_total": ("counter", "Damaged steps that restores passed over."),
    "saves_in_flight": ("gauge", "Saves that have begun and not ended."),
    "newest_step": ("gauge", "The newest step that this process has committed."),
    "state_bytes": ("gauge", "Size of what this rank held in the newest committed save."),
    "committed_timestamp_seconds": ("gauge", "When the newest save was committed, Unix time."),
    "restored_step": ("gauge", "The step that was restored last."),
    "save_seconds": ("histogram", "From the call of save() to the commit."),
    "save_blocked_seconds": ("histogram", "How long save() itself took."),
    "restore_seconds": ("histogram", "How long restore() took."),
}
# The same for each level that gets copies; the level is one more label.
_OF_LEVEL: dict[str, tuple[str, str]] = {
    "level_copied_bytes_total": ("counter", "Bytes of committed steps that this rank copied."),
    "level_copies_failed_total": ("counter", "Copies to the level that began and failed."),
    "level_newest_step": ("gauge", "The newest step that is at the level."),
    "level_interval_seconds": ("gauge", "The interval that was chosen for the level."),
    "level_committed_timestamp_seconds": ("gauge", "When the level last committed, Unix time."),
    "level_copy_seconds": ("histogram", "From the start of a copy to its commit at the level."),
}
# The same for each store of pages of a KV cache.
_OF_PAGES: dict[str, tuple[str, str]] = {
    "pages_hit_total": ("counter", "Pages that were asked for and delivered."),
    "pages_miss_total": ("counter", "Pages that were asked for and are not there."),
    "pages_bad_total": ("counter", "Pages that are damaged on storage."),
    "pages_late_total": ("counter", "Pages that were not there, or not stored, in time."),
    "pages_stored_total": ("counter", "Pages that were stored."),
    "pages_there_total": ("counter", "Pages that were put and were there already."),
    "pages_dropped_total": ("counter", "Pages that were put and had no room."),
    "pages_unwritten_total": ("counter", "Pages that the storage refused."),
    "pages_hit_bytes_total": ("counter", "Bytes of the pages that were delivered."),
    "pages_stored_bytes_total": ("counter", "Bytes of the pages that were stored."),
    "pages_behind_hit_total": ("counter", "Pages that came from the object store."),
    "pages_behind_sent_total": ("counter", "Pages that went to the object store."),
    "pages_behind_bad_total": ("counter", "Pages that came with wrong bytes."),
    "pages_behind_failed_total": ("counter", "Requests that the object store has failed."),
    "pages_evicted": ("gauge", "Pages that went from the files, of all processes."),
    "pages_in_files": ("gauge", "Pages that the files hold."),
    "pages_in_memory": ("gauge", "Pages that the memory holds."),
}


class _Histogram:
    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.sum = 0.0


class Figures:
    """The figures of one rank of one run, of one level of it, or of one store of pages."""

    def __init__(
        self, labels: Mapping[str, object], known: Mapping[str, tuple[str, str]] = _KNOWN
    ) -> None:
        self._given = labels
        self._labels = ",".join(f'{name}="{_escaped(str(of))}"' for name, of in labels.items())
        self._guard = threading.Lock()
        self._values = {name: 0.0 for name, (kind, _) in known.items() if kind == "counter"}
        if "saves_in_flight" in known:
            self._values["saves_in_flight"] = 0.0
        self._histograms = {
            name: _Histogram() for name, (kind, _) in known.items() if kind == "histogram"
        }
        self._levels: dict[str, Figures] = {}

    def of_level(self, name: str) -> Figures:
        """The figures of a level."""
        with self._guard:
            return self._levels.setdefault(name, Figures({**self._given, "level": name}, _OF_LEVEL))

    def levels(self) -> list[Figures]:
        """The figures of all levels so far."""
        with self._guard:
            return list(self._levels.values())

    def add(self, name: str, amount: float = 1) -> None:
        with self._guard:
            self._values[name] += amount

    def set(self, name: str, value: float) -> None:
        with self._guard:
            self._values[name] = value

    def observe(self, name: str, seconds: float) -> None:
        with self._guard:
            histogram = self._histograms[name]
            histogram.counts[bisect_left(BUCKETS_S, seconds)] += 1
            histogram.sum += seconds

    def samples(self, name: str) -> Iterator[str]:
        """The lines of one metric; none for a gauge that was never set."""
        with self._guard:
            histogram, value = self._histograms.get(name), self._values.get(name)
            if histogram is not None:
                counts, total = list(accumulate(histogram.counts)), histogram.sum
        if histogram is not None:
            yield from self._buckets(name, counts, total)
        elif value is not None:
            yield f"statehold_{name}{{{self._labels}}} {_number(value)}"

    def _buckets(self, name: str, counts: list[int], total: float) -> Iterator[str]:
        limits = [*map(_number, BUCKETS_S), "+Inf"]
        for limit, count in zip(limits, counts, strict=True):
            yield f'statehold_{name}_bucket{{{self._labels},le="{limit}"}} {count}'
        yield f"statehold_{name}_sum{{{self._labels}}} {_number(total)}"
        yield f"statehold_{name}_count{{{self._labels}}} {counts[-1]}"


_runs: dict[tuple[str, int | None], Figures] = {}
_runs_guard = threading.Lock()


def figures_of(path: str, rank: int | None) -> Figures:
    """The figures of a rank of a run, or (None) of a store of pages, in this process."""
    with _runs_guard:
        found = _runs.pop((path, rank), None)
        if found is None and rank is None:
            found = Figures({"store": path}, _OF_PAGES)
        _runs[path, rank] = found = found or Figures({"run": path, "rank": rank})  # now the newest
        while len(_runs) > RUNS_MAX:
            del _runs[next(iter(_runs))]
        return found


def exposition() -> str:
    """All figures of this process, in the text format 0.0.4 of Prometheus."""
    with _runs_guard:
        runs = list(_runs.values())
    each = [*runs, *(level for figures in runs for level in figures.levels())]
    known = {**_KNOWN, **_OF_LEVEL, **_OF_PAGES}
    return "".join(f"{line}\n" for name in known for line in _metric(name, known[name], each))


def _metric(name: str, known: tuple[str, str], all_figures: Iterable[Figures]) -> Iterator[str]:
    samples = [line for figures in all_figures for line in figures.samples(name)]
    if samples:
        kind, meaning = known
        yield f"# HELP statehold_{name} {meaning}"
        yield f"# TYPE statehold_{name} {kind}"
        yield from samples


def _escaped(text: str) -> str:
    """A label's value, with the three characters that the format escapes.

    UTF-8 cannot send lone surrogates.
    """
    sendable = text.encode("utf-8", "backslashreplace").decode()
    return sendable.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)
