"""Secret: what the processes of a job know and nobody else, and how each proves that it knows it.

STATEHOLD_SECRET has it. A job without it has the empty secret, which everybody knows.

    host     MAGIC, and a nonce
    guest    a nonce of its own, and the proof of a guest
    host     the proof of a host; zeros if the guest knows another secret

A proof is an HMAC-SHA256 of the role, of what is asked for (the door) and of both nonces.

Invariants: the secret itself is never sent. A proof is good for one connection, for one end and for
one door. Both ends prove: nobody believes a host that knows another secret.
Not here: the bytes on their way (wire, reception). What follows the proofs is neither encrypted nor
signed.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import secrets

from statehold.errors import refused

ENVIRONMENT = "STATEHOLD_SECRET"
LENGTH_MIN = 16  # characters: an eavesdropper can try shorter ones on a proof until one fits
MAGIC = b"statehold net 1\n"
NONCE_BYTES = PROOF_BYTES = 32
GREETING_BYTES = len(MAGIC) + NONCE_BYTES
REPLY_BYTES = NONCE_BYTES + PROOF_BYTES
is_same = hmac.compare_digest  # takes the same time for each wrong proof


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


class Secret:
    """text: "" is known to everybody."""

    def __init__(self, text: str) -> None:
        self.is_empty = not text
        self._key = hashlib.sha256(text.encode()).digest()

    def reply(self, door: str, greeting: bytes) -> tuple[bytes, bytes]:
        """What a guest sends, and what it has to hear then. Raises OSError."""
        if not greeting.startswith(MAGIC):
            raise ConnectionAbortedError(errno.EPROTO, "what answers there is no statehold")
        mine = new_nonce()
        nonces = greeting[len(MAGIC) :] + mine
        return mine + self._proof(b"guest", door, nonces), self._proof(b"host", door, nonces)

    def answer(self, door: str, nonce: bytes, reply: bytes) -> bytes | None:
        """What a host sends then; None: the guest knows another secret."""
        nonces, proof = nonce + reply[:NONCE_BYTES], reply[NONCE_BYTES:]
        if is_same(proof, self._proof(b"guest", door, nonces)):
            return self._proof(b"host", door, nonces)
        return None

    def _proof(self, role: bytes, door: str, nonces: bytes) -> bytes:
        return hmac.digest(self._key, b"\0".join((role, door.encode(), nonces)), "sha256")


def of_job(also: str = "") -> Secret:
    """The secret in the environment. also: what else the two ends have to know.

    Raises UsageError.
    """
    said = os.environ.get(ENVIRONMENT, "")
    if said and len(said) < LENGTH_MIN:
        hint = f"export {ENVIRONMENT}=$(openssl rand -hex 32)"
        expected = f"at least {LENGTH_MIN} characters"
        raise refused(f"{ENVIRONMENT} is too short to be a secret", expected, f"{len(said)}", hint)
    return Secret(f"{said}\n{also}" if also else said)
