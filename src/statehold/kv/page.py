"""A page on storage: one slot, whose first bytes prove what the others are.

    0      header: identity, key, bytes and XXH3-64 of the payload (native/page_header.h)
    4096   payload, zeros up to the end of the slot

Invariants: a slot is right for a key, or it is not. A header that was written for another key or
identity, that is torn, or whose payload differs from its checksum, is never taken for this page.
A payload is at a multiple of 4096, so that it moves without a copy.
Not here: where the slots are (tiers), which of them hold what (native/page_table.h).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from statehold import _core
from statehold.errors import refused

HEADER_BYTES = 4096
KEY_BYTES_MAX = 1024
IDENTITY_BYTES = 16


def slot_bytes(page_bytes: int) -> int:
    """The bytes of a slot for pages of at most so many bytes."""
    return HEADER_BYTES + whole_blocks(page_bytes)


def whole_blocks(nbytes: int) -> int:
    """The bytes of a payload with the zeros behind it."""
    return -(-nbytes // HEADER_BYTES) * HEADER_BYTES


def indices_of(identity: bytes, keys: Sequence[bytes]) -> list[int]:
    """The 64 bits by which each page is found. They are a hint: the header has the whole key.
    Raises UsageError for anything but a key."""
    try:
        return _core.page_indices(identity, keys)
    except ValueError:
        is_key = [isinstance(key, bytes) and 0 < len(key) <= KEY_BYTES_MAX for key in keys]
        bad = keys[is_key.index(False)]
    got = f"{len(bad)} bytes" if isinstance(bad, bytes) else bad
    hint = "use the hash of the block's tokens and of those before it"
    raise refused("not a key of a page", f"1 to {KEY_BYTES_MAX} bytes", got, hint)


def identity_in(text: str) -> bytes:
    """An identity from its hexadecimal digits. Raises UsageError."""
    if not re.fullmatch(f"[0-9a-fA-F]{{{2 * IDENTITY_BYTES}}}", text):
        expected = f"{2 * IDENTITY_BYTES} hexadecimal digits"
        raise refused("not an identity of pages", expected, text)
    return bytes.fromhex(text)


@dataclass(frozen=True, slots=True)
class Header:
    """The first bytes of a slot. before: the index of the page before it; 0 for none. score: what
    the page is worth to whom has put it."""

    identity: bytes
    key: bytes
    nbytes: int
    checksum: int
    before: int
    score: float

    def is_of(self, identity: bytes, key: bytes, nbytes: int) -> bool:
        """Whether this is the page of a key, and has so many bytes."""
        return (self.identity, self.key, self.nbytes) == (identity, key, nbytes)

    @classmethod
    def decode(cls, raw: bytes | memoryview) -> Header | None:
        """The header in HEADER_BYTES; None if it proves nothing."""
        found = _core.read_page_header(raw)
        return found and cls(*found)

    @classmethod
    def proven(cls, raw: bytes | memoryview) -> Header | None:
        """The header of the page in a slot; None if one of its bytes is wrong."""
        found = cls.decode(raw[:HEADER_BYTES])
        payload = bytes(raw[HEADER_BYTES:][: whole_blocks(found.nbytes)]) if found else b""
        return found if found and _core.xxh3_64(payload) == found.checksum else None

    @property
    def index(self) -> int:
        """By which the page is found."""
        return indices_of(self.identity, [self.key])[0]
