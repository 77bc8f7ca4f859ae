"""A page on storage: one slot, whose first bytes prove what the others are.

    0      magic "SHKVPAGE", format, length of the key, bytes of the payload, XXH3-64 of
           payload and zeros, 8 zeros, score (a double)
    48     identity (16 bytes), index of the page before it (8 bytes), key, zeros
    4088   XXH3-64 of all bytes before
    4096   payload, zeros up to the end of the slot

All integers are little-endian.

Invariants: a slot is right for a key, or it is not. A header that was written for another key or
identity, that is torn, or whose payload differs from its checksum, is never taken for this page.
A payload is at a multiple of 4096, so that it moves without a copy.
Not here: where the slots are (tiers), which of them hold what (table).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

from statehold import _core
from statehold.errors import refused

HEADER_BYTES = 4096
KEY_BYTES_MAX = 1024
IDENTITY_BYTES = 16
FORMAT = 1

_MAGIC = b"SHKVPAGE"
_FIXED = struct.Struct("<8sIIQQ8xd16sQ")
_SUM = struct.Struct("<Q")


def slot_bytes(page_bytes: int) -> int:
    """The bytes of a slot for pages of at most so many bytes."""
    return HEADER_BYTES + whole_blocks(page_bytes)


def whole_blocks(nbytes: int) -> int:
    """The bytes of a payload with the zeros behind it."""
    return -(-nbytes // HEADER_BYTES) * HEADER_BYTES


def index_of(identity: bytes, key: bytes) -> int:
    """The 64 bits by which a page is found. They are a hint: the header has the whole key."""
    return _core.xxh3_64(identity + key)


def indices_of(identity: bytes, keys: Iterable[bytes]) -> list[int]:
    """The same for many. Raises UsageError for anything but a key."""
    hashed, most = _core.xxh3_64, KEY_BYTES_MAX  # a scheduler asks for a thousand at a time
    return [
        hashed(identity + (key if type(key) is bytes and 0 < len(key) <= most else check_key(key)))
        for key in keys
    ]


def check_key(key: object) -> bytes:
    """Raise UsageError unless `key` is bytes that fit a header."""
    if isinstance(key, bytes) and 0 < len(key) <= KEY_BYTES_MAX:
        return key
    got = f"{len(key)} bytes" if isinstance(key, bytes) else key
    hint = "use the hash of the block's tokens and of those before it"
    raise refused("not a key of a page", f"1 to {KEY_BYTES_MAX} bytes", got, hint)


@dataclass(frozen=True, slots=True)
class Header:
    """The first bytes of a slot. before: index_of() the page before it; 0 for none. score: what the
    page is worth to whom has put it."""

    identity: bytes
    key: bytes
    nbytes: int
    checksum: int
    before: int = 0
    score: float = 0.0

    def is_of(self, identity: bytes, key: bytes, nbytes: int) -> bool:
        """Whether this is the page of a key, and has so many bytes."""
        return (self.identity, self.key, self.nbytes) == (identity, key, nbytes)

    def encode(self) -> bytes:
        """HEADER_BYTES."""
        about = (len(self.key), self.nbytes, self.checksum, self.score, self.identity, self.before)
        fixed = _FIXED.pack(_MAGIC, FORMAT, *about)
        raw = (fixed + self.key).ljust(HEADER_BYTES - _SUM.size, b"\0")
        return raw + _SUM.pack(_core.xxh3_64(raw))

    @classmethod
    def decode(cls, raw: bytes) -> Header | None:
        """The header in HEADER_BYTES; None if it proves nothing."""
        body = raw[: -_SUM.size]
        if not raw.startswith(_MAGIC) or _SUM.unpack(raw[-_SUM.size :])[0] != _core.xxh3_64(body):
            return None
        _, form, length, nbytes, checksum, score, identity, before = _FIXED.unpack_from(raw)
        if form != FORMAT or not 0 < length <= KEY_BYTES_MAX:
            return None
        key = raw[_FIXED.size : _FIXED.size + length]
        return cls(identity, key, nbytes, checksum, before, score)

    @property
    def index(self) -> int:
        """By which the page is found."""
        return index_of(self.identity, self.key)
