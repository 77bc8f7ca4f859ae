"""The proof: train, die in the middle of a save, resume, and get the same losses bit for bit.

    demo.py                 one process (story_alone.py)
    demo.py --offload       state on two paths, under a limit of memory (story_offload.py)
    demo.py --ranks 4       four processes, one dies; resumed on 4, 3 and 1 (story_ranks.py)

Owns the command line and the verdict. Invariants: it ends with 0 only when the story showed all
that it claims. Options it does not know go to train.py: demo.py --dim 128 --data ~/books.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import story_alone
import story_offload
from story import Demo, DemoError


def parse(arguments: Sequence[str]) -> Demo:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Train, kill the training in the middle of a save, resume, compare.",
        epilog="Other options go to train.py (see train.py --help): the size of the model, --data.",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="where (runs/demo)")
    parser.add_argument("--steps", type=int, help="to train (40; ranks: 24; offload: 8)")
    parser.add_argument("--kill-at", type=int, help="first save to die in (half of the steps)")
    parser.add_argument("--ranks", type=int, default=1, help="processes that train together (1)")
    parser.add_argument("--offload", nargs="*", metavar="DIR[=RATE]",
                        help="keep the state of the optimizer on paths (two in --out)")  # fmt: skip
    parser.add_argument("--memory", type=int, default=384, help="MiB beyond weights and gradients "
                        "with --offload (384); 0: no limit")  # fmt: skip
    known, options = parser.parse_known_args(arguments)
    steps = known.steps or (8 if known.offload is not None else 40 if known.ranks == 1 else 24)
    kill_at = known.kill_at or max(2, steps // 2)
    if not 2 <= kill_at <= steps:
        parser.error(f"--kill-at must be 2 to {steps}, so that a step is committed before")
    if known.offload is not None and known.ranks > 1:
        parser.error("--offload is for one process")
    if known.ranks < 1:
        parser.error("--ranks must be at least 1")
    return Demo(
        out=known.out,
        steps=steps,
        kill_at=kill_at,
        options=tuple(options),
        ranks=known.ranks,
        offload=known.offload,
        memory_mib=known.memory,
    )


def main(arguments: Sequence[str]) -> int:
    """The demo, or (--die-at STEP, --die-in-update STEP) the process that dies; the exit status."""
    if arguments[:1] == ["--die-at"]:
        story_alone.train_until_killed(int(arguments[1]), arguments[2:])
        return 0
    if arguments[:1] == ["--die-in-update"]:
        story_offload.train_until_killed(int(arguments[1]), arguments[2:])
        return 0
    try:
        demo = parse(arguments)
        if demo.offload is not None:
            story_offload.carry_out(demo)
        elif demo.ranks == 1:
            story_alone.carry_out(demo)
        else:
            import story_ranks  # which imports torch; the story of one process has no need of it

            story_ranks.carry_out(demo)
    except DemoError as error:
        print(f"\nthe demo failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
