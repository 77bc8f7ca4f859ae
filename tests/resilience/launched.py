"""A rank that torchrun has started: `launched.py {"node", "folder", "coordinator", ...} in JSON`.

Its log is FOLDER/NODE.ATTEMPT.RANK; `dooms` gives the fates of these names. Ranks are replicas of
their own, or with "width" the ranks of one replica.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    from resilience.replica import Order, train

    given: dict[str, Any] = json.loads(sys.argv[1])
    rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    name = f"{given['node']}.{attempt}.{rank}"
    at, file = given["hold"]
    doom = given["dooms"].get(name)
    train(
        Order(
            given["coordinator"],
            Path(given["folder"], name),
            given["until"],
            doom=None if doom is None else tuple(doom),
            place=int(rank) if given["width"] > 1 else 0,
            width=given["width"],
            hold=(at, Path(file)),
        )
    )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main()
