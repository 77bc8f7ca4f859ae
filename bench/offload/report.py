"""Tables of bench.offload. Medians over all updates of all rounds; ratios are of these."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from bench.offload.cases import FULL_SAVE

MIB = 1 << 20
Record = dict[str, Any]


class Row:
    """All records of one case."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records
        self.name: str = records[0]["name"]

    def of(self, key: str, phase: str = "updates") -> list[float]:
        return [each[key] for record in self.records for each in record.get(phase, [])]

    @property
    def update_s(self) -> float:
        return statistics.median(self.of("wall_s"))

    @property
    def total_s(self) -> float:
        """With the backward pass, where there is one."""
        return self.update_s + statistics.median(self.of("wall_s", "backward") or [0.0])

    @property
    def commit_s(self) -> float | None:
        """From the call of save() to the commit."""
        taken = self.of("wall_s", "saves")
        return statistics.median(taken) if taken else None

    def figure(self, key: str) -> float | None:
        values = [record[key] for record in self.records if key in record]
        return statistics.median(values) if values else None


def rows_of(records: Sequence[Record]) -> dict[str, Row]:
    names = dict.fromkeys(record["name"] for record in records)
    return {name: Row([each for each in records if each["name"] == name]) for name in names}


def table(records: Sequence[Record], numel: int) -> str:
    rows = rows_of(records)
    lines = [
        f"{'case':50} {'update s: min med max':>23} {'backward':>8} {'cpu s':>7} {'io B/par':>8} "
        f"{'of limit':>8} {'hidden':>6} {'MiB':>6} {'announced':>9} {'faster':>6} {'commit s':>8} "
        f"{'sooner':>6}"
    ]
    full = rows.get(FULL_SAVE)
    for row in rows.values():
        of = rows.get(row.records[0]["of"])
        taken = row.of("wall_s")
        io = statistics.median(row.of("io_bytes")) + statistics.median(
            row.of("io_bytes", "backward") or [0]
        )
        backward = row.of("wall_s", "backward")
        limit, hidden = row.figure("limit_s"), row.figure("hidden_s")
        compute = row.figure("compute_s")
        peak, announced = row.figure("peak_bytes"), row.figure("announced_bytes")
        lines.append(
            f"{row.name:50} {min(taken):7.3f} {row.update_s:7.3f} {max(taken):7.3f} "
            f"{_cell(statistics.median(backward) if backward else None, '8.3f')} "
            f"{statistics.median(row.of('cpu_s')):7.3f} {io / numel:8.2f} "
            f"{_cell(limit and limit / row.update_s, '8.2f')} "
            f"{_cell(hidden and compute and min(1.0, hidden / compute), '6.2f')} "
            f"{_cell(peak and peak / MIB, '6.0f')} {_cell(announced and announced / MIB, '9.0f')} "
            f"{_cell(of and of.total_s / row.total_s, '6.2f')} "
            f"{_cell(row.commit_s, '8.3f')} "
            f"{_cell(row.commit_s and full and full.commit_s / row.commit_s, '6.2f')}"
        )
    return "\n".join(line.rstrip() for line in lines)


def _cell(value: float | None, form: str) -> str:
    return format(value, form) if value else " " * int(form.split(".")[0])
