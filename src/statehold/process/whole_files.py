"""Files that are written whole or not at all: a reader sees the old content or the new one."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile


def replace_file(path: str | os.PathLike[str], content: bytes) -> None:
    """Make or replace a file. Raises OSError."""
    temporary = f"{os.fspath(path)}.{secrets.token_hex(8)}.partial"
    try:
        with open(temporary, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError) and error.filename == temporary:
            error.filename = os.fspath(path)  # the caller knows no other name
        raise


def try_folder(folder: str | os.PathLike[str]) -> None:
    """Make a directory if it is missing, and try a file in it. Raises OSError."""
    os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass
