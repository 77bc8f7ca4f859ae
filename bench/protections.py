"""What being safe costs: the library as it is, beside copies of it that lack a protection.

`python -m bench.protections`. A copy is the source with one statement of it replaced, so nothing in
the library can be switched off; it is built below --out and measured by the same save and restore
benchmarks, in turns with the original.

    checksums   no byte is hashed, neither when it is saved nor when it is restored
    syncs       no fdatasync or fsync: the device may still hold what is called committed
    versions    tensors that change while they are copied are not noticed
    all         none of these

Invariants: a replacement that does not apply fails the run; every copy's last save is restored and
compared bit for bit, as ever. Whether a difference is noise is to be seen from the spread of the
original's own rounds, which stands beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import harness
from bench.case import Case
from bench.report import Column, Row, spread_text, table
from bench.run import run_process
from bench.state import SHAPES

ORIGINAL = "as it is"


@dataclass(frozen=True, slots=True)
class Replacement:
    """One statement of one file, and what stands in its place."""

    path: str
    old: str
    new: str

    def apply(self, tree: Path) -> None:
        source = (tree / self.path).read_text()
        if source.count(self.old) != 1:
            raise RuntimeError(f"{self.path} does not have once: {self.old}")
        (tree / self.path).write_text(source.replace(self.old, self.new))


CHECKSUMS = (
    Replacement("native/checksum.cpp", "return kernel().whole(data, bytes);", "return 0;"),
    Replacement("native/checksum.cpp", "kernel().update(state_, data, bytes);", ""),
    Replacement("native/checksum.cpp", "return kernel().digest(state_);", "return 0;"),
)
SYNCS = (
    Replacement("native/fs_posix.cpp", "::fdatasync(fd_)", "fd_ * 0"),
    Replacement("native/fs_posix.cpp", "::fsync(dir.get())", "dir.get() * 0"),
    Replacement("native/fs_posix.cpp", "::fsync(file.get())", "file.get() * 0"),
)
VERSIONS = (
    Replacement(
        "src/statehold/checkpoint/save/pipeline.py",
        "_check_unmoved(work.capture.settle())",
        "_check_unmoved(None)",
    ),
)
VARIANTS: dict[str, tuple[Replacement, ...]] = {
    ORIGINAL: (),
    "no checksums": CHECKSUMS,
    "no syncs": SYNCS,
    "no versions": VERSIONS,
    "none at all": CHECKSUMS + SYNCS + VERSIONS,
}


def build(name: str, out: Path) -> Path:
    """A copy of the library without a protection; returns the folder to import it from."""
    tree = out / name.replace(" ", "-")
    shutil.rmtree(tree, ignore_errors=True)
    for part in ("native", "src"):
        ignored = shutil.ignore_patterns("_core*", "__pycache__")
        shutil.copytree(harness.ROOT / part, tree / part, ignore=ignored)
    for replacement in VARIANTS[name]:
        replacement.apply(tree)
    settings = ["-DCMAKE_BUILD_TYPE=Release", "-DSTATEHOLD_INPLACE=ON"]
    settings.append(f"-DPython_EXECUTABLE={sys.executable}")
    _quiet(["cmake", "-S", str(tree / "native"), "-B", str(tree / "build"), *settings])
    _quiet(["cmake", "--build", str(tree / "build"), "-j", str(os.cpu_count() or 1)])
    return tree / "src"


def _quiet(command: list[str]) -> None:
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"PATH": tools}
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}{done.stderr}")


def measure(bench: str, name: str, source: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One case of one copy, in a process of its own."""
    directory = Path(tempfile.mkdtemp(prefix=f"{bench}-", dir=options.dir))
    case = Case(bench, str(directory), size=options.size, peer="statehold", saves=options.saves)
    harness.drop_caches(directory, gently=case.smoke)
    kept = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(source)
    try:
        record = run_process(case, options.out)
    finally:
        os.environ.pop("PYTHONPATH")
        if kept is not None:
            os.environ["PYTHONPATH"] = kept
        shutil.rmtree(directory)
    if record["status"] != "ok" or record["result"]["difference"] is not None:
        raise RuntimeError(f"{bench} of the library, {name}: {record}")
    return record | {"variant": name}


def rounds(sources: dict[str, Path], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All copies in turns; every other round in the opposite order, so that drift is nobody's."""
    for round_ in range(options.reps):
        order = list(sources) if round_ % 2 == 0 else list(reversed(sources))
        for bench in ("save", "restore"):
            for name in order:
                yield measure(bench, name, sources[name], options)


def row(name: str, records: list[dict[str, Any]]) -> Row:
    """Over the rounds: the median of each round's later saves, and each round's restores."""
    mine = [record for record in records if record["variant"] == name]
    saved = [each["result"] for each in mine if each["case"]["bench"] == "save"]
    restored = [each["result"] for each in mine if each["case"]["bench"] == "restore"]

    def of_saves(key: str) -> dict[str, float] | None:
        # The first two saves of a process write fresh files, the later ones overwrite.
        return harness.spread(
            harness.median([save[key] for save in each["saves"][2:]]) or 0.0 for each in saved
        )

    keys = ("blocked_s", "staged_s", "durable_s", "cpu_s")
    found: Row = {"variant": name} | {key: of_saves(key) for key in keys}
    for key in ("cold_s", "warm_s"):
        found[key] = harness.spread(harness.median(each[key]) or 0.0 for each in restored)
    return found


COLUMNS: list[Column] = [
    ("library", lambda r: r["variant"]),
    ("blocked s", lambda r: spread_text(r["blocked_s"], 3)),
    ("staged s", lambda r: spread_text(r["staged_s"], 3)),
    ("durable s", lambda r: spread_text(r["durable_s"], 3)),
    ("processor s", lambda r: spread_text(r["cpu_s"], 3)),
    ("restore cold s", lambda r: spread_text(r["cold_s"], 3)),
    ("restore warm s", lambda r: spread_text(r["warm_s"], 3)),
]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.protections", description=__doc__)
    parser.add_argument("--size", choices=tuple(SHAPES), default="350m")
    parser.add_argument("--reps", type=int, default=5, help="rounds over all copies")
    parser.add_argument("--saves", type=int, default=8, help="saves per process")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--dir", type=Path, help="the storage under test (default: --out)")
    parser.add_argument("--out", type=Path, default=harness.ROOT / "bench/out/protections")
    options = parser.parse_args(arguments)
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    options.dir = (options.dir or options.out).resolve()
    command = " ".join(["python -m bench.protections", *sys.argv[1:]])
    facts = harness.facts(options.dir) | {"command": command}
    names = options.variants.split(",")
    sources = {name: build(name, options.out) for name in names}
    records = []
    for record in rounds(sources, options):
        records.append(record)
        print(f"{record['case']['bench']:8} {record['variant']:13} {record['process_s']:.1f} s")
    found = [row(name, records) for name in names]
    lines = [*(f"{key}: {value}" for key, value in facts.items()), "", *table(found, COLUMNS)]
    (options.out / "protections.txt").write_text("\n".join(lines) + "\n")
    whole = {"schema": 1, "facts": facts, "rows": found, "records": records}
    (options.out / "protections.json").write_text(json.dumps(whole, indent=1) + "\n")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
