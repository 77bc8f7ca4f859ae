"""The file of a subgroup on a path: where everything is in it, and the header that saves write.

Owns: the form of a file, which a step of a checkpoint can have as it is; what its header says.
Invariants: the form of a subgroup is the same for every generation. A file that a step has keeps
its header. The header changes only when a parameter has got its first update, and that update has
written new files. Every part has a name: the tensor of the step that it is a run of, or a name of
its own if the step has that tensor elsewhere.

Not here: which parameters a save takes from files (state).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch

from statehold import _core
from statehold.encoding import header
from statehold.layout.plan import BLOCK_BYTES, TensorSpec, metadata_of, pieces
from statehold.layout.stored import SUM_BYTES, StoredFile
from statehold.offload.subgroups import ITEM_BYTES, FieldPart, Subgroup

# -- where everything is in a file -----------------------------------------------------------------
# The file is a safetensors file. At its beginning is room for a header, which a save writes. Then
# come the parts of the subgroup, each from a page on, and between them padding.
#
# Each piece that is moved begins on a page. A piece that has a checksum is cut at each BLOCK_BYTES
# of the file, as a step wants it (docs/format.md). Padding is zero, and nobody reads it.


Piece = tuple[int, int]  # the bytes [begin, end) of a file


@dataclass(frozen=True)
class FileForm:
    """The form of the files of one subgroup. head_bytes: in whole pages."""

    subgroup: Subgroup
    head_bytes: int

    @property
    def data_begin(self) -> int:
        """Where the subgroup begins in the file."""
        return self.head_bytes

    @property
    def nbytes(self) -> int:
        """Of a file."""
        return self.data_begin + self.subgroup.nbytes

    @cached_property
    def head(self) -> Sequence[Piece]:
        """The pieces of the header."""
        return list(pieces(0, self.head_bytes, BLOCK_BYTES))

    @cached_property
    def parts(self) -> Sequence[Piece]:
        """The pieces of the parts, in the order of their bytes."""
        cuts = [self.cut(part.begin_bytes, part.end_bytes) for part, _ in self.layout]
        return list(chain.from_iterable(cuts))

    @cached_property
    def padding(self) -> Sequence[Piece]:
        """The pieces between them."""
        cuts = [self.cut(part.end_bytes, end) for part, end in self.layout]
        return list(chain.from_iterable(cuts))

    @property
    def layout(self) -> Iterator[tuple[FieldPart, int]]:
        """Each part, and where the next one begins, in bytes of the subgroup."""
        parts = self.subgroup.parts
        ends = [part.begin * ITEM_BYTES for part in parts[1:]] + [self.subgroup.nbytes]
        yield from zip(parts, ends, strict=True)

    def cut(self, begin: int, end: int) -> Sequence[Piece]:
        """The pieces of these bytes of the subgroup."""
        return list(pieces(self.data_begin + begin, end - begin, BLOCK_BYTES))


# -- the header ------------------------------------------------------------------------------------
# Only a save knows the names. So a file has room for a header, and the first save that takes it
# writes one. A later file gets the header of the newest save when it is written. A save that has
# another header overwrites that one.


# What a part is in a step: its spec.
SpecOf = Callable[[FieldPart], TensorSpec]
# A step calls a tensor of parameter `p` "optimizer.state.model.p.exp_avg", say: so many bytes more.
SPARE_BYTES = 64


def own_spec(part: FieldPart, name: str) -> TensorSpec:
    """A part that is no tensor of a step, under a name of its own."""
    numel = part.span.numel
    return TensorSpec(name, "F32", (numel,), ITEM_BYTES * numel)


def room_for(subgroup: Subgroup, names: Sequence[str], owner: str) -> int:
    """The bytes that a header of the file of a subgroup may need. names: of all parameters."""

    def spec_of(part: FieldPart) -> TensorSpec:
        name = f"{names[part.span.parameter]}.{part.field}.{SPARE_BYTES * 'x'}"
        return own_spec(part, f"{name}.{part.span.parameter}")

    return len(Head(FileForm(subgroup, 0), spec_of, owner).encoded)


class Head:
    """The header of the file of one subgroup. owner: a name that no other optimizer has."""

    def __init__(self, form: FileForm, spec_of: SpecOf, owner: str) -> None:
        self.form = form
        self._spec_of, self._owner = spec_of, owner

    @cached_property
    def encoded(self) -> bytes:
        """At least a page."""
        entries, at = [], 0
        for spec in self.specs:
            entries.append(header.Entry(spec.name, spec.dtype, spec.shape, at, at + spec.nbytes))
            at += spec.nbytes
        metadata = metadata_of(self.specs, step=0, world_size=1)
        return header.encode(entries, metadata, self.form.head_bytes)

    @property
    def fits(self) -> bool:
        """Whether there is room for it."""
        return len(self.encoded) == self.form.head_bytes

    @cached_property
    def memory(self) -> torch.Tensor:
        """The same bytes."""
        return torch.frombuffer(bytearray(self.encoded), dtype=torch.uint8)

    @property
    def ranges(self) -> list[tuple[Piece, int]]:
        """What is written of it: its pieces, each with the address of byte 0 of the file."""
        return [(piece, self.memory.data_ptr()) for piece in self.form.head]

    @cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The parts, and the padding behind each, in the order of the bytes."""
        found = []
        for place, (part, end) in enumerate(self.form.layout):
            found.append(self._spec_of(part))
            if gap := end - part.end_bytes:
                name = f"{self._owner}.padding.{self.form.subgroup.index}.{place}"
                found.append(TensorSpec(name, "U8", (gap,), gap))
        return tuple(found)

    def stored(self, path: str, sums: bytes) -> StoredFile:
        """The file at `path` as a step takes it. sums: of the pieces of its parts."""
        begins, at = [], self.form.data_begin
        for spec in self.specs:
            begins.append(at)
            at += spec.nbytes
        whole = b"".join(self._all_sums(sums))
        return StoredFile(path, at, self.form.data_begin, self.specs, tuple(begins), whole)

    def _all_sums(self, sums: bytes) -> Iterator[bytes]:
        """In the order of the bytes of the file."""
        form, fixed, at = self.form, iter(self._fixed_sums), 0
        yield from (next(fixed) for _ in form.head)
        for part, end in form.layout:
            size = SUM_BYTES * len(form.cut(part.begin_bytes, part.end_bytes))
            yield sums[at : at + size]
            at += size
            yield from (next(fixed) for _ in form.cut(part.end_bytes, end))

    @cached_property
    def _fixed_sums(self) -> list[bytes]:
        """Of the header, and of the padding."""
        in_head = (self.encoded[begin:end] for begin, end in self.form.head)
        padding = (bytes(end - begin) for begin, end in self.form.padding)
        return [
            _core.xxh3_64(each).to_bytes(SUM_BYTES, "little") for each in chain(in_head, padding)
        ]
