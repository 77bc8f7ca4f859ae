"""The facts of the machine that a figure of a device depends on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bench import harness
from bench.gpu import figures
from bench.gpu.figures import Figure
from bench.gpu.task import Task
from statehold import _core

__all__ = ["device_facts", "host_facts"]

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
QUERY = "name,driver_version,memory.total,pcie.link.gen.current,pcie.link.width.current,pci.bus_id"


def host_facts(directory: Path, command: list[str]) -> dict[str, Any]:
    """What harness.facts says, and memory, nodes and the way of doing I/O. No device is touched."""
    fs = _core.open_fs("auto", 32)
    io = f"{fs.backend}; {fs.note}" if fs.note else fs.backend
    fs.close()
    words = {"command": " ".join(["python -m bench.gpu", *command])}
    return (
        harness.facts(directory)
        | words
        | {
            "io": io,
            "huge_pages": {name: _text(HUGE_PAGES / name) for name in ("enabled", "defrag")},
            "numa_nodes": _text(Path("/sys/devices/system/node/online")),
            "processors_allowed": len(os.sched_getaffinity(0)),
            "available_memory_bytes": harness.available_memory(),
            "python": sys.version.split()[0],
        }
    )


def device_facts(task: Task) -> Iterator[Figure]:
    """The check "facts", which shows that the device answers."""
    yield figures.measured("torch", torch.__version__)
    if task.torch_device.type != "cuda":
        yield figures.skipped("device", "no CUDA device is asked for")
        return
    properties = torch.cuda.get_device_properties(task.torch_device)
    yield figures.measured("device", properties.name)
    yield figures.measured("device memory", properties.total_memory / harness.GB, "GB")
    yield figures.measured("CUDA of torch", str(torch.version.cuda))
    yield figures.measured("devices", torch.cuda.device_count())
    yield figures.measured(f"nvidia-smi: {QUERY}", _nvidia_smi())
    node = Path("/sys/bus/pci/devices") / _bus_id(properties) / "numa_node"
    yield figures.measured("NUMA node of the device", _text(node))


def _bus_id(properties: Any) -> str:
    domain, bus, device = (
        getattr(properties, f"pci_{key}_id", 0) for key in ("domain", "bus", "device")
    )
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def _nvidia_smi() -> str:
    words = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"not available: {type(error).__name__}"
    return done.stdout.strip().replace("\n", "; ")


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return "unknown"
