"""`statehold coordinate`: the process at which the replicas of a job meet.

Invariants: it imports no torch and writes no file. After a restart at the same address it goes on:
the replicas connect again, and tell it what it knew.
Not here: decisions (resilience/protocol/coordinator), sockets (resilience/control).
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import signal
import time
from functools import partial

from statehold.cli import codes
from statehold.cli.output import emit, flush, plain, say
from statehold.errors import UsageError
from statehold.net.addresses import joined
from statehold.options.keywords import check_number
from statehold.resilience.control import Server
from statehold.resilience.protocol.coordinator import Coordinator


def run(args: argparse.Namespace) -> int:
    if args.replicas is not None and args.replicas < 1:
        raise UsageError("--replicas must be at least 1", facts={"got": args.replicas})
    if not args.settle >= 0:
        raise UsageError("--settle must be at least 0 seconds", facts={"got": args.settle})
    check_number("--port", args.port, 0, 65535)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # the kernel may allow less (fs.nr_open)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each rank of a job takes a file
    coordinator = Coordinator(args.replicas, args.settle)
    report = partial(_report, args.json)
    server = Server(coordinator, args.host, args.port, report, once=args.once)
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda *_: server.stop())
    report(f"coordinating at {joined(args.host or '*', server.port)}")
    try:
        server.serve()
    finally:
        server.close()
    return codes.YES


def _report(is_json: bool, text: str) -> None:
    line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {plain(text)}"
    with contextlib.suppress(OSError):  # a job needs its coordinator, and not the log
        emit({"time": time.time(), "event": text}, indent=None) if is_json else say(line)
        flush()
