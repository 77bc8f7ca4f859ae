"""Restore: how fast a saved step comes back into tensors that exist already, cold and warm.

Invariants: the clock covers opening the library and the restore, as after a crash; the destination
tensors are allocated and touched before; imports and other first-use costs of every library are
paid before on a tiny state. Cold: page cache dropped. Warm: every file read once through the page
cache. Each restore starts from a wiped state and is compared bit for bit afterwards.
"""

from __future__ import annotations

import time
from typing import Any

from bench.case import Case
from bench.harness import drop_caches, files_below, warm_caches
from bench.memory import PeakMemory
from bench.peers import open_peer
from bench.state import TrainingState, build


def measure(case: Case) -> dict[str, Any]:
    _first_use(case)
    state = build(case.size)
    state.fill(case.seed)
    _save(case, state)
    files = case.path / "run"
    samples: dict[str, list[float]] = {"cold_s": [], "warm_s": []}
    peaks = []
    difference = None
    for key, warm in (("cold_s", False), ("warm_s", True), ("warm_s", True)):
        state.wipe()
        dropped = drop_caches(files, gently=case.smoke)
        if warm:
            warm_caches(files)
        seconds, peak = _restore_once(case, state, warm)
        samples[key].append(seconds)
        peaks.append(peak)
        difference = difference or state.difference(case.seed, 1)
    return {
        "bytes": state.total_bytes(),
        "file_bytes": sum(path.stat().st_size for path in files_below(files)),
        **samples,
        "page_cache": dropped,
        "extra_memory_bytes": max(peaks),
        "difference": difference,
    }


def _first_use(case: Case) -> None:
    tiny = build("smoke")
    tiny.fill(case.seed)
    peer = open_peer(case.peer, case.path / "first-use", tiny, case.peer_options())
    peer.save(tiny.step())
    peer.wait_durable()
    peer.restore(warm=False)
    peer.close()


def _save(case: Case, state: TrainingState) -> None:
    peer = open_peer(case.peer, case.path / "run", state, case.peer_options())
    peer.save(state.step())
    peer.wait_durable()
    peer.settle()
    peer.close()


def _restore_once(case: Case, state: TrainingState, warm: bool) -> tuple[float, int]:
    """(seconds to open and restore, peak extra memory)."""
    with PeakMemory() as memory:
        begin = time.perf_counter()
        peer = open_peer(case.peer, case.path / "run", state, case.peer_options())
        peer.restore(warm)
        seconds = time.perf_counter() - begin
    peer.close()
    return seconds, memory.extra_bytes
