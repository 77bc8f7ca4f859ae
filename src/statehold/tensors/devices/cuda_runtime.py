"""The CUDA runtime that torch has loaded, for the few functions that torch does not show.

Source: CUDA Runtime API, "Error Handling", "Stream Management" and "Memory Management"
(cudaGetLastError, cudaStreamCreateWithFlags, cudaThreadExchangeStreamCaptureMode, cudaMemcpyAsync).
HIP has the same functions under
its own names.
Invariants: where no runtime is found, every function does nothing.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from statehold.tensors.devices.jobs import CallCopies, Copies

_RELAXED = 2
_DEVICE_TO_HOST = 2
_NON_BLOCKING = 1  # it does not wait for the default stream
# Torch's own library finds the functions of the runtime that it is linked to. A process may have
# another runtime besides, which knows nothing of the errors of torch's.
_LIBRARIES = ("c10_cuda|c10_hip", "cudart|amdhip64")


@functools.cache
def library() -> Any:
    """The runtime in this process, or None."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            path = path_in(maps.read())
        return ctypes.CDLL(path) if path else None
    except OSError:
        return None


def path_in(maps: str) -> str | None:
    """The file with the functions, out of a list of what is mapped (proc(5))."""
    for names in _LIBRARIES:
        found = re.search(rf"(?<=\s)/.*/lib(?:{names})[^/\n]*\.so[^/\n]*$", maps, re.MULTILINE)
        if found is not None:
            return found[0]
    return None


def clear_error() -> None:
    """Forget an error of this thread that was dealt with: the runtime reports it once more to
    the next launch of a kernel, and that must not be one of the trainer."""
    if (get := _function("GetLastError")) is not None:
        get()


def new_stream() -> int | None:
    """The address of a stream of the current device that nobody else has; None if none is made."""
    create = _function("StreamCreateWithFlags")
    if create is None:
        return None
    stream = ctypes.c_void_p()
    if create(ctypes.byref(stream), _NON_BLOCKING):
        clear_error()
        return None
    return stream.value


@contextmanager
def relaxed_captures() -> Iterator[None]:
    """Inside, this thread may call what is unsafe while another one captures a graph: nothing that
    it does belongs to that graph. Without this a call fails, and the capture with it."""
    exchange = _function("ThreadExchangeStreamCaptureMode")
    if exchange is None:
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))  # leaves the mode before in `mode`
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


def has_copies() -> bool:
    """Whether the runtime's own function for copies is found."""
    return _function("MemcpyAsync") is not None


def copy_to_host(copies: Copies, stream: int, call: CallCopies) -> None:
    """Enqueue copies on the stream with this address. Raises RuntimeError as torch does."""
    function = ctypes.cast(_function("MemcpyAsync"), ctypes.c_void_p).value
    assert function is not None
    error = call(function, **copies._asdict(), kind=_DEVICE_TO_HOST, stream=stream)
    if error:
        clear_error()
        raise RuntimeError(f"CUDA error: a copy to the host was refused with error {error}")


def _function(name: str) -> Any:
    for prefix in ("cuda", "hip"):
        found = getattr(library(), prefix + name, None)
        if found is not None:
            return found
    return None
