"""An emulated machine with CUDA devices, under the real CudaBackend and the real engine.

`install` puts it in the place of torch.cuda where statehold asks for that, and has statehold take
its memory for device memory. `put` and `module` bring tensors there; what is done with them from
then on is queued (operations), and happens late (streams).
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import pkgutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

import statehold
from statehold.checkpoint.save import pipeline
from statehold.process.ending import end_all
from statehold.process.worker import Worker
from statehold.tensors import storable as tensors
from statehold.tensors.devices import cuda, cuda_runtime, devices, graphs
from support.cuda.api import AcceleratorGraph, Cuda, Local, Runtime, copy_async, device_of
from support.cuda.memory import Block, Memory, Pins
from support.cuda.operations import Operations
from support.cuda.streams import Stream, Timeline
from support.faults import must
from support.inside import trainer

PAGE = 4096
_EMPTY_ON = tensors.empty_on
POOL = 32  # c10/cuda/CUDAStream.h: "round-robin"
# What no thread may call while another one captures a graph in the global mode.
UNSAFE = ("cudaHostRegister", "cudaHostUnregister", "cudaEventSynchronize", "cudaEventQuery")


class Machine:
    """See the module. seed: when work is done that nobody waits for; None: never."""

    def __init__(self, count: int = 1, seed: int | None = None) -> None:
        self.count = count
        self.timeline = Timeline(seed, self.touch)
        self.memory = Memory(self._freed)
        self.pins = Pins()
        self.may_pin = True
        self.local = Local()
        self.contexts: set[int] = set()
        self.is_initialized = True  # a process may fork as long as torch has not done that
        self.failure: str | None = None  # from now on: every call reports it
        self.fails_at: Callable[[str], bool] = lambda operation: False
        self.operations = Operations(self)
        self.cuda = Cuda(self)
        self.copy_async = copy_async(self)
        self.copies = 0  # by it
        self.accelerator = SimpleNamespace(
            Graph=type("Graph", (AcceleratorGraph,), {"machine": self})
        )
        self.captures: dict[Any, str] = {}
        self.may_create_streams = True
        self.created: dict[int, Stream] = {}  # not by torch, by their addresses
        self._pools: dict[torch.device, dict[int, Stream]] = {}
        self._handed_out = 0
        self._defaults = [self.timeline.stream(torch.device("cuda", i)) for i in range(count)]

    # -- for tests -------------------------------------------------------------------------

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside, this thread works with the devices. At the end, all that is open in statehold
        ends. A dropped optimizer, say, would end later, on the machine of the next test."""
        with self.operations:
            try:
                yield
            finally:
                self.timeline.may_finish.set()
                end_all()

    def put(self, tensor: torch.Tensor, device: int = 0) -> torch.Tensor:
        """A tensor with these values on a device; there when this returns."""
        shape, stride = tensor.shape, tensor.stride()
        stream = self.default(device)
        made = self.memory.empty(device, stream, shape, stride, tensor.dtype)
        block = self.memory.block_of(made)
        assert block is not None
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            block.like(made).copy_(tensor)
        return made.requires_grad_(tensor.requires_grad)

    def module(self, module: torch.nn.Module, device: int = 0) -> Any:
        """The module, with its parameters and buffers on a device."""
        for each in [*module.parameters(), *module.buffers()]:
            each.data = self.put(each.data, device)
        return module

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values that a device tensor has after all work."""
        self.finish()
        block = self.memory.block_of(tensor)
        assert block is not None
        with torch._C._DisableTorchDispatch():
            return block.like(tensor).clone()

    def finish(self) -> None:
        self.timeline.finish()

    @contextmanager
    def still(self) -> Iterator[None]:
        """After all work; inside, device memory is read and changed as if it were the host's."""
        self.finish()
        with _disable_current_modes():
            yield

    @staticmethod
    def is_on_own_thread() -> bool:
        """Whether this is one of statehold's threads."""
        return threading.current_thread().name.startswith("statehold")

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        return self.memory.block_of(tensor) is not None

    def bytes_on(self, device: int = 0) -> int:
        return self.memory.allocated.get(device, 0)

    def peak_on(self, device: int = 0) -> int:
        return self.memory.peak.get(device, 0)

    def reset_peak(self) -> None:
        self.memory.peak = dict(self.memory.allocated)

    # -- for the emulation -----------------------------------------------------------------

    def device(self, device: Any) -> torch.device:
        return device_of(self, device)

    def default(self, index: int) -> Stream:
        return self._defaults[index]

    def pooled_stream(self, device: torch.device) -> Stream:
        """A stream of torch: there are POOL of them, and each is handed out again and again."""
        pool = self._pools.setdefault(device, {})
        self._handed_out += 1
        number = self._handed_out % POOL
        if number not in pool:
            pool[number] = self.timeline.stream(device)
        return pool[number]

    def create_stream(self) -> int:
        """A stream of the current device; its address."""
        address = 1024 * (1 + len(self.created))
        self.created[address] = self.timeline.stream(torch.device("cuda", self.local.device))
        return address

    def current(self, index: int | None = None) -> Stream:
        index = self.local.device if index is None else index
        return self.local.streams.get(index, self._defaults[index])

    def empty_on(
        self,
        device: torch.device,
        shape: Sequence[int],
        dtype: torch.dtype,
        strides: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """In the place of statehold's function."""
        if device.index is None:
            return _EMPTY_ON(device, shape, dtype, strides)
        strides = torch.empty(tuple(shape), device="meta").stride() if strides is None else strides
        return self.memory.empty(device.index, self.current(device.index), shape, strides, dtype)

    def copy_to_host(self, to: int, source: int, nbytes: int, stream: Stream) -> None:
        """As the copy engine does it; one that goes to memory that is not pinned is waited for."""
        block, begin = self.memory.block_at(source, nbytes)
        self.copies += 1

        def work() -> None:
            ctypes.memmove(to, block.bytes[begin : begin + nbytes].tobytes(), nbytes)

        self.timeline.give(stream, work)
        if not self.pins.hold_bytes(to, nbytes):
            stream.synchronize()

    def set_device(self, index: int) -> None:
        if index != self.local.device and self.failure is not None:
            raise torch.AcceleratorError(self.failure)  # the runtime enters the context
        self.local.device = index
        self.is_initialized = True
        self.contexts.add(index)

    def touch(self, operation: str) -> None:
        """The runtime is asked for something by this thread."""
        self.is_initialized = True
        self.contexts.add(self.local.device)
        if self.failure is None and self.fails_at(operation):
            self.failure = "CUDA error: an illegal memory access was encountered"
        if self.failure is not None:
            raise torch.AcceleratorError(self.failure)
        if operation == "a launch" and self.local.error:
            error, self.local.error = self.local.error, ""
            raise torch.AcceleratorError(error)
        if operation in UNSAFE:
            self._check_captures(operation)

    def answers(self, operation: str) -> bool:
        """The same, for functions that return errors."""
        try:
            self.touch(operation)
        except torch.AcceleratorError:
            return False
        return True

    def begin_capture(self, graph: Any, mode: str) -> None:
        self.captures[graph] = mode

    def end_capture(self, graph: Any) -> None:
        if self.captures.pop(graph) == "invalid":
            raise torch.AcceleratorError("CUDA error: operation failed due to a previous error")

    def _check_captures(self, operation: str) -> None:
        for graph, mode in self.captures.items():
            if mode == "global" and not self.local.is_relaxed:
                self.captures[graph] = "invalid"
                raise torch.AcceleratorError(
                    f"CUDA error: operation not permitted when stream is capturing: {operation}"
                )

    def unpin(self, address: int) -> int:
        nbytes = self.pins.ranges.get(address, 0)
        must(not nbytes or _is_mapped(address, nbytes), "memory was unmapped while it was pinned")
        return self.pins.remove(address)

    def enter(self) -> None:
        """This thread, another than the test's own, works with the devices from here on."""
        must(threading.current_thread() is not threading.main_thread(), "in_use() leaves only once")
        self.operations.__enter__()

    def _freed(self, block: Block, stream: object) -> None:
        assert isinstance(stream, Stream)
        self.timeline.bury(stream, block.poison)


def _is_mapped(address: int, nbytes: int) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    begin = address // PAGE * PAGE
    return int(libc.msync(ctypes.c_void_p(begin), ctypes.c_size_t(nbytes), 1)) == 0


def install(patch: pytest.MonkeyPatch, count: int = 1, seed: int | None = None) -> Machine:
    """A machine that statehold works with until `patch` is undone, inside machine.in_use()."""
    machine = Machine(count, seed)

    def device_of(tensor: torch.Tensor) -> torch.device:
        block = machine.memory.block_of(tensor)
        return torch.device("cpu") if block is None else torch.device("cuda", block.device)

    def devices_of(given: Iterable[torch.Tensor]) -> list[int]:
        blocks = map(machine.memory.block_of, given)
        return [-1 if block is None else block.device for block in blocks]

    _replace(patch, tensors.is_external, machine.is_on_device)
    _replace(patch, tensors.devices_of, devices_of)
    _replace(patch, tensors.device_of, device_of)
    _replace(patch, tensors.empty_on, machine.empty_on)
    for module in (cuda, graphs):
        patch.setattr(module, "cuda", machine.cuda)
    patch.setattr(graphs, "accelerator", machine.accelerator)
    patch.setattr(cuda, "_SIDE_STREAMS", {})
    patch.setattr(cuda.numa, "node_of", lambda _: None)
    patch.setattr(cuda_runtime, "library", lambda: Runtime(machine))
    _replace(patch, devices.backend_for, lambda _: cuda.CudaBackend())
    patch.setattr(torch.Tensor, "is_pinned", lambda tensor, *_: machine.pins.begin(tensor))

    def inside(name: str) -> Worker:
        worker = Worker(name)
        worker.submit(machine.enter)
        return worker

    patch.setattr(pipeline, "Worker", inside)
    return machine


def _replace(patch: pytest.MonkeyPatch, function: Any, by: Any) -> None:
    """Wherever statehold has imported it."""
    for module in _modules():
        for key, value in list(vars(module).items()):
            if value is function:
                patch.setattr(module, key, by)


@functools.cache
def _modules() -> list[ModuleType]:
    """All of statehold but integrations whose framework is not here. What was imported later, by a
    function, would keep what is patched."""
    walked = pkgutil.walk_packages(statehold.__path__, "statehold.", onerror=_not_here)
    found = []
    for module in walked:
        if not module.name.endswith("__main__"):
            with suppress(ModuleNotFoundError):
                found.append(importlib.import_module(module.name))
    return found


def _not_here(_name: str) -> None:
    """An integration whose framework is not installed: it is not walked."""


def copies_of(ckpt: statehold.Checkpointer) -> Any:
    """The DeviceCopies of the save that the gate holds updates for."""
    [held] = trainer(ckpt).gate.held.values()
    return held.passing.__self__
