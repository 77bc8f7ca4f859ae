"""Small files in a run directory that are no step: written whole or not at all, read with care.

Invariants: what is read is a regular file and bounded; no link is followed. One job saves into a
run, so nobody else writes.
Not here: what is in them (remembered, owners).
"""

from __future__ import annotations

import contextlib
import os
import stat

from statehold.errors import CorruptionError

BYTES_MAX = 64 * 1024


def write_note(run: str, name: str, content: bytes) -> None:
    """Make or replace the note `name` in the run directory, which is made. Raises OSError."""
    os.makedirs(run, exist_ok=True)
    temporary = os.path.join(run, f".{name}.partial")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    with open(fd, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(fd)
    os.replace(temporary, os.path.join(run, name))


def read_note(path: str, summary: str, hint: str) -> bytes | None:
    """What a note says; None if there is none. Raises CorruptionError with this summary."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        facts = {"file": path, "why": os.strerror(error.errno or 0)}
        raise CorruptionError(summary, facts=facts, hint=hint) from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise CorruptionError(summary, facts={"file": path, "why": "it is not a regular file"})
        with open(fd, "rb", closefd=False) as file:
            return file.read(BYTES_MAX)
    finally:
        os.close(fd)
