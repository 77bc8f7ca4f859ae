"""An object whose tensors lie in files, in generations, as those of an optimizer on storage do.

Each update writes new files and never the ones of the step before, unless nobody else links them.
Nothing is synced here: to make the files durable is the save's work.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from statehold import _core
from statehold.io.clients import Client, open_engine
from statehold.layout.flat import boxes_of_run
from statehold.layout.layout import Box, Layout
from statehold.layout.plan import BLOCK_BYTES, TensorSpec, pieces, plan_save
from statehold.layout.stored import StoredFile, held_in
from statehold.tensors.stored import InFiles, StoredState

PAGE = 4096
# (name of a tensor, elements [begin, end) of the part of it that this rank has)
Run = tuple[str, int, int]


class OnFiles:
    """`tensors` (of this rank, F32) in files below `folder`; `cuts` says what each file holds.

    layouts: of the tensors that this rank shares with others; shape: their global shapes.
    """

    def __init__(
        self,
        fs: Any,
        folder: str,
        tensors: Mapping[str, torch.Tensor],
        cuts: Sequence[Sequence[Run]],
        layouts: Mapping[str, tuple[Layout, tuple[int, ...], int]] | None = None,
    ) -> None:
        self.fs, self.folder = fs, folder
        self.tensors = dict(tensors)
        self.cuts, self.layouts = cuts, layouts or {}
        self.engine = open_engine(fs, 1 << 20, 1 << 18, 1)
        self.made = self.reused = self.released = 0
        self.files: list[StoredFile] = []
        self.held: list[str] = []  # by saves under way
        self.guard = threading.Lock()
        self.value = 0.0
        if not fs.is_dir(folder):
            fs.mkdir(folder)
        self.write()

    def update(self, by: float) -> None:
        """Change every tensor, and write the next generation of the files."""
        for tensor in self.tensors.values():
            tensor += by
        self.value += by
        self.write()

    def write(self) -> None:
        before = {file.path for file in self.files}
        self.files = [self._written(cut, before) for cut in self.cuts]

    def close(self) -> None:
        self.engine.close()

    # -- what a save asks ------------------------------------------------------------------

    def stored_state(self) -> StoredState:
        files = list(self.files) if self._writes else []
        with self.guard:
            self.held += [file.path for file in files]

        def release() -> None:
            with self.guard:
                self.released += 1
                for file in files:
                    self.held.remove(file.path)

        tree = {"moments": {name: InFiles(name) for name in self.tensors}, "value": self.value}
        elsewhere = [] if self._writes else held_in(self.files)
        return StoredState(
            tree, lambda: files, release, [each for each in elsewhere if each.layout is not None]
        )

    def state_dict(self) -> dict[str, Any]:
        return {"moments": self.tensors, "value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensors, self.value = dict(state["moments"]), state["value"]
        self.write()

    @property
    def _writes(self) -> bool:
        """Whether this rank has the files: the first of those that hold the same."""
        places = self.layouts.values()
        return all(layout.replica_index(rank) == 0 for layout, _, rank in places)

    # -- files -----------------------------------------------------------------------------

    def _written(self, cut: Sequence[Run], before: set[str]) -> StoredFile:
        specs, parts = [], []
        for name, begin, end in cut:
            local = self.tensors[name]
            (box,) = boxes_of_run(local.shape, begin, end)
            specs.append(self._spec(name, local, box))
            parts.append(local.reshape(-1)[begin:end].numpy().tobytes())
        used = sum(map(len, parts))
        if left := -used % PAGE:  # to whole pages
            specs.append(TensorSpec("padding " + self._file_name(cut), "U8", (left,), left))
            parts.append(bytes(left))
        plan = plan_save(specs, step=0)
        content = plan.header + b"".join(parts[i] for i in plan.source_index)
        path = self._take(before, len(content))
        self._move(path, content)
        segments = [(0, plan.data_begin)]
        segments += [(b, s.nbytes) for b, s in zip(plan.begins, plan.specs, strict=True)]
        sums = b"".join(
            _core.xxh3_64(content[low:high]).to_bytes(8, "little")
            for at, nbytes in segments
            for low, high in pieces(at, nbytes, BLOCK_BYTES)
        )
        return StoredFile(path, len(content), plan.data_begin, plan.specs, plan.begins, sums)

    def _file_name(self, cut: Sequence[Run]) -> str:
        return f"of {self.folder} {cut[0][0]} {cut[0][1]}"

    def _spec(self, name: str, local: torch.Tensor, box: Box) -> TensorSpec:
        if name not in self.layouts:
            return TensorSpec(
                name, "F32", box.shape, 4 * box.numel, False, None, tuple(local.shape), box.offsets
            )
        layout, shape, rank = self.layouts[name]
        outer = layout.box(shape, rank)
        offsets = tuple(a + b for a, b in zip(outer.offsets, box.offsets, strict=True))
        return TensorSpec(name, "F32", box.shape, 4 * box.numel, False, layout, shape, offsets)

    def _take(self, before: set[str], nbytes: int) -> str:
        """A file that nobody needs any more, if there is one, or a new one."""
        with self.guard:
            taken = {*before, *self.held}
        for name, _ in self.fs.listdir(self.folder):
            path = f"{self.folder}/{name}"
            is_free = path not in taken and self.fs.can_reuse(path)
            if is_free and self.fs.stat_bytes(path) == nbytes:
                self.reused += 1
                before.add(path)
                return path
        self.made += 1
        path = f"{self.folder}/{self.made:04d}"
        self.fs.open_write(path, nbytes).close()
        before.add(path)
        return path

    def _move(self, path: str, content: bytes) -> None:
        memory = np.frombuffer(content, np.uint8).copy()
        file = self.fs.open_write(path, len(content), reuse=True)
        try:
            job = self.engine.ranges(
                write=True,
                files=[file],
                file_index=array("Q", [0]),
                offsets=array("Q", [0]),
                sizes=array("Q", [memory.nbytes]),
                addresses=array("Q", [memory.ctypes.data]),
                owner=memory,
                client=Client.OFFLOAD_WRITE,
            )
            job.wait(60.0)
        finally:
            file.close()
