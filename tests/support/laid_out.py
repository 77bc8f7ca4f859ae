"""A step that ranks of any layout have written through the engine, on a simulated disk, by one
process: plan, write, record and commit of every rank of a job."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from statehold import _core
from statehold.checkpoint.restore.read_plan import ReadPlan
from statehold.checkpoint.save import writes
from statehold.format.manifest import Commit, RecordEntry, groups_of, record_name
from statehold.format.saved import SavedStep
from statehold.io.clients import open_engine
from statehold.layout.layout import Box, Layout
from statehold.layout.share import PlanCache
from statehold.ranks.membership import Membership
from statehold.steps.store import Store
from statehold.tensors.columns import Tensors as Columns
from statehold.tensors.columns import described
from statehold.tensors.devices import Devices
from support.faults import DEADLINE_S
from support.in_memory import SimFs
from support.meshes import local_specs
from support.records import CREATED, cut

RUN, STEP, ATTEMPT = "/runs/x", 7, "5f3a09c1-0"
MIB = 1 << 20
DTYPES = {"F64": np.float64, "F32": np.float32, "I16": np.int16, "U8": np.uint8}
Arrays = Mapping[str, np.ndarray[Any, Any]]
Tensors = dict[str, tuple[str, tuple[int, ...], Layout]]  # dtype, global shape, layout


def tensors_of(arrays: Arrays, layouts: Mapping[str, Layout]) -> Tensors:
    """The arrays in some layouts."""
    names = {np.dtype(kind): name for name, kind in DTYPES.items()}
    return {
        name: (names[array.dtype], array.shape, layouts[name]) for name, array in arrays.items()
    }


@contextmanager
def opened(arrays: Arrays, buffer_bytes: int = MIB) -> Iterator[Disk]:
    """A disk, and an engine with two buffers."""
    fs = SimFs(seed=1, short_io=0.2)
    engine = open_engine(fs, 2 * buffer_bytes, buffer_bytes, 2)
    try:
        yield Disk(fs, engine, arrays)
    finally:
        engine.close()


@dataclass
class Disk:
    """A run directory, an engine on it, and the global tensors."""

    fs: SimFs
    engine: _core.Engine
    arrays: Arrays

    def save(self, tensors: Tensors, size: int) -> None:
        """All ranks write their parts of the step, and rank 0 commits it."""
        stores = [Store(self.fs, RUN, rank=rank, world_size=size) for rank in range(size)]
        stores[0].create()
        raws, said = [], []
        for rank, store in enumerate(stores):
            record = self._write(store, tensors, rank, size)
            raws.append(record.encode())
            said.append(record.group_digests())
            store.seal(STEP, ATTEMPT, record_name(rank, size), raws[-1])
        entries = [
            RecordEntry(record_name(rank, size), len(raw), hashlib.sha256(raw).hexdigest())
            for rank, raw in enumerate(raws)
        ]
        state = groups_of(said)
        commit = Commit(STEP, size, CREATED, "test", ATTEMPT, tuple(entries), state, ())
        stores[0].commit(STEP, commit.encode(), ATTEMPT)

    def saved(self, rank: int, size: int) -> SavedStep:
        """The step as a rank of another job sees it."""
        return Store(self.fs, RUN, rank=rank, world_size=size).open(STEP, rank, size)

    def read(self, plan: ReadPlan, devices: Devices) -> dict[str, int]:
        """Read all that is planned; what the engine says of that."""
        directory = Store(self.fs, RUN).path(STEP)
        reading = plan.start(self.engine, lambda name, *_: f"{directory}/{name}")
        reading.finish(devices.load)
        return reading.job.stats

    def _write(self, store: Store, tensors: Tensors, rank: int, size: int) -> Any:
        specs = local_specs(tensors, rank)
        captured = []
        for spec in specs:
            box = Box(spec.offsets or (), spec.shape)
            tensor = torch.from_numpy(cut(self.arrays[spec.name], box))  # mostly not contiguous
            captured.append(described(spec, tensor, external=False))
        plan = PlanCache(Membership(rank, size)).get(specs, STEP)
        ordered = writes.FileOrder().ordered(plan, Columns(captured))
        job = writes.start_write(self.engine, plan.save, ordered)
        store.begin(STEP, ATTEMPT)
        file, _ = store.data_file(STEP, plan.save.file_name, plan.save.file_bytes, ATTEMPT)
        job.attach(file)
        job.wait_written(DEADLINE_S)
        job.finish()
        tree = {spec.name: {"$tensor": spec.name} for spec in specs}
        found = writes.account(plan.save, job.checksums())
        return writes.build_record(plan, tree, *found, attempt=ATTEMPT)
