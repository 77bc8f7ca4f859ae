"""The log of a run: one JSON object a line, appended, so that runs can be compared afterwards.

Records, by "event":
    start       step (trained so far), threads, torch, device, parameters, ranks
    state       step, sha256 of all tensors, whole, of model and optimizer, and of the position in
                the data   (with --checksums)
    step        step, loss, step_s (the whole iteration, save() included), blocked_s (save() alone)
    save        step, bytes, blocked_s, gate_s, staged_s, written_s, committed_s   (once committed)
    validation  step, loss
    limit       nbytes that the process may take (0: no limit), taken_bytes when it began
    update      step, and what an update of an offloaded optimizer took (optimizers.recorded_step)
Of a replica (replica.py), with times as time.time() gives them:
    start       pid, threads, at
    microbatch  step, index, samples, began, ended: computed, whether it was counted or not
    step        also share: the microbatches of this replica that were counted; at
Of an engine (served.py):
    answer      step, tokens, found: tokens of the prompt that came from pages; pid
A loss is the hexadecimal form of its float: equal text means equal bits. A run that was killed has
the steps after its newest committed one twice, once from either side of the kill.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class Journal:
    """Appends to a log; every record is with the operating system before `write` returns."""

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        # Unbuffered: a record is one write, so a SIGKILL leaves whole lines only.
        self._file = path.open("wb" if fresh else "ab", buffering=0)

    def write(self, event: str, **values: Any) -> None:
        """Append one record."""
        self._file.write(json.dumps({"event": event, **values}).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One training step of a log."""

    step: int
    loss_hex: str
    step_s: float
    blocked_s: float
    began_with: str | None  # the checksum of the state before it, with --checksums

    @property
    def loss(self) -> float:
        """The loss as a number."""
        return float.fromhex(self.loss_hex)


def read_events(path: Path, *events: str) -> Iterator[dict[str, Any]]:
    """The records of these events, in the order in which they were written."""
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if record["event"] in events:
            yield record


def read_steps(path: Path) -> list[StepRecord]:
    """The training steps of a log, in the order in which they ran."""
    found, states = [], {}
    for record in read_events(path, "step", "state"):
        step = record["step"]
        if record["event"] == "state":
            states[step] = record["sha256"]
            continue
        timings = record["step_s"], record["blocked_s"]
        found.append(StepRecord(step, record["loss"], *timings, states.get(step - 1)))
    return found
