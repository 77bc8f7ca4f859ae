"""The state of an offloaded optimizer: updated, gathered, loaded and closed as a whole.

Owns: the fields of all parameters; which of them a save takes from the files on the paths, and what
it calls what they hold.
Invariants: the first update of a subgroup makes its state: masters from the parameters, all else
zero. So weights may be loaded between the construction of an optimizer and its first update. After
an update that has failed, some subgroups are one update ahead of others. No update and no reading
goes on from there. load() makes the state whole again.

Not here: torch's surface (offload), one update (update), where subgroups are (pipeline).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count, zip_longest
from typing import Any

import torch

from statehold._core import Fs
from statehold.errors import ClosedError, StateMismatchError, UsageError
from statehold.layout.flat import boxes_of_run
from statehold.layout.plan import TensorSpec
from statehold.layout.share import HeldTensor
from statehold.observe.background_log import log_once
from statehold.offload.head import FileForm, Head, own_spec, room_for
from statehold.offload.on_device import (
    LANES,
    Mirror,
    OnDevice,
    alternate,
    candidates,
    check_every,
    pinned_bytes,
)
from statehold.offload.parameters import MASTER, Parameter, by_kind, described, flat, parameters_of
from statehold.offload.pipeline import SubgroupPipeline
from statehold.offload.rules import Rule
from statehold.offload.sizes import Buffers, Sizes
from statehold.offload.stats import PathStats, Stats
from statehold.offload.store import SubgroupStore
from statehold.offload.subgroups import ITEM_BYTES, FieldPart, Span, Subgroup
from statehold.offload.tiers import Tier, check_tiers
from statehold.offload.update import OptimizerUpdate, make, parts
from statehold.offload.workers import Workers
from statehold.process.reentry import enter, note
from statehold.tensors.placements import Placed
from statehold.tensors.storable import is_external, local_of
from statehold.tensors.stored import (
    Fill,
    InFiles,
    InStep,
    Role,
    SavedParameter,
    StoredState,
    Wanted,
)
from statehold.units import parse_bytes

# -- the state -------------------------------------------------------------------------------------


Groups = Sequence[Mapping[str, Any]]
OFFLOADED = "of an offloaded optimizer"  # its calls (process/reentry)

_taken: set[int] = set()
_guard = threading.Lock()


class Name:
    """The name of an optimizer in its files, which no other one of the process has until free().

    Names are counted, and that of an optimizer that has ended is free again. So a program that
    makes its optimizers in the same order gives them the same names in every run.
    """

    def __init__(self) -> None:
        with _guard:
            self._number = next(number for number in count() if number not in _taken)
            _taken.add(self._number)

    def __str__(self) -> str:
        return f"offload.{self._number}"

    def free(self) -> None:
        """Let another optimizer have it."""
        with _guard:
            _taken.discard(self._number)


class OffloadedState:
    """The fields of all parameters of `groups` on `tiers`.

    drains: whether gradients leave devices in backward. every: see check_every(). fs: a file system
    from the caller, which stays open.
    What does the work: `sizes` cuts subgroups, `store` and `pipeline` have them on paths and in
    memory, `rule` updates them; `on_device` those of devices, `mirror` what devices keep.
    """

    def __init__(
        self,
        groups: Groups,
        rule: Rule,
        tiers: Sequence[Tier],
        subgroup_bytes: int | str | None,
        drains: bool,
        every: int | str | None,
        fs: Fs | None,
    ) -> None:
        check_every(every)
        host_bytes, self._paths = check_tiers(tiers)
        self.rule = rule
        self.parameters = parameters_of(groups, rule)
        self.sizes = Sizes.of(
            [each.extent for each in self.parameters],
            host_bytes,
            len(self._paths),
            None if subgroup_bytes is None else parse_bytes(subgroup_bytes),
            torch.get_num_threads(),
            pinned_bytes(self.parameters),
            by_kind(self.parameters),
            LANES if every is not None and pinned_bytes(self.parameters) else 0,
        )
        self._subgroups_of: list[list[int]] = [[] for _ in self.parameters]
        for subgroup in self.sizes.subgroups:
            for span in subgroup.spans:
                self._subgroups_of[span.parameter].append(subgroup.index)
        self._name = Name()
        names = [each.name for each in self.parameters]
        forms = [
            FileForm(each, room_for(each, names, str(self._name))) for each in self.sizes.subgroups
        ]
        self._naming: Naming | None = None  # of the first save
        self.store = SubgroupStore(self._paths, forms, names, fs)
        self.timeline = self.store.timeline
        self._open(groups, every, drains=drains)
        self.failure: BaseException | None = None  # since then the state belongs to no step
        self._is_closed, self._owner_pid = False, os.getpid()
        self._updates, self._update_s, self._compute_s = 0, 0.0, 0.0

    def update(self, groups: Groups, grad_scale: torch.Tensor | None) -> None:
        """Update every parameter that has a gradient. Uses drained gradients up."""
        enter(f"step() {OFFLOADED}")
        begin = time.perf_counter()
        self._check_usable()
        self._check_options(groups)
        grads = self.gradients(must_wait=False)
        groups = [{**group, "lr": _on_host(group["lr"])} for group in groups]
        scale = _on_host(grad_scale)
        update = OptimizerUpdate(self.rule, self.parameters, groups, grads, scale, self._workers)
        active = [self.parameters[index] for index in update.active]

        def use(
            subgroup: Subgroup, memory: torch.Tensor, is_fresh: bool
        ) -> Callable[[], None] | None:
            if subgroup.index in self.on_device.places:
                gradients = self.mirror.gradients
                return self.on_device.use(update, gradients, subgroup, memory, is_fresh)
            self.mirror.arrive()
            begin = time.perf_counter()
            with self.timeline.during("update", subgroup.index):
                spans = update.use(subgroup, memory, is_fresh)
            self.mirror.send(spans)
            self._compute_s += time.perf_counter() - begin
            return None

        touched = self.on_device.in_turn(self._touched(update.active))
        with self._whole("update"):
            for parameter in active:
                parameter.step += 1
            try:
                self.pipeline.visit(touched, use, changes=True)
            except BaseException:
                self.on_device.wait()
                raise
            finally:
                self.mirror.arrive()
                self.mirror.discard()
                self.mirror.sent(update.active)
            for parameter in active:
                parameter.note_update()
        self._updates += 1
        self._update_s += time.perf_counter() - begin

    def gradients(self, *, must_wait: bool = True) -> dict[int, torch.Tensor]:
        """The gradients that there are, flat and on the host, by parameter.

        must_wait: until those of devices are there. Without it, arrive() of the mirror does.
        """
        self._check_usable()
        here = {
            index: each.gradient()
            for index, each in enumerate(self.parameters)
            if each.mirrored is None and each.tensor.grad is not None
        }
        return here | self.mirror.collect(must_wait=must_wait)

    @property
    def started(self) -> list[int]:
        """The parameters that were ever updated."""
        return [index for index, each in enumerate(self.parameters) if each.is_started]

    def gather(self, among: Sequence[int] | None = None) -> dict[int, dict[str, torch.Tensor]]:
        """Copies of the fields of the parameters that were ever updated, in their shapes.

        among: only of these.
        """
        note(f"a copy {OFFLOADED}")
        self._check_usable()
        started = self.started if among is None else among
        found = {index: self._empty_fields(self.parameters[index]) for index in started}

        def use(subgroup: Subgroup, memory: torch.Tensor, _: bool) -> None:
            for part, values in parts(subgroup, memory):
                span = part.span
                if span.parameter in found:
                    elements = flat(local_of(found[span.parameter][part.field]))
                    elements[span.begin : span.end] = values

        self.pipeline.visit(self._touched(started), use, changes=False)
        return found

    def stored(self, saved: Sequence[SavedParameter]) -> StoredState | None:
        """What gather() gives by parameter, with InFiles for what lies in files.

        None if nothing can be taken from files.
        """
        note(f"a save {OFFLOADED}")
        self._check_usable()
        naming, started = self._naming_of(saved), self.started
        heads = None if naming is None else naming.heads(started)
        if naming is None or heads is None:
            return None
        fields = self.gather([index for index in started if not naming.in_files[index]])
        for index in started:
            if naming.in_files[index]:
                fields[index] = self._fields_in_files(self.parameters[index], saved[index])
        elsewhere = tuple(naming.elsewhere(started))
        self.store.heads = heads
        tree = [fields.get(index) for index in range(len(self.parameters))]
        held = self.pipeline.hold(heads)
        return StoredState(tree, partial(held.files, heads), held.release, elsewhere)

    def check_parameters(self, groups: Groups) -> None:
        """Refuse groups with other parameters than those of the state, or in another order."""
        made = [(id(each.tensor), each.group) for each in self.parameters]
        live = [(id(each), index) for index, group in enumerate(groups) for each in group["params"]]
        if live != made:
            odd = next(n for n, (own, now) in enumerate(zip_longest(made, live)) if own != now)
            is_more = odd == len(made)
            raise UsageError(
                "the parameters of the groups are others than when the optimizer was made",
                facts={
                    "parameter": "one more" if is_more else self.parameters[odd].name,
                    "expected": "in no group" if is_more else _place(made, made[odd][0]),
                    "got": _place(live, (live if is_more else made)[odd][0]),
                    "still safe": "the state of the optimizer, for the parameters as they were",
                },
                hint="put the parameters back; make the optimizer when the model and the groups "
                "are complete, such as after fully_shard()",
            )

    def check(self, groups: Groups, entries: Sequence[Mapping[str, Any] | None]) -> None:
        """Refuse groups and entries of another model. Their number is for torch to refuse."""
        self._check_looks()
        if len(groups) > max(each.group for each in self.parameters):
            self._check_options(groups)
        if len(entries) == len(self.parameters):
            self._check_entries(entries)

    @torch.no_grad()
    def load(self, entries: Sequence[Mapping[str, Any] | None], fill: Fill | None = None) -> None:
        """Replace the state by `entries`, one for each parameter; None: it was never updated.

        fill: reads what is InStep there.
        """
        note(f"load_state_dict() {OFFLOADED}")
        self._check_open()
        self._check_looks()
        self._check_entries(entries)
        given = [
            {name: _flat_of(parameter, entry[name]) for name in parameter.fields if name in entry}
            for parameter, entry in zip(self.parameters, map(_known, entries), strict=True)
        ]

        def use(subgroup: Subgroup, memory: torch.Tensor, _: bool) -> None:
            make(subgroup, memory, self.parameters)
            wanted: list[Wanted] = []
            for part, values in parts(subgroup, memory):
                span, value = part.span, given[part.span.parameter].get(part.field)
                if isinstance(value, InStep):
                    wanted += value.run(span.begin, span.end, values)
                elif value is not None:
                    values.copy_(value[span.begin : span.end])
            if wanted and fill is not None:
                fill(wanted)

        with self._whole("load_state_dict()"):
            self.pipeline.reset()
            self.mirror.forget()
            self.mirror.bring_weights()
            for parameter, entry, fields in zip(self.parameters, entries, given, strict=True):
                parameter.version = None
                parameter.step.fill_(float(_known(entry).get("step", 1)) if fields else 0)
            started = [index for index, fields in enumerate(given) if fields]
            self.pipeline.visit(self._touched(started), use, changes=True)
        self.mirror.forget()
        self.failure = None

    def close(self) -> None:
        """Remove the state from all tiers. A forked child leaves its parent's state alone."""
        if not self._is_closed and os.getpid() == self._owner_pid:
            self._is_closed = True
            self._name.free()
            self.pipeline.close()
            self._workers.close()
            self.on_device.close()
            self.mirror.close()
            self.store.close()

    @property
    def stats(self) -> Stats:
        """The figures so far."""
        pipeline, store = self.pipeline, self.store
        targets = pipeline.targets
        placed = zip(self._paths, targets.counts, store.meters, strict=True)
        return Stats(
            updates=self._updates,
            update_s=self._update_s,
            compute_s=self._compute_s,
            waited_s=pipeline.waited_s,
            hidden_s=max(0.0, store.all_transfers.busy_s - pipeline.waited_s),
            hits=pipeline.hits,
            misses=pipeline.misses,
            state_bytes=self.sizes.state_bytes,
            cache_bytes=self.sizes.cache_bytes,
            buffer_bytes=self.sizes.pipeline_bytes,
            pinned_bytes=self.sizes.pinned_bytes,
            device_bytes=self.on_device.nbytes,
            device_updates=self.on_device.updates,
            device_subgroups=len(self.on_device.places),
            paths=tuple(
                PathStats(
                    path=path.directory,
                    subgroups=count,
                    read_bytes=meters.read.nbytes,
                    read_s=meters.read.busy_s,
                    written_bytes=meters.written.nbytes,
                    write_s=meters.written.busy_s,
                    busy_s=meters.both.busy_s,
                    given_up=targets.given_up.get(number),
                )
                for number, (path, count, meters) in enumerate(placed)
            ),
        )

    def _open(self, groups: Groups, every: int | str | None, *, drains: bool) -> None:
        rates = [path.rate for path in self._paths]
        known = [float(rate) for rate in rates if rate is not None]
        bandwidths = known if len(known) == len(rates) else [1.0] * len(rates)
        with contextlib.ExitStack() as undo:
            undo.callback(self.store.close)
            subgroups = self.sizes.subgroups
            buffers = Buffers(self.sizes.buffers, self.sizes.each_bytes)
            self._workers = Workers()
            undo.callback(self._workers.close)
            places = candidates(subgroups, self.parameters) if every is not None else {}
            self.on_device = OnDevice(places, subgroups, buffers, self.timeline)
            undo.callback(self.on_device.close)
            alternate(
                every, self.on_device, self.parameters, buffers[0], self.rule, groups,
                self._workers, drains=drains,
            )  # fmt: skip
            self.mirror = Mirror(self.parameters, self.on_device.spans(), drains=drains)
            undo.callback(self.mirror.close)
            self.pipeline = SubgroupPipeline(subgroups, buffers, self.store, bandwidths)
            undo.pop_all()

    def _naming_of(self, saved: Sequence[SavedParameter]) -> Naming | None:
        """What the files of a save say; None if it cannot have these files."""
        if not self._paths:
            return None
        if self._naming is None:
            self._naming = Naming(self.parameters, self.store.forms, saved, str(self._name))
        if self._naming.saved != list(saved):
            log_once(
                "a save of an offloaded optimizer writes its whole state, because the save before "
                f"has called it {self._naming.saved[0].name}, and this one {saved[0].name}: save "
                "it under the same name, by the same ranks"
            )
            return None
        return self._naming

    def _fields_in_files(self, parameter: Parameter, saved: SavedParameter) -> dict[str, Any]:
        found = {field: InFiles(saved.field(field)) for field in parameter.fields}
        return {"step": parameter.step.clone(), **found} if self.rule.keeps_step else found

    def _touched(self, parameters: Sequence[int]) -> list[int]:
        """The subgroups with spans of these parameters, in order."""
        return sorted({each for index in parameters for each in self._subgroups_of[index]})

    def _empty_fields(self, parameter: Parameter) -> dict[str, torch.Tensor]:
        """Tensors for the fields of a parameter, and its step if torch keeps one."""
        found = {name: parameter.empty_field() for name in parameter.fields}
        return {"step": parameter.step.clone(), **found} if self.rule.keeps_step else found

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the optimizer was closed")
        if os.getpid() != self._owner_pid:
            raise ClosedError(
                "this optimizer belongs to the process that was forked",
                facts={
                    "made by": f"process {self._owner_pid}",
                    "used by": f"process {os.getpid()}",
                    "still safe": "the optimizer of that process",
                },
                hint="make another optimizer in this process",
            )

    def _check_usable(self) -> None:
        self._check_open()
        self._check_looks()
        if self.failure is not None:
            raise UsageError(
                "an earlier update of this optimizer has failed, so its state belongs to no step",
                facts={"failure": f"{type(self.failure).__name__}: {self.failure}".splitlines()[0]},
                hint="restore the newest committed step, or call load_state_dict()",
            ) from self.failure

    def _check_looks(self) -> None:
        for parameter in self.parameters:
            if parameter.look() != parameter.made_as:
                raise UsageError(
                    "a parameter was converted or moved after its optimizer was made",
                    facts={
                        "parameter": parameter.name,
                        "expected": " ".join(map(str, parameter.made_as)),
                        "got": " ".join(map(str, parameter.look())),
                        "still safe": "the state of the optimizer, for the parameter as it was",
                    },
                    hint="convert the model first, then make the optimizer; or convert it back",
                )

    def _check_options(self, groups: Groups) -> None:
        for parameter in self.parameters:
            fields = self.rule.fields(groups[parameter.group])
            if fields != parameter.kept:
                raise UsageError(
                    "an option of a parameter group would change what is kept of a parameter",
                    facts={
                        "parameter": parameter.name,
                        "kept": ", ".join(parameter.kept) or "nothing",
                        "wanted": ", ".join(fields) or "nothing",
                    },
                    hint="make another optimizer with this option",
                )

    def _check_entries(self, entries: Sequence[Mapping[str, Any] | None]) -> None:
        for parameter, entry in zip(self.parameters, map(_known, entries), strict=True):
            needed = parameter.kept if entry else ()
            for name in (*needed, *({MASTER} & entry.keys())):
                value = entry.get(name)
                if isinstance(value, InStep):
                    continue  # the restore has compared it
                if not isinstance(value, torch.Tensor) or not parameter.fits(value):
                    raise StateMismatchError(
                        "the state of a parameter does not fit this optimizer",
                        facts={
                            "parameter": parameter.name,
                            "expected": f"{name} in {described(parameter.tensor)}",
                            "got": described(value),
                        },
                    )

    @contextlib.contextmanager
    def _whole(self, what: str) -> Iterator[None]:
        """What fails inside leaves a state of no step."""
        try:
            yield
        except BaseException as error:
            self.failure = error
            if hasattr(error, "add_note"):
                error.add_note(f"statehold: this {what} of an optimizer is incomplete")
            raise


def _place(places: Sequence[tuple[int, int]], parameter: int) -> str:
    found = [f"number {n}, in group {places[n][1]}" for n in range(len(places))
             if places[n][0] == parameter]  # fmt: skip
    return " and ".join(found) or "in no group"


def _flat_of(parameter: Parameter, value: torch.Tensor | InStep) -> torch.Tensor | InStep:
    return value if isinstance(value, InStep) else parameter.flat_of(value)


def _known(entry: Mapping[str, Any] | None) -> Mapping[str, Any]:
    return entry or {}


def _on_host(value: Any) -> Any:
    """The same number, where the host's kernel can read it."""
    is_there = isinstance(value, torch.Tensor) and is_external(value)
    return torch.tensor(value.item(), dtype=torch.float32, device="cpu") if is_there else value


# -- what a save takes from files ------------------------------------------------------------------
# A parameter is taken from files if its spans are boxes, as a step wants them, and if its place
# says which ranks hold it, too. The rest is gathered into memory, as state_dict() does.
#
# The first save decides the names, because a file that a step has keeps its header. A file may hold
# parts of parameters that the step has elsewhere, or not at all, because they were never updated.
# They are nobody's there.


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
        box = box if saved.place.box is None else box.within(saved.place.box)
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
