"""The measurements, as each rank of a job makes them; all ranks make the same calls.

Invariants: every clock is the machine's monotonic one, so that readings of different ranks may be
compared; report.py takes the last rank's. Ranks meet before each save, each training step and each
restore, as synchronous training does. What was saved is restored and compared bit for bit.
Not here: what is done with the figures (report.py).
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bench.harness import drop_caches, files_below, warm_caches
from bench.ranks import parts
from bench.ranks.peers import RankPeer, open_peer
from bench.ranks.state import RankState
from bench.ranks.task import Task
from bench.train import NO_SAVES, Compute

SECTOR_BYTES = 512


def measure(task: Task) -> dict[str, Any]:
    """This rank's record of `task`."""
    kinds: dict[str, Callable[[Task], dict[str, Any]]] = {
        "save": _saves,
        "train": _train,
        "write": _write,
        "restore": _restores,
        "raw": _raw,
    }
    gc.collect()
    return kinds[task.kind](task)


def _facts(state: RankState) -> dict[str, Any]:
    return {
        "bytes": state.local_bytes(),
        "whole_bytes": state.whole_bytes(),
        "tensors": len(state.tensors()),
    }


def _begin(task: Task) -> tuple[RankState, RankPeer]:
    """A filled state, and the library opened as a trainer opens it."""
    state = RankState(task.size, task.layout)
    state.fill(task.seed)
    peer = open_peer(task, state)
    if task.peer.startswith("statehold"):
        peer.restore()  # finds nothing
    return state, peer


# -- saving --------------------------------------------------------------------------------------


def _saves(task: Task) -> dict[str, Any]:
    state, peer = _begin(task)
    saves = [_save_once(peer, state) for _ in range(task.saves)]
    difference = _difference_after_restore(task, state, peer)
    peer.close()
    return _facts(state) | {
        "saves": saves,
        "reuses_files": peer.reuses_files,
        "difference": difference,
    }


def _save_once(peer: RankPeer, state: RankState) -> dict[str, Any]:
    step = state.step()
    dist.barrier()
    parts.take_seconds()
    cpu = _cpu_seconds()
    thread = time.thread_time()
    begin = time.perf_counter()
    peer.save(step)
    blocked = time.perf_counter()
    thread = time.thread_time() - thread
    found = parts.take_seconds()
    peer.wait_durable()
    durable = time.perf_counter()
    cpu = _cpu_seconds() - cpu
    dist.barrier()
    peer.settle()
    return {
        "begin": begin,
        "blocked": blocked,
        "durable": durable,
        "cpu_s": cpu,
        "blocked_cpu_s": thread,
        "parts_s": found,
        "statistics": peer.statistics(),
    }


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system


def _difference_after_restore(task: Task, state: RankState, peer: RankPeer) -> str | None:
    step = state.progress["step"]
    state.wipe()
    dist.barrier()
    peer.restore()
    return state.difference(task.seed, step)


# -- training ------------------------------------------------------------------------------------


def _train(task: Task) -> dict[str, Any]:
    compute = Compute()
    compute(1)
    if task.peer == NO_SAVES:
        state = RankState(task.size, task.layout)
        state.fill(task.seed)
        return _facts(state) | _loop(task, state, compute, None) | {"difference": None}
    state, peer = _begin(task)
    result = _loop(task, state, compute, peer)
    peer.settle()
    result["difference"] = _difference_after_restore(task, state, peer)
    peer.close()
    return _facts(state) | result


def _loop(task: Task, state: RankState, compute: Compute, peer: RankPeer | None) -> dict[str, Any]:
    """Compute, meet (the gradients), update, save; ends when the last save is durable."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(task.steps):
        compute(task.work)
        dist.barrier()
        step = state.step()  # statehold's gate is in it; DCP has copied before save returned
        if peer is not None:
            peer.save(step)
    if peer is not None:
        peer.wait_durable()
    dist.barrier()
    return {"loop_s": time.perf_counter() - begin}


# -- restoring -----------------------------------------------------------------------------------


def _write(task: Task) -> dict[str, Any]:
    """A step for others to restore."""
    state, peer = _begin(task)
    peer.save(0)
    peer.wait_durable()
    dist.barrier()
    peer.settle()
    peer.close()
    return _facts(state) | {"difference": None}


def _restores(task: Task) -> dict[str, Any]:
    state = RankState(task.size, task.layout)
    state.fill(task.seed)  # touches every page
    _rehearse(task, state)
    samples: dict[str, list[Any]] = {"cold": [], "warm": []}
    difference = None
    for key in ("cold", "warm", "warm"):
        state.wipe()
        _prepare_cache(task, warm=key == "warm")
        samples[key].append(_restore_once(task, state))
        difference = difference or state.difference(task.seed, 0)
    return _facts(state) | samples | {"difference": difference}


def _rehearse(task: Task, state: RankState) -> None:
    """First-use costs are paid before: imports, a first read."""
    _prepare_cache(task, warm=True)
    _restore_once(task, state)


def _prepare_cache(task: Task, *, warm: bool) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        drop_caches(task.path, gently=task.smoke)
        if warm:
            warm_caches(task.path)
    dist.barrier()


def _restore_once(task: Task, state: RankState) -> dict[str, Any]:
    device = _device_read_bytes(task.path)
    parts.take_reads()
    dist.barrier()
    begin = time.perf_counter()
    peer = open_peer(task, state)
    peer.restore()
    end = time.perf_counter()
    dist.barrier()
    peer.close()
    return {
        "begin": begin,
        "end": end,
        "device_bytes": _device_read_bytes(task.path) - device,
        "reads": parts.take_reads(),
    }


def _device_read_bytes(directory: Path) -> int:
    """What the device of `directory` was asked to read since boot, by everyone; 0 if unknown."""
    number = directory.stat().st_dev
    for line in Path("/proc/diskstats").read_text().splitlines():
        words = line.split()
        if (int(words[0]), int(words[1])) == (os.major(number), os.minor(number)):
            return int(words[5]) * SECTOR_BYTES
    return 0


# -- the limit of several processes --------------------------------------------------------------


def _raw(task: Task) -> dict[str, Any]:
    """The engine's raw mode in all ranks at once, each with a file as large as its share."""
    from statehold import _core

    buffer_bytes, depth = 16 << 20, 32
    share = RankState(task.size, task.layout).local_bytes()
    nbytes = -(-share // buffer_bytes) * buffer_bytes
    path = str(task.path / f"raw-{dist.get_rank()}")
    fs = _core.open_fs("auto", depth)
    spans = {}
    for key in ("fresh", "overwrite", "read"):
        _prepare_cache(task, warm=False)
        begin = time.perf_counter()
        if key == "read":
            _core.raw_read(fs, path, buffer_bytes, depth)
        else:
            _core.raw_write(fs, path, nbytes, buffer_bytes, depth, key == "overwrite")
        spans[key] = {"begin": begin, "end": time.perf_counter()}
    fs.close()
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return {"bytes": nbytes, "whole_bytes": nbytes * dist.get_world_size(), "spans": spans,
            "files": len(files_below(task.path)), "difference": None}  # fmt: skip
