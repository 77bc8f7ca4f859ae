"""The campaign: coverage-guided, for so many seconds. `make fuzz SECONDS=600`; needs atheris.

    python -m fuzz --seconds 600 [--corpus DIR]

Begins with the seeds, the corpus and the findings; what reaches new code is kept in DIR (by default
build/fuzz). An input may take 10 s, and 2 GiB more than the start; to open a file of this machine
while an input is looked at is a finding. The first finding ends the campaign and is written to DIR:
fix it, and keep it in tests/fuzz/findings/, which the everyday suite replays.
"""

from __future__ import annotations

import argparse
import hashlib
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import atheris

with atheris.instrument_imports(include=["statehold"]):
    from fuzz.targets import Targets, Wrong

from fuzz.mutate import mutate

HERE = Path(__file__).parent
INPUT_S = 10
MEMORY_BYTES = 2 << 30
TOUCHES = ("open", "os.", "shutil.", "subprocess.", "socket.")


class Guard:
    """Raises when an input makes this process touch a file."""

    def __init__(self) -> None:
        self.armed = False
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.armed and event.startswith(TOUCHES):
            self.armed = False
            raise Wrong(f"an input led to {event}{arguments!r}")

    def watched(self, check: Callable[[bytes], object]) -> Callable[[bytes], None]:
        def run(data: bytes) -> None:
            self.armed = True
            try:
                check(data)
            finally:
                self.armed = False

        return run


def limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def write_seeds(folder: Path, seeds: list[bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        (folder / hashlib.sha256(seed).hexdigest()[:16]).write_bytes(seed)


def mutated(data: bytes, size_max: int, seed: int) -> bytes:
    return data[:1] + mutate(data[1:], seed, size_max - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--corpus", type=Path, default=Path("build/fuzz"))
    given = parser.parse_args()
    targets = Targets()
    write_seeds(given.corpus, targets.seeds)
    for seed in targets.seeds:
        targets.check(seed)  # what is imported or opened once is, before the guard is armed
    limit_memory()
    folders = [str(given.corpus), str(HERE / "corpus"), str(HERE / "findings")]
    limits = [f"-timeout={INPUT_S}", "-rss_limit_mb=0", "-max_len=131072", "-print_final_stats=1"]
    limits += [f"-max_total_time={given.seconds}", f"-artifact_prefix={given.corpus}/finding-"]
    run = Guard().watched(targets.check)
    atheris.Setup([sys.argv[0], *limits, *folders], run, custom_mutator=mutated)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
