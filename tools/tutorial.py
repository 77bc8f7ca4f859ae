"""Runs docs/tutorial.md as a person would, with the statehold that is installed, in a new folder.

    python tools/tutorial.py

The first block of Python is train.py. Every other block runs as it stands, in a shell or in Python.
Each run of train.py has to print the loss of a step as the first one did.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.documents import Block, blocks  # noqa: E402


def run(block: Block, folder: Path) -> str:
    """What a block prints; ends this program if it fails."""
    print(f"--- {block}", block.code, sep="\n", flush=True)
    command = [sys.executable, "-"] if block.is_python else ["bash"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    done = subprocess.run(
        command, input=block.code, cwd=folder, env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600,
    )  # fmt: skip
    print(done.stdout, flush=True)
    if done.returncode:
        sys.exit(f"{block} of the tutorial ended with status {done.returncode}")
    return done.stdout


def main() -> None:
    used = [each for each in blocks(ROOT / "docs/tutorial.md") if each.heading != "Install"]
    train = next(each for each in used if each.is_python)
    losses: dict[str, str] = {}
    starts: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(train.code)
        for block in used:
            if block is train:
                continue
            printed = run(block, Path(folder))
            starts += map(int, re.findall(r"^starting at step (\d+)$", printed, re.MULTILINE))
            for step, loss in re.findall(r"^step (\d+)  loss (\S+)$", printed, re.MULTILINE):
                if losses.setdefault(step, loss) != loss:
                    sys.exit(f"the loss of step {step} was {losses[step]}, and is {loss} now")
    # From the beginning, to be killed, after that, and from the step before the damaged one.
    # What a killed run has printed may be lost.
    at_first, *killed, resumed, before_the_damage = starts
    is_told = {at_first, *killed} == {0} and 50 <= resumed <= 200 and before_the_damage == 199
    if not is_told or len(losses) != 10:
        sys.exit(f"the tutorial has other runs than it says: {starts}, {losses}")
    print("the tutorial runs as it says")


if __name__ == "__main__":
    main()
