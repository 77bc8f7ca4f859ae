"""StorageWriter: dcp.save and dcp.async_save into one committed step directory.

The path of a save: the coordinator makes `<checkpoint_id>.<attempt>.partial` when it has every plan
(prepare_global_plan), and its name travels to the ranks in their plans; every rank writes its files
there (write_data); the coordinator writes the manifest and renames (finish). So a save that fails
on any rank, or dies, leaves what was at checkpoint_id as it was.

Holds: an error on any rank reaches the caller of save through torch; nothing is pickled; a writer
holds no memory, file or thread between two calls, so it can be pickled at any time.
Not here: which rank writes what (the planner), the bytes (writing), the records (commit), the
ranks without collectives (alone), the renames (publish).
"""

from __future__ import annotations

import dataclasses
import os
import re
import secrets
from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter as _StorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from statehold.dcp.commit import Sent, complete, hand_over
from statehold.dcp.machine import Machine
from statehold.dcp.staging import StagingPool
from statehold.dcp.tree import Path
from statehold.dcp.writing import Place, write_items
from statehold.errors import UsageError
from statehold.plan import STEP_MAX
from statehold.publish import delete, make_directories, parent_of, publish

_PARTIAL = r"\.[0-9a-f]{16}\.partial"
_OURS = re.compile(r"manifest\.json|rank-\d{5}-of-\d{5}(-\d+)?\.(safetensors|json)")
_RESULT = MetadataIndex("statehold")
_LAST_NUMBER = re.compile(r"(\d+)\D*$")


class StorageWriter(_StorageWriter, AsyncStager):
    """Writes a checkpoint as a step of statehold; for torch.distributed.checkpoint.

    path: the directory of the checkpoint; the `checkpoint_id` of a save replaces it. The last
        number in its name is the step.
    overwrite: replace a checkpoint that is there already, in one operation, once the new one is
        complete; False refuses.
    staging_bytes, buffer_bytes, queue_depth, copy_threads, backend: as for a Checkpointer. The
        staging memory is allocated for each save, and never larger than what the rank writes.

    As `AsyncStager` of dcp.async_save it copies the state into host memory that is used again.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        overwrite: bool = True,
        staging_bytes: int | str = "256MiB",
        buffer_bytes: int | str = "16MiB",
        queue_depth: int = 32,
        copy_threads: int | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self._path = None if path is None else _absolute(path)
        self._overwrite = overwrite
        self._machine = Machine(
            staging_bytes=staging_bytes,
            buffer_bytes=buffer_bytes,
            queue_depth=queue_depth,
            copy_threads=copy_threads,
            backend=backend,
        )
        self._staging = StagingPool()
        self._rank = 0
        self._use_collectives = True

    # -- torch.distributed.checkpoint.StorageWriter ------------------------------------------

    @property
    def checkpoint_id(self) -> str | None:
        """The directory that the next save makes."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in os.fspath(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._path = _absolute(checkpoint_id)

    # torch passes rank and use_collectives only to a parameter of this very name.
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._rank = kwargs.get("rank", 0)
        self._use_collectives = kwargs.get("use_collectives", True)

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self._path)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        place = self._begin(len(plans))
        return [
            dataclasses.replace(plan, storage_data=dataclasses.replace(place, rank=rank))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        place = self._place_of(plan)
        with self._machine.storage() as fs:
            written = write_items(self._machine, fs, place, plan, planner, alone=False)
            sent = hand_over(fs, place, written)
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(_RESULT, sum(f.bytes for f in written.files), sent)])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        sents: list[Sent] = [each.storage_data for result in results for each in result]
        place = sents[0].place
        with self._machine.storage() as fs:
            raw = complete(fs, sents, _paths(metadata))
            if publish(fs, place.partial, place.final, raw):
                delete(fs, place.partial)

    # -- torch.distributed.checkpoint.staging.AsyncStager --------------------------------------

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return self._staging.stage(state_dict)

    @property
    def should_synchronize_after_execute(self) -> bool:
        return False

    def synchronize_staging(self) -> None:
        """Nothing: the copy is complete when `stage` returns."""

    def close(self) -> None:
        """Free the memory of staged copies. The writer can be used again."""
        self._staging.close()

    # -- pickling, for the process checkpointer ------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_staging": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._staging = StagingPool()

    # -- the attempt ---------------------------------------------------------------------------

    def _begin(self, world_size: int) -> Place:
        """An empty directory for the files of all ranks; clears what a failed attempt left."""
        final = self._path
        if final is None:
            raise UsageError(
                "a checkpoint needs a directory",
                hint="give save() a checkpoint_id, or the StorageWriter a path",
            )
        attempt = secrets.token_hex(8)
        place = Place(final, f"{final}.{attempt}.partial", _step(final), 0, world_size, attempt)
        with self._machine.storage() as fs:
            self._check_replaceable(fs, final)
            make_directories(fs, parent_of(final))
            for leftover in _partials(fs, final):
                delete(fs, leftover)
            fs.mkdir(place.partial)
        return place

    def _check_replaceable(self, fs: Any, final: str) -> None:
        """What is at `final` may go once the new checkpoint is complete."""
        if not fs.is_dir(final):
            return
        names = [name for name, _ in fs.listdir(final)]
        foreign = [name for name in names if not _OURS.fullmatch(name)]
        if foreign:
            raise UsageError(
                "the directory of a checkpoint holds files that are not of a checkpoint",
                facts={"directory": final, "for example": foreign[0]},
                hint="a checkpoint replaces the whole directory: save it into one of its own",
            )
        if names and not self._overwrite:
            raise UsageError(
                "there is a checkpoint already, and overwrite is False", facts={"directory": final}
            )

    def _place_of(self, plan: SavePlan) -> Place:
        """Where this rank writes. A plan that the planner cached tells of an earlier attempt."""
        place = plan.storage_data
        if not isinstance(place, Place):
            raise UsageError(
                "a planner dropped the storage_data of a plan",
                facts={"got": type(place).__name__},
                hint="keep it in finish_plan: dataclasses.replace(plan, items=...)",
            )
        assert self._path is not None
        with self._machine.storage() as fs:
            if fs.is_dir(place.partial):
                return place
            found = _partials(fs, self._path)
        if len(found) != 1:
            facts = {"checkpoint": self._path, "expected": "one", "got": len(found)}
            raise UsageError("the directory of the save under way is not there", facts=facts)
        attempt = found[0].split(".")[-2]
        return dataclasses.replace(
            place, final=self._path, partial=found[0], step=_step(self._path), attempt=attempt
        )


def _absolute(path: str | os.PathLike[str]) -> str:
    return os.path.abspath(os.fspath(path))


def _step(path: str) -> int:
    """The last number in the name of a directory; 0 without one."""
    found = _LAST_NUMBER.search(os.path.basename(path))
    return min(int(found[1]), STEP_MAX) if found else 0


def _partials(fs: Any, final: str) -> list[str]:
    parent, _, name = final.rpartition("/")
    pattern = re.compile(re.escape(name) + _PARTIAL)
    return [
        f"{parent}/{entry}"
        for entry, is_dir in fs.listdir(parent_of(final))
        if is_dir and pattern.fullmatch(entry)
    ]


def _paths(metadata: Metadata) -> Mapping[str, Path]:
    """Where in the state dict the names of the items were, as far as the planner says so."""
    data = metadata.planner_data
    if not isinstance(data, Mapping):
        return {}
    return {name: path for name, path in data.items() if type(path) is tuple and path}
