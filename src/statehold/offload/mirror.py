"""Parameters on devices, as the host has them: pinned copies of their weights and gradients.

Gradients of what the host updates go there on a stream of their own: in step(), or with `drains` as
backward makes them, and then the device gets their memory back. New weights go to the device on
another stream, and the current stream waits for them.

Invariants:
- The host reads what a device copies only after the event of the copy (arrive). It writes what a
  device copies only after the event of that copy: collect() waits for weights on their way back.
- The host never waits for the new weights of an update, unless a next update begins.
- A gradient that was taken from its parameter is kept until its copy has completed. At most
  DRAINING_BYTES_MAX wait for that: then backward waits for the oldest.
- Gradients of several backwards are added on the device, in the order of one stream. So the sum has
  the bits that torch would have left in `.grad`.
Not here: what is updated (update), streams (lanes), pinning (tensors/devices).
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from statehold.errors import DeviceError, UsageError
from statehold.offload.lanes import Lanes
from statehold.offload.parameters import Parameter, flat
from statehold.offload.subgroups import PAGE_BYTES, Span
from statehold.tensors.devices.backends import Event
from statehold.tensors.devices.devices import backend_for
from statehold.tensors.devices.pinning import Pinning, mapped
from statehold.tensors.storable import device_of, empty_on, is_external, local_of
from statehold.units import MiB

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
    return _laid_out([each for each in parameters if _is_mirrored(each)])[1][-1]


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
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        elsewhere: Mapping[int, Sequence[Span]],
        *,
        drains: bool,
    ) -> None:
        self._parameters = {i: each for i, each in enumerate(parameters) if _is_mirrored(each)}
        self._copies: dict[int, _Copy] = {}
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
                       if self._copies[index].version != parameter.version_now]  # fmt: skip
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
            return {index: self._copies[index].grad for index in {*found, *self._drained}}

    def arrive(self) -> None:
        """Return when the gradients of collect() are on the host."""
        if self._is_arriving:
            self._wait_for_gradients()
            self._is_arriving = False

    def send(self, spans: Iterable[Span]) -> None:
        """Have the new weights of these spans copied to their devices."""
        by_parameter: dict[int, list[Span]] = {}
        for span in spans:
            if span.parameter in self._copies:
                by_parameter.setdefault(span.parameter, []).append(span)

        def bring(index: int) -> None:
            weights, there = self._copies[index].weights, flat(self._parameters[index].local)
            for span in by_parameter[index]:
                new = weights[span.begin : span.end]
                there[span.begin : span.end].copy_(new, non_blocking=True)

        self._on_lanes(TO_DEVICE, by_parameter, bring)

    def sent(self, updated: Iterable[int]) -> None:
        """Order what the current streams are given next after all that was sent."""
        for index in updated:
            if index in self._copies:
                self._copies[index].version = self._parameters[index].version_now
        self._lanes.go_before(TO_DEVICE)

    def discard(self) -> None:
        """Forget the drained gradients: the next backward makes others."""
        with self._guard:
            self.gradients.clear()
            self._drained.clear()

    def forget(self) -> None:
        """Forget the weights: somebody may have changed them by any means."""
        for each in self._copies.values():
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
            self._copies[index] = _Copy(weights, grad)
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
        copy, parameter = self._copies[index], self._parameters[index]
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
        copy, parameter = self._copies[index], self._parameters[index]
        elements = parameter.gradient()
        if elements.dtype != copy.grad.dtype:
            raise UsageError(
                "a gradient on a device has another dtype than its parameter",
                facts={"parameter": parameter.name, "expected": str(copy.grad.dtype),
                       "got": str(elements.dtype)},
            )  # fmt: skip
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


def _is_mirrored(parameter: Parameter) -> bool:
    return is_external(parameter.local)


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
