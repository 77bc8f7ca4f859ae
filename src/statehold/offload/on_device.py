"""Updates of subgroups on a device, while the host updates others.

A subgroup has a **lane**: a side stream, and memory on the device. The stream brings the state from
the buffer of the host, runs the kernel of the rule on it and on the parameters there, and takes the
state back. A device has two lanes, so one brings state while the other one takes it back.

Invariants:
- All work on a subgroup is that of one stream. So the memory of a lane has one subgroup at a time.
- A buffer of the host belongs to the device until the function that use() returns has ended.
- The host waits for nothing in use(), and whatever has been given to a stream, wait() waits for.
- Memory on devices is taken at construction, and nothing grows.
Not here: gradients and weights on the host (mirror).

Which subgroups a device updates, and which the host.

A device may update the subgroups whose parameters are all there. It updates every k-th of these,
always the same ones, so training with a given k is repeatable. With "auto" k comes from the model
of planners/interleaving and from rates that are measured here.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from statehold.errors import DeviceError, UsageError
from statehold.offload.lanes import Lanes
from statehold.offload.parameters import Parameter, flat
from statehold.offload.rules import Batch, Rule
from statehold.offload.sizes import Buffers
from statehold.offload.stats import Timeline
from statehold.offload.subgroups import CUT, ITEM_BYTES, Span, Subgroup, strips
from statehold.offload.update import Fields, OptimizerUpdate
from statehold.offload.workers import STRIP as HOST_STRIP
from statehold.offload.workers import Workers
from statehold.planners.interleaving import Carried, Device, best_period
from statehold.tensors.devices.backends import Event
from statehold.tensors.devices.devices import backend_for
from statehold.tensors.devices.pinning import Pinning
from statehold.tensors.storable import device_of, empty_on, is_external
from statehold.units import format_bytes

LANES = 2
STRIP = 1 << 22  # elements whose gradients are widened at once: 16 MiB


@dataclass(frozen=True, slots=True)
class Lane:
    """A stream, and memory on its device.

    state: of a subgroup. grads: of a strip in float32; drained: as they come from the host.
    numbers: what kernels read there, such as how many updates a parameter has had.
    """

    device: torch.device
    name: str
    state: torch.Tensor
    grads: torch.Tensor
    drained: torch.Tensor
    numbers: torch.Tensor

    @classmethod
    def of(cls, device: torch.device, name: str, subgroups: Sequence[Subgroup]) -> Lane:
        """With memory for any of these subgroups."""
        items = max(each.nbytes for each in subgroups) // ITEM_BYTES
        strip, numbers = min(STRIP, items), 1 + max(len(each.spans) for each in subgroups)
        try:
            state, grads, few = (
                empty_on(device, (size,), torch.float32) for size in (items, strip, numbers)
            )
            return cls(device, name, state, grads, empty_on(device, (strip,), torch.bfloat16), few)
        except torch.OutOfMemoryError as error:
            raise UsageError(
                "a device has too little memory to update subgroups",
                facts={"device": str(device), "needed": f"{LANES} lanes with "
                       f"{format_bytes(ITEM_BYTES * items + 6 * strip + 4 * numbers)} each"},
                hint="lower subgroup_bytes, or leave device_every off",
            ) from error  # fmt: skip

    @property
    def nbytes(self) -> int:
        """All its memory on the device."""
        return sum(each.nbytes for each in (self.state, self.grads, self.drained, self.numbers))


class OnDevice:
    """Lanes for subgroups that are on devices, by their indices. memory: the buffers of the host.

    places: the subgroups that devices update; all of them until choose(). updates: of subgroups.
    """

    def __init__(
        self,
        places: Mapping[int, torch.device],
        subgroups: Sequence[Subgroup],
        buffers: Buffers,
        timeline: Timeline,
    ) -> None:
        self.places, self.updates = dict(places), 0
        self.work, self._timeline = Lanes(), timeline
        self._subgroups = subgroups
        here = [subgroups[index] for index in places]
        self.lanes = {
            device: [Lane.of(device, f"offload update {i}", here) for i in range(LANES)]
            for device in dict.fromkeys(places.values())
        }
        self._turns = {each: itertools.cycle(lanes) for each, lanes in self.lanes.items()}
        self._pinnings: list[Pinning] = []
        for device in itertools.islice(self.lanes, 1):
            self._pinnings.append(Pinning(backend_for(device), device))
            for index in range(buffers.count):  # one by one: no copy goes beyond a buffer
                self._pinnings[0].pin(buffers[index])

    def choose(self, every: int | None) -> None:
        """Have devices update every k-th of the subgroups; None: none."""
        chosen = itertools.islice(self.places.items(), 0, None, every) if every else ()
        self.places = dict(chosen)
        if not self.places:
            self.close()

    def use(
        self,
        update: OptimizerUpdate,
        gradients: Mapping[int, torch.Tensor],
        subgroup: Subgroup,
        memory: torch.Tensor,
        is_fresh: bool,
    ) -> Callable[[], None]:
        """Begin to update a subgroup. Returns what waits until it is updated in its buffer.

        gradients: those that devices have, by parameter; `update` has the others.
        """
        active = update.prepare(subgroup, memory, is_fresh)
        device = self.places[subgroup.index]
        lane = next(self._turns[device])
        here = memory[: subgroup.nbytes // ITEM_BYTES]
        with self.work.on(device, lane.name):
            there = lane.state[: here.numel()]
            there.copy_(here, non_blocking=True)
            fields, side = Fields(subgroup, there), _Device(lane, update, gradients)
            for strip in strips(active, lane.grads.numel(), 1):
                update.run(strip, fields, side)
            here.copy_(there, non_blocking=True)
        self.updates += 1
        return partial(self._end, subgroup, device, self.work.newest(device, lane.name))

    def wait(self) -> None:
        """Return when no stream has work any more."""
        for lane in itertools.chain(*self.lanes.values()):
            self.work.wait(lane.name)

    def close(self) -> None:
        """Give all memory back. The host updates every subgroup from here on."""
        with suppress(DeviceError, RuntimeError):  # a device that has failed reaches no memory
            self.wait()
        for pinning in self._pinnings:
            pinning.close()
        self.lanes, self.places = {}, {}
        self._turns.clear()

    @property
    def nbytes(self) -> int:
        """All memory on devices."""
        return sum(lane.nbytes for lane in itertools.chain(*self.lanes.values()))

    def in_turn(self, wanted: Sequence[int]) -> list[int]:
        """These subgroups, each of a device a period earlier: at the end nothing waits for it."""
        ahead = len(self._subgroups) // max(1, len(self.places))
        return sorted(wanted, key=lambda index: index - ahead * (index in self.places))

    def spans(self) -> dict[int, list[Span]]:
        """What devices update of each parameter."""
        found: dict[int, list[Span]] = {}
        for index in sorted(self.places):
            for span in self._subgroups[index].spans:
                found.setdefault(span.parameter, []).append(span)
        return found

    def _end(self, subgroup: Subgroup, device: torch.device, event: Event) -> None:
        with self._timeline.during("update", subgroup.index, str(device)):
            self.work.synchronize(device, event)


class _Device:
    """The Side of a subgroup on a device."""

    def __init__(
        self, lane: Lane, update: OptimizerUpdate, gradients: Mapping[int, torch.Tensor]
    ) -> None:
        self._lane, self._update, self._gradients = lane, update, gradients
        self._numbers: dict[float, torch.Tensor] = {}
        self.scale = None if update.scale is None else self._number(update.scale.item())

    def weights(self, parameter: Parameter) -> torch.Tensor:
        return flat(parameter.local)

    def gradient(self, span: Span, begin: int) -> torch.Tensor:
        into = self._lane.grads[begin : begin + span.numel]
        found = self._gradients.get(span.parameter)
        if found is not None:
            return into.copy_(found[span.begin : span.end])
        drained = self._update.grads[span.parameter][span.begin : span.end]
        if drained.dtype == into.dtype:
            return into.copy_(drained, non_blocking=True)
        # As it is: torch would widen it on the host, and wait.
        same = self._lane.drained.view(drained.dtype)[begin : begin + span.numel]
        return into.copy_(same.copy_(drained, non_blocking=True))

    def step(self, parameter: Parameter) -> torch.Tensor:
        if self._update.rule.keeps_step:
            return self._number(parameter.step.item())
        return parameter.step  # no kernel reads it

    def _number(self, value: float) -> torch.Tensor:
        """A number where kernels can read it."""
        if value not in self._numbers:
            self._numbers[value] = self._lane.numbers[len(self._numbers)].fill_(value)
        return self._numbers[value]


# -- alternation -----------------------------------------------------------------------------------


logger = logging.getLogger("statehold")

TRIES = 3  # of each measurement; the fastest counts


def check_every(every: object) -> None:
    """Refuse what is neither None, "auto", nor a number of subgroups."""
    is_number = isinstance(every, int) and not isinstance(every, bool) and every >= 1
    if every is not None and every != "auto" and not is_number:
        raise UsageError(
            "device_every has to say which subgroups a device updates",
            facts={"expected": 'None, "auto", or k for every k-th one', "got": repr(every)},
        )


def alternate(
    every: int | str | None,
    on_device: OnDevice,
    parameters: Sequence[Parameter],
    memory: torch.Tensor,
    rule: Rule,
    groups: Sequence[Mapping[str, Any]],
    workers: Workers,
    *,
    drains: bool,
) -> None:
    """Have devices update every k-th of the candidates. memory: a buffer without content."""
    if on_device.places:
        try:
            rate, device = measure(on_device, memory, rule, groups[0], workers)
        except NotImplementedError as error:
            raise UsageError(
                "torch has no fused kernel of this optimizer for the device",
                facts={"device": str(next(iter(on_device.lanes)))},
                hint="leave device_every off: the host updates everything then",
            ) from error
        found = best_period(rate, device, carried(parameters, drains=drains))
        best = found.length if found else None
        length = every if isinstance(every, int) else best
        logger.info(
            "offload: the host updates %.3g parameters a second, and the device %.3g. The link "
            "carries %.3g GB/s to the device, %.3g from it, and %.3g both ways at once. By these "
            "figures it is best that the device updates %s. It updates %s",
            rate, device.rate, device.to_device / 1e9, device.from_device / 1e9, device.both / 1e9,
            _share(best), _share(length),
        )  # fmt: skip
        on_device.choose(length)


def candidates(
    subgroups: Sequence[Subgroup], parameters: Sequence[Parameter]
) -> dict[int, torch.device]:
    """The indices of the subgroups that a device may update, and which device."""
    found = {}
    for subgroup in subgroups:
        tensors = [parameters[span.parameter].local for span in subgroup.spans]
        devices = {device_of(each) for each in tensors}
        if len(devices) == 1 and is_external(tensors[0]):
            found[subgroup.index] = devices.pop()
    return found


def carried(parameters: Sequence[Parameter], *, drains: bool) -> Carried:
    """What the link carries for a parameter on a device, on average."""
    there = [each for each in parameters if is_external(each.local)]
    numel = sum(each.local.numel() for each in there)
    state = sum(each.local.numel() * ITEM_BYTES * len(each.fields) for each in there)
    weights = sum(each.local.nbytes for each in there) / numel
    return Carried(state / numel, weights, weights if drains else 0)


def measure(
    on_device: OnDevice,
    memory: torch.Tensor,
    rule: Rule,
    group: Mapping[str, Any],
    workers: Workers,
) -> tuple[float, Device]:
    """The parameters a second that the host updates, and what the first device and its link do."""
    lanes = next(iter(on_device.lanes.values()))
    one, other = (lane.state for lane in lanes)
    memory, half = memory[: one.numel()], one.numel() // 2
    fields = rule.fields(group)
    numel = memory.numel() // (2 + len(fields)) // CUT * CUT

    def update(state: torch.Tensor, step: torch.Tensor, spans: Sequence[Span]) -> None:
        for span in spans:
            shifts = range(0, numel * (2 + len(fields)), numel)
            params, grads, *kept = ([state[at + span.begin : at + span.end]] for at in shifts)
            batch = Batch(params, grads, [step], dict(zip(fields, kept, strict=True)))
            rule.update(batch, {**group, "lr": 0.0}, None)

    def in_lanes(*calls: Callable[[], object]) -> float:
        def run() -> None:
            for lane, call in zip(lanes, calls, strict=False):
                with on_device.work.on(lane.device, lane.name):
                    call()
            on_device.wait()

        return _seconds(run)

    whole, step = [Span(0, 0, numel)], torch.ones((), device="cpu")
    cut = list(strips(whole, HOST_STRIP, workers.count))
    memory.zero_()
    on_host_s = _seconds(lambda: workers.run(lambda strip: update(memory, step, strip), cut))
    to_device_s = in_lanes(lambda: one.copy_(memory, non_blocking=True), lambda: other.zero_())
    from_device_s = in_lanes(lambda: memory.copy_(one, non_blocking=True))
    both_s = in_lanes(
        lambda: one[:half].copy_(memory[:half], non_blocking=True),
        lambda: memory[half:].copy_(other[half:], non_blocking=True),
    )
    there = lanes[0].numbers[0] if rule.keeps_step else step
    on_device_s = in_lanes(lambda: update(one, there.fill_(1), whole))
    nbytes = memory.nbytes
    rates = nbytes / to_device_s, nbytes / from_device_s, nbytes / both_s
    return numel / on_host_s, Device(*rates, numel / on_device_s)


def _share(every: int | None) -> str:
    return "no subgroup" if every is None else f"one subgroup of {every}"


def _seconds(call: Callable[[], object]) -> float:
    """What a call takes, when it has been made before."""
    taken = []
    for _ in range(TRIES):
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    return min(taken)
