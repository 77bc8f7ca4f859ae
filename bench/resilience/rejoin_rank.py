"""One rank of bench.resilience.rejoin: a peer that trains, or the joiner. Prints a record."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

from bench.resilience import burden
from statehold.process.worker import Flag
from statehold.resilience.likeness import Likeness
from statehold.resilience.meeting import MeetingPlace, meet
from statehold.resilience.transfer import StateTransfer


class Rank:
    def __init__(self, spec: dict[str, Any], rank: int) -> None:
        self._desk, self._rank, self._size = spec["desk"], rank, spec["peers"] + 1
        self.is_joiner = rank == spec["peers"]
        self._state = burden.state(spec["bytes"], is_trained=not self.is_joiner)
        self._work = burden.WORK[spec["trainer"]]
        self._step_s = spec["step_s"]
        self.transfer = StateTransfer(self._state, "127.0.0.1")
        self._meetings = 0

    def digest(self) -> int:
        return Likeness(self._state).digest()

    @property
    def nbytes(self) -> int:
        model, optimizer = self._state["model"], self._state["optimizer"]
        states = [each for state in optimizer.state.values() for each in state.values()]
        return sum(each.nbytes for each in (*model.parameters(), *states))

    def turn(self, epoch: int, *, with_joiner: bool) -> dict[str, float]:
        where = MeetingPlace(
            self._desk, epoch, (self._rank, 0), (self._size, 1), "127.0.0.1", Flag()
        )
        self._meet()
        begin, cpu = time.perf_counter(), time.process_time()
        if self.is_joiner:
            if with_joiner:
                self.transfer.fetch(where)
            fetched = time.perf_counter() - begin
            cpu_s = time.process_time() - cpu
            self._meet()
            return {"fetch_s": fetched, "cpu_s": cpu_s}
        if with_joiner:
            self.transfer.serve(where)
        served = time.perf_counter()
        self._work(self._step_s)
        worked = time.perf_counter()
        self._meet()
        self.transfer.stop_serving()
        end = time.perf_counter()
        return {
            "serve_s": served - begin,
            "work_s": worked - served,
            "step_s": end - begin,
            "cpu_s": time.process_time() - cpu,
        }

    def _meet(self) -> None:
        """All ranks, as in a reduction."""
        self._meetings += 1
        name = f"turn {self._meetings}"
        meet(self._desk, name, self._rank, self._size, "", Flag())


def main() -> None:
    torch.set_num_threads(1)
    spec, number = json.loads(sys.argv[1]), int(sys.argv[2])
    rank = Rank(spec, number)
    turns: list[dict[str, dict[str, float]]] = []
    for epoch in range(1, spec["rounds"] + 1):
        without = rank.turn(epoch, with_joiner=False)
        turns.append({"without": without, "with": rank.turn(epoch, with_joiner=True)})
    record: dict[str, Any] = {"digest": rank.digest(), "turns": turns}
    if rank.is_joiner:
        fetched, cpu = ([turn["with"][each] for turn in turns] for each in ("fetch_s", "cpu_s"))
        record |= {"bytes": rank.nbytes, "fetch_s": fetched, "cpu_s": cpu, "turns": []}
    print(json.dumps(record))


if __name__ == "__main__":
    main()
