"""CUDA devices that are emulated on the host: late, poisoned, counted, and failing on demand."""

from support.cuda.machine import Machine, copies_of, install

__all__ = ["Machine", "copies_of", "install"]
