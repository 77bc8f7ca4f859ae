"""`statehold kv ls|verify STORE`: the pages of a KV cache, by identity, and whether they are right.

Invariants: a store in use is not disturbed. A page whose bytes are damaged is no error of the
store, which takes it for a miss: verify still exits with 1, so that a disk that damages is found.
Not here: reading the files (kv/looking).
"""

from __future__ import annotations

import argparse

from statehold.cli import codes
from statehold.cli.output import counted, emit, say, table
from statehold.kv.looking import look
from statehold.units import format_bytes


def run(args: argparse.Namespace) -> int:
    seen = look(args.store, verify=args.action == "verify")
    if args.json:
        emit({
            "store": args.store, "slots": seen.geometry.slots,
            "slot_bytes": seen.geometry.slot_bytes, "file_bytes": seen.file_bytes,
            "payload_bytes": seen.payload_bytes, "pages": dict(seen.pages), "bad": seen.bad,
        })  # fmt: skip
    else:
        pages, slots = counted(seen.pages.total(), "page"), seen.geometry.slots
        say(f"{pages} in {slots} slots; the files take {format_bytes(seen.file_bytes)}")
        if seen.pages:
            say(table(("IDENTITY", "PAGES"), seen.pages.most_common(), right="PAGES"))
        for where in seen.bad:
            say(f"damaged: {where}")
    return codes.NO if seen.bad and args.action == "verify" else codes.YES
