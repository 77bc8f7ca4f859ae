"""`python -m bench.scale`: how public calls grow with what a run holds, and a job of 16,384 ranks.

Owns: the runs of each size, the calls, the exponents, and the table. A group is one thing that
grows: `steps` kept, `tensors` of a rank, `samples` of a data position, `files` of a step (a rank
writes one), `replicas` of a job, and `ranks` that save together.

Invariants: a figure is the processor time of all threads of this process, as a median, so waiting
for a disk does not count, and other work of the machine counts little. The exponent is the slope
over the two largest sizes: 1 is linear. Calls of `ranks` go through the product's own rounds, on a
store that counts: calls, and bytes in both directions. What a call of TCPStore costs is measured in
the same run. The page that has the results says what is arithmetic with these.
Not here: planning (plan.py), and the bytes of tensors (save.py).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import math
import random
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

import statehold
from bench import harness
from bench.report import Column, table
from statehold import lineage
from statehold._core import xxh3_64
from statehold.checkpoint.levels.hosts.census import Holding, settled
from statehold.checkpoint.levels.hosts.discovery import HANDED_ON, KeyPair, drawn
from statehold.cli import main as command
from statehold.format.entries import record_file, sha256
from statehold.format.manifest import Commit, Manifest, RecordEntry, groups_of, record_name
from statehold.format.record import Record
from statehold.format.saved import MANIFEST_NAME
from statehold.layout.claims import judge
from statehold.layout.layout import Layout, Mesh, Ranks
from statehold.layout.plan import BLOCK_BYTES, TensorSpec, pieces, plan_save
from statehold.layout.share import HeldTensor, balance
from statehold.ranks.board import StoreBoard
from statehold.ranks.membership import Membership
from statehold.ranks.peers import Peers
from statehold.resilience.protocol.coordinator import Coordinator
from statehold.resilience.protocol.member import Member
from statehold.resilience.protocol.messages import Beat, Hello, Install, View, encode

STAGING = "64MiB"
ATTEMPT = "01234567-0"
HOST_RANKS = 8
WAIT_S = 600.0
LONG_S = 2.0
Row = dict[str, Any]
Calls = Iterator[tuple[str, float]]


def seconds(action: Callable[[], object], times: int = 3) -> float:
    """Processor seconds of a call; a long one is not made again."""
    found: list[float] = []
    while len(found) < times and sum(found) < LONG_S:
        begin = time.process_time()
        action()
        found.append(time.process_time() - begin)
    return harness.median(found) or 0.0


def said(*words: str) -> Callable[[], int]:
    """A command of statehold, without its output."""

    def run() -> int:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return command(list(words))

    return run


def opened(run: Path, **options: Any) -> statehold.Checkpointer:
    return statehold.Checkpointer(run, staging_bytes=STAGING, **options)


# -- calls of one process --------------------------------------------------------------------------


def of_a_run(run: Path, state: dict[str, Any], keep: Any, newest: int) -> Calls:
    """The calls that read or save a step."""
    with opened(run, keep=keep) as ckpt:
        yield "restore", seconds(lambda: ckpt.restore(state))
        numbers = iter(range(newest + 1, newest + 100))

        def save() -> statehold.Save:
            return ckpt.save(next(numbers), state)

        save().wait("committed", WAIT_S)
        handles: list[statehold.Save] = []
        returned = []
        for _ in range(5):
            returned.append(seconds(lambda: handles.append(save()), 1))
            handles[-1].wait("committed", WAIT_S)
        yield "save, until it returns", harness.median(returned) or 0.0
        yield "save, until committed", seconds(lambda: save().wait("committed", WAIT_S), 5)
        yield "steps()", seconds(ckpt.steps)
        yield "levels()", seconds(ckpt.levels)
    yield "load", seconds(lambda: statehold.load(run))
    yield "open, newest()", seconds(lambda: statehold.open(run).newest())
    yield "open, steps()", seconds(lambda: statehold.open(run).steps())
    yield "ls", seconds(said("ls", str(run)), 1)
    yield "verify RUN", seconds(said("verify", str(run)), 1)
    yield "prune", seconds(said("prune", str(run), "--keep", "1"), 1)
    tensors = {"model": {name: torch.empty_like(each) for name, each in state["model"].items()}}
    with statehold.subscribe(run, tensors) as updates:
        first = updates.wait(WAIT_S)
        if first is not None:
            first.apply()
        yield "a poll without news", seconds(lambda: updates.wait(0))


def steps(size: int, folder: Path) -> Calls:
    """Small steps, all of which stay; after the first they are its files with another number."""
    run, state = (
        folder / "run",
        {"model": {"a": torch.ones(8, device="cpu"), "b": torch.ones(3, device="cpu")}},
    )
    with opened(run) as ckpt:
        ckpt.save(1, state).wait("committed", WAIT_S)
    for step in range(2, size + 1):
        copy = run / f"step-{step:012d}"
        shutil.copytree(run / f"step-{1:012d}", copy)
        manifest = Manifest.decode((copy / MANIFEST_NAME).read_bytes(), "manifest")
        (copy / MANIFEST_NAME).write_bytes(dataclasses.replace(manifest, step=step).encode())
    yield from of_a_run(run, state, statehold.Keep(last=2, every=1), size)
    yield "verify --all", seconds(said("verify", str(run), "--all"), 1)
    catalog = lineage.Catalog(folder)
    yield "Catalog.scan, all new", seconds(catalog.scan, 1)
    yield "Catalog.scan, none new", seconds(catalog.scan)
    yield "lineage.nearest", seconds(lambda: lineage.nearest(torch.nn.Linear(3, 3), catalog))
    yield "tree", seconds(said("tree", str(folder)), 1)
    yield "rewind to the first half", rewound(run, size // 2 or 1)


def rewound(run: Path, step: int) -> float:
    with opened(run) as ckpt:
        return seconds(lambda: ckpt.rewind(step), 1)


def tensors(size: int, folder: Path) -> Calls:
    model = {f"layers.{i}.weight": torch.full((4,), float(i), device="cpu") for i in range(size)}
    yield from saved_once(folder / "run", {"model": model})


def samples(size: int, folder: Path) -> Calls:
    """A position that lists an order of samples, as plain values."""
    data = {"order": list(range(size)), "next": size // 2}
    yield from saved_once(
        folder / "run", {"model": {"a": torch.ones(4, device="cpu")}, "data": data}
    )


def saved_once(run: Path, state: dict[str, Any]) -> Calls:
    with opened(run, keep=2) as ckpt:
        first: list[statehold.Save] = []
        yield "first save, until it returns", seconds(lambda: first.append(ckpt.save(1, state)), 1)
        first[0].wait("committed", WAIT_S)
    yield from of_a_run(run, state, 2, 1)


def files(size: int, folder: Path) -> Calls:
    """A step of as many ranks, each of which has written a part of two tensors."""
    run = folder / "run"
    write_step(run, size)
    yield "load", seconds(lambda: statehold.load(run))
    yield "open, newest()", seconds(lambda: statehold.open(run).newest())
    yield "open, steps()", seconds(lambda: statehold.open(run).steps())
    yield "ls", seconds(said("ls", str(run)), 1)
    yield "verify RUN", seconds(said("verify", str(run)), 1)
    whole = {"model": {name: torch.zeros(size, 8, device="cpu") for name in ("a", "b")}}
    with opened(run) as ckpt:
        yield "restore, by one rank", seconds(lambda: ckpt.restore(whole))
        yield "steps()", seconds(ckpt.steps)
    with statehold.subscribe(run, whole) as updates:
        first = updates.wait(WAIT_S)
        if first is not None:
            first.apply()
        yield "a poll without news", seconds(lambda: updates.wait(0))
    yield "copy_step", seconds(lambda: statehold.copy_step(run, folder / "copy"), 1)


def record_of(rank: int, world: int) -> tuple[Record, bytes]:
    """The record of a rank, and its data file."""
    layout = Layout(Mesh((world,), tuple(range(world))), ((0, 0),))
    held = tuple(HeldTensor(name, "F32", (world, 8), layout) for name in ("a", "b"))
    specs = [
        TensorSpec(each.name, "F32", (1, 8), 32, False, layout, each.shape, (rank, 0))
        for each in held
    ]
    plan = plan_save(specs, step=1, world_size=world, rank=rank)
    content = plan.header + bytes(32 * len(specs))
    segments = [(0, plan.data_begin), *((begin, 32) for begin in plan.begins)]
    sums = b"".join(
        xxh3_64(content[begin:end]).to_bytes(8, "little")
        for at, nbytes in segments
        for begin, end in pieces(at, nbytes, BLOCK_BYTES)
    )
    file, entries = record_file(plan, sums)
    state = {"model": {each.name: {"$tensor": each.name} for each in held}}
    chunks = {name: entry.chunks for name, entry in entries.items()}
    record = Record(1, world, rank, ATTEMPT, BLOCK_BYTES, (file,), held, chunks, state)
    return record, content


def commit_of(records: Sequence[RecordEntry], digests: Sequence[Mapping[str, str]]) -> Commit:
    created = "2026-11-28T07:00:00+00:00"
    state = groups_of(digests)
    return Commit(1, len(records), created, "statehold", ATTEMPT, tuple(records), state)


def write_step(run: Path, world: int) -> None:
    folder = run / f"step-{1:012d}"
    folder.mkdir(parents=True)
    entries, digests = [], []
    for rank in range(world):
        record, content = record_of(rank, world)
        raw = record.encode()
        entries.append(RecordEntry(record_name(rank, world), len(raw), sha256(raw)))
        digests.append(record.group_digests())
        (folder / record.files[0].name).write_bytes(content)
        (folder / entries[-1].name).write_bytes(raw)
    (folder / MANIFEST_NAME).write_bytes(commit_of(entries, digests).encode())


# -- replicas --------------------------------------------------------------------------------------


class Job:
    """A coordinator and the members of a job, each of one rank, without sockets."""

    def __init__(self, replicas: int) -> None:
        self.coordinator = Coordinator(replicas)
        self.members: dict[int, Member] = {}
        self.messages = self.bytes = 0
        self.coordinator_s = 0.0
        self.member_s: list[float] = []
        for conn in range(replicas):
            desk = f"10.0.{conn // 250}.{conn % 250}:40000"
            hello = Hello(f"replica-{conn}", 0, 1, {"seed": "1"}, View(0, digest="x"), desk=desk)
            self.members[conn] = Member(hello, microbatches=replicas)

    def tell(self, *events: Callable[[], Any]) -> None:
        """Events for the coordinator, and all that follows from them."""
        waiting = deque(events)
        last, size = None, 0
        while waiting:
            begin = time.process_time()
            sent = waiting.popleft()()
            self.coordinator_s += time.process_time() - begin
            for conn, message in sent:
                if message is not last:
                    last, size = message, len(encode(message))
                self.messages += 1
                self.bytes += size
                if conn not in self.members or (isinstance(message, Install) and self.member_s):
                    continue  # what an epoch costs one member is measured once
                begin = time.process_time()
                answer = self.members[conn].receive(message)
                if isinstance(message, Install):
                    self.member_s.append(time.process_time() - begin)
                if answer is not None:
                    waiting.append(partial(self.coordinator.receive, conn, answer, 0.5))


def replicas(size: int, folder: Path) -> Calls:
    job = Job(size)
    for conn, member in job.members.items():
        job.tell(partial(job.coordinator.hello, conn, member.hello(), 0.0))
    yield "coordinator: the job begins", job.coordinator_s
    member = job.members[0]
    yield "a member: an epoch begins", job.member_s[0]
    beats = [partial(job.coordinator.receive, conn, Beat(0), 0.1) for conn in job.members]
    yield "coordinator: a beat of each", seconds(lambda: [beat() for beat in beats])
    yield "coordinator: a tick", seconds(lambda: job.coordinator.tick(0.1))
    yield "Replicas.commit", seconds(lambda: member.commit(member.epoch, end_epoch=False), 5)


GROUPS: dict[str, tuple[Callable[[int, Path], Calls], tuple[int, ...]]] = {
    "steps": (steps, (1, 10, 100, 1_000, 10_000)),
    "tensors": (tensors, (10, 100, 1_000, 10_000, 100_000)),
    "samples": (samples, (100, 1_000, 10_000, 100_000, 1_000_000)),
    "files": (files, (1, 10, 100, 1_000)),
    "replicas": (replicas, (1, 10, 100, 1_000, 4_000)),
}


# -- ranks that save together ----------------------------------------------------------------------


class Counting:
    """A store of torch that counts what goes to it and comes from it."""

    def __init__(self) -> None:
        self._store: Any = HashStore()
        self.calls = self.bytes_in = self.bytes_out = 0

    def set(self, key: str, value: bytes) -> None:
        self.calls += 1
        self.bytes_in += len(key) + len(value)
        self._store.set(key, value)

    def add(self, key: str, amount: int) -> int:
        self.calls += 1
        return int(self._store.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        self.calls += 1
        self.bytes_in += sum(map(len, keys))
        return bool(self._store.check(keys))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.calls += 1
        found = [bytes(each) for each in self._store.multi_get(keys)]
        self.bytes_out += sum(map(len, found))
        return found

    def wait(self, keys: list[str], timeout: Any) -> None:
        self.calls += 1
        self._store.wait(keys, timeout)

    def delete_key(self, key: str) -> bool:
        self.calls += 1
        return bool(self._store.delete_key(key))


def job_on(world: int) -> tuple[Counting, list[Peers]]:
    store = Counting()
    boards = [StoreBoard(store, "run") for _ in range(world)]
    peers = [Peers(board, Membership(rank, world), WAIT_S) for rank, board in enumerate(boards)]
    return store, peers


def message_of(rank: int, digests: Mapping[str, str]) -> bytes:
    """What a rank says when its part is durable (save/publishing)."""
    about = {"step": 1, "bytes": 1 << 30, "host": f"host-{rank // HOST_RANKS}", "version": 1}
    return json.dumps(
        {**about, "record": [9_000, "0" * 64], "digests": digests, "claims": {}}
    ).encode()


def save_of(world: int) -> Row:
    """A save's commit, from D4 on."""
    store, peers = job_on(world)
    digests = record_of(0, 8)[0].group_digests()
    for seq in range(3):  # in the last one, notes of rounds before are dropped
        store.calls = store.bytes_in = store.bytes_out = 0
        for rank, peer in enumerate(peers):
            peer.arrive(seq, message_of(rank, digests))
        begin = time.process_time()
        messages = [json.loads(each) for each in peers[0].gather(seq)]
        judge([each["claims"] for each in messages])
        entries = [
            RecordEntry(record_name(rank, world), *each["record"])
            for rank, each in enumerate(messages)
        ]
        raw = commit_of(entries, [each["digests"] for each in messages]).encode()
        spread = balance([each["bytes"] for each in messages], [each["host"] for each in messages])
        outcome = json.dumps({"lesson": {}, "balance": dataclasses.asdict(spread)}).encode()
        peers[0].conclude(seq, outcome)
        rank_0_s = time.process_time() - begin
        for peer in peers[1:]:
            peer.outcome(seq)
    decode = seconds(lambda: Manifest.decode(raw, "manifest"))
    return {
        "ranks": world,
        "calls": store.calls,
        "bytes_in": store.bytes_in,
        "bytes_out": store.bytes_out,
        "rank_0_s": rank_0_s,
        "manifest_bytes": len(raw),
        "decode_s": decode,
    }


def meeting_of(world: int) -> Row:
    """The first meeting at a level of each host: each rank hides the secret of the job for a few
    others, and all read where the hosts are."""
    own, other, secret = KeyPair(), KeyPair(), drawn()
    each_s = seconds(lambda: own.hidden(secret, other.public), 9)
    in_a_row, rank = 0, world - 1
    while rank:
        in_a_row, rank = in_a_row + 1, (rank - 1) // HANDED_ON
    firsts = range(0, world, HOST_RANKS)
    hosts = [
        [f"host-{first // HOST_RANKS}", "10.100.100.100:40000", [[first, first + HOST_RANKS - 1]]]
        for first in firsts
    ]
    return {
        "ranks": world,
        "a key, ms": 1e3 * each_s,
        "a rank_s": each_s * HANDED_ON,
        "in a row": in_a_row,
        "answer_bytes": len(json.dumps(hosts)),
    }


def losses_of(hosts: int, lost: int, tries: int = 5) -> Row:
    """A census after a loss, where the next host has a copy: is the newest step whole?"""
    draw = random.Random(lost)
    whole, took = 0, []
    for _ in range(tries):
        gone = set(draw.sample(range(hosts), lost))
        held = []
        for host in (each for each in range(hosts) if each not in gone):
            for is_copy, owner in ((False, host), (True, (host - 1) % hosts)):
                ranks = Ranks.of(range(owner * HOST_RANKS, (owner + 1) * HOST_RANKS))
                held.append((host, Holding(9, is_copy, "a" * 64, "", hosts * HOST_RANKS, ranks)))
        begin = time.process_time()
        whole += 9 in settled(held)[0]
        took.append(time.process_time() - begin)
    apart = math.comb(hosts - lost, lost)  # on a circle, times hosts / (hosts - lost)
    chance = Fraction(apart * hosts, (hosts - lost) * math.comb(hosts, lost))
    return {
        "hosts": hosts,
        "lost": lost,
        "holdings": len(held),
        "rank_0_s": harness.median(took),
        "message_bytes": sum(len(json.dumps(each.document())) for _, each in held[:2]),
        "whole": f"{whole} of {tries}",
        "chance": float(chance),
    }


def membership_of(replicas: int, lost: int) -> Row:
    """Replicas are lost at once; the others enter an epoch without them."""
    job = Job(replicas)
    for conn, member in job.members.items():
        job.tell(partial(job.coordinator.hello, conn, member.hello(), 0.0))
    job.messages = job.bytes = 0
    job.coordinator_s, job.member_s = 0.0, []
    for conn in range(0, 2 * lost, 2):
        del job.members[conn]
    job.tell(*(partial(job.coordinator.lost, conn, 0.5) for conn in range(0, 2 * lost, 2)))
    return {
        "replicas": replicas,
        "lost": lost,
        "messages": job.messages,
        "bytes": job.bytes,
        "coordinator_s": job.coordinator_s,
        "member_s": job.member_s[0],
        "epoch": job.coordinator.epoch,
    }


def store_costs(clients: int = 16, calls: int = 400) -> Row:
    """What a call of TCPStore costs, and what a connection takes, with its server in this process.

    All clients call at once, so a client and the server share the processors of this machine."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    before = len(list(Path("/proc/self/fd").iterdir()))
    boards = [
        StoreBoard(TCPStore("127.0.0.1", server.port, is_master=False), "run")
        for _ in range(clients)
    ]
    peers = [Peers(board, Membership(r, clients), WAIT_S) for r, board in enumerate(boards)]
    with ThreadPoolExecutor(clients) as threads:
        list(threads.map(lambda peer: peer.agree("a", b"", lambda _: b""), peers))
        per_rank = (len(list(Path("/proc/self/fd").iterdir())) - before) / clients
        begin = time.perf_counter()

        def many(board: StoreBoard) -> None:
            for number in range(calls):
                board.post(f"k{number % 8}", bytes(400))

        list(threads.map(many, boards))
        took = time.perf_counter() - begin
        begin = time.perf_counter()
        boards[0].post("large", bytes(8 << 20))
        for board in boards:
            board.peek("large")
        rate = clients * (8 << 20) / (time.perf_counter() - begin)
    return {
        "call_us": 1e6 * took / (clients * calls),
        "descriptors_of_both_sides": per_rank,
        "bytes_per_s": rate,
    }


# -- the report ------------------------------------------------------------------------------------


def exponent(found: Mapping[int, float]) -> float | None:
    """The slope between the two largest sizes, if both take a measurable time."""
    sizes = sorted(found)[-2:]
    if len(sizes) < 2 or min(found[each] for each in sizes) < 1e-4:
        return None
    return math.log(found[sizes[1]] / found[sizes[0]]) / math.log(sizes[1] / sizes[0])


def measured(group: str, most: int, root: Path) -> list[Row]:
    run, sizes = GROUPS[group]
    rows: dict[str, dict[int, float]] = {}
    for size in (each for each in sizes if each <= most):
        with tempfile.TemporaryDirectory(dir=root) as folder:
            for call, took in run(size, Path(folder)):
                rows.setdefault(call, {})[size] = took
    return [
        {"group": group, "call": call, "seconds": found, "exponent": exponent(found)}
        for call, found in rows.items()
    ]


def growth_table(rows: list[Row]) -> list[str]:
    sizes = sorted({size for row in rows for size in row["seconds"]})
    columns: list[Column] = [(rows[0]["group"] + ", ms", lambda row: row["call"])]
    columns += [(f"{size:,}", partial(_milliseconds, size)) for size in sizes]
    columns.append(("exponent", lambda row: _shown(row["exponent"])))
    return table(rows, columns)


def _milliseconds(size: int, row: Row) -> str:
    return _shown(row["seconds"].get(size), 1e3)


def _shown(value: Any, times: float = 1) -> str:
    if isinstance(value, float):
        return f"{value * times:,.0f}" if value * times >= 100 else f"{value * times:.3g}"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def ranks_tables(most: int) -> dict[str, list[Row]]:
    worlds = [each for each in (8, 64, 512, 4_096, 16_384) if each <= most]
    hosts = min(2_000, most // HOST_RANKS)
    lost = [each for each in (1, 16, 256) if 4 * each <= hosts]
    return {
        "a call of the store": [store_costs()],
        "a save's commit": [save_of(world) for world in worlds],
        "the first meeting of hosts": [meeting_of(worlds[-1])],
        "hosts are lost": [losses_of(hosts, each) for each in lost],
        "replicas are lost": [membership_of(hosts, each) for each in lost],
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.scale", description=__doc__)
    parser.add_argument("--only", choices=(*GROUPS, "ranks"), action="append")
    parser.add_argument("--most", type=int, default=sys.maxsize, help="the largest size")
    parser.add_argument("--dir", type=Path, help="the storage of the runs (default: below --out)")
    parser.add_argument("--out", type=Path, default=harness.ROOT / "bench" / "out")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    words = ["python -m bench.scale", *(sys.argv[1:] if arguments is None else arguments)]
    facts = harness.facts(options.dir or options.out) | {"command": " ".join(words)}
    rows: list[Row] = []
    lines = [facts["command"], ""]
    for group in options.only or (*GROUPS, "ranks"):
        if group == "ranks":
            for title, found in ranks_tables(min(options.most, 16_384)).items():
                rows += [{"group": title, **each} for each in found]
                columns: list[Column] = (
                    [(key, partial(lambda key, row: _shown(row[key]), key)) for key in found[0]]
                    if found
                    else []
                )
                lines += [title, *table(found, columns), ""] if found else []
        else:
            here = measured(group, options.most, options.dir or options.out)
            rows += here
            lines += [*growth_table(here), ""]
        print(*lines, sep="\n", flush=True)
        with (options.out / "scale.txt").open("a") as saved:
            saved.write("\n".join(lines) + "\n")
        lines = []
    (options.out / "scale.json").write_text(json.dumps({"facts": facts, "rows": rows}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
