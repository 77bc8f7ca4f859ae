"""What no reading of the code could settle, asked of a device in about a minute.

A cold review of the device path left these questions. Each answer is a figure that is written as
soon as it is found. An answer that would make the rest of the run worthless comes first; the one
that may spoil the process comes last.
Invariants: a question that raises is recorded, and the next one is asked.
"""

from __future__ import annotations

import gc
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator

import torch
from torch import cuda

from bench.gpu import figures
from bench.gpu.figures import Figure
from bench.gpu.task import Skipped, Task
from bench.harness import GB
from statehold.offload.on_device import Lanes
from statehold.tensors.devices import cuda_runtime
from statehold.units import GiB, MiB

__all__ = ["unsettled"]

PORTABLE = 1  # of cudaHostRegister
CYCLES = 1 << 29
SMALL, MANY = 128, 20_000
ENTRIES = 2000


def unsettled(task: Task) -> Iterator[Figure]:
    """The check."""
    task.need_cuda("what only a device can answer")
    device = torch.zeros(1, device=task.torch_device).device  # with its number
    for question in QUESTIONS:
        try:
            yield from question(device)
        except Skipped as reason:
            yield figures.skipped(question.__name__, str(reason))
        except Exception as error:
            said = str(error).partition("\n")[0]
            yield figures.failed(question.__name__, f"{type(error).__name__}: {said}")


# -- the host's memory -----------------------------------------------------------------------------


def mapped(nbytes: int, *, dont_fork: bool = False) -> torch.Tensor:
    """Pages of their own, which no call has touched."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    if dont_fork:
        memory.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(memory, dtype=torch.uint8)  # keeps the memory


def register(tensor: torch.Tensor) -> int:
    return int(cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.numel(), PORTABLE))


def unregister(tensor: torch.Tensor) -> int:
    return int(cuda.cudart().cudaHostUnregister(tensor.data_ptr()))


def signal_of_child(action: Callable[[], object]) -> int:
    """How a forked child ends that does this: 0, or the number of a signal."""
    pid = os.fork()
    if pid == 0:
        action()
        os._exit(0)
    return os.WTERMSIG(os.waitpid(pid, 0)[1])


def on_a_thread(action: Callable[[], object]) -> None:
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()


# -- the questions ---------------------------------------------------------------------------------


def runtime(_: torch.device) -> Iterator[Figure]:
    """Without the runtime there are no relaxed captures, no streams of our own, and no copies that
    keep the interpreter lock free: the other figures would be those of another product."""
    found = cuda_runtime.library() is not None and bool(cuda_runtime.new_stream())
    yield figures.equal("the runtime of torch is found", str(found), "True")
    yield figures.equal("copies without the lock", str(cuda_runtime.has_copies()), "True")


def registering_twice(device: torch.device) -> Iterator[Figure]:
    """An error that was dealt with must not come back in somebody's next launch."""
    memory = mapped(16 * MiB)
    codes = register(memory), register(memory)
    cuda_runtime.clear_error()
    torch.zeros(8, device=device).add_(1).cpu()
    codes = *codes, unregister(memory)
    yield figures.equal("registering twice, unregistering", str(codes), "(0, 712, 0)")


def pause_of_python(_: torch.device) -> Iterator[Figure]:
    """Whether torch's binding holds the interpreter lock while it registers."""
    nbytes = 2 * GiB
    memory, is_done, worst = mapped(nbytes), threading.Event(), 0.0
    begin = last = time.perf_counter()

    def pin() -> None:
        register(memory)
        is_done.set()

    threading.Thread(target=pin).start()
    while not is_done.is_set():
        now = time.perf_counter()
        worst, last = max(worst, now - last), now
    took = time.perf_counter() - begin
    unregister(memory)
    yield figures.at_most("pause of Python while 2 GiB are registered", worst * 1e3, 20, "ms")
    yield figures.measured("registering 2 GiB", took / nbytes * GB, "s/GB")


def memory_after_a_fork(device: torch.device) -> Iterator[Figure]:
    """Whether a device sees what the parent writes after a fork."""
    for name, dont_fork in (("plain", False), ("MADV_DONTFORK", True)):
        memory = mapped(64 * MiB, dont_fork=dont_fork)
        register(memory)
        memory.fill_(1)
        reads, writes = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.read(reads, 1)
            os._exit(0)
        memory.fill_(2)  # the parent's pages may move here
        there = torch.empty(memory.numel(), dtype=torch.uint8, device=device)
        there.copy_(memory, non_blocking=True)
        cuda.synchronize(device)
        os.write(writes, b"x")
        os.waitpid(pid, 0)
        os.close(reads)
        os.close(writes)
        unregister(memory)
        said = "right" if bool((there == 2).all()) else "old bytes"
        title = f"pinned memory after a fork, {name}"
        yield figures.equal(title, said, "right") if dont_fork else figures.measured(title, said)


def forks(_: torch.device) -> Iterator[Figure]:
    """How long a fork takes beside pinned memory."""
    for name, dont_fork in (("plain", False), ("MADV_DONTFORK", True)):
        memory = mapped(4 * GiB, dont_fork=dont_fork)
        register(memory)
        begin = time.perf_counter()
        signal_of_child(lambda: None)
        took = time.perf_counter() - begin
        unregister(memory)
        yield figures.measured(f"fork beside 4 GiB pinned, {name}", took * 1e3, "ms")


def event_in_a_child(device: torch.device) -> Iterator[Figure]:
    """An event that a forked child's collector ends."""
    events = [cuda.Event()]
    events[0].record()
    cuda.synchronize(device)

    def drop() -> None:
        events.clear()
        gc.collect()

    yield figures.equal("an event ends in a child: signal", signal_of_child(drop), 0)


def event_in_a_capture(device: torch.device) -> Iterator[Figure]:
    """An event that ends while its thread captures a graph."""
    events = [cuda.Event()]
    events[0].record()
    cuda.synchronize(device)
    graph, tensor = cuda.CUDAGraph(), torch.zeros(8, device=device)
    with cuda.graph(graph, capture_error_mode="global"):
        tensor.add_(1)
        events.clear()
        gc.collect()
        tensor.add_(1)
    graph.replay()
    yield figures.equal("an event ends in a capture", float(tensor[0].item()), 2.0)


def copy_of_another_thread(device: torch.device) -> Iterator[Figure]:
    """What a thread on the default stream reads of work that a side stream still has to do."""
    weights, got, side = torch.zeros(1 << 20, device=device), list[float](), cuda.Stream(device)
    cuda.synchronize(device)
    with cuda.stream(side):
        cuda._sleep(CYCLES)
        weights.fill_(3)
        on_a_thread(
            lambda: got.append(float(torch.empty(1 << 20, device="cpu").copy_(weights)[0].item()))
        )
    cuda.synchronize(device)
    yield figures.measured("a copy of another thread sees (3: the last update)", got[0])


def accelerator_graph(device: torch.device) -> Iterator[Figure]:
    """torch's other class of graphs moves no version counter."""
    kind = getattr(torch.accelerator, "Graph", None)
    if kind is None:
        raise Skipped(f"torch {torch.__version__} has no torch.accelerator.Graph")
    tensor, graph = torch.zeros(8, device=device), kind()
    with torch.Stream(device), graph:
        tensor.add_(1)
    before = tensor._version
    graph.replay()
    cuda.synchronize(device)
    moved = tensor._version - before
    yield figures.measured("versions that a replay of accelerator.Graph moves", moved)


def gathering(device: torch.device) -> Iterator[Figure]:
    """What the stage thread's gathering of small tensors takes of the processor."""
    parts = [torch.ones(SMALL, device=device) for _ in range(MANY)]
    out = torch.empty(SMALL * MANY, device=device)
    torch.cat(parts[:200], out=out[: SMALL * 200])
    cuda.synchronize(device)
    begin = time.perf_counter()
    torch.cat(parts, out=out)
    took = time.perf_counter() - begin
    yield figures.measured(f"torch.cat of {MANY} tensors, on the host", took * 1e3, "ms")


def lanes(device: torch.device) -> Iterator[Figure]:
    """What it takes to enter a lane of the offload."""
    lane = Lanes()
    host, there = torch.ones(256, device="cpu").pin_memory(), torch.empty(256, device=device)

    def enter() -> None:
        with lane.on(device, "unsettled"):
            there.copy_(host, non_blocking=True)

    enter()
    begin = time.perf_counter()
    for _ in range(ENTRIES):
        enter()
    took = time.perf_counter() - begin
    yield figures.measured("entering a lane and copying 1 KiB", took / ENTRIES * 1e6, "us each")


def copy_during_a_capture(device: torch.device) -> Iterator[Figure]:
    """A plain copy of another thread, which has not said that it knows of captures."""
    source, tensor, said = torch.ones(1 << 20, device=device), torch.zeros(8, device=device), []

    def copy() -> None:
        try:
            torch.empty(1 << 20, device="cpu").copy_(source)
            said.append("copied")
        except RuntimeError as error:
            said.append(str(error).splitlines()[0][:80])

    try:
        with cuda.graph(cuda.CUDAGraph(), capture_error_mode="global"):
            tensor.add_(1)
            on_a_thread(copy)
        said.append("the capture is whole")
    except RuntimeError as error:
        said.append(f"the capture is lost: {str(error).splitlines()[0][:80]}")
    yield figures.measured("a plain copy during a capture", ", ".join(said))


QUESTIONS: tuple[Callable[[torch.device], Iterator[Figure]], ...] = (
    runtime,
    memory_after_a_fork,
    event_in_a_child,
    copy_of_another_thread,
    accelerator_graph,
    registering_twice,
    pause_of_python,
    gathering,
    lanes,
    forks,
    event_in_a_capture,
    copy_during_a_capture,
)
