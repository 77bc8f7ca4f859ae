"""Save: how long the trainer is blocked, when the state is staged, when it is durable.

Invariants: saves follow each other with nothing in the background, the state changed by one
optimizer step in between; the first one starts right after the library is opened, so it pays for
its warm-up. The last one is restored over a wiped state and compared bit for bit.
"""

from __future__ import annotations

import os
import time
from typing import Any

from bench.case import Case
from bench.harness import files_below
from bench.memory import PeakMemory
from bench.peers import Peer, load_peer, open_peer
from bench.state import TrainingState, build


def measure(case: Case) -> dict[str, Any]:
    load_peer(case.peer)
    state = build(case.size)
    state.fill(case.seed)
    with PeakMemory() as memory:
        peer = open_peer(case.peer, case.path, state, case.peer_options())
        peer.begin()
        saves = [_save_once(peer, state) for _ in range(case.saves)]
    files = files_below(peer.step_directory())
    result = {
        "bytes": state.total_bytes(),
        "tensors": len(state.tensors()),
        "saves": saves,
        "reuses_files": peer.reuses_files,
        "staging_bytes": peer.staging_bytes,
        "extra_memory_bytes": memory.extra_bytes,
        "counter_error_bytes": memory.counter_error_bytes,
        "files": len(files),
        "file_bytes": sum(path.stat().st_size for path in files),
    }
    step = state.progress["step"]
    state.wipe()
    peer.restore(warm=True)
    result["difference"] = state.difference(case.seed, step)
    peer.close()
    return result


def _save_once(peer: Peer, state: TrainingState) -> dict[str, Any]:
    step = state.step()
    cpu = _cpu_seconds()
    begin = time.perf_counter()
    peer.save(step)
    blocked = time.perf_counter()
    peer.wait_staged()
    staged = time.perf_counter()
    peer.wait_durable()
    durable = time.perf_counter()
    cpu = _cpu_seconds() - cpu
    peer.settle()
    return {
        "blocked_s": blocked - begin,
        "staged_s": staged - begin if peer.reports_staged else None,
        "durable_s": durable - begin,
        "cpu_s": cpu,
        "statistics": peer.statistics(),
    }


def _cpu_seconds() -> float:
    """User and system time of this process (not of a checkpoint process that still lives)."""
    times = os.times()
    return times.user + times.system
