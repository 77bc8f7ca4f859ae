"""Boards of every kind, and ranks as threads that meet on them."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from statehold.ranks.board import Board, DirectoryBoard, StoreBoard
from statehold.ranks.membership import Membership
from statehold.ranks.peers import Peers
from support.in_memory import MemoryBoard

T = TypeVar("T")
DEADLINE_S = 60.0
Maker = Callable[[], Board]


def memory(_folder: Path) -> Maker:
    board = MemoryBoard()
    return lambda: board


def directory(folder: Path) -> Maker:
    return lambda: DirectoryBoard(folder / "peers")


def tcp_server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def tcp_client(port: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


def tcp(_folder: Path) -> Maker:
    """A client of its own for every rank, below a prefix, as torch.distributed hands it out."""
    server = tcp_server()

    def make() -> Board:
        store = dist.PrefixStore("default_pg", tcp_client(server.port))
        return StoreBoard(store, "runs/x")

    return make


def file(folder: Path) -> Maker:
    return lambda: StoreBoard(dist.FileStore(str(folder / "store")), "runs/x")


def hashed(_folder: Path) -> Maker:
    store = dist.HashStore()
    return lambda: StoreBoard(store, "runs/x")


class Uncloned:
    """A store without clone(): what is waited for must be asked for."""

    def __init__(self, store: Any) -> None:
        for name in ("set", "get", "add", "check", "delete_key"):
            setattr(self, name, getattr(store, name))


def uncloned(_folder: Path) -> Maker:
    store = Uncloned(dist.HashStore())
    return lambda: StoreBoard(store, "runs/x")


KINDS = {
    "memory": memory,
    "directory": directory,
    "tcp": tcp,
    "file": file,
    "hash": hashed,
    "uncloned": uncloned,
}


def peers_of(make: Maker, size: int, timeout_s: float = DEADLINE_S) -> list[Peers]:
    return [Peers(make(), Membership(rank, size), timeout_s) for rank in range(size)]


def together(peers: list[Peers], act: Callable[[Peers], T]) -> list[T | BaseException]:
    """What `act` returns or raises on each rank, all running at once."""

    def caught(one: Peers) -> T | BaseException:
        try:
            return act(one)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(peers)) as pool:
        return list(pool.map(caught, peers))


def seconds(count: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=count)
