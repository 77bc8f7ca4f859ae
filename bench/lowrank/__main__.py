"""`python -m bench.lowrank published|fit|steps|losses|saves`: see bench/README.md."""

from __future__ import annotations

import importlib
import sys

from bench.lowrank import published


def main(arguments: list[str]) -> int:
    """The part of the benchmark that the first word names."""
    if arguments == ["published"]:
        print(*published.lines(), sep="\n")
        return 0
    if arguments == ["fit"]:
        print(published.fit())
        return 0
    if arguments[:1] in (["steps"], ["losses"], ["saves"]):
        # With torch, which the table of before does not need.
        part = importlib.import_module(f"bench.lowrank.{arguments[0]}")
        return int(part.run(arguments[1:]))
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
