"""A step into memory: the time until it is safe from the death of the process, beside a plain copy.

`python -m bench.mapped`. The tensors of a training state go through the engine into one file on
tmpfs; then the file gets its final name. In turns with it, in the same process and on as many
threads of the same niceness, the same bytes are copied from memory to memory with memcpy.

    reused      a retired file, overwritten through the mapping it has: how a run goes on
    remapped    a retired file of which this process has no mapping: the first saves after a restart
    prepared    a new file, whose pages were made present before the save
    fresh       a new file: the first saves of a run
    buffered    a retired file, through staging buffers and pwrite: what a mapping saves
    restored    not a save: the file of `reused`, read and verified into tensors

Invariants: every save's file is compared with its source by checksums of all of it, taken from
memory after the clock has stopped; each figure is the median of ratios within a round, because the
machine is not ours alone. The plain copy is the faster of one memcpy a thread (which the C library
does past the caches) and one a tensor.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench import harness
from bench.report import Column, number, spread_text, table
from bench.state import SHAPES, build
from statehold import _core

BLOCK_BYTES = 1 << 20
BUFFER_BYTES = 16 << 20
ENGINE_NICENESS = 5
HEADER = b"h" * 4096


@dataclass
class Took:
    """Of one save or copy: seconds on the clock, and of processors."""

    wall_s: float
    cpu_s: float


class Clock:
    """Measures the body of a with statement."""

    took: Took

    def __enter__(self) -> Clock:
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.took = Took(time.perf_counter() - self._wall, time.process_time() - self._cpu)


def in_threads(count: int, body: Callable[[int], None]) -> None:
    """Runs body(0) ... body(count - 1) at once, as nicely as the engine's threads."""

    def run(index: int) -> None:
        os.nice(ENGINE_NICENESS)  # on Linux, of this thread
        body(index)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Copies:
    """Plain copies of the bytes of the state, between memory that has been touched."""

    def __init__(self, tensors: list[torch.Tensor], threads: int) -> None:
        self.threads = threads
        self.tensors = tensors
        self.bytes = sum(tensor.nbytes for tensor in tensors)
        self.source = torch.ones(self.bytes, dtype=torch.uint8, device="cpu")
        self.target = torch.ones(self.bytes, dtype=torch.uint8, device="cpu")

    def whole(self) -> Took:
        part = -(-self.bytes // self.threads)

        def copy(index: int) -> None:
            begin = index * part
            count = min(part, self.bytes - begin)
            source, target = self.source.data_ptr() + begin, self.target.data_ptr() + begin
            ctypes.memmove(target, source, count)

        with Clock() as clock:
            in_threads(self.threads, copy)
        return clock.took

    def by_tensor(self) -> Took:
        begins = itertools.accumulate((t.nbytes for t in self.tensors), initial=0)
        work = iter(list(zip(self.tensors, begins, strict=False)))

        def copy(_index: int) -> None:
            for tensor, begin in work:
                ctypes.memmove(self.target.data_ptr() + begin, tensor.data_ptr(), tensor.nbytes)

        with Clock() as clock:
            in_threads(self.threads, copy)
        return clock.took


class Saves:
    """Saves of a state into files of one directory."""

    def __init__(self, directory: Path, tensors: list[torch.Tensor], threads: int) -> None:
        self.directory = directory
        self.fs = _core.open_fs()
        self.engine = _core.Engine(self.fs, 16 * BUFFER_BYTES, BUFFER_BYTES, threads)
        self.tensors = tensors
        sizes = [tensor.nbytes for tensor in tensors]
        *begins, self.file_bytes = itertools.accumulate(sizes, initial=len(HEADER))
        self.arguments: dict[str, Any] = {
            "file_bytes": self.file_bytes,
            "block_bytes": BLOCK_BYTES,
            "begins": array("q", begins),
            "sizes": array("q", sizes),
            "addresses": array("Q", [tensor.data_ptr() for tensor in tensors]),
            "flags": bytes(len(tensors)),
            "strided": {},
            "header": HEADER,
            "owner": tensors,
        }
        self.kept = self._first("reused.step")
        self._first("remapped.step").close()
        self._first("buffered.step").close()

    def _path(self, name: str) -> str:
        return str(self.directory / name)

    def _first(self, name: str) -> _core.File:
        file = self.fs.open_write(self._path(name), self.file_bytes, mapped=True)
        self._write(file, None)
        return file

    def _write(self, file: _core.File, rename: tuple[str, str] | None) -> _core.WriteJob:
        job = self.engine.write(**self.arguments, file=file)
        if not job.wait_written(600.0):
            raise RuntimeError("a save was not written in ten minutes")
        job.finish()
        if rename is not None:
            self.fs.rename(*rename)
        return job

    def reused(self) -> Took:
        begin, end = self._path("reused.spare"), self._path("reused.step")
        self.fs.rename(end, begin)
        with Clock() as clock:
            if not self.fs.can_reuse(begin, self.kept):
                raise RuntimeError("a retired file is in use")
            self.kept = self.fs.open_write(
                begin, self.file_bytes, True, mapped=True, kept=self.kept
            )
            job = self._write(self.kept, (begin, end))
        self.verify(self.kept, job)
        return clock.took

    def remapped(self) -> Took:
        begin, end = self._path("remapped.spare"), self._path("remapped.step")
        self.fs.rename(end, begin)
        with Clock() as clock:
            if not self.fs.can_reuse(begin):
                raise RuntimeError("a retired file is in use")
            file = self.fs.open_write(begin, self.file_bytes, True, mapped=True)
            job = self._write(file, (begin, end))
        self.verify(file, job)
        file.close()
        return clock.took

    def _new(self, prepare: bool) -> Took:
        begin, end = self._path("new.partial"), self._path("new.step")
        file = None
        if prepare:
            file = self.fs.open_write(begin, self.file_bytes, mapped=True)
            file.populate(0, self.file_bytes)
        with Clock() as clock:
            file = file or self.fs.open_write(begin, self.file_bytes, mapped=True)
            job = self._write(file, (begin, end))
        self.verify(file, job)
        file.close()
        self.fs.unlink(end)
        return clock.took

    def prepared(self) -> Took:
        return self._new(prepare=True)

    def fresh(self) -> Took:
        return self._new(prepare=False)

    def buffered(self) -> Took:
        begin, end = self._path("buffered.spare"), self._path("buffered.step")
        self.fs.rename(end, begin)
        with Clock() as clock:
            file = self.fs.open_write(begin, self.file_bytes, True)
            job = self._write(file, (begin, end))
        viewed = self.fs.open_view(end, self.file_bytes)
        self.verify(viewed, job)
        viewed.close()
        return clock.took

    def restored(self) -> Took:
        """By reads from the page cache, which tmpfs is."""
        sizes = self.arguments["sizes"]
        targets = [torch.ones(size, dtype=torch.uint8, device="cpu") for size in sizes]
        read = {key: self.arguments[key] for key in ("block_bytes", "begins", "sizes", "flags")}
        job = self._write(self.kept, None)
        with Clock() as clock:
            done = self.engine.read(
                **read,
                files=[self._path("reused.step")],
                file_bytes=[self.file_bytes],
                file_index=array("q", bytes(8 * len(sizes))),
                addresses=array("Q", [target.data_ptr() for target in targets]),
                strided={},
                sums=job.checksums()[8:],
                owner=targets,
            ).wait(600.0)
        if not done:
            raise RuntimeError("a restore took more than ten minutes")
        return clock.took

    def verify(self, file: _core.File, job: _core.WriteJob) -> None:
        """The file holds the state, and the checksums are of it."""
        for tensor, begin in zip(self.tensors, self.arguments["begins"], strict=True):
            source = _core.hash_memory(tensor.data_ptr(), tensor.nbytes)
            if _core.hash_memory(file.address + begin, tensor.nbytes) != source:
                raise RuntimeError(f"{file.path}: bytes from {begin} on differ from their source")
        sums = array("Q", job.checksums())
        if sums[0] != _core.xxh3_64(HEADER):
            raise RuntimeError(f"{file.path}: the checksum of the header is wrong")

    def close(self) -> None:
        self.engine.close()
        self.kept.close()
        self.fs.close()


CASES = ("reused", "remapped", "prepared", "fresh", "buffered", "restored")
PLAIN = ("memcpy", "memcpy by tensor")


def rounds(copies: Copies, saves: Saves, count: int) -> Iterator[dict[str, Took]]:
    """All cases in turns, every other round in the opposite order."""
    cases: dict[str, Callable[[], Took]] = {
        PLAIN[0]: copies.whole,
        PLAIN[1]: copies.by_tensor,
        **{name: getattr(saves, name) for name in CASES},
    }
    for round_ in range(count):
        order = list(cases) if round_ % 2 == 0 else list(reversed(cases))
        yield {name: cases[name]() for name in order}


def rows(records: list[dict[str, Took]], total_bytes: int) -> list[dict[str, Any]]:
    def plain(record: dict[str, Took], key: str) -> float:
        return min(getattr(record[name], key) for name in PLAIN)

    found = []
    for name in (*PLAIN, *CASES):
        row: dict[str, Any] = {"case": name}
        for key in ("wall_s", "cpu_s"):
            values = [getattr(record[name], key) for record in records]
            row[key] = harness.spread(values)
            row[f"{key}_ratio"] = harness.spread(
                value / plain(record, key) for value, record in zip(values, records, strict=True)
            )
        row["gb_s"] = total_bytes / (row["wall_s"] or {})["median"] / harness.GB
        found.append(row)
    return found


COLUMNS: list[Column] = [
    ("case", lambda r: r["case"]),
    ("wall s", lambda r: spread_text(r["wall_s"], 3)),
    ("x plain copy", lambda r: spread_text(r["wall_s_ratio"])),
    ("processor s", lambda r: spread_text(r["cpu_s"], 3)),
    ("x plain copy's", lambda r: spread_text(r["cpu_s_ratio"])),
    ("GB/s", lambda r: number(r["gb_s"])),
]


def measure(options: argparse.Namespace) -> tuple[list[dict[str, Took]], int]:
    state = build(options.size)
    state.fill(seed=1)
    tensors = list(state.tensors().values())
    directory = Path(tempfile.mkdtemp(prefix="statehold-bench-", dir=options.dir))
    try:
        copies = Copies(tensors, options.threads)
        saves = Saves(directory, tensors, options.threads)
        records = []
        for record in rounds(copies, saves, options.reps):
            records.append(record)
            print("  ".join(f"{name} {took.wall_s:.3f}" for name, took in record.items()))
        saves.close()
    finally:
        shutil.rmtree(directory)
    return records, copies.bytes


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.mapped", description=__doc__)
    parser.add_argument("--size", choices=tuple(SHAPES), default="80m")
    parser.add_argument("--reps", type=int, default=9, help="rounds over all cases")
    parser.add_argument("--threads", type=int, default=2, help="of the engine, and of the copies")
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"), help="on tmpfs")
    parser.add_argument("--out", type=Path, default=harness.ROOT / "bench/out/mapped")
    options = parser.parse_args(arguments)
    command = " ".join(["python -m bench.mapped", *sys.argv[1:]])
    facts = harness.facts(options.dir) | {"command": command}
    records, total_bytes = measure(options)
    found = rows(records, total_bytes)
    lines = [*(f"{key}: {value}" for key, value in facts.items()), f"bytes: {total_bytes}", ""]
    lines += table(found, COLUMNS)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "mapped.txt").write_text("\n".join(lines) + "\n")
    raw = [{name: vars(took) for name, took in record.items()} for record in records]
    whole = {"schema": 1, "facts": facts, "bytes": total_bytes, "rows": found, "records": raw}
    (options.out / "mapped.json").write_text(json.dumps(whole, indent=1) + "\n")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
