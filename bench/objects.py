"""`python -m bench.objects`: ObjectSteps beside obstore itself, on one server, in turns.

The figures are GB/s of one file up and down. The peers are the fastest calls of obstore itself.
They upload with `put`, the whole buffer or an iterator of its parts. They download with `get_range`
in parallel threads, and with `get_ranges`. Each is measured with the part size and the parts in
flight of ObjectSteps, and with obstore's own defaults. All get the same read-only memory. "copied"
is ObjectSteps with blocks that could be written to. "promoted" is a promotion of a file in a memory
level, from its place. "promoted, read" is a promotion of a file that is not in memory. Both verify
the file. The denominator is the fastest peer of the run, by median.

Every round takes all ways in turn, so a machine that is busy now and then slows all of them. The
first round does not count. All memory was touched before it is filled. The downloaded bytes are
compared with the uploaded ones when the clock has stopped.

The server is bench/s3_server.py in a process of its own, or another one, given by --endpoint, with
credentials in the environment and an existing bucket.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench import harness
from statehold import _core
from statehold.io.objects.client import IN_FLIGHT_BYTES, PART_BYTES, ObjectClient
from statehold.layout.plan import pieces
from statehold.steps.copying import DataFile, FileSpan, blocks, viewed_blocks
from statehold.steps.objects import ObjectSteps
from statehold.units import MiB, parse_bytes

ATTEMPT, NAME = "00000000-1", "rank-00000-of-00001.safetensors"
IN_FLIGHT = IN_FLIGHT_BYTES // PART_BYTES
Way = Callable[[], None]
Found = dict[str, list[tuple[float, float]]]


@contextlib.contextmanager
def own_server() -> Iterator[str]:
    """Run bench/s3_server.py; its endpoint."""
    command = [sys.executable, "-m", "bench.s3_server"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=harness.ROOT, **pipes) as server:
        try:
            port = int(server.stdout.readline())
            yield f"http://127.0.0.1:{port}"
        finally:
            server.stdin.close()


def slices(data: memoryview, size: int) -> Iterator[memoryview]:
    return (data[begin : begin + size] for begin in range(0, len(data), size))


def promotions(steps: ObjectSteps, data: memoryview) -> dict[str, Way]:
    """Uploads of a file in memory, as promotions make them."""
    folder = tempfile.mkdtemp(dir="/dev/shm")
    atexit.register(shutil.rmtree, folder)
    path = f"{folder}/{NAME}"
    fs = _core.open_fs("threads", 1, 1)
    made = fs.open_write(path, len(data), mapped=True)
    ctypes.memmove(made.address, bytes(data), len(data))
    cuts = pieces(0, len(data), MiB)
    sums = [_core.hash_memory(made.address + begin, end - begin) for begin, end in cuts]
    made.close()
    text = "".join(f"{each:016x}" for each in sums)
    file = DataFile(NAME, len(data), MiB, (FileSpan(0, len(data), text, ""),))

    def viewed() -> None:
        found = fs.open_view(path, len(data))
        steps.upload(1, ATTEMPT, NAME, len(data), viewed_blocks(file, found))
        found.close()

    def read() -> None:
        found = fs.open_read(path)
        steps.upload(1, ATTEMPT, NAME, len(data), blocks(file, found))
        found.close()

    return {"statehold, promoted": viewed, "statehold, promoted, read": read}


def uploads(steps: ObjectSteps, store: Any, data: memoryview) -> dict[str, Way]:
    writable = memoryview(bytearray(data))

    def through_steps(data: memoryview) -> None:
        steps.upload(1, ATTEMPT, NAME, len(data), slices(data, 4 * MiB))

    def parts(**settings: int) -> Way:
        return lambda: store.put("peer", slices(data, PART_BYTES), use_multipart=True, **settings)

    ours = {"chunk_size": PART_BYTES, "max_concurrency": IN_FLIGHT}
    return {
        "statehold": lambda: through_steps(data),
        "statehold, copied": lambda: through_steps(writable),
        **promotions(steps, data),
        "put, buffer": lambda: store.put("peer", data, use_multipart=True, **ours),
        "put, buffer, defaults": lambda: store.put("peer", data),
        "put, parts": parts(**ours),
        "put, parts, defaults": parts(),
    }


def downloads(steps: ObjectSteps, store: Any, into: memoryview) -> dict[str, Way]:
    begins = range(0, len(into), PART_BYTES)
    lengths = [min(PART_BYTES, len(into) - begin) for begin in begins]

    def part(begin: int, length: int) -> None:
        into[begin : begin + length] = memoryview(
            store.get_range("peer", start=begin, length=length)
        )

    def in_threads() -> None:
        with ThreadPoolExecutor(IN_FLIGHT) as threads:
            list(threads.map(part, begins, lengths))

    return {
        "statehold": lambda: steps.fetch(1, NAME, [(0, into)]),
        "get_range, threads": in_threads,
        "get_ranges": lambda: _drop(store.get_ranges("peer", starts=begins, lengths=lengths)),
        "get": lambda: _drop(store.get("peer").bytes()),
    }


def _drop(_: object) -> None:
    """What a peer returned stays in memory of its own; it is not copied to where it is needed."""


def rates(ways: dict[str, Way], size: int, rounds: int, check: Way) -> Found:
    """(GB/s, this process's processor seconds a GB) of each way in each counted round."""
    found: Found = {name: [] for name in ways}
    for round_ in range(-1, rounds):
        for name in random.sample(sorted(ways), len(ways)):
            begin, computed = time.perf_counter(), time.process_time()
            ways[name]()
            taken, computed = time.perf_counter() - begin, time.process_time() - computed
            if round_ >= 0:
                found[name].append((size / harness.GB / taken, computed / size * harness.GB))
        check()
    return found


def measure(endpoint: str, url: str, size: int, rounds: int) -> dict[str, Found]:
    steps = ObjectSteps(url, options={"endpoint": endpoint, "allow_http": True})
    # The same store, with the same deadlines and options, as its own methods see it.
    client: ObjectClient = steps.client
    store = client._store()
    data = (random.Random(1).randbytes(4 * MiB) * (size // (4 * MiB) + 1))[:size]
    into = bytearray(size)
    up = rates(uploads(steps, store, memoryview(data)), size, rounds, _drop_nothing)
    steps.publish(1, ATTEMPT, b"manifest")

    def check() -> None:
        steps.fetch(1, NAME, [(0, memoryview(into))])
        if into != data:
            raise SystemExit("what came back is not what was sent")

    down = rates(downloads(steps, store, memoryview(into)), size, rounds, check)
    steps.retire(1)
    client.delete("peer")
    return {"upload": up, "download": down}


def _drop_nothing() -> None:
    pass


def ratio(found: Found) -> tuple[str, float]:
    """The fastest peer, and the median over the rounds of our rate over its."""
    peers = {name: middle(values, 0) for name, values in found.items()}
    best = max((name for name in peers if "statehold" not in name), key=lambda name: peers[name])
    pairs = zip(found["statehold"], found[best], strict=True)
    return best, statistics.median(ours[0] / theirs[0] for ours, theirs in pairs)


def middle(values: list[tuple[float, float]], which: int) -> float:
    return statistics.median(value[which] for value in values)


def table(results: dict[str, Found]) -> str:
    lines = []
    for direction, found in results.items():
        best, value = ratio(found)
        lines.append(f"{direction}: {value:.2f} of the fastest peer ({best}); target 0.9")
        for name, values in found.items():
            low, high = min(values)[0], max(values)[0]
            speed, computed = middle(values, 0), middle(values, 1)
            lines.append(
                f"  {name:<25} {speed:5.2f} GB/s ({low:.2f} to {high:.2f})"
                f"  {computed:5.2f} processor s a GB"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.objects", description=__doc__)
    parser.add_argument("--size", default="128MiB")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--endpoint", help="of another server than bench/s3_server.py")
    parser.add_argument("--url", default="s3://bench/objects")
    parser.add_argument("--out", type=Path, default=Path("bench/out/objects"))
    asked = parser.parse_args(arguments)
    size = parse_bytes(asked.size)
    with contextlib.ExitStack() as stack:
        endpoint = asked.endpoint
        if endpoint is None:
            os.environ.update(AWS_ACCESS_KEY_ID="bench", AWS_SECRET_ACCESS_KEY="bench")
            os.environ.setdefault("AWS_REGION", "us-east-1")
            endpoint = stack.enter_context(own_server())
        results = measure(endpoint, asked.url, size, asked.rounds)
    print(table(results))
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "table.txt").write_text(table(results) + "\n")
    record = {"size": size, "GB/s and processor s a GB": results, "facts": harness.facts(asked.out)}
    (asked.out / "results.json").write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
