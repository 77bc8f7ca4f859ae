"""One rank in a process of its own, for tests that kill it: opens, then makes rounds as told.

rank.py KIND WHERE RANK SIZE TIMEOUT_S. KIND is "tcp" (WHERE: port), or "directory" (WHERE: path).
Each line on stdin is the number of a round; each line on stdout is JSON: {"open": token}, then one
{"round": n, ...} with "outcome", or "error" (its class) and "ranks" or "rank".
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch.distributed as dist

from statehold.errors import StateholdError
from statehold.ranks.board import Board, DirectoryBoard, StoreBoard
from statehold.ranks.peers import Peers
from support.boards import DEADLINE_S


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


def main() -> None:
    kind, where, rank, size, timeout_s = sys.argv[1:]
    peers = Peers(board(kind, where), int(rank), int(size), DEADLINE_S)
    print(json.dumps({"open": peers.open()}), flush=True)
    peers._timeout_s = float(timeout_s)  # not before: the others may still be importing torch
    for line in sys.stdin:
        print(json.dumps({"round": int(line), **take_part(peers, int(line))}), flush=True)


if __name__ == "__main__":
    main()
