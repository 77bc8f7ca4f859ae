"""One check in one process, so that no check inherits another one's memory, pins or device errors.

Owns: `Task` (what a check is given) and `run_task`, which runs a check and writes a line for each
figure as soon as it is found. `python -m bench.gpu.task SPEC RESULT` is what run.py starts.
Holds: what was found before a check raised, or was stopped, is in the file.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TextIO

import torch

from bench.gpu import figures
from bench.gpu.figures import Figure

__all__ = ["Check", "Skipped", "Task", "run_task"]


class Skipped(Exception):
    """The check cannot run here; the message says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """What a check is given.

    state_bytes: of the state that is saved. found: the figures of earlier checks, by name, among
    them the ceilings. is_smoke: everything is as small and short as it can be.
    """

    check: str
    device: str
    directory: str
    state_bytes: int
    found: Mapping[str, float] = dataclasses.field(default_factory=dict)
    is_smoke: bool = False

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)

    @property
    def path(self) -> Path:
        """An empty directory on the storage under test; the caller removes it."""
        return Path(self.directory)

    def at_most_bytes(self, nbytes: int) -> int:
        """So many bytes, or those of the state if these are fewer."""
        return min(nbytes, self.state_bytes)

    def need_cuda(self, what: str) -> None:
        if self.torch_device.type != "cuda":
            raise Skipped(f"{what}: only on CUDA")

    def of_ceiling(self, name: str, value: float, ceiling: str, target: float) -> Figure:
        """`value` over an earlier figure of the same unit."""
        limit = self.found.get(ceiling)
        if not limit:
            return figures.skipped(name, f"no figure for: {ceiling}")
        return figures.at_least(name, value / limit, target)


Check = Callable[[Task], Iterator[Figure]]


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
    file.write(json.dumps(dataclasses.asdict(figure)) + "\n")
    file.flush()


def main() -> None:
    from bench.gpu.checks import CHECKS

    task = Task(**json.loads(Path(sys.argv[1]).read_text()))
    run_task(task, CHECKS[task.check].run, Path(sys.argv[2]))


if __name__ == "__main__":
    main()
