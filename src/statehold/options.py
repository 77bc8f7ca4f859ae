"""The settings of a Checkpointer: one frozen value, validated together.

No environment variable overrides a field, and no field is ignored because of another one. Four
fields say how bytes move (`Moving`). If such a field is None, its value comes from the profile that
`statehold bench io` measured on the storage, if there is one, and otherwise from `DEFAULTS`. A
profile never overrides a field that the user gave.
Not here: where a profile lies and when statehold uses it (io/profile).
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from statehold.errors import UsageError
from statehold.units import MiB, format_bytes, parse_bytes, parse_seconds

BACKENDS = ("auto", "io_uring", "threads")
COORDINATIONS = ("auto", "store", "directory", "none")

# A day: no live rank is later than that, and clocks and stores can still count it.
PEER_TIMEOUT_S_MAX = 86_400

NODES_MAX = 1_000_000

_PATH = (str, os.PathLike)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|(s3|gs|az|file):/")  # Path() takes one slash away

_STEP = re.compile(r"step-\d{12}")

# A buffer is one write: below 1 MiB the device is not kept busy, and a checksum block (1 MiB)
# must never straddle two buffers.
BUFFER_BYTES_MIN = MiB


@dataclass(frozen=True, kw_only=True, slots=True)
class Moving:
    """How bytes move: the values that a profile can give to fields of Options that are None."""

    buffer_bytes: int
    queue_depth: int
    backend: str
    copy_threads: int | None


DEFAULTS = Moving(buffer_bytes=16 * MiB, queue_depth=32, backend="auto", copy_threads=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How a Checkpointer stages, writes and keeps steps.

    keep: committed steps to keep, newest first; None keeps all.
    staging_bytes: the most host memory that copies in flight use. If it is at least the size of the
        state, the update of the optimizer waits only for a memory copy. If it is smaller, the
        update also waits for the writes of the rest. None: 1 GiB, or one and a quarter of what this
        rank writes if that is more. All ranks of a host together use at most a third of the memory
        that is available. A log line says what was chosen.
    buffer_bytes: size of one staging buffer and of one write. None: from the profile, or 16 MiB.
    queue_depth: transfers in flight at once. None: from the profile, or 32.
    copy_threads: threads that copy and checksum. None: from the profile, or the number of
        processors, at most 4.
    backend: "io_uring", "threads" (pread/pwrite), or "auto", which takes io_uring if the kernel
        allows it. None: from the profile, or "auto".
    profile: the profile of the storage that `statehold bench io` measured. "auto" takes the file in
        ~/.config/statehold/io, if there is one. A path takes this file. None takes no profile.
    reuse_files: overwrite the files of retired steps instead of allocating new ones.
    coordination: how the ranks of a job find each other. "store" uses the store of
        torch.distributed. "directory" uses files in the run directory, with RANK and WORLD_SIZE
        from the environment. With "none" this process saves alone, even if others run beside it.
        "auto" uses the store if torch.distributed is initialized with more than one rank.
    peer_timeout_s: how long to wait for another rank before it counts as lost.
    node_mtbf: for levels with every="auto", the mean time between failures of one node, such as
        "250d". None: a published figure (264 days).
    nodes: for levels with every="auto", the number of nodes of the job. None: the number of hosts
        of its ranks.
    address: the address of this host on the network over which hosts read each other's files, if
        each host has its own level; a name or a number, without a port. None: the address from
        which this host reaches MASTER_ADDR, or the address of its own name.
    trace: a file for a Chrome/Perfetto JSON trace, written at close(). Each of several ranks writes
        its own file, with its rank in the name. None records nothing.
    """

    keep: int | None = None
    staging_bytes: int | str | None = None
    buffer_bytes: int | str | None = None
    queue_depth: int | None = None
    copy_threads: int | None = None
    backend: str | None = None
    profile: str | os.PathLike[str] | None = "auto"
    reuse_files: bool = True
    coordination: str = "auto"
    peer_timeout_s: float = 600.0
    node_mtbf: str | None = None
    nodes: int | None = None
    address: str | None = None
    trace: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.keep is not None and (type(self.keep) is not int or self.keep < 1):
            raise UsageError(
                "keep must be a number of steps, at least 1, or None for all",
                facts={"got": repr(self.keep)},
            )
        if self.backend is not None:
            _check_choice("backend", self.backend, BACKENDS)
        if self.profile is not None and not isinstance(self.profile, (str, os.PathLike)):
            raise UsageError(
                'profile must be "auto", a path, or None', facts={"got": repr(self.profile)}
            )
        _check_choice("coordination", self.coordination, COORDINATIONS)
        for name, most in (("queue_depth", 4096), ("copy_threads", 4096), ("nodes", NODES_MAX)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 1 <= value <= most):
                raise UsageError(f"{name} must be 1 to {most}", facts={"got": repr(value)})
        if self.node_mtbf is not None and self.node_mtbf_s is None:
            raise UsageError(
                "node_mtbf must be a time",
                facts={"expected": 'such as "250d" or "6000h"', "got": repr(self.node_mtbf)[:80]},
            )
        if self.trace is not None and not (self.trace and isinstance(self.trace, _PATH)):
            raise UsageError("trace must be the path of a file", facts={"got": repr(self.trace)})
        if self.address is not None and not (isinstance(self.address, str) and self.address):
            raise UsageError(
                "address must be a name or a number", facts={"got": repr(self.address)}
            )
        self._check_timeout()
        self._check_memory()

    def _check_timeout(self) -> None:
        timeout_s = self.peer_timeout_s
        number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
        if not number or not 0 < timeout_s <= PEER_TIMEOUT_S_MAX:
            raise UsageError(
                "peer_timeout_s must be a number of seconds",
                facts={"expected": f"above 0, up to {PEER_TIMEOUT_S_MAX}", "got": repr(timeout_s)},
            )

    def _check_memory(self) -> None:
        buffer, staging = self.buffer_size, self.staging_size
        if buffer < BUFFER_BYTES_MIN or buffer % BUFFER_BYTES_MIN:
            raise UsageError(
                "buffer_bytes must be a multiple of 1 MiB", facts={"got": format_bytes(buffer)}
            )
        if staging is not None and staging < 2 * buffer:
            raise UsageError(
                "staging_bytes must hold at least two buffers",
                facts={"expected": f"at least {format_bytes(2 * buffer)}",
                       "got": format_bytes(staging)},
            )  # fmt: skip

    @property
    def node_mtbf_s(self) -> float | None:
        """node_mtbf, in seconds."""
        return parse_seconds(self.node_mtbf)

    @property
    def staging_size(self) -> int | None:
        """staging_bytes, in bytes; None: the first save chooses it."""
        return None if self.staging_bytes is None else parse_bytes(self.staging_bytes)

    @property
    def buffer_size(self) -> int:
        """buffer_bytes, in bytes, with the default instead of None."""
        return (
            DEFAULTS.buffer_bytes if self.buffer_bytes is None else parse_bytes(self.buffer_bytes)
        )

    @property
    def depth(self) -> int:
        """queue_depth, with the default instead of None."""
        return self.queue_depth or DEFAULTS.queue_depth

    @property
    def backend_choice(self) -> str:
        """backend, with the default instead of None."""
        return self.backend or DEFAULTS.backend

    @property
    def copy_thread_count(self) -> int:
        """copy_threads, with the default instead of None."""
        return self.copy_threads or min(4, os.cpu_count() or 1)

    def filled(self, moving: Moving) -> Options:
        """These options, with the values of `moving` instead of None.

        If staging_bytes does not hold two buffers of the profile, the profile's buffer_bytes is
        left out. So a run that opens without a profile also opens with one.
        """
        found = {
            field.name: getattr(moving, field.name)
            for field in fields(Moving)
            if getattr(self, field.name) is None
        }
        staging = self.staging_size
        if staging is not None and staging < 2 * moving.buffer_bytes:
            found.pop("buffer_bytes", None)
        return replace(self, **found)


def _check_choice(name: str, got: str, choices: tuple[str, ...]) -> None:
    if got not in choices:
        raise UsageError(f"not a valid {name}", facts={"expected": ", ".join(choices), "got": got})


def options_of(given: Mapping[str, Any]) -> Options:
    """The options that a user has given by name. Raises UsageError for an unknown name, too."""
    known = sorted(field.name for field in fields(Options))
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, ["levels", *known], 3)
            raise UsageError(
                "a Checkpointer has no such option",
                facts={"got": name, "expected": f"one of levels, {', '.join(known)}"},
                hint=f"did you mean {' or '.join(close)}?" if close else None,
            )
    return Options(**given)


def check_path(path: str | os.PathLike[str], what: str) -> str:
    """`path`, if it can be the path of a directory: not empty, and not a URL."""
    text = os.fspath(path) if isinstance(path, _PATH) else None
    if not isinstance(text, str) or not text.strip():
        raise UsageError(
            f"{what} is not the path of a directory",
            facts={"expected": "a path that is not empty", "got": repr(path)[:80]},
            hint='"." is the working directory',
        )
    if _URL.match(text):
        scheme = text.partition(":")[0]
        raise UsageError(
            f"{what} is a URL, not the path of a directory",
            facts={"expected": "a path such as runs/llama", "got": f"{scheme}://..."},
            hint='make the store a level: levels=[Directory(), ObjectStore("s3://b/llama")]',
        )
    if (
        home := os.path.expanduser(text)
    ) != text:  # otherwise statehold would make a directory called ~
        raise UsageError(
            f"{what} begins with ~, which only a shell replaces",
            facts={"expected": home, "got": text},
            hint=f'pass os.path.expanduser("{text}")',
        )
    return text


def check_run(run: str | os.PathLike[str]) -> str:
    """The path of a run, absolute."""
    path = os.path.abspath(check_path(run, "the run"))
    above, name = os.path.split(path)
    if _STEP.fullmatch(name):  # otherwise the run would seem to have no steps
        raise UsageError(
            "the run is the directory of a step",
            facts={"expected": above, "got": path},
            hint=f"open the run, and call restore(state, step={int(name[5:])})",
        )
    return path
