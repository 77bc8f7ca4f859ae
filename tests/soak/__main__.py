"""Saves and restores in a loop for hours: memory, descriptors and threads must stay what they are.

    python -m soak --minutes 120

A job of one rank and one of two (as threads) take turns: save, restore, and now and then a
damaged step, a failed save, and another Checkpointer on the run. After a warm-up nothing may grow.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from soak.loop import Soak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=120)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(Soak(Path(folder)).run(60 * given.minutes, tell=print))


if __name__ == "__main__":
    main()
