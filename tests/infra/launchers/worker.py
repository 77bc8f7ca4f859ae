"""A worker of torchrun or of Ray: an example of `examples/`, which waits once in the middle.

    worker.py EXAMPLE FOLDER NODE

The example's run is FOLDER/run. The worker waits after the commit of step HOLD until FOLDER/go is
there. It appends JSON lines to FOLDER/told: {"node", "pid", "ranks", "start"}, then {"pid",
"holding"}.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HOLD = 12


def watch(tell: Callable[..., None], go: Path) -> None:
    """Let each Checkpointer of this process tell of its restore, and wait after step HOLD."""
    import torch

    import statehold

    restore, save = statehold.Checkpointer.restore, statehold.Checkpointer.save

    def restoring(ckpt: Any, *args: Any, **options: Any) -> int | None:
        start = restore(ckpt, *args, **options)
        tell(ranks=torch.distributed.get_world_size(), start=start or 0)
        return start

    def saving(ckpt: Any, step: int, *args: Any, **options: Any) -> Any:
        saved = save(ckpt, step, *args, **options)
        if step == HOLD and not go.exists():
            saved.wait("committed", 120)
            tell(holding=step)
            while not go.exists():
                signal.sigtimedwait([], 0.01)
        return saved

    statehold.Checkpointer.restore = restoring  # type: ignore[assignment]
    statehold.Checkpointer.save = saving  # type: ignore[assignment]


def main() -> None:
    example, folder, node = sys.argv[1], Path(sys.argv[2]), sys.argv[3]

    def tell(**event: Any) -> None:
        with open(folder / "told", "a") as told:
            told.write(json.dumps({"node": node, "pid": os.getpid(), **event}) + "\n")

    watch(tell, folder / "go")
    sys.argv = [example, str(folder / "run")]
    runpy.run_path(example, run_name="__main__")


if __name__ == "__main__":
    main()
