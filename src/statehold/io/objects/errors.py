"""Errors of an object store, by name and without secrets.

Owns: the names of `obstore` failures, and the shown parts of their texts.
Invariants: no text of obstore is passed on, because it quotes URLs with signatures, tokens and
passwords. A message consists of recognised parts: an HTTP status, the code of the store, an errno,
    the kind of transport failure. The original error is not chained.
Not here: retries (the client's, configured in address).
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

T = TypeVar("T")

_STATUS = re.compile(r"status code: ([1-5][0-9]{2})\b")
_CODE = re.compile(r"<Code>([A-Za-z]{1,64})</Code>")
_OS_ERROR = re.compile(r"\(os error ([0-9]{1,3})\)")
_PAST_END = re.compile(r"status code: 416\b|StartTooLarge")
_NO_RANGE = re.compile(r"NotPartial|NoContentRange|UnexpectedRange|\w+ContentRange\b")
# What stores, and those who check certificates and tokens, say to a machine whose clock is wrong.
_SKEWED = re.compile(
    r"RequestTimeTooSkewed|RequestExpired|RequestInTheFuture|Signature (?:not yet current|expired)"
    r"|Request date header too old|iat and exp|NotValidYet|certificate has expired"
    r"|InvalidCertificate\(Expired"
)
_BUSY = {"408", "429", "500", "502", "503", "504"}
_DENIED = {"401", "403"}
_DENIED_KINDS = {"PermissionDeniedError", "UnauthenticatedError"}
_FULL = {"507", "QuotaExceeded", "XMinioStorageFull", "InsufficientCapacity"}
# Debug texts of the transport, and the errno with the same meaning. The first match counts, so
# texts from closest to the wire come first.
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
_CLOCK_HINT = (
    "the clock of this machine and that of the store differ: set this clock (date -u shows it; "
    "chronyd or systemd-timesyncd keeps it right), or let the store renew what has expired"
)
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


def not_given_back(operation: str, path: str) -> StorageError:
    return StorageError(
        f"cannot {operation}",
        errno=errno.EPROTO,
        path=path,
        facts={"expected": "the range that was asked for", "got": "something else"},
        hint="the store does not give back parts of objects, so no step can be restored from it. "
        "Another server for the same storage may",
    )


def is_past_end(fault: Exception) -> bool:
    """Whether obstore says that a range begins after the end of an object."""
    return _PAST_END.search(str(fault)) is not None


def naming(operation: str, path: str, action: Callable[[], T]) -> T:
    """The result of `action`. An error of obstore becomes an error of ours, unchained."""
    try:
        return action()
    except StateholdError:
        raise
    except Exception as fault:
        error = _named(fault, operation, path)
    # This is outside of the handler, and not in a context manager. Otherwise the error of obstore,
    # with everything that it quotes, would become the context of this error, and appear in every
    # traceback and error report.
    raise error


def _named(fault: Exception, operation: str, path: str) -> StateholdError:
    text = str(fault)
    status, code = _first(_STATUS, text), _first(_CODE, text)
    if isinstance(fault, FileNotFoundError) and code != "NoSuchBucket":
        return missing(operation, path)
    if _NO_RANGE.search(text):
        return not_given_back(operation, path)
    if type(fault).__name__ in _DENIED_KINDS:
        status = status or "403"
    error = (
        _refusal(status, code, operation, path)
        if status
        else _transport_failure(text, operation, path)
    )
    if _SKEWED.search(text):
        error.hint = _CLOCK_HINT
    return error


def _refusal(status: str, code: str | None, operation: str, path: str) -> StorageError:
    """The error for an unexpected answer."""
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
    """The error for a missing or incomplete answer, or of the local disk (file://)."""
    number = next((number for sign, number in _TRANSPORT.items() if sign in text), None)
    if number is None or "Generic LocalFileSystem" in text:
        local = _first(_OS_ERROR, text)
        return storage_error(operation, int(local) if local else errno.EIO, path)
    hint = _HTTP_HINT if number == errno.EPROTONOSUPPORT else _LATER_HINT
    return UnavailableError(f"cannot {operation}", errno=number, path=path, hint=hint)


def _first(pattern: re.Pattern[str], text: str) -> str | None:
    match = pattern.search(text)
    return match[1] if match else None
