"""What every benchmark shares: the facts of the machine, the page cache, medians, durable files.

Invariants: a run records everything needed to repeat or to doubt it (machine, kernel, file system,
device, versions, commit, how the page cache was dropped).
Not here: what is measured (save.py, train.py, restore.py, limit.py), how it is shown (report.py).
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
GB = 1e9
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
PACKAGES = ("torch", "numpy", "safetensors", "torchsnapshot", "statehold")


def start(module: str, *words: object, **options: Any) -> subprocess.Popen[str]:
    """Start `python -m MODULE WORDS` with this tree in its path."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, words)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        text=True,
        **options,
    )


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def files_below(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def sync_path(path: Path) -> None:
    """fsync one file or directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    """fsync every file and directory below, then the directory itself."""
    for path in sorted(directory.rglob("*"), reverse=True):
        sync_path(path)
    sync_path(directory)


def publish(partial: Path) -> None:
    """Make a directory `*.partial` durable, then visible under its name."""
    sync_tree(partial)
    os.rename(partial, partial.with_suffix(""))
    sync_path(partial.parent)


def drop_method() -> str:
    """How `drop_caches` will work in this process."""
    return "drop_caches" if os.access(DROP_CACHES, os.W_OK) else "fadvise"


def drop_caches(directory: Path, gently: bool = False) -> str:
    """Make the files below cold, after writing back what is dirty; returns the method used.

    `gently` leaves the rest of the machine alone: tests must not wait for others' dirty pages.
    """
    method = "fadvise" if gently else drop_method()
    if method == "drop_caches":
        os.sync()
        DROP_CACHES.write_text("1\n")
        return method
    for path in files_below(directory):
        sync_path(path)
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    return method


def warm_caches(directory: Path) -> None:
    """Read every file below once, buffered."""
    buffer = bytearray(1 << 24)
    for path in files_below(directory):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def available_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _mount_of(directory: Path) -> tuple[str, str, str, str]:
    """(device, mount point, file system, options) of a directory."""
    best = ("?", "", "?", "")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        device, point, kind, options = line.split()[:4]
        if directory.is_relative_to(point) and len(point) >= len(best[1]):
            best = (device, point, kind, options)
    return best


def _device_facts(device: str) -> dict[str, str]:
    facts = {}
    queue = Path("/sys/class/block") / Path(device).name
    for name in ("queue/rotational", "queue/scheduler", "queue/nr_requests", "device/model"):
        path = queue / name
        if path.is_file():
            facts[name.partition("/")[2]] = path.read_text().strip()
    return facts


def _command(*words: str) -> str:
    try:
        return subprocess.run(
            words, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "fio": _command("fio", "--version")}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def facts(directory: Path) -> dict[str, Any]:
    """The machine, the storage under `directory`, the versions and the commit."""
    device, point, kind, options = _mount_of(directory.resolve())
    commit = _command("git", "rev-parse", "--short=12", "HEAD")
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python -m bench", *sys.argv[1:]]),
        "commit": commit + ("+changes" if _command("git", "status", "--porcelain") else ""),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "filesystem": {"device": device, "mount": point, "type": kind, "options": options},
        "device": _device_facts(device),
        "load_average_before": os.getloadavg(),
        "page_cache": drop_method(),
        "versions": _versions(),
    }


def spread(values: Iterable[float]) -> dict[str, float] | None:
    """min, median and max of some repetitions."""
    sample = sorted(values)
    if not sample:
        return None
    return {"min": sample[0], "median": statistics.median(sample), "max": sample[-1]}
