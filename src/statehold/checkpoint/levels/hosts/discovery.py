"""The hosts of a job, for levels that each of them has for itself: one meeting of all ranks.

    meet     once: which ranks see the same files, which rank leads there, the addresses; a census
    census   again: which steps are whole over all hosts, and the places of their files

A host is a set of ranks that see the same files of a level. The lowest rank there leads: it
commits, retires and clears for all of them, and serves their files to other hosts. Host i has its
copies on hosts i+1, i+2, ... around.

Invariants: no rank asks another one about its files. Each leader tells rank 0, which tells all. The
meeting waits for all ranks, so no call of save() does it: it runs on the commit thread, or in calls
that all ranks make together. Its decision is the same on all, also for a rank that comes again.

Not here: the use of the decision (place), the transfer of files (serving, remote).
"""

from __future__ import annotations

import hashlib
import json
import secrets
import socket
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

from statehold.checkpoint.levels.hosts.census import Holding, PlacedFiles, settled, together
from statehold.checkpoint.levels.hosts.place import HostPlace, KnownHost
from statehold.checkpoint.levels.hosts.remote import FarFiles, RemoteFiles
from statehold.checkpoint.levels.hosts.serving import FileServer
from statehold.errors import PeerFailedError, StateholdError, UsageError
from statehold.layout.layout import Ranks
from statehold.process.host_memory import SHARED_MEMORY
from statehold.process.warn import logger
from statehold.ranks.peers import Peers
from statehold.ranks.rounds import Round
from statehold.steps.near_files import NearFiles

# -- the meeting -----------------------------------------------------------------------------------


_KIND = "hosts"
# A rank hands the secret on to so many others, in 5 ms each, and each of them does the same. So the
# secret passes four ranks on its way to the last of 16,384.
HANDED_ON = 16
CENSUS = Round("census")


class Exchange(Protocol):
    """The transfer of files from host to host."""

    def serve(self, places: Sequence[HostPlace]) -> str:
        """Serve the files of these levels, and of the copies beside them; the address."""

    def let_in(self, secret: str) -> None:
        """Answer who has this secret."""

    def reach(self, address: str, secret: str, place: str) -> FarFiles:
        """A level of the host that serves at `address`."""

    def near(self, place: HostPlace) -> NearFiles:
        """The directories for files of a level that are fetched from other hosts."""

    def stop(self) -> None:
        """Serve no longer."""

    def close(self) -> None:
        """Release everything."""


class WireExchange:
    """Between the processes of the job; `address`: of this host (serving).

    Files are fetched into memory, or without space there into the directory `run`.
    """

    def __init__(self, run: str, address: str | None = None) -> None:
        self._run = run
        self._address = address
        self._server: FileServer | None = None
        self._reached: list[RemoteFiles] = []

    def serve(self, places: Sequence[HostPlace]) -> str:
        if self._server is None:
            served = [each for place in places for each in (place, place.copies)]
            server = FileServer({each.name: each.store.root for each in served}, self._address)
            server.start()
            self._server = server
        return self._server.address

    def let_in(self, secret: str) -> None:
        if self._server is not None:
            self._server.let_in(secret)

    def reach(self, address: str, secret: str, place: str) -> FarFiles:
        self._reached.append(RemoteFiles(address, secret, place))
        return self._reached[-1]

    def near(self, place: HostPlace) -> NearFiles:
        return NearFiles((SHARED_MEMORY, self._run))

    def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    def close(self) -> None:
        self.stop()
        for each in self._reached:
            each.close()


class Hosts:
    """The hosts, as one rank sees them. Thread-safe. places: the levels that a host may have for
    itself; a rank that has none comes to no meeting."""

    def __init__(
        self, places: Sequence[HostPlace], peers: Peers | None, exchange: Exchange
    ) -> None:
        self._places = places
        self._peers = peers
        self._exchange = exchange
        self._guard = threading.Lock()
        self._is_known = peers is None
        if peers is None:
            only = KnownHost(socket.gethostname(), (0,), {})
            for place in places:
                place.met((only,), 0, 0, exchange.near(place))
                _warn_of_missing_copies(place, 1)
        self._learned = False
        self._outcome: Any = None  # of the meeting, once it is known
        self._secret, self._handed = "", 0  # to so many others
        self._tries = 0

    @cached_property
    def _keys(self) -> KeyPair:
        return KeyPair()

    def discover(self) -> None:
        """Meet the other ranks, unless that has happened. Raises on all of them if the meeting
        fails on one. A rank that fails behind it goes on there at the next call."""
        with self._guard:
            if not self._is_known and self._peers is not None:
                self._discover(self._peers)
                self._is_known = self._learned = True

    def give_up(self, error: StateholdError) -> None:
        """This rank will not come to the meeting now: end it for all, if others may wait."""
        with self._guard:
            if self._peers is not None and self._outcome is None and not self._learned:
                self._peers.fail(self._tries, error, _KIND)
                self._tries += 1

    def census(self, within: Round = CENSUS) -> None:
        """All ranks together, with no save under way: look again which steps are whole.

        Nothing to do on one host.
        """
        self.discover()
        apart = [place for place in self._places if place.is_apart]
        if not apart or self._peers is None:
            return
        for place in apart:
            place.begin_census()
        note = {place.name: place.holdings() for place in apart if place.leads}

        def decide(notes: list[Any]) -> dict[str, Any]:
            by_level = {place.name: _holdings_of_leaders(place, notes) for place in apart}
            return _settled(by_level, set(by_level))

        found = within.hold(self._peers, note, decide)
        for place in apart:
            _take(place, found[place.name])

    @property
    def are_apart(self) -> bool:
        """Whether a level lies on several hosts, as far as this rank knows."""
        return any(place.is_apart for place in self._places)

    def close(self) -> None:
        self._exchange.close()

    # -- the meeting -----------------------------------------------------------------------

    def _discover(self, peers: Peers) -> None:
        if self._outcome is None:
            self._outcome = self._meet(peers)
        levels, found = self._outcome
        if any(len(hosts) > 1 for hosts in levels.values()):
            self._hand_on(peers)
            self._exchange.let_in(self._secret)
        peers.drop(_key_of(peers.rank))
        for place in self._places:
            self._learn(place, levels[place.name], peers.rank)
            _take(place, found[place.name])
        if not any(place.is_apart and place.leads for place in self._places):
            self._exchange.stop()

    def _meet(self, peers: Peers) -> Any:
        peers.post(_key_of(peers.rank), self._keys.public.encode())
        try:
            return Round(_KIND, self._tries).hold(peers, self._note(), self._decide)
        except StateholdError:
            # A meeting that has ended is not repeated. A rank that missed its end still gets the
            # outcome.
            if peers.has_ended(_KIND, self._tries):
                self._tries += 1
            raise

    def _note(self) -> dict[str, Any]:
        """The message of this rank to the others: itself, and the steps on its host."""
        note: dict[str, Any] = {"name": socket.gethostname(), "levels": {}}
        for place in self._places:
            level = {"identity": place.identity(), "holdings": place.holdings()}
            note["levels"][place.name] = level
        try:
            note["address"] = self._exchange.serve(self._places)
        except StateholdError as error:  # matters only with another host
            note["error"] = str(error)
        return note

    def _decide(self, notes: list[Any]) -> list[Any]:
        levels = {place.name: _leaders(place, notes) for place in self._places}
        hosts = {place.name: _hosts(place, notes, levels[place.name]) for place in self._places}
        found = _settled(
            {
                name: _holdings(notes[ranks[0]]["levels"][name]["holdings"] for ranks in there)
                for name, there in levels.items()
            },
            {name for name, there in levels.items() if len(there) > 1},
        )
        return [hosts, found]

    def _hand_on(self, peers: Peers) -> None:
        """Get the secret of the servers from the rank that hands it to this one, and hand it on.
        Raises PeerLostError."""
        rank = peers.rank
        if not self._secret and rank == 0:
            self._secret = drawn()
        elif not self._secret:
            public, hidden = json.loads(peers.awaited(_secret_of(rank), _before(rank)))
            self._secret = self._keys.opened(hidden, public)
            peers.drop(_secret_of(rank))
        first = HANDED_ON * rank + 1
        for each in range(first + self._handed, min(first + HANDED_ON, peers.world_size)):
            if (key := peers.peek(_key_of(each))) is not None:
                note = self._keys.public, self._keys.hidden(self._secret, key.decode())
                peers.post(_secret_of(each), json.dumps(note).encode())
            self._handed += 1

    def _learn(self, place: HostPlace, known: Sequence[Sequence[Any]], rank: int) -> None:
        mine, hosts = 0, []
        for index, (name, address, ranges) in enumerate(known):
            ranks = tuple(each for first, last in ranges for each in range(first, last + 1))
            files: dict[str, FarFiles] = {}
            if rank in ranks:
                mine = index
            elif len(known) > 1:
                names = (place.name, place.copies.name)
                files = {each: self._exchange.reach(address, self._secret, each) for each in names}
            hosts.append(KnownHost(name, ranks, files))
        place.met(hosts, mine, rank, self._exchange.near(place))
        if rank == 0:
            _warn_of_missing_copies(place, len(hosts))


def _key_of(rank: int) -> str:
    return f"{_KIND}-key-{rank}"


def _secret_of(rank: int) -> str:
    return f"{_KIND}-secret-{rank}"


def _before(rank: int) -> list[int]:
    """The ranks through which the secret comes to this one."""
    found = list[int]()
    while rank:
        rank = (rank - 1) // HANDED_ON
        found.append(rank)
    return found


def _warn_of_missing_copies(place: HostPlace, hosts: int) -> None:
    """Log a warning if there are fewer hosts than copies need."""
    if place.wanted_copies >= hosts:
        there = f"there are {hosts} hosts" if hosts > 1 else "this process is alone"
        logger.warning(
            "level %s asks for %d copies on other hosts, but %s: it keeps %d",
            place.name, place.wanted_copies, there, hosts - 1,
        )  # fmt: skip


def _leaders(place: HostPlace, notes: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Rank 0: the ranks of each host of a level; the first of them leads there."""
    ranks: dict[str, list[int]] = {}
    for rank, note in enumerate(notes):
        ranks.setdefault(note["levels"][place.name]["identity"], []).append(rank)
    return list(ranks.values())


def _hosts(
    place: HostPlace, notes: Sequence[Mapping[str, Any]], there: Sequence[Sequence[int]]
) -> list[list[Any]]:
    """Rank 0: the hosts of a level, as all ranks get them."""
    leaders = [notes[ranks[0]] for ranks in there]
    keep = place.store.retention.keep
    if len(leaders) > 1 and keep is not None and keep.last == 1:
        shown = sorted({leader["name"] for leader in leaders})[:8]
        raise UsageError(
            "a level on several hosts must keep at least 2 steps",
            facts={"level": place.name, "got": "keep=1, or last=1", "hosts": ", ".join(shown)},
        )
    for ranks in there:
        if len(leaders) > 1 and "error" in notes[ranks[0]]:
            raise PeerFailedError(ranks[0], notes[ranks[0]]["error"])
    names = [leader["name"] for leader in leaders]
    count = Counter(names)
    return [
        [
            # Containers may all have the same name, so this name tells their files apart.
            name if count[name] == 1 else f"{name} of rank {ranks[0]}",
            leader.get("address"),
            Ranks.of(ranks).ranges,
        ]
        for name, leader, ranks in zip(names, leaders, there, strict=True)
    ]


Holdings = list[tuple[int, Holding]]  # a host, and a directory that it has


def _holdings_of_leaders(place: HostPlace, notes: Sequence[Mapping[str, Any]]) -> Holdings:
    """Rank 0: the messages of the leading ranks of a level."""
    return _holdings(notes[host.ranks[0]].get(place.name) or [] for host in place.hosts)


def _holdings(by_host: Iterable[Sequence[Sequence[Any]]]) -> Holdings:
    return [
        (host, Holding.of(document))
        for host, documents in enumerate(by_host)
        for document in documents
    ]


def _settled(by_level: Mapping[str, Holdings], apart: Collection[str]) -> dict[str, Any]:
    """Rank 0: for each level the whole steps, and its parts of steps that are whole only over all
    levels of several hosts, `apart`."""
    joint = together({name: by_level[name] for name in apart})
    found = {}
    for name, each in by_level.items():
        whole, missing = settled(each)
        found[name] = {
            "whole": [[step, placed.document()] for step, placed in whole.items()],
            "joint": [[step, placed.document()] for step, placed in joint.get(name, {}).items()],
            "missing": [[step, ranks.ranges] for step, ranks in missing.items()],
        }
    return found


def _take(place: HostPlace, found: Mapping[str, Any]) -> None:
    place.take_census(
        {step: PlacedFiles.of(document) for step, document in found["whole"]},
        {step: PlacedFiles.of(document) for step, document in found["joint"]},
        {step: Ranks(tuple(map(tuple, ranges))) for step, ranges in found["missing"]},
    )


# -- one secret for all ranks ----------------------------------------------------------------------
# The store of torch answers everybody who connects, and lists its keys. So the secret itself is
# never there: it is hidden under a key that only two ranks can compute (Diffie-Hellman in group 14
# of RFC 3526). A file of the run directory would need no arithmetic, but hosts may share none.
#
# What is on the board does not tell the secret. Who writes to the board may pass for a rank, as
# everywhere in torch.distributed.


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
    """The keys of one rank:

        keys = KeyPair()                        each rank, which posts keys.public
        hidden = keys.hidden(secret, public)    who hands it to the rank that has posted `public`
        secret = keys.opened(hidden, public)    that rank, with the key of who hands it on

    A rank has them for as long as it meets the others.
    """

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
