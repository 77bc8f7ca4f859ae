"""Errors of an object store, by name and without secrets.

Owns: what a failure of `obstore` is called here, and what of its text is shown.
Invariants: nothing of that text is passed on. It quotes URLs, and in these stand signatures, tokens
and passwords; so a message is made of what is recognised in it: an HTTP status, the code that the
store gave, an errno, the kind of transport failure. The original is not chained either.
Not here: retries (the client's, configured in object_client).
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from typing import TypeVar

from statehold.errors import (
    MissingFileError,
    StateholdError,
    StorageError,
    TruncatedFileError,
    UnavailableError,
    storage_error,
)

__all__ = ["is_past_end", "missing", "naming", "too_large", "truncated"]

T = TypeVar("T")

_STATUS = re.compile(r"status code: ([1-5][0-9]{2})\b")
_CODE = re.compile(r"<Code>([A-Za-z]{1,64})</Code>")
_OS_ERROR = re.compile(r"\(os error ([0-9]{1,3})\)")
_PAST_END = re.compile(r"status code: 416\b|StartTooLarge")
_BUSY = {"408", "429", "500", "502", "503", "504"}
_DENIED = {"401", "403"}
_DENIED_KINDS = {"PermissionDeniedError", "UnauthenticatedError"}
_FULL = {"507", "QuotaExceeded", "XMinioStorageFull", "InsufficientCapacity"}
# What the transport says of itself in its debug text, and the errno that says the same; the first
# that is found counts, so what is said closest to the wire comes first.
_TRANSPORT = {
    "ConnectionRefused": errno.ECONNREFUSED,
    "TimedOut": errno.ETIMEDOUT,
    "kind: Timeout": errno.ETIMEDOUT,
    "ConnectionReset": errno.ECONNRESET,
    "BrokenPipe": errno.ECONNRESET,
    "IncompleteMessage": errno.ECONNRESET,
    "kind: Connect": errno.EHOSTUNREACH,
    "kind: Interrupted": errno.ECONNRESET,
    "BadScheme": errno.EPROTONOSUPPORT,
    "HTTP error": errno.EPROTO,
}
_DENIED_HINT = (
    "credentials come from the environment: check that they are set and may use this bucket"
)
_LATER_HINT = "committed steps are untouched; try again later"
_HTTP_HINT = 'http:// without encryption needs options={"allow_http": True}, or AWS_ALLOW_HTTP=true'


def missing(operation: str, path: str) -> MissingFileError:
    facts = {"file": path, "during": operation}
    return MissingFileError("a file does not exist", facts=facts)


def truncated(operation: str, path: str, end: int) -> TruncatedFileError:
    facts = {"file": path, "ends before": f"{end} bytes", "during": operation}
    return TruncatedFileError("a file ends before the bytes it should hold", facts=facts)


def too_large(operation: str, path: str, bytes_max: int) -> StorageError:
    facts = {"expected": f"at most {bytes_max} bytes"}
    return StorageError(f"cannot {operation}", errno=errno.EFBIG, path=path, facts=facts)


def is_past_end(fault: Exception) -> bool:
    """Whether obstore says that a range begins behind the end of an object."""
    return _PAST_END.search(str(fault)) is not None


def naming(operation: str, path: str, action: Callable[[], T]) -> T:
    """The result of `action`; what obstore raises in it becomes an error of ours, unchained."""
    try:
        return action()
    except StateholdError:
        raise
    except Exception as fault:
        error = _named(fault, operation, path)
    # Outside of the handler, and not in a context manager: what obstore raised, with all that it
    # quotes, would become the context of this, and stand in every traceback and error report.
    raise error


def _named(fault: Exception, operation: str, path: str) -> StateholdError:
    text = str(fault)
    status, code = _first(_STATUS, text), _first(_CODE, text)
    if isinstance(fault, FileNotFoundError) and code != "NoSuchBucket":
        return missing(operation, path)
    if type(fault).__name__ in _DENIED_KINDS:
        status = status or "403"
    if status:
        return _refusal(status, code, operation, path)
    return _transport_failure(text, operation, path)


def _refusal(status: str, code: str | None, operation: str, path: str) -> StorageError:
    """The error for an answer that is not the one we want."""
    if {status, code} & _FULL:
        return storage_error(operation, errno.ENOSPC, path)
    kind, number, hint = StorageError, errno.EIO, None
    if code == "NoSuchBucket":
        number = errno.ENOENT
    elif status in _DENIED:
        number, hint = errno.EACCES, _DENIED_HINT
    elif status in _BUSY:
        kind, number, hint = UnavailableError, errno.EAGAIN, _LATER_HINT
    facts = {"answer": " ".join(filter(None, [status, code]))}
    return kind(f"cannot {operation}", errno=number, path=path, facts=facts, hint=hint)


def _transport_failure(text: str, operation: str, path: str) -> StorageError:
    """The error where no answer came, or half of one; or of the local disk (file://)."""
    number = next((number for sign, number in _TRANSPORT.items() if sign in text), None)
    if number is None or "Generic LocalFileSystem" in text:
        local = _first(_OS_ERROR, text)
        return storage_error(operation, int(local) if local else errno.EIO, path)
    hint = _HTTP_HINT if number == errno.EPROTONOSUPPORT else _LATER_HINT
    return UnavailableError(f"cannot {operation}", errno=number, path=path, hint=hint)


def _first(pattern: re.Pattern[str], text: str) -> str | None:
    match = pattern.search(text)
    return match[1] if match else None
