"""One measurement in one fresh process, so that memory and warm-up never leak between peers.

Owns: `Case` (what to measure), and `run_case` which measures it in this process and returns a
plain record. `python -m bench.case SPEC RESULT` is what run.py starts for every case.
Invariants: a record is always written: "ok", "unavailable" or "failed", the latter two with the
reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import sys
import time
import traceback
import zlib
from pathlib import Path
from typing import Any

from bench.peers.base import PeerOptions, Unavailable


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One process of one benchmark. Fields that a benchmark does not use keep their defaults."""

    bench: str  # "save", "train", "restore" or "limit": the module that runs it
    directory: str  # an empty directory on the storage under test; removed by run.py
    size: str = "smoke"
    peer: str = ""
    repetition: int = 0
    staging_bytes: int = 1 << 30
    saves: int = 3  # save: how many, one after the other
    steps: int = 4  # train: how many, saving after every `interval`-th
    interval: int = 1
    work: int = 0  # train: matrix products per step, from the calibration
    step_s: float = 0.3  # limit: what `work` is calibrated for

    @property
    def seed(self) -> int:
        """Different for every peer and repetition: a stale file cannot pass for a new one."""
        return zlib.crc32(f"{self.bench} {self.peer} {self.repetition}".encode()) % 10007

    @property
    def smoke(self) -> bool:
        return self.size == "smoke"

    @property
    def path(self) -> Path:
        return Path(self.directory)

    def peer_options(self) -> PeerOptions:
        return PeerOptions(staging_bytes=self.staging_bytes)


def run_case(case: Case) -> dict[str, Any]:
    """Measure `case` here and now."""
    begin = time.perf_counter()
    record: dict[str, Any] = {"case": dataclasses.asdict(case), "status": "ok", "reason": ""}
    try:
        record["result"] = importlib.import_module(f"bench.{case.bench}").measure(case)
    except Unavailable as error:
        record |= {"status": "unavailable", "reason": str(error)}
    except Exception as error:  # one broken peer must not lose the figures of the others
        traceback.print_exc()
        record |= {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    record["process_s"] = time.perf_counter() - begin
    return record


def main() -> None:
    with contextlib.suppress(OSError):  # if memory runs out, this process is the one to go
        Path("/proc/self/oom_score_adj").write_text("1000")
    case = Case(**json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(run_case(case)))


if __name__ == "__main__":
    main()
