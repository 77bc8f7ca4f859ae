"""How the ranks of a job come to one secret over a board that everybody may read.

    keys = KeyPair()                              each rank, which posts keys.public
    hidden = keys.hidden(secret, public)          rank 0, for the rank that has posted `public`
    secret = keys.opened(hidden, public)          that rank, with what rank 0 has posted

The store of torch answers everybody who connects, and lists its keys. So the secret itself is never
there: it is hidden under a key that only two ranks can compute (Diffie-Hellman in group 14 of
RFC 3526). A file of the run directory would need no arithmetic, but hosts may share none.
Invariants: what is on the board does not tell the secret. Who writes to the board may pass for a
rank, as everywhere in torch.distributed.
Not here: the meeting (discovery), what the secret opens (serving).
"""

from __future__ import annotations

import hashlib
import secrets

_PRIME = int(
    "FFFFFFFFFFFFFFFFC90FDAA22168C234C4C6628B80DC1CD129024E088A67CC74020BBEA63B139B22"
    "514A08798E3404DDEF9519B3CD3A431B302B0A6DF25F14374FE1356D6D51C245E485B576625E7EC6"
    "F44C42E9A637ED6B0BFF5CB6F406B7EDEE386BFB5A899FA5AE9F24117C4B1FE649286651ECE45B3D"
    "C2007CB8A163BF0598DA48361C55D39A69163FA8FD24CF5F83655D23DCA3AD961C62F356208552BB"
    "9ED529077096966D670C354E4ABC9804F1746C08CA18217C32905E462E36CE3BE39E772C180E8603"
    "9B2783A2EC07A28FB5C55DF06F4C52C9DE2BCBF6955817183995497CEA956AE515D2261898FA0510"
    "15728E5A8AACAA68FFFFFFFFFFFFFFFF",
    16,
)
_KEY_BYTES = 32  # twice the strength of the group


def drawn() -> str:
    """A new secret."""
    return secrets.token_hex(_KEY_BYTES)


class KeyPair:
    """The keys of one rank, for as long as it meets the others."""

    def __init__(self) -> None:
        self._private = int(secrets.token_hex(_KEY_BYTES), 16)
        self.public = f"{pow(2, self._private, _PRIME):x}"

    def hidden(self, secret: str, public: str) -> str:
        """What only the rank that has posted `public` opens. Raises ValueError for no key."""
        return self._mixed(bytes.fromhex(secret), public).hex()

    opened = hidden  # it mixes with the same bytes again

    def _mixed(self, data: bytes, public: str) -> bytes:
        other = int(public, 16)
        if not 1 < other < _PRIME - 1:
            raise ValueError("not the key of a rank")
        shared = pow(other, self._private, _PRIME).to_bytes(256, "big")
        mask = hashlib.sha256(shared).digest()
        return bytes(each ^ key for each, key in zip(data, mask, strict=True))
