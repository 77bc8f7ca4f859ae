"""One check in one process, so that no check inherits another one's memory, pins or device errors.

`python -m bench.gpu.child SPEC RESULT` is what run.py starts. A check's figures are written as soon
as they are found, each on a line of its own.
Invariants: what a check found before it raised, or was stopped, is in the file.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
import traceback
from pathlib import Path
from typing import TextIO

from bench.gpu import figures
from bench.gpu.checks import CHECKS
from bench.gpu.figures import Figure
from bench.gpu.task import Check, Skipped, Task

__all__ = ["run_task"]


def run_task(task: Task, check: Check, result: Path) -> None:
    """Run `check`, and append to `result` what it finds. Raises nothing that a check raises."""
    with result.open("a") as file:
        try:
            for figure in check(task):
                _write(figure, file)
        except Skipped as reason:
            _write(figures.skipped(task.check, str(reason)), file)
        except Exception as error:  # the next check must go on
            traceback.print_exc()
            _write(figures.failed(task.check, f"{type(error).__name__}: {error}"), file)
    gc.collect()


def _write(figure: Figure, file: TextIO) -> None:
    line = json.dumps(dataclasses.asdict(figure))
    print(line, flush=True)  # to checks.log, which is kept if the run is cut off here
    file.write(line + "\n")
    file.flush()


def main() -> None:
    task = Task(**json.loads(Path(sys.argv[1]).read_text()))
    run_task(task, CHECKS[task.check].run, Path(sys.argv[2]))


if __name__ == "__main__":
    main()
