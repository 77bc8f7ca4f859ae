"""Ranks in processes of their own, for tests that kill them: each opens, then makes rounds as told.

A rank is forked from a server that has imported torch. It sends its token, then for each number
of a round a dict: "outcome"; or "error" (its class), "text", and "ranks" or "rank".
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from statehold.errors import StateholdError
from statehold.ranks.board import Board, DirectoryBoard, StoreBoard
from statehold.ranks.membership import Membership
from statehold.ranks.peers import Peers
from support.boards import DEADLINE_S
from support.faults import must
from support.forked import forked


def board(kind: str, where: str) -> Board:
    if kind == "directory":
        return DirectoryBoard(where)
    store = dist.TCPStore("127.0.0.1", int(where), is_master=False, wait_for_workers=False)
    return StoreBoard(dist.PrefixStore("default_pg", store), "runs/x")


def take_part(peers: Peers, seq: int) -> dict[str, object]:
    try:
        peers.arrive(seq, b"%d" % peers.rank)
        if peers.rank:
            return {"outcome": peers.outcome(seq).decode()}
        try:
            result = b"+".join(peers.gather(seq))
        except StateholdError as error:
            peers.conclude(seq, error)
            raise
        peers.conclude(seq, result)
        return {"outcome": result.decode()}
    except StateholdError as error:
        told = {name: getattr(error, name) for name in ("rank", "ranks") if hasattr(error, name)}
        return {"error": type(error).__name__, "text": str(error), **told}


def _quietly(body: Callable[..., None], *arguments: object) -> None:
    """Without what torch writes where a store's server has died, which is pages."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    body(*arguments)


def _end(own: Connection) -> None:
    """Until the test lets this process go, by closing its end."""
    with contextlib.suppress(EOFError):
        own.recv()


def serve_store(own: Connection) -> None:
    """Serves a store; says its port."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    own.send(store.port)
    _end(own)


def be_rank(own: Connection, kind: str, where: str, rank: int, size: int, timeout_s: float) -> None:
    """Opens, says the token, then makes rounds as told, and says what came of each."""
    peers = Peers(board(kind, where), Membership(rank, size), DEADLINE_S)
    own.send(peers.open())
    peers.timeout_s = timeout_s  # not before: the others may still have to start
    with contextlib.suppress(EOFError):
        while True:
            own.send(take_part(peers, own.recv()))


class Process:
    """A forked process that is asked, and answers."""

    def __init__(self, body: Callable[..., None], *arguments: object) -> None:
        context = forked()
        self._end, theirs = context.Pipe()
        self._process = context.Process(
            target=_quietly, args=(body, theirs, *arguments), daemon=True
        )
        self._process.start()
        theirs.close()

    def tell(self, order: object) -> None:
        self._end.send(order)

    def read(self) -> Any:
        must(self._end.poll(DEADLINE_S), "a process does not answer")
        return self._end.recv()

    def kill(self) -> None:
        """SIGKILL; returns when it is dead."""
        self._process.kill()
        self._process.join(DEADLINE_S)
        must(self._process.exitcode is not None)
