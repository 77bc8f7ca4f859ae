"""The bytes that go up to an object store: a first run, its later steps, and a second run.

Both runs tune adapters on the same base. The second begins from a step of the first. The server is
bench.s3_server, which counts what it receives.
"""

from __future__ import annotations

from pathlib import Path
from urllib.request import urlopen

from bench.objects import own_server
from bench.unchanged.common import MIB, Group, Sizes, Tuning, folder
from statehold import Checkpointer, Directory, ObjectStore

DEADLINE_S = 600.0


def received(endpoint: str) -> int:
    with urlopen(f"{endpoint}/-/received") as answer:
        return int(answer.read())


def measure(sizes: Sizes, where: Path, rounds: int) -> Group:
    group = Group()
    with folder(where) as made, own_server() as endpoint:
        first, second = Tuning(sizes), Tuning(sizes)
        group.facts["changing bytes"] = first.changing_bytes
        sent = _run(made / "first", first, endpoint, None)
        again = _run(made / "second", second, endpoint, f"{made}/first@2")
        for name, each in (("first", sent), ("second", again)):
            for index, nbytes in enumerate(each, 1):
                group.rows.append({"case": f"{name} run, step {index}", "MB up": nbytes / 1e6})
    own = 1.02 * first.changing_bytes + MIB
    group.aim("later step, bytes up of 1.02 x its own + 1 MiB", "<= 1", sent[1] / own,
              sent[1] <= own, 3)  # fmt: skip
    group.aim("second run, bytes up of 1.02 x its own + 1 MiB", "<= 1", again[0] / own,
              again[0] <= own, 3)  # fmt: skip
    return group


def _run(run: Path, tuning: Tuning, endpoint: str, parent: str | None) -> list[int]:
    """What each of two saves has sent."""
    options = {"endpoint": endpoint, "allow_http": "true", "skip_signature": "true"}
    levels = [Directory(keep=2), ObjectStore(f"s3://bucket/{run.name}", options=options)]
    found = []
    with Checkpointer(run, levels=levels, parent=parent) as ckpt:
        begin = ckpt.restore(tuning.state) if parent else 0
        before = received(endpoint)
        for step in (1, 2):
            ckpt.gate()
            tuning.step()
            ckpt.save((begin or 0) + step, tuning.state)
            ckpt.flush(DEADLINE_S)
            now = received(endpoint)
            found.append(now - before)
            before = now
    return found
