"""Ranks in network namespaces of their own, each behind a link of a given rate. Needs root.

Owns: the namespaces, a bridge between them, and a token bucket on what each sends. Invariants:
nothing of it is left when the context ends. Names carry the process, so several runs do not meet.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

NETWORK = "10.98.77"
INTERFACE = "eth0"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextlib.contextmanager
def linked(ranks: int, mbit: int) -> Iterator[list[list[str]]]:
    """For each rank: the words that run a command in its namespace. mbit: 0 for no limit."""
    own = f"{os.getpid() % 100_000}"
    bridge, names = f"shb{own}", [f"shn{own}-{rank}" for rank in range(ranks)]
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for rank, name in enumerate(names):
            _connect(name, bridge, f"shv{own}{rank}", f"{NETWORK}.{rank + 1}/24", mbit)
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in names:  # its end of the link goes with it, and so does the other one
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)


def _connect(name: str, bridge: str, outer: str, address: str, mbit: int) -> None:
    _ip("netns", "add", name)
    _ip("link", "add", outer, "type", "veth", "peer", "name", INTERFACE, "netns", name)
    _ip("link", "set", outer, "master", bridge, "up")
    inside = ("netns", "exec", name)
    _ip(*inside, "ip", "addr", "add", address, "dev", INTERFACE)
    for interface in ("lo", INTERFACE):
        _ip(*inside, "ip", "link", "set", interface, "up")
    if mbit:
        limit = ("rate", f"{mbit}mbit", "burst", "256kb", "latency", "200ms")
        _ip(*inside, "tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf", *limit)
