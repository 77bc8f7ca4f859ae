"""Which parameters a save takes from the files on the paths, and what it calls what they hold.

A parameter is taken from files if its spans are boxes, as a step wants them, and if its place says
which ranks hold it, too. The rest is gathered into memory, as state_dict() does.

Invariants: the first save decides the names, because a file that a step has keeps its header. A
file may hold parts of parameters that the step has elsewhere, or not at all, because they were
never updated. They are nobody's there.
Not here: the headers (head), the bytes (store), who is asked (state).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import add

from statehold.layout.flat import boxes_of_run
from statehold.layout.layout import Box
from statehold.layout.plan import TensorSpec
from statehold.layout.share import HeldTensor
from statehold.observe.background_log import log_once
from statehold.offload.file_form import FileForm
from statehold.offload.head import Head, own_spec
from statehold.offload.parameters import Parameter
from statehold.offload.subgroups import ITEM_BYTES, FieldPart, Span
from statehold.tensors.placements import Placed
from statehold.tensors.stored import Role, SavedParameter

DTYPE = "F32"


def are_boxes(shape: Sequence[int], spans: Sequence[Span]) -> bool:
    """Whether each of these spans of a parameter is one box of it, as a step wants it."""
    return all(len(list(boxes_of_run(shape, span.begin, span.end))) == 1 for span in spans)


class Naming:
    """What a save calls the state of `parameters`. forms: of all files. owner: see Head."""

    def __init__(
        self,
        parameters: Sequence[Parameter],
        forms: Sequence[FileForm],
        saved: Sequence[SavedParameter],
        owner: str,
    ) -> None:
        self.saved = list(saved)
        self._parameters, self._forms, self._owner = parameters, forms, owner
        spans: list[list[Span]] = [[] for _ in parameters]
        for form in forms:
            for span in form.subgroup.spans:
                spans[span.parameter].append(span)
        self._written, self._heads = frozenset[int](), dict[int, Head]()
        self.in_files = [self._is_in_files(*each) for each in enumerate(spans)]
        self._warn_of_compared(spans)

    def is_written(self, parameter: int) -> bool:
        """Whether this rank has the files of a parameter."""
        return self.in_files[parameter] and self.saved[parameter].role is Role.WRITES

    def elsewhere(self, parameters: Sequence[int]) -> Iterator[HeldTensor]:
        """Which tensors of these another rank has in its files."""
        for index in parameters:
            saved, parameter = self.saved[index], self._parameters[index]
            if self.in_files[index] and saved.role is Role.NAMES:
                shape = _global_shape(saved.place, parameter)
                for field in parameter.fields:
                    yield HeldTensor(saved.field(field), DTYPE, shape, saved.place.layout)

    def heads(self, parameters: Sequence[int]) -> Mapping[int, Head] | None:
        """By the index of the subgroup, the headers of files of these parameters.

        A parameter is updated for the first time in a new file, so no header changes. None, and a
        warning, if the files have no room for them.
        """
        written = frozenset(index for index in parameters if self.is_written(index))
        if self._written != written:
            self._written = written
            self._heads = {
                form.subgroup.index: Head(form, self._spec, self._owner)
                for form in self._forms
                if any(span.parameter in written for span in form.subgroup.spans)
            }
        large = [head for head in self._heads.values() if not head.fits]
        if large:
            span = large[0].form.subgroup.spans[0]
            log_once(
                "a save of an offloaded optimizer writes its whole state, because the names of its "
                f"parameters, as {self.saved[span.parameter].name}, are much longer than the "
                "optimizer knew: make it from model.named_parameters()"
            )
        return None if large else self._heads

    def _is_in_files(self, index: int, spans: Sequence[Span]) -> bool:
        parameter, saved = self._parameters[index], self.saved[index]
        if not spans or saved.role is Role.COMPARES:
            return False
        is_possible = parameter.is_in_order and are_boxes(parameter.local.shape, spans)
        if not is_possible:
            log_once(
                "a save of an offloaded optimizer writes state again that lies in files, because "
                f"no step can have that of {parameter.name} as it is: make it contiguous, or raise "
                "subgroup_bytes if its rows are long"
            )
        return is_possible

    def _warn_of_compared(self, spans: Sequence[Sequence[Span]]) -> None:
        compared = [
            parameter.name
            for parameter, saved, found in zip(self._parameters, self.saved, spans, strict=True)
            if found and saved.role is Role.COMPARES
        ]
        if compared:
            log_once(
                "a save of an offloaded optimizer writes state again that lies in files, that of "
                f"{len(compared)} parameters ({compared[0]}, ...), because only the bytes say "
                "whether other ranks hold the same: save a DistributedDataParallel as it is, not "
                "its .module, and lay other parameters on a mesh of all ranks"
            )

    def _spec(self, part: FieldPart) -> TensorSpec:
        index, span = part.span.parameter, part.span
        saved, parameter = self.saved[index], self._parameters[index]
        if index not in self._written:
            name = f"{self._owner}.copy.{index}.{part.field}.{span.begin}"
            return own_spec(part, name)
        (box,) = boxes_of_run(parameter.local.shape, span.begin, span.end)
        begin = (0,) * len(box.shape) if saved.place.box is None else saved.place.box.offsets
        box = Box(tuple(map(add, begin, box.offsets)), box.shape)
        return TensorSpec(
            saved.field(part.field),
            DTYPE,
            box.shape,
            ITEM_BYTES * box.numel,
            layout=saved.place.layout,
            global_shape=_global_shape(saved.place, parameter),
            offsets=box.offsets,
        )


def _global_shape(place: Placed, parameter: Parameter) -> tuple[int, ...]:
    return tuple(parameter.local.shape) if place.shape is None else place.shape
