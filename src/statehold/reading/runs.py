"""open(): the steps of a run, and what each holds, without reading its data.

Invariants: nothing is changed on disk, and no lock is taken. A Step describes one save: if a job
saves the step again, the description does not change, and load() returns the newer save.
Not here: data (load), levels other than the run directory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from statehold.encoding import values
from statehold.encoding.header import bytes_of
from statehold.errors import StepNotFoundError
from statehold.format.trees import tensors_of
from statehold.layout.plan import step_of
from statehold.options.paths import NamedStep, check_path
from statehold.reading.load import load
from statehold.reading.places import (
    StepPlace,
    at_rest,
    file_system,
    load_manifest,
    run_of,
    tell_misnamed,
)
from statehold.steps.shelf import DirectoryShelf
from statehold.steps.whole import whole_steps
from statehold.tensors import nodes
from statehold.tensors.composed import value_of
from statehold.units import format_bytes


def open(run: str | os.PathLike[str]) -> Run:
    """The steps of a run, for looking at.

    Args:
        run: the run directory.

    Raises:
        UsageError: there is no such directory.
    """
    path = run_of(check_path(run, "the run"))
    tell_misnamed(path)
    return Run(path)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a step: its global shape, and the dtype as safetensors calls it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, repr=False)
class Step:
    """A committed step.

    Attributes:
        step: its number.
        path: its directory.
        created: in UTC, ISO 8601.
        writer: the program and version that saved it.
        version: of the format.
        world_size: how many ranks saved it.
        tensors: every tensor by its name.
        metrics, tags: what it says of itself, as save() got it.
        values: everything else by its name, as it was saved; a value on which ranks differ is
            missing.
    """

    step: int
    path: str
    created: str
    writer: str
    version: int
    world_size: int
    tensors: Mapping[str, TensorInfo]
    values: Mapping[str, Any]
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def __repr__(self) -> str:  # a large model has thousands of tensors
        return f"<Step {self.path}: {len(self.tensors)} tensors, {format_bytes(self.nbytes)}>"

    def load(self, name: str = "", **options: Any) -> Any:
        """What statehold.load() returns of this step.

        Args:
            name: as for load().
            options: as for load().
        """
        return load(os.path.dirname(self.path), name, step=self.step, **options)


class Run:
    """The steps of a run: `run.steps()`, `run[100]`, `run.newest()`, and a loop over them."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._store = DirectoryShelf(file_system(), path)

    def steps(self) -> list[int]:
        """The committed steps that have all their files, oldest first, as they are now."""
        return whole_steps(self._store)

    def newest(self) -> Step | None:
        """The newest step; None if there is none."""
        with contextlib.suppress(StepNotFoundError):
            return at_rest(self._store.fs, NamedStep(self.path), self._described)
        return None

    def __getitem__(self, step: int) -> Step:
        return at_rest(self._store.fs, NamedStep(self.path, step_of(step)), self._described)

    def __iter__(self) -> Iterator[Step]:
        for step in self.steps():
            with contextlib.suppress(StepNotFoundError):  # its job has retired it since
                yield self[step]

    def __len__(self) -> int:
        return len(self.steps())

    def __repr__(self) -> str:
        return f"<Run {self.path}: {len(self)} steps>"

    def _described(self, place: StepPlace) -> Step:
        manifest = load_manifest(self._store.fs, place.directory)
        saved = place.open(self._store.fs)
        tensors = {
            name: TensorInfo(name, each.dtype, each.shape, bytes_of(each.dtype, each.shape) or 0)
            for name, each in saved.tensors.items()
        }
        return Step(
            step=place.step,
            path=self._store.path(place.step),
            created=manifest.created,
            writer=manifest.writer,
            version=manifest.version,
            world_size=saved.world_size,
            tensors=tensors,
            values=dict(_values(saved.state, "")),
            metrics=dict(manifest.about.metrics),
            tags=manifest.about.tags,
        )


def _values(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    """What is no tensor, by dotted names."""
    if nodes.differing(node) is None and next(tensors_of(node), None) is None:
        yield path, values.decode(node, lambda tag, payload: value_of(tag, payload, _no_tensor))
        return
    items = dict(enumerate(node)) if type(node) is list else nodes.members(node) or {}
    for key, item in items.items():
        yield from _values(item, f"{path}.{key}" if path else str(key))


def _no_tensor(name: str) -> Any:
    raise KeyError(name)
