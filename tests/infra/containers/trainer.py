"""The job of a container: trains to a step, or until it has to leave.

Usage: trainer.py RUN LAST OPTIONS, with a JSON object of options: width; memory, a path, or "" for
that of statehold's choice; staging; leave_s; forbid, a system call; groups of processes, to join.
Reports on stdout, one JSON line an event: {"restored"}; {"step", "loss"} after a commit; {"end"}.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))


def report(**event: Any) -> None:
    os.write(1, json.dumps(event).encode() + b"\n")


def main() -> None:
    run, last, options = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    for group in options.get("groups", ()):
        Path(group, "cgroup.procs").write_text(str(os.getpid()))
    if "forbid" in options:
        from support.seccomp import forbid

        forbid(options["forbid"])

    import statehold
    from support.training import Training

    levels: list[Any] = [statehold.Directory(keep=2)]
    if "memory" in options:
        near = statehold.Memory(path=options["memory"] or None, agent=False)
        levels = [near, statehold.Directory(every=1000, keep=2)]
    more = {"staging_bytes": options["staging"]} if "staging" in options else {}
    width = options.get("width", 64)
    with statehold.Checkpointer(run, levels=levels, **more) as ckpt:
        training = Training(seed=1, width=width)  # other bits than those of the job
        begin = ckpt.restore(training.state)
        if begin is None:
            training = Training(width=width)
        report(restored=begin)
        if "leave_s" in options:
            ckpt.leave_on(within_s=options["leave_s"])
        for step in range((begin or 0) + 1, last + 1):
            loss = training.step()
            ckpt.save(step, training.state).wait("committed", 60)
            report(step=step, loss=loss.hex())
        report(end=ckpt.backend, pid=os.getpid())


if __name__ == "__main__":
    main()
