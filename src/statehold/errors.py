"""Every error statehold raises, sorted by who has to act.

    StateholdError
    ├── UsageError                 you asked for something that cannot be done
    │   ├── UnsupportedValueError  a value in the state that no step can hold
    │   ├── StateMismatchError     the live state and the step differ in names, shapes or dtypes
    │   ├── StepNotFoundError      the step that was asked for is not committed in this run
    │   ├── StepOrderError         a save of a step older than the newest one
    │   ├── ClosedError            the Checkpointer was closed
    │   ├── RunBusyError           another process (or object) is saving into this run directory
    │   ├── ReplicaRefusedError    the replica differs from the job that it wants to join
    │   └── PortInUseError         something else listens on the port for metrics
    ├── TornSnapshot               a tensor changed while it was being copied; nothing was published
    ├── ReplicaLostError           the job goes on without this replica
    ├── ReplicasDifferError        ranks hold different values of a tensor that was equal
    ├── MicrobatchError            about one microbatch; `step`, `index` and `samples` say which
    │   ├── DatasetError           the data set has failed
    │   └── ImpureSamplesError     a microbatch was drawn twice, and the draws differ
    ├── WorkerLostError            a process that draws samples has ended
    ├── WaitTimeout                a deadline passed; the save itself goes on
    ├── PeerLostError              other ranks did not answer in time; `ranks` says which
    ├── PeerFailedError            another rank failed, and says why; `rank` says which
    ├── StorageError               the storage refused: errno, path and offset are attributes
    │   ├── NoSpaceError           ENOSPC or EDQUOT
    │   └── UnavailableError       a store or host cannot be reached, or asks to slow down
    ├── DeviceError                a device with tensors of the state has failed
    ├── CorruptionError            the bytes on disk differ from those that were committed
    │   ├── MissingFileError       a file that the manifest names does not exist
    │   ├── TruncatedFileError     a file is shorter (or longer) than the manifest says
    │   ├── ChecksumError          bytes differ from their checksum
    │   ├── ManifestError          the manifest cannot be parsed or contradicts itself
    │   └── HeaderError            a safetensors header cannot be parsed or contradicts itself
    ├── FormatVersionError         written by a newer statehold
    └── InvariantError             statehold is wrong: please report it

A message is one line that says what happened, then one fact a line (what, where, expected and
got), then a hint. `facts` has the same facts as a dict for programs.
"""

from __future__ import annotations

import contextlib
import errno as _errno
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

__all__ = [
    "ChecksumError",
    "ClosedError",
    "CorruptionError",
    "DatasetError",
    "DeviceError",
    "FormatVersionError",
    "HeaderError",
    "ImpureSamplesError",
    "InvariantError",
    "ManifestError",
    "MicrobatchError",
    "MissingFileError",
    "NoSpaceError",
    "PeerFailedError",
    "PeerLostError",
    "PortInUseError",
    "ReplicaLostError",
    "ReplicaRefusedError",
    "ReplicasDifferError",
    "RunBusyError",
    "StateMismatchError",
    "StateholdError",
    "StepNotFoundError",
    "StepOrderError",
    "StorageError",
    "TornSnapshot",
    "TruncatedFileError",
    "UnavailableError",
    "UnsupportedValueError",
    "UsageError",
    "WaitTimeout",
    "WorkerLostError",
]

# The longest line of a message, in characters.
LINE_MAX = 1000

# The fact of an error that came after the rename that publishes a step (D6).
PUBLISHED = "published"
# The fact of an error of restore() that came after it had begun to write into the state.
OVERWRITTEN = "the state"


class StateholdError(Exception):
    """Base of every error of this package.

    `summary` is the one-line statement, `facts` the details by name, `hint` what to do next.
    """

    def __init__(
        self, summary: str, /, *, facts: Mapping[str, Any] | None = None, hint: str | None = None
    ) -> None:
        super().__init__(summary)
        self.summary = summary
        self.facts: dict[str, Any] = dict(facts or {})
        self.hint = hint

    def __str__(self) -> str:
        width = max((len(name) for name in self.facts), default=0)
        lines = [self.summary]
        lines += [f"  {name:<{width}}  {value}" for name, value in self.facts.items()]
        if self.hint is not None:
            lines.append(f"  hint: {self.hint}")
        return "\n".join(map(_printable, "\n".join(lines).split("\n")))

    def __repr__(self) -> str:
        facts = "".join(f", {name}={str(value)[:200]!r}" for name, value in self.facts.items())
        return f"{type(self).__name__}({self.summary!r}{facts})"

    def with_fact(self, name: str, value: Any) -> StateholdError:
        """Add a fact that only an outer layer knows, such as the step; returns self."""
        self.facts[name] = value
        return self


class UsageError(StateholdError):
    """The call cannot be carried out as asked; nothing was changed."""


class UnsupportedValueError(UsageError):
    """A value in the state cannot be represented in a step; `facts["path"]` says which."""


class StateMismatchError(UsageError):
    """The live state and the step do not fit together; raised before any tensor is touched."""


class StepNotFoundError(UsageError):
    """The step is not committed in this run."""


class StepOrderError(UsageError):
    """The step is older than the newest one, committed or under way."""


class ClosedError(UsageError):
    """The Checkpointer, or the subscription, was closed."""


class RunBusyError(UsageError):
    """Another Checkpointer holds the run directory for saving; `passes`: a command, for a while."""

    passes = False


class PortInUseError(UsageError):
    """Something else listens on the port."""


class TornSnapshot(StateholdError):
    """A tensor changed between capture and the end of its copy; the step was not published."""


class ReplicasDifferError(StateholdError):
    """A tensor that several ranks held alike differs between them; the step was not published."""


class ReplicaRefusedError(UsageError):
    """The replica differs from the job that it wants to join, or is in; `facts` say in what."""


class ReplicaLostError(StateholdError):
    """The job goes on without this replica: it was taken for dead, or has lost one of its ranks."""


class MicrobatchError(StateholdError):
    """An error about the microbatch `index` of `step`, which has the samples `samples`."""

    def __init__(
        self,
        summary: str,
        /,
        *,
        step: int,
        index: int,
        samples: Sequence[int],
        facts: Mapping[str, Any] | None = None,
        hint: str | None = None,
    ) -> None:
        self.step = step
        self.index = index
        self.samples = tuple(samples)
        where = {"step": step, "microbatch": index, "samples": some(self.samples, 64)}
        super().__init__(summary, facts={**where, **(facts or {})}, hint=hint)


class DatasetError(MicrobatchError):
    """The data set, or the function that makes a batch of its samples, has failed."""


class ImpureSamplesError(MicrobatchError):
    """The same microbatch was drawn twice, here or on another replica, and the draws differ."""


class WorkerLostError(StateholdError):
    """A process that draws samples has ended by itself, or was killed."""


class WaitTimeout(StateholdError, TimeoutError):
    """The deadline of a wait passed; the work that it waited for continues in the background."""


class PeerLostError(StateholdError):
    """Ranks of this job did not answer before the deadline: `ranks`, in order."""

    def __init__(
        self,
        summary: str,
        /,
        *,
        ranks: Iterable[int],
        facts: Mapping[str, Any] | None = None,
        hint: str | None = None,
    ) -> None:
        self.ranks = tuple(sorted(ranks))
        super().__init__(summary, facts={"ranks": some(self.ranks, 16), **(facts or {})}, hint=hint)


class PeerFailedError(StateholdError):
    """Another rank of this job failed: `rank`; `reason` is the text of its error.

    follows: that rank did not begin this save, because an earlier save had failed.
    """

    def __init__(self, rank: int, reason: str, *, follows: bool = False) -> None:
        super().__init__(
            f"rank {rank} failed, so the other ranks stopped", facts={"its error": reason}
        )
        self.rank = rank
        self.reason = reason
        self.follows = follows


class StorageError(StateholdError):
    """The storage refused an operation: `errno`, `path`, and `offset` in bytes or None."""

    def __init__(
        self,
        summary: str,
        /,
        *,
        errno: int = 0,
        path: str = "",
        offset: int | None = None,
        facts: Mapping[str, Any] | None = None,
        hint: str | None = None,
    ) -> None:
        details: dict[str, Any] = {}
        if path:
            details["path"] = path
        if offset is not None:
            details["offset"] = f"{offset} bytes"
        if errno:
            details["errno"] = f"{_errno.errorcode.get(errno, errno)} ({os.strerror(errno)})"
        details.update(facts or {})
        super().__init__(summary, facts=details, hint=hint)
        self.errno = errno
        self.path = path
        self.offset = offset


class NoSpaceError(StorageError):
    """The file system or a quota is full."""


class UnavailableError(StorageError):
    """A store or host did not answer before the deadline, or asked to slow down: try later."""


class DeviceError(StateholdError):
    """A GPU, or another device with tensors of the state, has failed."""


class CorruptionError(StateholdError):
    """The bytes on disk differ from those that were committed."""


class MissingFileError(CorruptionError):
    """A file that the manifest names does not exist, or is not a regular file."""


class TruncatedFileError(CorruptionError):
    """A file has another size than the manifest says."""


class ChecksumError(CorruptionError):
    """Bytes on disk differ from the checksum recorded when they were written."""


class ManifestError(CorruptionError):
    """A manifest cannot be parsed, or contradicts itself."""


class HeaderError(CorruptionError):
    """A safetensors header cannot be parsed, or contradicts itself."""


class FormatVersionError(StateholdError):
    """The step was written by a newer version of statehold; upgrade to read it."""


class InvariantError(StateholdError):
    """An internal check failed, and the save or restore was stopped. Please report it."""


def _printable(line: str) -> str:
    """Names come from files, so they must not fill or control the terminal that shows an error."""
    if len(line) > LINE_MAX:
        line = f"{line[:LINE_MAX]}..."
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


_FREE_SPACE = (
    "free space (and inodes: df -i) on this file system, or keep fewer steps; committed steps are "
    "untouched"
)
_HINTS = {
    _errno.ENOSPC: _FREE_SPACE,
    _errno.EDQUOT: _FREE_SPACE,
    _errno.EMFILE: "raise this process's limit of open files (ulimit -n)",
    _errno.ENFILE: "this machine has too many files open (sysctl fs.file-max)",
    _errno.EFBIG: "raise this process's limit of the size of a file (ulimit -f)",
    _errno.ENOTDIR: "a file is where a directory should be: give another path, or move the file",
    _errno.EROFS: "give a writable directory; reading and restoring need no write access",
    _errno.EAGAIN: "raise this process's limits of threads and memory (ulimit -u, ulimit -v)",
    _errno.ENOMEM: "lower staging_bytes, or raise this process's limit of memory (ulimit -v)",
}


def shown(value: object) -> str:
    """What somebody has passed, for a message: short, and whatever its repr() raises."""
    try:
        return repr(value)[:80]
    except Exception:  # an int of more digits than Python prints, or the code of others
        return f"a value of type {type(value).__qualname__}, which repr() cannot show"


def some(names: Sequence[object], most: int = 8) -> str:
    """The first of them, for a message, and how many more there are."""
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def meant(name: str, known: Iterable[str]) -> str | None:
    """A question that names the nearest of `known`; None: nothing is near."""
    import difflib  # seldom needed, and errors are always loaded

    close = difflib.get_close_matches(name, list(known), 3)
    return f"did you mean {' or '.join(close)}?" if close else None


def latest(steps: Iterable[int]) -> str:
    """The last of them, for a message."""
    found = sorted(steps)
    return ", ".join(map(str, found[-8:])) + (f" ({len(found)} in all)" if found else "none")


def refused(
    summary: str, expected: object, got: object, hint: str | None = None, **where: object
) -> UsageError:
    """The error for an argument. got: a text as it is, anything else as Python writes it."""
    found = got if isinstance(got, str) else shown(got)
    return UsageError(summary, facts={**where, "expected": expected, "got": found}, hint=hint)


def named(error: BaseException, when: str) -> StateholdError:
    """`error` itself if it is ours; an InvariantError that wraps it if it is unexpected."""
    if isinstance(error, StateholdError):
        return error
    if not isinstance(error, Exception):
        interrupted = StateholdError(f"interrupted by {type(error).__name__} {when}")
        interrupted.__cause__ = error
        return interrupted
    hint = "please report it, with the traceback"
    if threading.current_thread() is threading.main_thread():  # where handlers of signals run
        hint = f"if a signal handler of yours raised it, ignore this; otherwise {hint}"
    unexpected = InvariantError(
        f"unexpected {type(error).__name__} {when}",
        facts={"cause": str(error) or repr(error)},
        hint=hint,
    )
    unexpected.__cause__ = error
    return unexpected


def annotate(error: Exception, when: str) -> None:
    """Add a note `when` to an exception of the user's own code (Python 3.11 and later)."""
    if not isinstance(error, StateholdError) and hasattr(error, "add_note"):
        error.add_note(f"statehold: {when}")


@contextlib.contextmanager
def failing(what: str) -> Iterator[None]:
    """Add to an error of ours what failed with it."""
    try:
        yield
    except StateholdError as error:
        error.with_fact("failed", what)
        raise


def no_such_step(step: int, run: str, steps: Sequence[int] | None = None) -> StepNotFoundError:
    """The error for a step that is not committed. steps: the committed steps, if known."""
    facts = {"run": run}
    if steps is not None:
        facts["committed"] = latest(steps)
    return StepNotFoundError(f"step {step} is not committed in this run", facts=facts)


def storage_error(operation: str, errno: int, path: str, offset: int | None = None) -> StorageError:
    """The error for a failed storage operation; the native core raises through this, too."""
    kind = NoSpaceError if errno in (_errno.ENOSPC, _errno.EDQUOT) else StorageError
    return kind(
        f"cannot {operation}", errno=errno, path=path, offset=offset, hint=_HINTS.get(errno)
    )


@contextlib.contextmanager
def storing(operation: str, path: str = "") -> Iterator[None]:
    """Raise the error for a failed storage operation in place of an OSError. No path: its own."""
    try:
        yield
    except OSError as error:
        where = path or str(error.filename or "")
        raise storage_error(operation, error.errno or _errno.EIO, where) from error


def from_native(
    code: str, operation: str, errno: int, path: str, offset: int | None
) -> StateholdError:
    """Translate a failed native Status.

    `code` is "io", "missing", "irregular", "truncated", "closed" or "invariant".
    """
    if code == "io":
        return storage_error(operation, errno, path, offset)
    if code == "missing":
        return MissingFileError("a file does not exist", facts={"file": path, "during": operation})
    if code == "irregular":
        facts = {"file": path, "expected": "a regular file", "during": operation}
        hint = "statehold follows no links, FIFOs or devices: copy the file itself to this path"
        return MissingFileError("something else is where a file should be", facts=facts, hint=hint)
    if code == "truncated":
        facts = {"file": path, "ends at": f"{offset} bytes", "during": operation}
        return TruncatedFileError("a file does not have the bytes it should hold", facts=facts)
    if code == "closed":
        return ClosedError(f"the engine was closed during {operation}")
    return InvariantError(f"internal check failed: {operation}", facts={"path": path})
