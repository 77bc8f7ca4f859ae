"""A rank as a process: python rank.py NAME PORT LEASE_S [fork]. It says why it is out at last.

With `fork` it has a child that lives on, and whose number it says first.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))
from resilience.control.peers import PATIENCE_S, Peer


def main(name: str, port: str, lease_s: str, *options: str) -> None:
    peer = Peer(name, int(port), float(lease_s))
    if options:
        peer.until(lambda each: each.epoch > 0)
        child = os.fork()
        if not child:
            time.sleep(PATIENCE_S)
            os._exit(0)
        print("child", child, flush=True)
    peer.until(lambda each: each.fenced is not None)
    print("fenced:", peer.member.fenced, flush=True)


main(*sys.argv[1:])
