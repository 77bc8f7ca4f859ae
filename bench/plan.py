"""`python -m bench.plan`: what planning costs a rank, and how that grows with ranks and tensors.

Owns: the states (a Llama of 405e9 parameters in four dimensions of parallelism; synthetic ones of
10,000 tensors a rank), described as a rank would capture them, and the table. Pure arithmetic: no
torch, no device, no storage, no other ranks.
Invariants: "cold" starts with meshes that were never used, as the first save of a job does;
"cached" is the next step with equal specs that are other objects, as a capture makes them. Records
and the manifest are encoded for real, with checksums of the right number; store operations are
counted by a round of all ranks over a store in memory. Seconds are of the processor: planning waits
for nothing.
Not here: what the bytes cost (save.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from torch.distributed import HashStore

from bench import harness
from statehold.encoding.header import bytes_of
from statehold.format.entries import record_file
from statehold.format.manifest import Commit, RecordEntry, groups_of, record_name
from statehold.format.record import Record
from statehold.layout.layout import Layout, Mesh
from statehold.layout.plan import BLOCK_BYTES, TensorSpec, piece_count
from statehold.layout.share import PlanCache, RankPlan, balance, share
from statehold.ranks.board import StoreBoard
from statehold.ranks.membership import Membership
from statehold.ranks.peers import Peers

HOST_RANKS = 8
# world -> (pipeline, replicas, shards, tensor parallel), the outermost first
WORLDS = {
    64: (2, 1, 4, 8),
    256: (4, 1, 8, 8),
    1024: (8, 1, 16, 8),
    4096: (16, 1, 32, 8),
    16384: (16, 2, 64, 8),
}
BALANCED_RANKS_MAX = 64  # every rank is planned to see how even the writing is

Split = tuple[tuple[int, int], ...]
Tensors = list[tuple[str, str, tuple[int, ...], Layout]]
# Axes of a stage's mesh: 0 replicas, 1 shards (FSDP), 2 tensor parallel, which cuts first.
COLUMNS: Split = ((2, 0), (1, 0))
ROWS: Split = ((2, 1), (1, 0))
NORM: Split = ((1, 0),)


@dataclasses.dataclass(frozen=True)
class Llama:
    """Llama 3.1 405B."""

    layers: int = 126
    hidden: int = 16384
    ffn: int = 53248
    vocabulary: int = 128256
    kv: int = 1024  # 8 of 128 heads

    def stage(self, index: int, stages: int) -> Iterator[tuple[str, tuple[int, ...], Split]]:
        """(name, shape, splits) of the parameters of a pipeline stage."""
        h, f = self.hidden, self.ffn
        if index == 0:
            yield "tok_embeddings.weight", (self.vocabulary, h), COLUMNS
        for n in range(self.layers * index // stages, self.layers * (index + 1) // stages):
            for name, shape, splits in (
                ("attention.wq", (h, h), COLUMNS),
                ("attention.wk", (self.kv, h), COLUMNS),
                ("attention.wv", (self.kv, h), COLUMNS),
                ("attention.wo", (h, h), ROWS),
                ("feed_forward.w1", (f, h), COLUMNS),
                ("feed_forward.w2", (h, f), ROWS),
                ("feed_forward.w3", (f, h), COLUMNS),
                ("attention_norm", (h,), NORM),
                ("ffn_norm", (h,), NORM),
            ):
                yield f"layers.{n}.{name}.weight", shape, splits
        if index == stages - 1:
            yield "norm.weight", (h,), NORM
            yield "output.weight", (self.vocabulary, h), COLUMNS


def llama(world: int, rank: int) -> Tensors:
    """Parameters in bfloat16; master weights, moments in float32 and `step` of the optimizer."""
    stages, *grid = WORLDS[world]
    stage, mesh = _stage_mesh(world, stages, grid, rank)
    tensors: Tensors = []
    for name, shape, splits in Llama().stage(stage, stages):
        layout = Layout(mesh, splits)
        tensors.append((f"model.{name}", "BF16", shape, layout))
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            tensors.append((f"optimizer.state.{name}.{kind}", "F32", shape, layout))
        tensors.append((f"optimizer.state.{name}.step", "F32", (), Layout(mesh)))
    return tensors


def _stage_mesh(world: int, stages: int, grid: Sequence[int], rank: int) -> tuple[int, Mesh]:
    size = world // stages
    stage = rank // size
    return stage, Mesh(tuple(grid), tuple(range(stage * size, (stage + 1) * size)))


def hybrid(world: int, rank: int, count: int) -> Tensors:
    """Two replicas of shards over tensor parallel, on all ranks; every fifth tensor is a norm."""
    mesh = Mesh((2, world // 16, 8), tuple(range(world)))
    found: Tensors = []
    for i in range(count):
        splits, shape = [(NORM, (8192,)), (COLUMNS, (8192 + 8 * i, 4096)), (ROWS, (4096, 8192))][
            min(i % 5, 2)
        ]
        found.append((f"model.layers.{i}.weight", "BF16", shape, Layout(mesh, splits)))
    return found


def replicated(world: int, rank: int, count: int) -> Tensors:
    """DistributedDataParallel: every rank holds everything."""
    mesh = Mesh((world,), tuple(range(world)))
    return [
        (f"model.layers.{i}.weight", "BF16", (1024 + i % 777, 1 + i % 8192), Layout(mesh))
        for i in range(count)
    ]


def captured(tensors: Tensors, rank: int) -> list[TensorSpec]:
    """The specs of `rank`."""
    specs = []
    for name, dtype, shape, layout in tensors:
        box = layout.box(shape, rank)
        nbytes = bytes_of(dtype, box.shape) or 0
        specs.append(TensorSpec(name, dtype, box.shape, nbytes, False, layout, shape, box.offsets))
    return specs


# -- measuring -----------------------------------------------------------------------------------


def measure(case: str, world: int, build: Callable[[int], Tensors], reps: int) -> dict[str, Any]:
    """One row: the slowest of the sampled ranks, the median of `reps`."""
    rows = [_measure_rank(world, build, rank, reps) for rank in (0, world // 2 + 1, world - 1)]
    row = {key: max(each[key] for each in rows) for key in rows[0]}
    row |= {"case": case, "world": world, "sampled_ranks": len(rows)}
    row |= _measure_manifest(world, build) | _operations(world)
    if world <= BALANCED_RANKS_MAX:
        row["balance"] = _balance(world, build)
    return row


def _measure_rank(
    world: int, build: Callable[[int], Tensors], rank: int, reps: int
) -> dict[str, Any]:
    cold, cached, plan = [], [], None
    for step in range(reps):
        specs = _fresh(captured(build(rank), rank), build(rank))
        cache = PlanCache(Membership(rank, world))
        begin = time.process_time()
        plan = cache.get(specs, step)
        cold.append(time.process_time() - begin)
        again = [spec._replace(name=_copy(spec.name)) for spec in specs]
        begin = time.process_time()
        cache.get(again, step + 1)
        cached.append(time.process_time() - begin)
    assert plan is not None
    begin = time.process_time()
    record = _record(plan, world, rank)
    encoded = record.encode()
    said = record.group_digests()
    seconds = time.process_time() - begin
    return {
        "record_s": seconds,
        "record_bytes": len(encoded),
        "message_bytes": len(json.dumps(said)),
        "tensors": len(plan.share.held),
        "parts": len(plan.share.parts.specs),
        "written_bytes": plan.save.file_bytes,
        "cold_s": harness.median(cold),
        "cached_s": harness.median(cached),
        "header_bytes": plan.save.data_begin,
    }


def _record(plan: RankPlan, world: int, rank: int) -> Record:
    """What the rank would publish; the checksums are zeros."""
    save = plan.save
    count = piece_count(0, save.data_begin, BLOCK_BYTES)
    for spec, begin in zip(save.specs, save.begins, strict=True):
        count += piece_count(begin, spec.nbytes, BLOCK_BYTES)
    file, tensors = record_file(save, bytes(8 * count))
    state: dict[str, dict[str, Any]] = {}
    for held in plan.share.held:
        state.setdefault(held.name.split(".")[0], {})[held.name] = {"$tensor": held.name}
    return Record(
        step=save.step,
        world_size=world,
        rank=rank,
        attempt="01234567-0",
        block_bytes=BLOCK_BYTES,
        files=(file,),
        held=plan.share.held,
        chunks={name: entry.chunks for name, entry in tensors.items()},
        state=state,
    )


def _measure_manifest(world: int, build: Callable[[int], Tensors]) -> dict[str, Any]:
    """What rank 0 does with all digests. The ranks of a mesh say the same: one is asked."""
    said: list[dict[str, str]] = []
    while len(said) < world:
        rank, tensors = len(said), build(len(said))
        plan = PlanCache(Membership(rank, world)).get(captured(tensors, rank), 1)
        alike = len(tensors[0][3].mesh.ranks)
        said += [_record(plan, world, rank).group_digests()] * alike
    entries = [RecordEntry(record_name(rank, world), 1 << 20, "0" * 64) for rank in range(world)]
    begin = time.process_time()
    commit = Commit(
        step=1,
        world_size=world,
        created="2026-11-21T07:00:00+00:00",
        writer="statehold",
        attempt="01234567-0",
        records=tuple(entries),
        state=groups_of(said),
    )
    encoded = commit.encode()
    return {"manifest_s": time.process_time() - begin, "manifest_bytes": len(encoded)}


@cache
def _operations(world: int) -> dict[str, int]:
    """Calls to the store for one save, when saves before it have left notes to drop."""
    store = HashStore()
    boards = [StoreBoard(store, "run") for _ in range(world)]
    peers = [Peers(board, Membership(rank, world), 60.0) for rank, board in enumerate(boards)]
    before = []
    for seq in range(4):
        before = [board.operations for board in boards]
        for peer in peers:
            peer.arrive(seq, b"")
        peers[0].gather(seq)
        peers[0].conclude(seq, b"")
        for peer in peers[1:]:
            peer.outcome(seq)
    calls = [board.operations - then for board, then in zip(boards, before, strict=True)]
    return {"rank_0_operations": calls[0], "rank_operations": max(calls[1:])}


def _fresh(specs: Sequence[TensorSpec], tensors: Tensors) -> list[TensorSpec]:
    """The same specs over meshes that nobody has looked anything up in."""
    return [
        spec._replace(layout=layout) for spec, (_, _, _, layout) in zip(specs, tensors, strict=True)
    ]


def _copy(name: str) -> str:
    """Another object, because every capture makes its names again."""
    return name[:1] + name[1:]


def _balance(world: int, build: Callable[[int], Tensors]) -> dict[str, Any]:
    """Over all ranks; a host has HOST_RANKS of them."""
    loads = []
    for rank in range(world):
        parts = share(captured(build(rank), rank), rank).parts
        loads.append(sum(part.spec.nbytes for part in parts))
    hosts = [f"host-{rank // HOST_RANKS}" for rank in range(world)]
    return dataclasses.asdict(balance(loads, hosts))


def rows(smoke: bool, reps: int) -> Iterator[dict[str, Any]]:
    """Growth with ranks at 10,000 tensors a rank, and with tensors at the most ranks."""
    worlds = (64,) if smoke else tuple(WORLDS)
    count = 50 if smoke else 10_000
    for world in worlds:
        yield measure("llama-405b", world, partial(llama, world), reps)
    synthetic: dict[str, Callable[..., Tensors]] = {"hybrid": hybrid, "replicated": replicated}
    for case, build in synthetic.items():
        for world in worlds:
            yield measure(case, world, partial(build, world, count=count), reps)
    for case, build in synthetic.items():
        for size in (count // 10, count // 2, count * 2):
            yield measure(case, worlds[-1], partial(build, worlds[-1], count=size), reps)


# -- the report ----------------------------------------------------------------------------------


def _titles() -> str:
    return "".join(title.rjust(width) for title, width, _ in TABLE) + "\n"


def _line(row: dict[str, Any]) -> str:
    return "".join(show(row).rjust(width) for _, width, show in TABLE) + "\n"


def _uneven(row: dict[str, Any]) -> str:
    ranks = row["balance"]["ranks"] if "balance" in row else None
    return f"{ranks['max'] / ranks['mean']:.3f}" if ranks else "-"


TABLE: list[tuple[str, int, Callable[[dict[str, Any]], str]]] = [
    ("case", 11, lambda row: row["case"]),
    ("ranks", 7, lambda row: str(row["world"])),
    ("tensors", 8, lambda row: str(row["tensors"])),
    ("parts", 7, lambda row: str(row["parts"])),
    ("cold s", 8, lambda row: f"{row['cold_s']:.3f}"),
    ("cached ms", 10, lambda row: f"{1e3 * row['cached_s']:.2f}"),
    ("header kB", 10, lambda row: f"{row['header_bytes'] / 1e3:.0f}"),
    ("record kB", 10, lambda row: f"{row['record_bytes'] / 1e3:.0f}"),
    ("record s", 9, lambda row: f"{row['record_s']:.3f}"),
    ("manifest kB", 12, lambda row: f"{row['manifest_bytes'] / 1e3:.0f}"),
    ("manifest s", 11, lambda row: f"{row['manifest_s']:.3f}"),
    ("calls", 6, lambda row: str(row["rank_operations"])),
    ("rank 0", 7, lambda row: str(row["rank_0_operations"])),
    ("max/mean", 9, _uneven),
]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.plan", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="small; not a result")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--out", type=Path, default=harness.ROOT / "bench" / "out")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    facts = harness.facts(options.out) | {
        "command": " ".join(["python -m bench.plan", *sys.argv[1:]])
    }
    found, table = [], _titles()
    print(table, end="", flush=True)
    for row in rows(options.smoke, 1 if options.smoke else options.reps):
        found.append(row)
        table += _line(row)
        print(_line(row), end="", flush=True)
    whole = {"schema": 1, "facts": facts, "rows": found}
    (options.out / "plan.json").write_text(json.dumps(whole, indent=1) + "\n")
    (options.out / "plan.txt").write_text(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
