"""What the logs of replicas say: what each has counted in which step, and a timeline.

Owns figures and plots; reads logs only (replica.py, and struck.jsonl of the demo). Invariants: what
is counted comes from the shares of committed steps; what was computed, from each microbatch. A
replica is called by its number, and a step by its number from 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from journal import read_events, read_steps
from report import NO_PLOT, WARMUP_STEPS, pyplot_or_none

STRUCK = "struck.jsonl"
COLUMNS = 24  # steps in a line of the timeline
SIGNS = {"SIGKILL": "X", "SIGSTOP": "Z"}
LEGEND = (
    "microbatches that were counted, by step; X killed, Z stopped, + takes the state, . not there"
)


@dataclass(frozen=True, slots=True)
class Replica:
    """What one replica has written down. steps: the committed ones, by number."""

    number: int
    log: Path
    steps: dict[int, dict[str, Any]]
    microbatches: list[dict[str, Any]]

    @property
    def counted(self) -> list[tuple[int, int]]:
        """Its microbatches that count, as (step, index)."""
        return [(step, index) for step, each in self.steps.items() for index in each["share"]]


@dataclass(frozen=True, slots=True)
class Ledger:
    """Of all replicas of a run.

    counted: in how many shares each microbatch is, as (step, index). samples: how often each
    sample was counted. computed: how often each replica has computed each microbatch.
    """

    counted: Counter[tuple[int, int]]
    samples: Counter[int]
    computed: Counter[tuple[int, int, int]]

    @property
    def repeated(self) -> int:
        """Microbatches that one replica has computed more than once."""
        return sum(times > 1 for times in self.computed.values())

    @property
    def dropped(self) -> int:
        """Microbatches that were computed and not counted."""
        return self.computed.total() - self.counted.total()


def read(run: Path) -> list[Replica]:
    """All replicas of a run, by number."""
    logs = {int(path.stem.partition("-")[2]): path for path in run.glob("replica-*.jsonl")}
    return [
        Replica(
            number,
            log,
            {each["step"]: each for each in read_events(log, "step")},
            list(read_events(log, "microbatch")),
        )
        for number, log in sorted(logs.items())
    ]


def ledger(replicas: Sequence[Replica]) -> Ledger:
    """Count what has been counted."""
    counted, samples = Counter[tuple[int, int]](), Counter[int]()
    computed = Counter[tuple[int, int, int]]()
    for replica in replicas:
        drawn = {(each["step"], each["index"]): each["samples"] for each in replica.microbatches}
        counted.update(replica.counted)
        for name in replica.counted:
            samples.update(drawn.get(name, ()))
        computed.update(
            (replica.number, each["step"], each["index"]) for each in replica.microbatches
        )
    return Ledger(counted, samples, computed)


def struck(run: Path, event: str = "struck") -> list[dict[str, Any]]:
    """What has struck which replica, in which step and when; "continued": when it went on."""
    path = run / STRUCK
    return list(read_events(path, event)) if path.exists() else []


def timeline(run: Path) -> str:
    """A line for each replica, and a column for each step."""
    replicas = read(run)
    signs = {(each["replica"], each["step"]): SIGNS[each["signal"]] for each in struck(run)}
    last = max(step for replica in replicas for step in replica.steps)

    def cell(replica: Replica, step: int) -> str:
        if step in replica.steps:
            return f"{len(replica.steps[step]['share']) or '+':>3}"
        return f"{signs.get((replica.number, step), '.'):>3}"

    lines = []
    for first in range(1, last + 1, COLUMNS):
        steps = range(first, min(first + COLUMNS, last + 1))
        lines.append(f"   {'step':<10}" + "".join(f"{step:>3}" for step in steps))
        lines += [
            f"   replica {replica.number:<2}" + "".join(cell(replica, step) for step in steps)
            for replica in replicas
        ]
    return "\n".join([*lines, f"   {LEGEND}"])


def pauses(reference: Path, run: Path) -> str:
    """How long the steps took in which something struck, beside a step without failures."""
    usual = median(each.step_s for each in read_steps(read(reference)[0].log)[WARMUP_STEPS:])
    found = read(run)[0].steps
    lines = [f"a step of the reference took {usual:.2f} s (median)"]
    for step, names in _by_step(struck(run)).items():
        lines.append(f"step {step} took {found[step]['step_s']:.2f} s, with {names}")
    return "\n".join(f"   {line}" for line in lines)


def _by_step(struck: Sequence[dict[str, Any]]) -> dict[int, str]:
    """What has struck in each step, in words."""
    steps: dict[int, list[str]] = {}
    for each in struck:
        steps.setdefault(each["step"], []).append(f"{each['signal']} of replica {each['replica']}")
    return {step: " and ".join(words) for step, words in steps.items()}


def save_plot(reference: Path, run: Path, path: Path) -> str:
    """Draw both loss curves, and when each replica computed what, as a PNG; says where."""
    pyplot = pyplot_or_none()
    if pyplot is None:
        return NO_PLOT
    replicas = read(run)
    figure, (losses, lanes) = pyplot.subplots(
        2, 1, figsize=(9, 4 + 0.5 * len(replicas)), height_ratios=(3, 2), layout="constrained"
    )
    for log, style in (
        (read(reference)[0].log, {"label": "undisturbed", "color": "0.75", "linewidth": 6}),
        (replicas[0].log, {"label": "replicas die, hang and come back", "color": "tab:blue"}),
    ):
        steps = read_steps(log)
        losses.plot([each.step for each in steps], [each.loss for each in steps], **style)
    for step, names in _by_step(struck(run)).items():
        losses.axvline(step, color="tab:red", linestyle="--", label=f"step {step}: {names}")
    losses.set_xlabel("step")
    losses.set_ylabel("loss (nats per byte)")
    losses.set_title("the same losses bit for bit")
    losses.legend()
    _draw_lanes(lanes, replicas, run)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return f"   plot: {path}"


def _draw_lanes(axes: Any, replicas: Sequence[Replica], run: Path) -> None:
    begin = min(each["began"] for replica in replicas for each in replica.microbatches)
    for place, replica in enumerate(replicas):
        counted = set(replica.counted)
        for is_counted, color in ((True, "tab:blue"), (False, "tab:red")):
            bars = [
                (each["began"] - begin, each["ended"] - each["began"])
                for each in replica.microbatches
                if ((each["step"], each["index"]) in counted) == is_counted
            ]
            axes.broken_barh(bars, (place - 0.4, 0.8), color=color, alpha=0.6, linewidth=0.3)
    for each in replicas[0].steps.values():
        axes.axvline(each["at"] - begin, color="0.85", linewidth=0.6, zorder=0)
    for kind, marker in (("struck", "x"), ("continued", ">")):
        found = struck(run, kind)
        times, places = [each["at"] - begin for each in found], [each["replica"] for each in found]
        axes.scatter(times, places, marker=marker, color="black", zorder=3)
    axes.set_yticks(range(len(replicas)), [f"replica {each.number}" for each in replicas])
    axes.invert_yaxis()
    axes.set_xlabel("s; blue: counted, red: dropped, x: SIGKILL or SIGSTOP, >: SIGCONT, | commits")
