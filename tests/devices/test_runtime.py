"""Which library the functions of the CUDA runtime come from."""

from __future__ import annotations

from statehold.tensors.devices import cuda_runtime

LINE = "7f0000000000-7f0000001000 r-xp 00000000 08:01 1234                       {}\n"
OTHER = "/usr/local/cuda-11/lib64/libcudart.so.11.0"
TORCHS = "/home/a user/lib/torch/lib/libc10_cuda.so"


def maps(*paths: str) -> str:
    return "".join(map(LINE.format, ["[heap]", "/usr/lib/libc.so.6", *paths]))


def test_the_runtime_is_that_of_torch() -> None:
    """A process may have several, each with errors of its own."""
    assert cuda_runtime.path_in(maps(OTHER, TORCHS)) == TORCHS
    assert cuda_runtime.path_in(maps(TORCHS.replace("_cuda", "_hip"))) is not None


def test_any_runtime_is_better_than_none() -> None:
    assert cuda_runtime.path_in(maps(OTHER)) == OTHER
    assert cuda_runtime.path_in(maps("/opt/rocm/lib/libamdhip64.so.6")) is not None
    assert cuda_runtime.path_in(maps()) is None
