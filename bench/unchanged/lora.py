"""Adapters on a frozen base: a save at each step, by statehold and by others.

"blocked" is the time until the call returns; "of it computed" is what the calling thread had of the
processor, which others of the machine cannot make longer. "durable" counts from the call, until the
step would survive a power cut. "written" is what the step takes on storage that no other step has.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench import harness
from bench.unchanged.common import MIB, Group, Sizes, Tuning, folder, own_bytes, ratios, same
from statehold import Checkpointer, Io

Saved = tuple[float, float, float, int]  # blocked s, computed s, durable s, bytes
DEADLINE_S = 600.0


class Ours:
    """statehold. as_state_dict: hands over the state_dict() of the model and of the optimizer."""

    def __init__(
        self, path: Path, tuning: Tuning, *, shares: bool, as_state_dict: bool = False
    ) -> None:
        self._path, self._tuning, self._as_dict = path, tuning, as_state_dict
        self._ckpt = Checkpointer(path, keep=2, io=Io(share_files=shares))

    def save(self, step: int) -> Saved:
        state = self._tuning.state
        if self._as_dict:
            state = {name: each.state_dict() for name, each in state.items()}
        begin, computed = time.perf_counter(), time.thread_time()
        save = self._ckpt.save(step, state)
        blocked, computed = time.perf_counter() - begin, time.thread_time() - computed
        save.wait("committed", DEADLINE_S)
        durable = time.perf_counter() - begin
        self._ckpt.gate()
        return blocked, computed, durable, own_bytes(self._path / f"step-{step:012d}")

    def close(self, tuning: Tuning, sizes: Sizes) -> None:
        self._ckpt.close()
        found = Tuning(sizes)
        state = found.state
        if self._as_dict:
            state = {name: each.state_dict() for name, each in state.items()}
        with Checkpointer(self._path) as reader:
            reader.restore(state)
        if self._as_dict:
            for name, each in found.state.items():
                each.load_state_dict(state[name])
        if not same(found.tensors(), tuning.tensors()):
            raise RuntimeError("wrong bytes were restored")


class Peer:
    """A library that writes all tensors into a folder; the two newest stay."""

    def __init__(self, path: Path, tuning: Tuning, write: Callable[[Path, Any], None]) -> None:
        self._path, self._tuning, self._write = path, tuning, write
        self._steps = list[int]()
        path.mkdir()

    def save(self, step: int) -> Saved:
        begin, computed = time.perf_counter(), time.thread_time()
        partial = self._path / f"{step}.partial"
        partial.mkdir()
        self._write(partial, self._tuning.tensors())
        harness.publish(partial)
        seconds, computed = time.perf_counter() - begin, time.thread_time() - computed
        self._steps.append(step)
        for old in self._steps[:-2]:
            shutil.rmtree(self._path / str(old), ignore_errors=True)
        names = 2 if isinstance(self._write, Blobs) else 1
        return seconds, computed, seconds, own_bytes(self._path / str(step), names)

    def close(self, tuning: Tuning, sizes: Sizes) -> None:
        """Its own tests say whether it restores."""


def torch_save(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    torch.save(tensors, folder / "state.pt")


def safetensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "a.safetensors")


def dcp(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    from torch.distributed import checkpoint

    writer = checkpoint.FileSystemWriter(folder, thread_count=2, sync_files=False)
    checkpoint.save(tensors, storage_writer=writer, no_dist=True)


class Blobs:
    """Content addressing, as that of git-lfs: a tensor is a blob that is named by its sha256."""

    def __init__(self, path: Path) -> None:
        self._blobs = path
        path.mkdir()

    def __call__(self, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
        names = []
        for name, each in tensors.items():
            data = memoryview(each.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
            blob = self._blobs / hashlib.sha256(data).hexdigest()
            if not blob.exists():
                blob.write_bytes(data)
                harness.sync_path(blob)
            os.link(blob, folder / f"{len(names)}")
            names.append(name)
        (folder / "names").write_text("\n".join(names))


def measure(sizes: Sizes, where: Path, rounds: int) -> Group:
    tuning = Tuning(sizes)
    found: dict[str, list[list[Saved]]] = defaultdict(list)
    with folder(where) as made:
        cases: dict[str, Ours | Peer] = {
            "statehold": Ours(made / "shared", tuning, shares=True),
            "statehold, share_files=False": Ours(made / "whole", tuning, shares=False),
            "state_dict": Ours(made / "dict", tuning, shares=True, as_state_dict=True),
            "state_dict, share_files=False": Ours(
                made / "dict-whole", tuning, shares=False, as_state_dict=True
            ),
            "torch.save": Peer(made / "torch", tuning, torch_save),
            "safetensors": Peer(made / "safetensors", tuning, safetensors),
            "DCP, 2 threads": Peer(made / "dcp", tuning, dcp),
            "blobs by sha256": Peer(made / "blobs", tuning, Blobs(made / "all")),
        }
        step = 0
        for round_ in range(-1, rounds):
            names = list(cases) if round_ % 2 else list(cases)[::-1]
            for name in names:
                # The first round is for what a run does once: the base, and a state_dict's history.
                once = 5 if isinstance(cases[name], Ours) else 1
                saved = []
                for _ in range(once if round_ < 0 else sizes.saves):
                    saved.append(cases[name].save(step := step + 1))
                    tuning.step()
                if round_ >= 0:
                    found[name].append(saved)
        for case in cases.values():
            case.save(step := step + 1)
            case.close(tuning, sizes)
    return _judged(tuning, found)


def _judged(tuning: Tuning, found: dict[str, list[list[Saved]]]) -> Group:
    group = Group(facts={"changing bytes": tuning.changing_bytes})
    whole = "statehold, share_files=False"

    def medians(name: str, index: int) -> list[float]:
        return [statistics.median(each[index] for each in round_) for round_ in found[name]]

    for name in found:
        group.rows.append(
            {
                "case": name,
                "blocked ms": 1e3 * statistics.median(medians(name, 0)),
                "of it computed ms": 1e3 * statistics.median(medians(name, 1)),
                "durable s": statistics.median(medians(name, 2)),
                "x shared": ratios(medians(name, 2), medians("statehold", 2)),
                "written MB": statistics.median(medians(name, 3)) / 1e6,
            }
        )
    written = max(saved[3] for round_ in found["statehold"] for saved in round_)
    limit = 1.02 * tuning.changing_bytes + MIB
    group.aim("bytes written, of 1.02 x what changed + 1 MiB", "<= 1", written / limit,
              written <= limit, 3)  # fmt: skip
    faster = ratios(medians(whole, 2), medians("statehold", 2))
    group.aim("committed, x sooner than with share_files=False", ">= 10", faster, faster >= 10, 1)
    for shared in ("statehold", "state_dict"):
        blocked = ratios(medians(shared, 0), medians(f"{shared}, share_files=False", 0))
        group.aim(f"{shared}: save() blocks, x share_files=False", "<= 1", blocked, blocked <= 1)
    return group
