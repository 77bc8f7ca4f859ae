"""Files that are on storage before a save, and are part of its step as they are: what they hold.

Owns: the description of such a file, its validation, and its place among the files of a rank.
Invariants: a file that passed `check` is one that a step can list. Its tensors tile it, aligned to
their dtypes, and every piece has a checksum. The parts of a tensor in several files are runs of the
box that the rank writes, and together they are that box. A rank hands over only files that it
writes: of what several ranks hold, the first one has the files, and the others name the tensors.
Not here: who has such files (tensors/stored), the second names that a step gives them (store), what
the step says of them (format).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from statehold.encoding import header
from statehold.errors import InvariantError
from statehold.layout.flat import run_of
from statehold.layout.layout import Box, Layout
from statehold.layout.plan import SavePlan, TensorSpec, check_specs, file_name, sum_places
from statehold.layout.share import HeldTensor, global_shape

SUM_BYTES = 8


@dataclass(frozen=True)
class StoredFile:
    """A safetensors file at `path` that nobody writes any more.

    `specs` and `begins` (absolute offsets) are in the order of the bytes. A spec is of the part of
    a tensor that the file holds; its layout is that of the tensor. A spec without one is of a
    tensor that this rank alone has, or of padding. `sums` holds the checksums of all pieces, those
    of the header first, 8 little-endian bytes each.
    """

    path: str
    file_bytes: int
    data_begin: int
    specs: tuple[TensorSpec, ...]
    begins: tuple[int, ...]
    sums: bytes

    def placed(self, save: SavePlan, part: int) -> SavePlan:
        """Its plan, as number `part` of the files of the rank that saves by `save`."""
        return replace(
            save,
            file_name=file_name(save.rank, save.world_size, part),
            specs=self.specs,
            source_index=(),
            begins=self.begins,
            header=b"",
            data_begin=self.data_begin,
            file_bytes=self.file_bytes,
        )


@dataclass(frozen=True)
class StoredPart:
    """The files of a step other than the one that a rank writes.

    held: the tensors that only these files hold, and those that another rank has in such files.
    """

    files: Sequence[StoredFile] = ()
    held: Sequence[HeldTensor] = ()


def held_in(files: Sequence[StoredFile]) -> list[HeldTensor]:
    """What the record of their rank says of the tensors in `files`, each once."""
    found: dict[str, HeldTensor] = {}
    for file in files:
        for spec in file.specs:
            held = HeldTensor(spec.name, spec.dtype, global_shape(spec), spec.layout)
            if found.setdefault(spec.name, held) != held:
                raise _invalid(file, f"{spec.name}: {found[spec.name]}", f"{held}")
    return list(found.values())


def check(files: Sequence[StoredFile], rank: int, others: Collection[str]) -> None:
    """Raise InvariantError unless `files` can be part of a step of `rank`.

    others: the names of the tensors that the rank saves in its own file.
    """
    parts: defaultdict[str, list[Box]] = defaultdict(list)
    for file in files:
        _check_file(file)
        for spec in file.specs:
            if spec.name in others:
                raise _invalid(file, "tensors that are in this file only", spec.name)
            if spec.layout is not None and spec.layout.replica_index(rank):
                raise _invalid(file, f"tensors that rank {rank} writes", spec.name)
            offsets = (0,) * len(spec.shape) if spec.offsets is None else spec.offsets
            parts[spec.name].append(Box(offsets, spec.shape))
    for held in held_in(files):
        outer = Box.whole(held.shape)
        if isinstance(held.layout, Layout):
            outer = held.layout.box(held.shape, rank)
        _check_runs(held.name, outer, sorted(parts[held.name], key=lambda box: box.offsets))


def _check_file(file: StoredFile) -> None:
    check_specs(file.specs)
    if file.data_begin < header.PAGE or file.data_begin % header.PAGE:
        raise _invalid(file, f"data that begins at a multiple of {header.PAGE}", file.data_begin)
    at = file.data_begin
    for spec, begin in zip(file.specs, file.begins, strict=True):
        if begin != at:
            raise _invalid(file, f"{spec.name} at {at}, after the tensor before it", begin)
        if begin * 8 % header.DTYPE_BITS[spec.dtype]:
            raise _invalid(file, f"{spec.name} at a multiple of its elements' size", begin)
        at += spec.nbytes
    if at != file.file_bytes:
        raise _invalid(file, f"{file.file_bytes} bytes", f"tensors that end at {at}")
    count = sum_places(file.data_begin, file.begins, file.specs)[-1]
    if len(file.sums) != SUM_BYTES * count:
        raise _invalid(file, f"{count} checksums", f"{len(file.sums) / SUM_BYTES:g}")


def _check_runs(name: str, outer: Box, parts: Sequence[Box]) -> None:
    at = 0
    for part in parts if outer.numel else ():
        run = run_of(part, outer)
        if run is None or run[0] != at:
            expected = f"elements of {outer} that follow each other, from number {at} on"
            facts = {"tensor": name, "expected": expected, "got": str(part)}
            raise InvariantError("files on storage do not hold a tensor part by part", facts=facts)
        at = run[1]
    if at != outer.numel:
        facts = {"tensor": name, "expected": f"{outer.numel} elements of {outer}", "got": str(at)}
        raise InvariantError("files on storage do not hold all of a tensor", facts=facts)


def _invalid(file: StoredFile, expected: str, got: object) -> InvariantError:
    facts = {"file": file.path, "expected": expected, "got": str(got)}
    return InvariantError("a file on storage cannot be part of a step", facts=facts)
