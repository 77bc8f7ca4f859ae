"""Saves and restores in a loop for hours: memory, descriptors, threads and files must not grow.

    python -m soak --minutes 120

Says every minute what it holds, and fails as soon as something has grown. What a round is: loop.py.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from soak.loop import Soak


def say(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=120)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(Soak(Path(folder)).run(60 * given.minutes, tell=say))


if __name__ == "__main__":
    main()
