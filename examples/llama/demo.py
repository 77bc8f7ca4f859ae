"""The proof: train, die in the middle of a save, resume, and get the same losses bit for bit.

    demo.py                 one process (story_alone.py)
    demo.py --offload       state on two paths, under a limit of memory (story_offload.py)
    demo.py --ranks 4       four processes, one dies; resumed on 4, 3 and 1 (story_ranks.py)
    demo.py --replicas 4    four replicas; two die in a step, one hangs, and they come back
                            (story_replicas.py)
    demo.py --serving       an engine takes the steps live, and is killed (story_serving.py)

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
from story import Demo, DemoError, OtherArithmetic

ATTEMPTS = 3  # while torch computes other bits from an equal state


def parse(arguments: Sequence[str]) -> Demo:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Train, kill the training in the middle of a save, resume, compare.",
        epilog="Other options go to train.py (see train.py --help): the size of the model, --data.",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="where (runs/demo)")
    parser.add_argument("--steps", type=int, help="to train (40; offload: 8; "
                        "ranks and replicas: 24)")  # fmt: skip
    parser.add_argument("--kill-at", type=int, help="first save to die in (half of the "
                        "steps); replicas: step (a quarter)")  # fmt: skip
    parser.add_argument("--ranks", type=int, default=1, help="processes that train together (1)")
    parser.add_argument("--replicas", type=int, default=0, help="that train together, and are lost")
    parser.add_argument("--serving", action="store_true", help="an engine takes the steps live")
    parser.add_argument("--offload", nargs="*", metavar="DIR[=RATE]",
                        help="keep the state of the optimizer on paths (two in --out)")  # fmt: skip
    parser.add_argument("--memory", type=int, default=384, help="MiB beyond weights and gradients "
                        "with --offload (384); 0: no limit")  # fmt: skip
    known, options = parser.parse_known_args(arguments)
    steps = known.steps or _default_steps(known)
    kill_at = known.kill_at or max(2, steps // (4 if known.replicas else 2))
    if problem := _problem(known, steps, kill_at):
        parser.error(problem)
    return Demo(
        out=known.out,
        steps=steps,
        kill_at=kill_at,
        options=tuple(options),
        ranks=known.ranks,
        replicas=known.replicas,
        offload=known.offload,
        serving=known.serving,
        memory_mib=known.memory,
    )


def _default_steps(known: argparse.Namespace) -> int:
    if known.offload is not None:
        return 8
    return 24 if known.replicas or known.ranks > 1 else 40


def _problem(known: argparse.Namespace, steps: int, kill_at: int) -> str | None:
    """Why there is no such demo."""
    kinds = known.offload is not None, known.ranks > 1, known.replicas > 0, known.serving
    if sum(kinds) > 1:
        return "--offload, --ranks, --replicas and --serving are demos of their own"
    if known.ranks < 1:
        return "--ranks must be at least 1"
    if known.replicas and known.replicas < 4:
        return "--replicas must be at least 4: two are killed, one hangs, and one goes on"
    if not 2 <= kill_at <= steps:
        return f"--kill-at must be 2 to {steps}, so that a step is committed before"
    return None


def main(arguments: Sequence[str]) -> int:
    """The demo, or (--die-at STEP, --die-in-update STEP) the process that dies; the exit status."""
    if arguments[:1] == ["--die-at"]:
        story_alone.train_until_killed(int(arguments[1]), arguments[2:])
        return 0
    if arguments[:1] == ["--die-in-update"]:
        story_offload.train_until_killed(int(arguments[1]), arguments[2:])
        return 0
    demo = parse(arguments)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            carry_out(demo)
            return 0
        except OtherArithmetic as error:
            print(f"\nattempt {attempt} of {ATTEMPTS}: {error}", file=sys.stderr, flush=True)
        except DemoError as error:
            print(f"\nthe demo failed: {error}", file=sys.stderr)
            return 1
    print("the demo failed: torch computed other bits each time", file=sys.stderr)
    return 1


def carry_out(demo: Demo) -> None:
    """Tell the story that was asked for. It is imported here if it imports torch."""
    if demo.serving:
        import story_serving

        story_serving.carry_out(demo)
    elif demo.replicas:
        import story_replicas

        story_replicas.carry_out(demo)
    elif demo.offload is not None:
        story_offload.carry_out(demo)
    elif demo.ranks == 1:
        story_alone.carry_out(demo)
    else:
        import story_ranks

        story_ranks.carry_out(demo)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
