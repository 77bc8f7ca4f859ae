"""Updates of subgroups on a device, while the host updates others.

    Lanes       side streams of devices, and the events of what they were given last
    Mirror      parameters on devices, as the host has them: pinned weights and gradients
    OnDevice    subgroups that devices update, each on a stream with memory of its own
    alternate   which subgroups a device updates, and which the host

Invariants: memory on devices is taken at construction, and nothing grows. The host reads what a
device copies only after the event of the copy. It writes what a device copies only after the event
of that copy. wait() waits for whatever has been given to a stream.

Not here: the update on the host (update, workers), how many subgroups a device should update
(planners/interleaving).
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from statehold.errors import DeviceError, UsageError, refused
from statehold.offload.parameters import Parameter, flat
from statehold.offload.rules import Batch, Rule
from statehold.offload.sizes import Buffers
from statehold.offload.stats import Timeline
from statehold.offload.subgroups import CUT, ITEM_BYTES, PAGE_BYTES, Span, Subgroup, strips
from statehold.offload.update import Fields, OptimizerUpdate
from statehold.offload.workers import STRIP as HOST_STRIP
from statehold.offload.workers import Workers
from statehold.planners.interleaving import Carried, Device, best_period
from statehold.process.warn import logger
from statehold.tensors.devices.backends import Event, StreamBackend
from statehold.tensors.devices.devices import backend_for
from statehold.tensors.devices.pinning import Pinning, mapped
from statehold.tensors.devices.relay import named_failures
from statehold.tensors.storable import device_of, empty_on, is_external, local_of
from statehold.units import MiB, format_bytes

# -- updates on a device ---------------------------------------------------------------------------
# The stream of a lane brings the state from the buffer of the host, runs the kernel of the rule on
# it and on the parameters there, and takes the state back. A device has two lanes, so one brings
# state while the other one takes it back. All work on a subgroup is that of one stream. So the
# memory of a lane has one subgroup at a time.
#
# A buffer of the host belongs to the device until the function that use() returns has ended. The
# host waits for nothing in use(), and for the rest in wait().


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


# -- weights and gradients on the host -------------------------------------------------------------
# Gradients of what the host updates go there on a stream of their own: in step(), or with `drains`
# as backward makes them, and then the device gets their memory back. New weights go to the device
# on another stream, and the current stream waits for them. The host never waits for the new weights
# of an update, unless a next update begins: collect() waits for weights on their way back.
#
# A gradient that was taken from its parameter is kept until its copy has completed. At most
# DRAINING_BYTES_MAX wait for that: then backward waits for the oldest. Gradients of several
# backwards are added on the device, in the order of one stream. So the sum has the bits that torch
# would have left in `.grad`.


DRAINING_BYTES_MAX = 512 * MiB
ALIGNED_BYTES = 64
# Or one larger tensor. Meanwhile no other thread launches (tensors/devices/pinning).
PINNED_AT_ONCE_BYTES = 16 * MiB
TO_HOST, TO_DEVICE = "offload to host", "offload to device"  # lanes of tensors/devices


@dataclass
class _Copy:
    """weights, grad: the elements on the host. version: of the parameter that `weights` has."""

    weights: torch.Tensor
    grad: torch.Tensor
    version: int | None = None


def pinned_bytes(parameters: Iterable[Parameter]) -> int:
    """The memory for weights and gradients of those that are on a device."""
    return _laid_out([each for each in parameters if is_external(each.local)])[1][-1]


def _laid_out(parameters: Iterable[Parameter]) -> tuple[list[tuple[int, int]], list[int]]:
    """Where the weights and the gradient of each begin in memory; and the bounds of what is pinned
    by one call: whole pages, and whole tensors, because no copy may go beyond what one call pins.
    """
    begins, bounds, end = list[tuple[int, int]](), [0], 0
    for each in parameters:
        both = []
        for _ in ("weights", "gradient"):
            if end - bounds[-1] >= PINNED_AT_ONCE_BYTES:
                end = _aligned(end, PAGE_BYTES)
                bounds.append(end)
            both.append(end)
            end += _aligned(each.local.nbytes, ALIGNED_BYTES)
        begins.append((both[0], both[1]))
    return begins, [*bounds, _aligned(end, PAGE_BYTES)]


class Mirror:
    """The copies of those of `parameters` that are on a device.

    elsewhere: what the host does not update of each parameter. gradients: on devices, of these.
    copies: in host memory, by the index of the parameter.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        elsewhere: Mapping[int, Sequence[Span]],
        *,
        drains: bool,
    ) -> None:
        self._parameters = {i: each for i, each in enumerate(parameters) if is_external(each.local)}
        self.copies: dict[int, _Copy] = {}
        self._drains, self._elsewhere = drains, elsewhere
        self.gradients: dict[int, torch.Tensor] = {}
        self._drained: set[int] = set()
        self._moving: deque[tuple[torch.Tensor, Event]] = deque()
        self._moving_bytes = 0
        self._is_arriving, self._must_wait = False, False
        self._lanes = Lanes()
        self._guard = threading.RLock()  # autograd has a thread for each device
        self._hooks: list[RemovableHandle] = []
        for parameter in self._parameters.values() if drains else ():
            _check_alone(parameter)
        if self._parameters:
            device = device_of(next(iter(self._parameters.values())).local)
            self._pinning = Pinning(backend_for(device), device)
            self._map()
        for index, parameter in self._parameters.items() if drains else ():
            if parameter.tensor.requires_grad:
                drain = partial(self._drain, index)
                self._hooks.append(_hooked(parameter.tensor, drain))

    def bring_weights(self) -> None:
        """Have the weights on the host that somebody else has changed."""
        with self._guard:
            self._lanes.wait(TO_DEVICE)
            changed = [index for index, parameter in self._parameters.items()
                       if self.copies[index].version != parameter.version_now]  # fmt: skip
            try:
                self._on_lanes(TO_HOST, changed, self._bring)
            finally:
                self._lanes.wait(TO_HOST)

    def collect(self, *, must_wait: bool) -> dict[int, torch.Tensor]:
        """Have weights on the host, and gradients on their way there. Returns the gradients.

        Without `drains` they lack what is updated elsewhere, and `gradients` has it. They may be
        read after arrive(); must_wait: at once.
        """
        with self._guard:
            self.bring_weights()
            self.gradients.clear()
            self._is_arriving, self._must_wait = False, must_wait or self._drains
            found = [] if self._drains else [
                index for index, each in self._parameters.items() if each.tensor.grad is not None
            ]  # fmt: skip
            try:
                if self._drains:
                    for index, parameter in self._parameters.items():
                        self._drain(index, parameter.tensor)  # what a program has put into .grad
                self._on_lanes(TO_HOST, found, self._bring_grad)
                self._is_arriving = not self._must_wait
            finally:
                if not self._is_arriving:
                    self._wait_for_gradients()
            return {index: self.copies[index].grad for index in {*found, *self._drained}}

    def arrive(self) -> None:
        """Return when the gradients of collect() are on the host."""
        if self._is_arriving:
            self._wait_for_gradients()
            self._is_arriving = False

    def send(self, spans: Iterable[Span]) -> None:
        """Have the new weights of these spans copied to their devices."""
        by_parameter: dict[int, list[Span]] = {}
        for span in spans:
            if span.parameter in self.copies:
                by_parameter.setdefault(span.parameter, []).append(span)

        def bring(index: int) -> None:
            weights, there = self.copies[index].weights, flat(self._parameters[index].local)
            for span in by_parameter[index]:
                new = weights[span.begin : span.end]
                there[span.begin : span.end].copy_(new, non_blocking=True)

        self._on_lanes(TO_DEVICE, by_parameter, bring)

    def sent(self, updated: Iterable[int]) -> None:
        """Order what the current streams are given next after all that was sent."""
        for index in updated:
            if index in self.copies:
                self.copies[index].version = self._parameters[index].version_now
        self._lanes.go_before(TO_DEVICE)

    def discard(self) -> None:
        """Forget the drained gradients: the next backward makes others."""
        with self._guard:
            self.gradients.clear()
            self._drained.clear()

    def forget(self) -> None:
        """Forget the weights: somebody may have changed them by any means."""
        for each in self.copies.values():
            each.version = None

    def close(self) -> None:
        """Unpin, once no copy is under way. The gradients that follow stay on the device."""
        for hook in self._hooks:
            hook.remove()
        if self._parameters:
            # A device that has failed reaches no memory any more.
            with suppress(DeviceError, RuntimeError):
                self._lanes.wait(TO_HOST)
                self._lanes.wait(TO_DEVICE)
            self._pinning.close()

    def _wait_for_gradients(self) -> None:
        self._lanes.wait(TO_HOST)
        self._moving.clear()
        self._moving_bytes = 0

    def _map(self) -> None:
        begins, bounds = _laid_out(self._parameters.values())
        memory = mapped(bounds[-1])
        for begin, end in itertools.pairwise(bounds):
            if begin < end:
                self._pinning.pin(memory[begin:end])
        for (index, parameter), both in zip(self._parameters.items(), begins, strict=True):
            nbytes, dtype = parameter.local.nbytes, parameter.tensor.dtype
            weights, grad = (memory[begin : begin + nbytes].view(dtype) for begin in both)
            self.copies[index] = _Copy(weights, grad)
            parameter.mirrored = weights

    def _on_lanes(self, lane: str, indices: Iterable[int], give: Callable[[int], None]) -> None:
        """Give the lane of each device the work on its parameters. To enter a lane takes Python
        and the driver some 50 us: it is entered once a device, not once a parameter."""
        by_device: dict[torch.device, list[int]] = {}
        for index in indices:
            by_device.setdefault(device_of(self._parameters[index].local), []).append(index)
        for device, here in by_device.items():
            with self._lanes.on(device, lane):
                for index in here:
                    give(index)

    def _bring(self, index: int) -> None:
        """Copy weights. On the lane to the host."""
        copy, parameter = self.copies[index], self._parameters[index]
        copy.weights.copy_(flat(parameter.local), non_blocking=True)
        copy.version = parameter.version_now

    def _drain(self, index: int, tensor: torch.Tensor) -> None:
        """A hook of autograd: take the gradient away from its parameter."""
        if tensor.grad is None:
            return
        _check_alone(self._parameters[index])
        grad = local_of(tensor.grad)
        with self._guard:
            try:
                self._on_lanes(TO_HOST, [index], self._bring_grad)
                self._drained.add(index)
            finally:
                tensor.grad = None
                if event := self._lanes.newest(device_of(grad), TO_HOST):
                    self._moving.append((grad, event))
                    self._moving_bytes += grad.nbytes
            self._let_go()

    def _let_go(self) -> None:
        """Give memory of gradients back whose copies have completed."""
        while self._moving:
            grad, event = self._moving[0]
            if self._moving_bytes > DRAINING_BYTES_MAX:
                self._lanes.synchronize(device_of(grad), event)
            elif not self._lanes.is_complete(device_of(grad), event):
                return
            self._moving.popleft()
            self._moving_bytes -= grad.nbytes

    @torch.no_grad()
    def _bring_grad(self, index: int) -> None:
        """Copy a gradient, and with it what was drained before. On the lane to the host."""
        copy, parameter = self.copies[index], self._parameters[index]
        elements = parameter.gradient()
        if elements.dtype != copy.grad.dtype:
            text = "a gradient on a device has another dtype than its parameter"
            raise refused(text, str(copy.grad.dtype), str(elements.dtype), parameter=parameter.name)
        if index in self._drained:
            total = empty_on(device_of(parameter.local), elements.shape, elements.dtype)
            elements = total.copy_(copy.grad, non_blocking=True).add_(elements)
        elsewhere = () if self._drains else self._elsewhere.get(index, ())
        for begin, end in _gaps(elsewhere, copy.grad.numel()):
            copy.grad[begin:end].copy_(elements[begin:end], non_blocking=True)
        if elsewhere:
            self.gradients[index] = elements
            # What is made on this lane may be read on another one when it is complete.
            self._must_wait |= not _is_memory_of(elements, parameter.tensor.grad)


def _hooked(tensor: Any, call: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Have autograd call this whenever the gradient has been added to `.grad`."""
    handle: RemovableHandle = tensor.register_post_accumulate_grad_hook(call)
    return handle


def _is_memory_of(elements: torch.Tensor, grad: torch.Tensor | None) -> bool:
    """Whether these are the elements of a gradient, and no copy of them."""
    return grad is not None and elements.data_ptr() == local_of(grad).data_ptr()


def _gaps(spans: Iterable[Span], end: int) -> Iterator[tuple[int, int]]:
    """The ranges between these spans, which are in order, up to `end`."""
    begin = 0
    for span in spans:
        if span.begin > begin:
            yield begin, span.begin
        begin = span.end
    if end > begin:
        yield begin, end


def _aligned(nbytes: int, to: int) -> int:
    return -(-nbytes // to) * to


def _check_alone(parameter: Parameter) -> None:
    """Refuse to take gradients that other ranks still have to add theirs to."""
    ranks = torch.distributed
    if ranks.is_available() and ranks.is_initialized() and ranks.get_world_size() > 1:
        raise UsageError(
            "drain_gradients takes gradients before DistributedDataParallel has reduced them",
            facts={"parameter": parameter.name, "ranks": ranks.get_world_size()},
            hint="leave drain_gradients off: step() copies the reduced gradients",
        )


# -- alternation -----------------------------------------------------------------------------------
# A device may update the subgroups whose parameters are all there. It updates every k-th of these,
# always the same ones, so training with a given k is repeatable. With "auto" k comes from the model
# of planners/interleaving and from rates that are measured here.


TRIES = 3  # of each measurement; the fastest counts


def check_every(every: object) -> None:
    """Refuse what is neither None, "auto", nor a number of subgroups."""
    is_number = isinstance(every, int) and not isinstance(every, bool) and every >= 1
    if every is not None and every != "auto" and not is_number:
        text = "device_every has to say which subgroups a device updates"
        raise refused(text, 'None, "auto", or k for every k-th one', repr(every))


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


# -- side streams ----------------------------------------------------------------------------------
# Work of a lane follows what the current stream of its device has been given before. What a lane
# has been given before an error has an event, too, because it may be under way.


class Lanes:
    """The lanes of one owner, on any devices. Raises DeviceError for a device that has failed."""

    def __init__(self) -> None:
        self._newest: dict[tuple[torch.device, str], Event] = {}

    @contextmanager
    def on(self, device: torch.device, lane: str) -> Iterator[None]:
        """Inside, work of this thread on the device is the lane's."""
        with _entered(device) as backend:
            stream = backend.fork(device, lane)
            try:
                with backend.on(stream):
                    yield
            finally:
                self._newest[device, lane] = backend.record(stream)

    def newest(self, device: torch.device, lane: str) -> Event | None:
        """The event of what the lane has been given so far; None: nothing."""
        return self._newest.get((device, lane))

    def is_complete(self, device: torch.device, event: Event) -> bool:
        """Whether an event of newest() has completed."""
        with _entered(device) as backend:
            return backend.is_complete(event)

    def synchronize(self, device: torch.device, event: Event) -> None:
        """Return when an event of newest() has completed. On any thread."""
        with _entered(device) as backend:
            backend.synchronize(event)

    def wait(self, lane: str) -> None:
        """Return when a lane has done its work on all devices."""
        for (device, its_lane), event in self._newest.items():
            if its_lane == lane:
                self.synchronize(device, event)

    def go_before(self, lane: str) -> None:
        """Order what the current streams are given next after the work of a lane."""
        for (device, its_lane), event in self._newest.items():
            if its_lane == lane:
                with _entered(device) as backend:
                    backend.make_current_wait(event)


@contextmanager
def _entered(device: torch.device) -> Iterator[StreamBackend]:
    backend = backend_for(device)
    with named_failures(), backend.using(device):
        yield backend
