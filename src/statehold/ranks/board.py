"""Boards: where the ranks of a job leave notes for each other. No collective, no thread.

A note is a key with a small value. `StoreBoard` keeps notes in a torch.distributed store (any
object with its methods; torch is not imported), `DirectoryBoard` in files of a shared directory.

    post, peek, wait, drop      single notes
    enter, full, ring, collect  a group: one note of each rank, gathered by one rank, which sleeps
                                until the group is full or some rank rings
    open                        a token that this job's ranks share and no other job ever had

Invariants: thread-safe.
- Nothing blocks beyond its deadline (`until`, on the clock of time.monotonic).
- Waiting blocks on the server if there is one, because thousands of polling ranks would overload
  it. A wait has a connection of its own: a client of a TCPStore does one call at a time, and the
  training thread's calls must not queue behind a wait of minutes.
- A store that does not answer is a PeerLostError of rank 0, which serves it. A directory that
  cannot be read or written is a StorageError.
Not here: the meaning of the notes, and who waits for whom (peers).
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import functools
import hashlib
import operator
import os
import re
import secrets
import shutil
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from statehold.errors import PeerLostError, StateholdError, storage_error, storing
from statehold.process.whole_files import open_regular

T = TypeVar("T")

# How long a server may take to answer a call that does not wait for another rank.
ANSWER_S = 30.0
WAIT_MIN_S = 0.005
# Keys in one call: bounds the size of a message to the server.
KEYS_PER_CALL = 1024
# Polling sleeps this share of the time waited so far: short waits end promptly, long ones are
# cheap, and no wait is stretched by more than this.
POLL_SHARE = 0.05
POLL_MIN_S, POLL_MAX_S = 0.001, 1.0
_BELL = "bell"


class Board(Protocol):
    """Notes that every rank of a job can read. `operations` counts the calls to the storage."""

    operations: int

    def post(self, key: str, value: bytes) -> None: ...

    def peek(self, key: str) -> bytes | None: ...

    def wait(self, keys: Sequence[str], until: float) -> list[str]:
        """Return once all keys exist, or at `until`: the keys that are missing then."""

    def drop(self, keys: Sequence[str]) -> None: ...

    def enter(self, group: str, member: int, size: int, value: bytes) -> None:
        """Leave this member's note in a group of `size`; once."""

    def full(self, group: str, size: int, until: float) -> list[int]:
        """Return once all members entered, some rank rang, or at `until`: the missing members."""

    def ring(self, group: str) -> None:
        """End full() now."""

    def collect(self, group: str, size: int) -> list[bytes]:
        """The members' notes; all must have entered."""

    def forget(self, groups: Sequence[str], rank: int) -> None:
        """Drop this rank's notes of groups; rank 0 also drops the groups' own notes."""

    def open(self, rank: int, size: int, until: float) -> str:
        """The job's token, the same on all ranks, new each time that all ranks call this."""

    def close(self) -> None: ...


_TOKEN = re.compile(rb"[0-9a-f]{8}")


def new_token() -> str:
    """Eight random hexadecimal digits."""
    return secrets.token_hex(4)


def did_not_come(summary: str, ranks: Iterable[int], **facts: Any) -> PeerLostError:
    """The error if ranks do not come to a meeting: they have ended, or were never called to it."""
    return PeerLostError(
        summary,
        ranks=ranks,
        facts=facts,
        hint="every rank has to call save(), restore(), rewind(), flush() and close(), not rank 0 "
        'alone. A process whose Checkpointer has coordination="none" saves alone. If every rank '
        "calls them, look at what these ranks printed last; peer_timeout_s sets how long to wait",
    )


def lost_leader(missing: str) -> PeerLostError:
    """The error if rank 0 does not do in time what the others wait for."""
    return did_not_come(f"rank 0 did not {missing} in time", (0,))


class StoreBoard:
    """Notes in a torch.distributed store, below "statehold/<digest of run>/"."""

    def __init__(self, store: Any, run: str) -> None:
        self.operations = 0
        self._store = store
        self._prefix = f"statehold/{hashlib.sha256(run.encode()).hexdigest()[:16]}/"
        self._guard = threading.Lock()
        self._idle: list[Any] = []
        self._private = hasattr(store, "clone")
        self._failed = False
        self._opening: dict[int, str] = {}  # by rank: the key of an opening that is not done

    # -- single notes ----------------------------------------------------------------------

    def post(self, key: str, value: bytes) -> None:
        self._call(lambda store: store.set(self._prefix + key, value))

    def peek(self, key: str) -> bytes | None:
        if not self._call(lambda store: store.check([self._prefix + key])):
            return None
        return bytes(self._call(lambda store: store.get(self._prefix + key)))

    def wait(self, keys: Sequence[str], until: float) -> list[str]:
        named = [self._prefix + key for key in keys]
        block = self._block if self._private else self._poll
        if block(named, until):
            return []
        return [key[len(self._prefix) :] for key in self._missing(named)]

    def drop(self, keys: Sequence[str]) -> None:
        for named in [self._prefix + key for key in keys]:
            self._call(operator.methodcaller("delete_key", named))

    # -- groups ----------------------------------------------------------------------------

    def enter(self, group: str, member: int, size: int, value: bytes) -> None:
        self.post(f"{group}/{member}", value)
        if self._add(f"{group}/count") == size:
            self.post(f"{group}/{_BELL}", b"full")

    def full(self, group: str, size: int, until: float) -> list[int]:
        # One key, not `size` of them: a rank that rings need not know which ranks are missing.
        rung = not self.wait([f"{group}/{_BELL}"], until)
        if rung and self.peek(f"{group}/{_BELL}") == b"full":
            return []
        keys = [f"{self._prefix}{group}/{member}" for member in range(size)]
        return [int(key.rpartition("/")[2]) for key in self._missing(keys)]

    def ring(self, group: str) -> None:
        self.post(f"{group}/{_BELL}", b"rung")

    def collect(self, group: str, size: int) -> list[bytes]:
        keys = [f"{self._prefix}{group}/{member}" for member in range(size)]
        found: list[bytes] = []
        for first in range(0, size, KEYS_PER_CALL):
            found += self._read(keys[first : first + KEYS_PER_CALL])
        return found

    def forget(self, groups: Sequence[str], rank: int) -> None:
        for group in groups:
            self.drop([f"{group}/{rank}"])
            if rank == 0:
                self.drop([f"{group}/count", f"{group}/{_BELL}"])

    # -- opening ---------------------------------------------------------------------------

    def open(self, rank: int, size: int, until: float) -> str:
        # All ranks open a run equally often, so the n-th opening of one is that of the others. The
        # store counts, and not the process, because a process may outlive its job.
        # A rank whose peers were late tries the same opening again.
        key = self._opening.get(rank) or f"token/{self._add(f'openings/{rank}')}"
        self._opening[rank] = key
        if rank == 0:
            self.post(key, new_token().encode())
        elif self.wait([key], until):
            raise lost_leader("call the ranks to open the run")
        token = bytes(self.peek(key) or b"").decode()
        del self._opening[rank]
        return token

    def close(self) -> None:
        """Close the private connections; the next call opens one again."""
        with self._guard:
            self._idle.clear()

    # -- calls to the store ----------------------------------------------------------------

    @contextlib.contextmanager
    def _connection(self) -> Iterator[Any]:
        """A client that no other thread uses meanwhile; there are as many as threads here."""
        with self._guard:
            self.operations += 1
            store = self._idle.pop() if self._idle else None
        if store is None:
            store = self._connect()
        yield store  # not released after an error: it may be halfway through a reply
        with self._guard:
            self._idle.append(store)

    def _connect(self) -> Any:
        if not self._private:
            return self._store
        if self._failed:
            # Connecting to a dead server takes torch many minutes. A client that it has lost
            # notices at once.
            self._store.check([self._prefix])
        try:
            connection = self._store.clone()
        except (RuntimeError, OSError):
            self._store.check([self._prefix])  # raises if the server is gone
            self._private = False  # a store that cannot be cloned: share it, and poll
            return self._store
        if connection is not self._store and hasattr(connection, "set_timeout"):
            connection.set_timeout(datetime.timedelta(seconds=ANSWER_S))
        return connection

    def _call(self, action: Callable[[Any], T]) -> T:
        try:
            with self._connection() as store:
                return action(store)
        except StateholdError:
            raise
        except (RuntimeError, OSError, EOFError) as error:  # what torch raises, by release
            self._failed = True
            raise PeerLostError(
                "the store through which the ranks talk does not answer",
                ranks=(0,),
                facts={"cause": str(error).partition("\n")[0]},
                hint="rank 0 or the launcher on its host runs it: check which of them has ended",
            ) from error

    def _add(self, key: str) -> int:
        return int(self._call(lambda store: store.add(self._prefix + key, 1)))

    def _read(self, keys: list[str]) -> list[bytes]:
        if not self._call(lambda store: store.check(keys)):
            raise PeerLostError(
                "notes of ranks vanished while they were read",
                ranks=[int(key.rpartition("/")[2]) for key in self._missing(keys)],
            )
        if hasattr(self._store, "multi_get"):
            return [bytes(value) for value in self._call(lambda store: store.multi_get(keys))]
        return [bytes(self._call(operator.methodcaller("get", key))) for key in keys]

    def _missing(self, keys: list[str]) -> list[str]:
        """The missing keys: few calls if few are missing."""
        if not keys or self._call(lambda store: store.check(keys)):
            return []
        if len(keys) == 1:
            return keys
        half = len(keys) // 2
        return self._missing(keys[:half]) + self._missing(keys[half:])

    def _block(self, keys: list[str], until: float) -> bool:
        """Sleep on the server until the keys are there."""
        for _ in _pauses(until):
            # One wait for all the time left, because torch prints two warnings for each wait that
            # runs out. Never below a millisecond: that is 0 to torch, and 0 means for ever.
            left_s = max(until - time.monotonic(), WAIT_MIN_S)
            if self._call(functools.partial(_waited, keys=keys, timeout_s=left_s)):
                return True
        return False

    def _poll(self, keys: list[str], until: float) -> bool:
        return any(self._call(lambda store: store.check(keys)) for _ in _pauses(until))


class DirectoryBoard:
    """Notes as files below `path`, which all ranks share; a key's "/" are directories.

    A file appears whole, by rename. Waiting is polling. Leftovers of a dead job never count for
    this one, because open() gives a token only to ranks that answered it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.operations = 0
        self._root = os.fspath(path)

    # -- single notes ----------------------------------------------------------------------

    def post(self, key: str, value: bytes) -> None:
        path = self._path(key)
        folder, name = os.path.split(path)
        temporary = os.path.join(folder, f".{name}.{secrets.token_hex(8)}")
        with self._doing("post a note to the other ranks", path):
            with contextlib.suppress(FileNotFoundError):
                return _write(temporary, path, value)
            os.makedirs(folder, exist_ok=True)
            return _write(temporary, path, value)

    def peek(self, key: str) -> bytes | None:
        path = self._path(key)
        with self._doing("read a note of another rank", path):
            try:
                with open(path, "rb", opener=open_regular) as file:
                    return file.read()
            except FileNotFoundError:
                return None

    def wait(self, keys: Sequence[str], until: float) -> list[str]:
        missing = list(keys)
        for _ in _pauses(until):
            missing = [key for key in missing if not self._exists(key)]
            if not missing:
                break
        return missing

    def drop(self, keys: Sequence[str]) -> None:
        for path in map(self._path, keys):
            with self._doing("remove a note", path), contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            with contextlib.suppress(OSError):  # not empty yet: the rank that empties it removes it
                os.rmdir(os.path.dirname(path))

    # -- groups ----------------------------------------------------------------------------

    def enter(self, group: str, member: int, size: int, value: bytes) -> None:
        self.post(f"{group}/{member}", value)

    def full(self, group: str, size: int, until: float) -> list[int]:
        missing = list(range(size))
        for _ in _pauses(until):
            names = self._names(group)
            missing = [member for member in range(size) if str(member) not in names]
            if not missing or _BELL in names:
                break
        return missing

    def ring(self, group: str) -> None:
        self.post(f"{group}/{_BELL}", b"rung")

    def collect(self, group: str, size: int) -> list[bytes]:
        notes = [self.peek(f"{group}/{member}") for member in range(size)]
        vanished = [member for member, note in enumerate(notes) if note is None]
        if vanished:
            raise PeerLostError("notes of ranks vanished while they were read", ranks=vanished)
        return [note for note in notes if note is not None]

    def forget(self, groups: Sequence[str], rank: int) -> None:
        for group in groups:
            self.drop([f"{group}/{rank}"])
            if rank == 0:
                self.drop([f"{group}/{_BELL}"])

    # -- opening ---------------------------------------------------------------------------

    def open(self, rank: int, size: int, until: float) -> str:
        """Rank 0 calls with a new token, the others answer it with a nonce, rank 0 lists them."""
        if os.path.islink(self._root):
            # Its contents are deleted, and a link may lead anywhere.
            raise storage_error("keep the notes of the ranks in a link", errno.ELOOP, self._root)
        return self._lead(size, until) if rank == 0 else self._follow(rank, size, until)

    def _lead(self, size: int, until: float) -> str:
        token = new_token()
        self.post("call", token.encode())
        self.enter(f"{token}/hello", 0, size, b"")
        missing = self.full(f"{token}/hello", size, until)
        if missing:
            raise did_not_come("ranks did not come to open the run", missing)
        nonces = self.collect(f"{token}/hello", size)
        self.post(f"{token}/welcome", b" ".join(nonces))
        self._clear(token)
        return token

    def _follow(self, rank: int, size: int, until: float) -> str:
        nonce, answered = secrets.token_hex(8).encode(), ""
        for _ in _pauses(until):
            token = self._called()
            if token and token != answered:
                # Perhaps a dead job's call. Then rank 0 will call again, and gets another answer.
                self.enter(f"{token}/hello", rank, size, nonce)
                answered = token
            welcome = self.peek(f"{token}/welcome") if token else None
            if welcome is not None and nonce in welcome.split():
                return token
        raise lost_leader("call the ranks to open the run")

    def _called(self) -> str:
        """The token in the call; "" without one. After a loss of power a dead job's call may hold
        anything, because notes are not synced."""
        call = self.peek("call") or b""
        return call.decode() if _TOKEN.fullmatch(call) else ""

    def _clear(self, token: str) -> None:
        """Remove the leftovers of dead jobs. Live ranks may have made some of them, and make them
        again."""
        with self._doing("list the notes of the ranks", self._root):
            names = os.listdir(self._root)
        for name in names:
            if name not in (token, "call"):
                shutil.rmtree(os.path.join(self._root, name), ignore_errors=True)

    def close(self) -> None: ...

    # -- files -----------------------------------------------------------------------------

    def _path(self, key: str) -> str:
        names = [urllib.parse.quote(name, safe="").replace(".", "%2E") for name in key.split("/")]
        return os.path.join(self._root, *names)

    def _exists(self, key: str) -> bool:
        with self._doing("look for a note of another rank", self._root):
            try:
                os.stat(self._path(key))
            except FileNotFoundError:
                return False
        return True

    def _names(self, group: str) -> set[str]:
        path = self._path(group)
        with self._doing("list the notes of the ranks", path):
            try:
                return set(os.listdir(path))
            except FileNotFoundError:
                return set()

    @contextlib.contextmanager
    def _doing(self, operation: str, path: str) -> Iterator[None]:
        self.operations += 1
        with storing(operation, path):
            yield


def _waited(store: Any, keys: list[str], timeout_s: float) -> bool:
    """Whether the keys are there, now or within `timeout_s`."""
    try:
        store.wait(keys, datetime.timedelta(seconds=timeout_s))
    except (RuntimeError, OSError):
        # Time over, or the store is gone. A call tells them apart, whatever the class or text of
        # this release of torch.
        return bool(store.check(keys))
    return True


def _write(temporary: str, path: str, value: bytes) -> None:
    with open(temporary, "wb") as file:
        file.write(value)
    os.replace(temporary, path)


def _pauses(until: float) -> Iterator[None]:
    """Ticks with growing sleeps between them; the last tick comes at `until`, and there is at least
    one."""
    begin = now = time.monotonic()
    yield
    while now < until:
        pause = min(max(POLL_MIN_S, (now - begin) * POLL_SHARE), POLL_MAX_S, until - now)
        time.sleep(pause)
        now = time.monotonic()
        yield
