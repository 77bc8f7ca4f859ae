"""A step as a tree of streamed tensors and values, for exports.

Invariants: every byte was verified before it is handed out. A tensor that no other format can hold
as a tensor is an error with its name. Memory is the engine's buffers and one part.
Not here: what a format cannot hold (one module for each).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from statehold import _core
from statehold.checkpoint.restore.read_plan import ReadPlan
from statehold.encoding import values
from statehold.errors import StateMismatchError, UnsupportedValueError
from statehold.integrations.formats.streamed import PART_BYTES, Streamed, part_of, runs
from statehold.io.clients import open_engine
from statehold.layout.flat import boxes_of_run
from statehold.layout.layout import Box
from statehold.reading.tree import part_of as node_of
from statehold.tensors import dtypes, foreign, nodes
from statehold.units import MiB

if TYPE_CHECKING:
    from statehold._core import Engine
    from statehold.format.saved import SavedStep

BUFFER_BYTES = 4 * MiB
STAGING_BYTES = 4 * BUFFER_BYTES


class StepTree:
    """The part of a step that `name` means: `root`, and what became something else.

    arrays: the names of NumPy arrays, which are tensors here.
    """

    def __init__(self, saved: SavedStep, directory: str, engine: Engine, name: str) -> None:
        self._saved = saved
        self._directory = directory
        self._engine = engine
        self._made: dict[str, Streamed] = {}
        self.arrays: list[str] = []
        node = node_of(saved.state, name, directory)
        if (differing := nodes.differing(node)) is not None:
            facts = {"step": directory, "saved": str(differing)}
            hint = "name=... exports a part; statehold.load(..., rank=R) takes the values of a rank"
            raise StateMismatchError("ranks saved different values", facts=facts, hint=hint)
        self.root = values.decode(node, self._leaf)

    def _leaf(self, tag: str, payload: Any) -> Any:
        if tag == "$tensor":
            return self._streamed(payload)
        if tag == "$ndarray":
            self.arrays.append(payload)
            return self._streamed(payload)
        if tag == "$complex128":
            return Streamed(torch.complex128, payload.shape[:-1], payload.parts)
        if tag == "$subclass":
            names = sorted(payload["tensors"])
            facts = {"class": payload["class"], "inner tensors": ", ".join(names)}
            hint = "export a part of the step without it, with name=..."
            raise UnsupportedValueError(
                "a tensor that consists of others cannot be exported", facts=facts, hint=hint
            )
        return foreign.value_of(tag, payload)

    def _streamed(self, name: str) -> Streamed:
        if name not in self._made:
            saved = self._saved.tensors[name]
            dtype = dtypes.dtype_of(saved.dtype, name)
            shape = dtypes.torch_shape(dtype, saved.shape)
            self._saved.chunks(name, Box.whole(saved.shape))  # raises where ranks differ
            self._made[name] = Streamed(dtype, shape, partial(self._parts, name, dtype, shape))
        return self._made[name]

    def _parts(
        self, name: str, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> Iterator[torch.Tensor]:
        memory = torch.empty(PART_BYTES, dtype=torch.uint8, device="cpu")
        for begin, end in runs(dtype, shape):
            part = memory[: (end - begin) * dtype.itemsize]
            plan = ReadPlan(self._saved, hint="statehold verify lists all damage")
            at, flat = 0, part.view(dtype)
            for box in boxes_of_run(shape, begin, end):
                self._place(plan, name, box, flat[at : at + box.numel].view(box.shape))
                at += box.numel
            plan.start(self._engine, lambda file, *_: f"{self._directory}/{file}").finish()
            yield part

    def _place(self, plan: ReadPlan, name: str, box: Box, target: torch.Tensor) -> None:
        stored = dtypes.stored_shape(target.dtype, box.shape, name)
        offsets = dtypes.stored_shape(target.dtype, box.offsets, name)
        for chunk in self._saved.chunks(name, Box(offsets, stored)):
            held = dtypes.torch_box(target.dtype, chunk.box)
            common = held if not box.shape else held.intersection(box)
            if common is not None:
                inner = part_of(target, common.relative_to(box))
                plan.place(name, chunk, common.relative_to(held), inner)


@contextlib.contextmanager
def engine_for_parts() -> Iterator[Engine]:
    """An engine whose memory does not depend on the step."""
    with contextlib.closing(_core.open_fs()) as fs:
        engine = open_engine(fs, STAGING_BYTES, BUFFER_BYTES, 2)
        with contextlib.closing(engine):
            yield engine
