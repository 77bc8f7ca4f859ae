"""Updates of an optimizer whose state lies on tiers, beside the limits of its paths and torch.

`python -m bench.offload DIR [DIR=RATE ...]`. Parameters in bfloat16, and their gradients. The cases
take turns in each round: torch's fused AdamW on float32 masters that are in memory, all state in
`Host`, each path alone, and all paths together. RATE limits a path, as in "500MB".

Invariants: the limit of a path is measured in the same round, on the same directory, with as many
bytes: one allocated file is overwritten while another one is read (O_DIRECT, as the engine's raw
mode does it), or one after the other if that is faster. A path with a RATE has this as its limit.
"of limit" is that time over the time of an update. Bytes are those of /proc/self/io, which does not
count file systems in memory; the optimizer's own count is beside it. At the end, parameters and
masters are compared with torch's bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench.harness import GB
from statehold import _core, offload
from statehold.units import parse_bytes

BUFFER_BYTES, DEPTH = 16 << 20, 32
WARM_UP = 2  # updates until every file is there and every path has been measured


@dataclass
class Target:
    """A directory under test, and the limit that it was given, if any."""

    directory: Path
    rate: str | None

    @property
    def tier(self) -> offload.Path:
        return offload.Path(self.directory, self.rate)


@dataclass
class Case:
    """A way to keep the state. Seconds of each update; bytes moved by each, counted twice."""

    name: str
    tiers: list[offload.Host | offload.Path] = field(default_factory=list)
    taken_s: list[float] = field(default_factory=list)
    counted: list[int] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)
    limit_s: list[float] = field(default_factory=list)
    waited: float = 0.0


class Weights:
    """Parameters of the shape of a decoder's layers, with gradients; the same each time."""

    def __init__(self, numel: int) -> None:
        each = min(numel, 16 << 20)
        torch.manual_seed(1)
        self.params = [
            torch.nn.Parameter(torch.randn(each // 4096 or 1, min(each, 4096)).bfloat16())
            for _ in range(max(1, numel // each))
        ]
        for param in self.params:
            param.grad = torch.randn(param.shape).bfloat16()
        self.numel = sum(param.numel() for param in self.params)

    def masters(self) -> list[torch.nn.Parameter]:
        found = [torch.nn.Parameter(param.detach().float()) for param in self.params]
        for master, param in zip(found, self.params, strict=True):
            master.grad = None if param.grad is None else param.grad.float()
        return found


def device_bytes() -> int:
    """What this process has read from devices and written to them."""
    lines = Path("/proc/self/io").read_text().splitlines()
    numbers = dict(line.split(": ") for line in lines)
    return int(numbers["read_bytes"]) + int(numbers["write_bytes"])


def both_ways_s(directory: Path, nbytes: int) -> float:
    """The seconds in which a path writes `nbytes` and reads as many."""
    whole = max(BUFFER_BYTES, nbytes // BUFFER_BYTES * BUFFER_BYTES)
    with contextlib.closing(_core.open_fs()) as fs, _files(directory, 2) as (one, other):

        def write(path: str, reuse: bool) -> float:
            return _core.raw_write(fs, path, whole, BUFFER_BYTES, DEPTH, reuse)

        def read(path: str) -> float:
            return _core.raw_read(fs, path, BUFFER_BYTES, DEPTH)

        for path in (one, other):
            write(path, False)
        apart_s = write(one, True) + read(other)
        begin = time.perf_counter()
        with ThreadPoolExecutor(2) as pool:
            for each in (pool.submit(write, one, True), pool.submit(read, other)):
                each.result()
        together_s = time.perf_counter() - begin
    return min(apart_s, together_s) * nbytes / whole


@contextlib.contextmanager
def _files(directory: Path, count: int) -> Iterator[list[str]]:
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        yield [f"{folder}/limit-{index}" for index in range(count)]


def timed(
    case: Case, step: Callable[[], object], stats: Callable[[], offload.Stats] | None
) -> None:
    before, device = stats() if stats else None, device_bytes()
    begin = time.perf_counter()
    step()
    case.taken_s.append(time.perf_counter() - begin)
    case.counted.append(device_bytes() - device)
    after = stats() if stats else None
    if before and after:
        case.moved.append(_bytes_of(after) - _bytes_of(before))
        case.waited = (after.waited_s - before.waited_s) / case.taken_s[-1]


def _bytes_of(stats: offload.Stats) -> int:
    return sum(path.read_bytes + path.written_bytes for path in stats.paths)


def run_torch(case: Case, weights: Weights, updates: int) -> list[torch.Tensor]:
    """Returns the masters after WARM_UP and `updates` updates."""
    masters = weights.masters()
    optimizer = torch.optim.AdamW(masters, fused=True)
    for update in range(WARM_UP + updates):
        if update < WARM_UP:
            optimizer.step()
        else:
            timed(case, optimizer.step, None)
    return [master.detach() for master in masters]


def run_offloaded(case: Case, weights: Weights, updates: int, wanted: list[torch.Tensor]) -> None:
    optimizer = offload.AdamW(weights.params, tiers=case.tiers)
    with contextlib.closing(optimizer):
        for update in range(WARM_UP + updates):
            if update < WARM_UP:
                optimizer.step()
            else:
                timed(case, optimizer.step, lambda: optimizer.stats)
    for param, master in zip(weights.params, wanted, strict=True):
        if not torch.equal(param.detach(), master.to(param.dtype)):
            raise AssertionError(f"{case.name}: the parameters are not those of torch")


def measure(targets: list[Target], numel: int, host: str, updates: int, rounds: int) -> list[Case]:
    paths: list[offload.Host | offload.Path] = [target.tier for target in targets]
    near = [offload.Host(host)]
    plain, in_host = (
        Case("torch, in memory"),
        Case("Host", [offload.Host(f"{16 * numel + (1 << 30)}B")]),
    )
    alone = [Case(str(target.directory), [*near, target.tier]) for target in targets]
    together = [Case("all paths", [*near, *paths])] if len(targets) > 1 else []
    for _ in range(rounds):
        wanted = run_torch(plain, Weights(numel), updates)
        run_offloaded(in_host, Weights(numel), updates, wanted)
        rates = []
        for case, target in zip(alone, targets, strict=True):
            run_offloaded(case, Weights(numel), updates, wanted)
            each_way = case.moved[-1] // 2
            if target.rate is not None:
                limit_s = 2 * each_way / parse_bytes(target.rate)
            else:
                limit_s = both_ways_s(target.directory, each_way)
            case.limit_s.append(limit_s)
            rates.append(2 * each_way / limit_s)
        for case in together:
            run_offloaded(case, Weights(numel), updates, wanted)
            case.limit_s.append(case.moved[-1] / sum(rates))
    return [plain, in_host, *alone, *together]


def show(cases: list[Case], numel: int) -> None:
    print(f"{'case':32} {'update s: min med max':>23} {'B/param':>8} {'io B/param':>10} "
          f"{'GB/s':>6} {'of limit':>8} {'waited':>7}")  # fmt: skip
    for case in cases:
        taken = sorted(case.taken_s)
        middle = statistics.median(taken)
        moved = statistics.median(case.moved or [0])
        limit = f"{statistics.median(case.limit_s) / middle:8.2f}" if case.limit_s else " " * 8
        print(f"{case.name:32} {taken[0]:7.3f} {middle:7.3f} {taken[-1]:7.3f} "
              f"{moved / numel:8.2f} {statistics.median(case.counted) / numel:10.2f} "
              f"{moved / middle / GB:6.2f} {limit} {case.waited:7.2f}")  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.offload", description=__doc__)
    parser.add_argument("directories", nargs="+", metavar="DIR[=RATE]")
    parser.add_argument("--params", type=float, default=5e8)
    parser.add_argument("--host", default="0B", help="memory that keeps state, as in 1GiB")
    parser.add_argument("--updates", type=int, default=5, help="that are timed, in each round")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args(arguments)
    targets = []
    for each in given.directories:
        directory, _, rate = each.partition("=")
        Path(directory).mkdir(parents=True, exist_ok=True)
        targets.append(Target(Path(directory), rate or None))
    numel = Weights(int(given.params)).numel
    print(
        f"{numel:,} parameters in bfloat16, {12 * numel / GB:.2f} GB of state, Host {given.host}, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    show(measure(targets, numel, given.host, given.updates, given.rounds), numel)
    return 0


if __name__ == "__main__":
    sys.exit(main())
