"""`python -m bench.lowrank published`, or `fit`: the planner beside the table of BOOST."""

from __future__ import annotations

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
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
