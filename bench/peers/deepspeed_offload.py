"""DeepSpeed ZeRO-3 with offload_optimizer to the CPU or to NVMe, for bench.offload.

Runs under an interpreter that has deepspeed and libaio: `PYTHON bench/peers/deepspeed_offload.py
JSON`. It imports nothing of this repository, and speaks as bench.offload.process does: "ready",
a line, JSON. The model is that of bench.offload.process, or of bench.offload.on_device. DeepSpeed
compiles its operators at the first run, which takes minutes; TORCH_EXTENSIONS_DIR keeps them.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

WARM_UP = 2
LR = 1e-4
ENVIRONMENT = {
    "MASTER_ADDR": "127.0.0.1",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_SIZE": "1",
}


def configuration(path: str | None, buffers: int, subgroup: int) -> dict[str, Any]:
    offload: dict[str, Any] = {"device": "cpu", "pin_memory": True}
    if path is not None:
        offload |= {
            "device": "nvme",
            "nvme_path": path,
            "buffer_count": buffers,
            "pipeline_read": True,
            "pipeline_write": True,
        }
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": subgroup,
            "offload_optimizer": offload,
        },
        "aio": {
            "block_size": 1 << 20,
            "queue_depth": 8,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
        },
    }


def device_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    numbers = dict(line.split(": ") for line in lines)
    return int(numbers["read_bytes"]) + int(numbers["write_bytes"])


def memory_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def train(given: dict[str, Any], speak: Any) -> dict[str, Any]:
    import deepspeed
    import torch

    widths, on_device = given["widths"], given["on_device"]
    settle = torch.cuda.synchronize if on_device else int
    torch.manual_seed(1)
    model = torch.nn.Sequential()
    for into, out in itertools.pairwise(widths):
        if on_device:  # as bench.offload.on_device, which has no time for random numbers either
            model.append(torch.nn.utils.skip_init(torch.nn.Linear, into, out, bias=False))
            torch.nn.init.constant_(model[-1].weight, 1 / into)
        else:
            model.append(torch.nn.Linear(into, out, bias=False))
        model[-1].bfloat16()
    batch = torch.randn(8, widths[0], device="cpu").bfloat16()
    batch = batch.cuda() if on_device else batch
    Path("/proc/self/clear_refs").write_text("5")
    before = memory_bytes("VmRSS")
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=configuration(given["path"], given["buffers"], given["subgroup"]),
    )
    records: dict[str, list[dict[str, float]]] = {"updates": [], "backward": []}

    def timed(name: str, call: Any) -> None:
        device, cpu, begin = device_bytes(), time.process_time(), time.perf_counter()
        call()
        settle()
        end = time.perf_counter()
        records[name].append(
            {"begin": begin, "end": end, "wall_s": end - begin,
             "cpu_s": time.process_time() - cpu, "io_bytes": device_bytes() - device}
        )  # fmt: skip

    for update in range(WARM_UP + given["updates"]):
        if update == WARM_UP:
            print("ready", file=speak, flush=True)
            sys.stdin.readline()
        timed("backward", lambda: engine.backward(engine(batch).float().square().mean()))
        timed("updates", engine.step)
    return {
        "name": given["name"],
        "peak_bytes": memory_bytes("VmHWM") - before,
        "version": deepspeed.__version__,
        **{name: found[WARM_UP:] for name, found in records.items()},
    }


def main(words: list[str]) -> int:
    given = json.loads(words[0])
    accelerator = "cuda" if given["on_device"] else "cpu"
    its_own = {"MASTER_PORT": str(given["port"]), "DS_ACCELERATOR": accelerator}
    os.environ.update(ENVIRONMENT | its_own)
    # ninja and other programs of this interpreter; what DeepSpeed prints does not mix with ours.
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    speak = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps([train(given, speak)]), file=speak, flush=True)
    os._exit(0)  # DeepSpeed's threads may abort at the end of an interpreter


if __name__ == "__main__":
    main(sys.argv[1:])
