"""The settings of a Checkpointer: one frozen value, validated together, read from nowhere else.

No environment variable overrides a field, and no field is ignored because of another one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from statehold.errors import UsageError
from statehold.units import MiB, format_bytes, parse_bytes

BACKENDS = ("auto", "io_uring", "threads")
COORDINATIONS = ("auto", "store", "directory", "none")

# A day: no rank that is alive is later than that, and clocks and stores can still count it.
PEER_TIMEOUT_S_MAX = 86_400

_PATH = (str, os.PathLike)

# A buffer is one write: below 1 MiB the device is not kept busy, and a checksum block (1 MiB)
# must never straddle two buffers.
BUFFER_BYTES_MIN = MiB


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How a Checkpointer stages, writes and keeps steps.

    keep: committed steps to keep, newest first; None keeps all.
    staging_bytes: host memory for copies in flight, allocated once at open and faulted in by a
        thread of its own. With at least the size of the state, the update of the optimizer waits
        for a memory copy only; with less, it also waits for the writes of what does not fit.
    buffer_bytes: size of one staging buffer and of one write.
    queue_depth: transfers in flight at once.
    copy_threads: threads that copy and checksum; None takes the processors there are, at most 4.
    backend: "io_uring", "threads" (pread/pwrite), or "auto": io_uring where the kernel allows it.
    reuse_files: overwrite the files of retired steps instead of allocating new ones.
    coordination: how the ranks of a job find each other. "store": through the store of
        torch.distributed; "directory": through files in the run directory, with RANK and WORLD_SIZE
        from the environment; "none": this process is alone, whatever runs beside it; "auto": the
        store if torch.distributed is initialized with more than one rank, else alone.
    peer_timeout_s: how long to wait for another rank before it counts as lost.
    trace: a file for what happened when, as Chrome/Perfetto JSON, written at close(); of several
        ranks each writes its own, with its rank in the name. None: nothing is recorded.
    """

    keep: int | None = None
    staging_bytes: int | str = "1GiB"
    buffer_bytes: int | str = "16MiB"
    queue_depth: int = 32
    copy_threads: int | None = None
    backend: str = "auto"
    reuse_files: bool = True
    coordination: str = "auto"
    peer_timeout_s: float = 600.0
    trace: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.keep is not None and (type(self.keep) is not int or self.keep < 1):
            raise UsageError(
                "keep must be a number of steps, at least 1, or None for all",
                facts={"got": repr(self.keep)},
            )
        _check_choice("backend", self.backend, BACKENDS)
        _check_choice("coordination", self.coordination, COORDINATIONS)
        for name in ("queue_depth", "copy_threads"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 1 <= value <= 4096):
                raise UsageError(f"{name} must be 1 to 4096", facts={"got": repr(value)})
        if self.trace is not None and not (self.trace and isinstance(self.trace, _PATH)):
            raise UsageError("trace is the path of a file", facts={"got": repr(self.trace)})
        self._check_timeout()
        self._check_memory()

    def _check_timeout(self) -> None:
        timeout_s = self.peer_timeout_s
        number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
        if not number or not 0 < timeout_s <= PEER_TIMEOUT_S_MAX:
            raise UsageError(
                "peer_timeout_s is a number of seconds",
                facts={"expected": f"above 0, up to {PEER_TIMEOUT_S_MAX}", "got": repr(timeout_s)},
            )

    def _check_memory(self) -> None:
        buffer, staging = self.buffer_size, self.staging_size
        if buffer < BUFFER_BYTES_MIN or buffer % BUFFER_BYTES_MIN:
            raise UsageError(
                "buffer_bytes must be a multiple of 1 MiB", facts={"got": format_bytes(buffer)}
            )
        if staging < 2 * buffer:
            raise UsageError(
                "staging_bytes must hold at least two buffers",
                facts={"expected": f"at least {format_bytes(2 * buffer)}",
                       "got": format_bytes(staging)},
            )  # fmt: skip

    @property
    def staging_size(self) -> int:
        """staging_bytes, in bytes."""
        return parse_bytes(self.staging_bytes)

    @property
    def buffer_size(self) -> int:
        """buffer_bytes, in bytes."""
        return parse_bytes(self.buffer_bytes)

    @property
    def copy_thread_count(self) -> int:
        """copy_threads, with None resolved."""
        return self.copy_threads or min(4, os.cpu_count() or 1)


def _check_choice(name: str, got: str, choices: tuple[str, ...]) -> None:
    if got not in choices:
        raise UsageError(f"no such {name}", facts={"expected": ", ".join(choices), "got": got})
