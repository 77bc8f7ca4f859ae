"""The example of Ray Train, on a Ray of its own, whose workers wait once in the middle.

    ray_job.py EXAMPLE FOLDER RAYS    RAYS: a folder with a short name for what Ray keeps

Its workers do as those of worker.py, and say the same.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import ray


def main() -> None:
    example, folder, rays = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    names = runpy.run_path(example)
    train = names["train"]

    def watched(config: dict[str, str]) -> None:
        from infra.launchers.worker import watch

        def tell(**event: Any) -> None:
            with open(folder / "told", "a") as told:
                told.write(json.dumps({"node": "ray", "pid": os.getpid(), **event}) + "\n")

        watch(tell, folder / "go")
        train(config)

    names["main"].__globals__["train"] = watched
    ray.init(num_cpus=4, include_dashboard=False, _temp_dir=rays)
    try:
        names["main"](str(folder / "run"))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
