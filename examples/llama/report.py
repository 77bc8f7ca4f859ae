"""What the logs of two runs say: the cost of saving, and both loss curves.

Owns figures and plots; reads logs only. Invariants: every figure is computed from the logs alone,
and a step is compared with the same step of the reference run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from journal import StepRecord, read_events, read_steps

# The first steps of a process warm up caches and allocators; their times say nothing.
WARMUP_STEPS = 2
PLOT_COLUMNS, PLOT_ROWS = 72, 14
NO_PLOT = "   no plot: matplotlib is not installed"


@dataclass(frozen=True, slots=True)
class Measured:
    """The steps of both runs, in the order in which they ran, and the committed saves."""

    reference: list[StepRecord]
    run: list[StepRecord]
    saves: list[dict[str, Any]]
    starts: list[int]

    def settled(self, steps: Sequence[StepRecord], starts: Sequence[int]) -> list[StepRecord]:
        """The steps that are not among the first of a process; all, where none is left."""
        warming = {start + nth for start in starts for nth in range(1, WARMUP_STEPS + 1)}
        return [record for record in steps if record.step not in warming] or list(steps)


def measure(reference: Path, run: Path) -> Measured:
    """Read both logs."""
    starts = [record["step"] for record in read_events(run, "start")]
    saves = list(read_events(run, "save"))
    return Measured(read_steps(reference), read_steps(run), saves, starts)


def table(measured: Measured) -> str:
    """The figures of saving, one a line."""
    saves = measured.saves
    # The same steps on both sides, or the warm-up of a resumed process would count as a cost.
    plain = median(r.step_s for r in measured.settled(measured.reference, measured.starts))
    saving = median(r.step_s for r in measured.settled(measured.run, measured.starts))
    blocked = [save["blocked_s"] + save["gate_s"] for save in saves]
    committed = [save["committed_s"] for save in saves]
    rates = [save["bytes"] / save["committed_s"] for save in saves]
    rows = [
        ("committed saves", f"{len(saves)} of {saves[-1]['bytes'] / 1e6:.1f} MB, one a step"),
        ("time blocked per save", f"median {_ms(median(blocked))}, longest {_ms(max(blocked))}"),
        ("  in save() itself", f"median {_ms(median([save['blocked_s'] for save in saves]))}"),
        ("  in optimizer.step()", f"median {_ms(median([save['gate_s'] for save in saves]))}"),
        ("time to committed", f"median {_ms(median(committed))}, longest {_ms(max(committed))}"),
        ("durable throughput", f"median {median(rates) / 1e9:.2f} GB/s, fdatasync included"),
        ("a step without / with saves", f"{_ms(plain)} / {_ms(saving)}"),
        ("slow-down of a step", f"{(saving / plain - 1) * 100:+.1f} %  (medians)"),
    ]
    return "\n".join(f"   {name:<29}{value}" for name, value in rows)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def ascii_plot(measured: Measured, killed_in: int) -> str:
    """Both loss curves in characters: '*' where they are the same, '|' the step of the kill."""
    expected = {record.step: record.loss for record in measured.reference}
    found = {record.step: record.loss for record in measured.run}
    steps, losses = max(expected), [*expected.values(), *found.values()]
    low, high = min(losses), max(losses)
    columns = min(PLOT_COLUMNS, steps)
    grid = [[" "] * columns for _ in range(PLOT_ROWS)]

    def column(step: int) -> int:
        return (step - 1) * (columns - 1) // max(1, steps - 1)

    def row(loss: float) -> int:
        return round((high - loss) / ((high - low) or 1.0) * (PLOT_ROWS - 1))

    for line in grid:
        line[column(killed_in)] = "|"
    for step, loss in expected.items():
        grid[row(loss)][column(step)] = "."
    for step, loss in found.items():
        grid[row(loss)][column(step)] = "*" if loss == expected.get(step) else "x"
    labels = {0: f"{high:.2f}", PLOT_ROWS - 1: f"{low:.2f}"}
    lines = [f"   {labels.get(i, ''):>6} {''.join(line)}" for i, line in enumerate(grid)]
    lines.append(
        f"   {'loss':>6} {'step 1':<{columns // 2}}{f'step {steps}':>{columns - columns // 2}}"
    )
    lines.append(
        f"   {'':>6} * both runs   . reference only   x killed and resumed only   | the kill"
    )
    return "\n".join(lines)


def save_plot(measured: Measured, killed_in: int, resumed_from: int, path: Path) -> str:
    """Draw both loss curves, and the seconds of both runs' steps, as a PNG; says where."""
    pyplot = pyplot_or_none()
    if pyplot is None:
        return NO_PLOT
    figure, (losses, seconds) = pyplot.subplots(
        2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    after = after_restart(measured.run)
    before = measured.run[: len(measured.run) - len(after)]
    for axes, value in ((losses, "loss"), (seconds, "step_s")):
        for records, style in (
            (measured.reference, {"label": "uninterrupted", "color": "0.75", "linewidth": 6}),
            (before, {"label": "saving, until the kill", "color": "tab:blue"}),
            (after, {"label": f"resumed from step {resumed_from}", "color": "tab:orange"}),
        ):
            axes.plot([r.step for r in records], [getattr(r, value) for r in records], **style)
        axes.axvline(killed_in, color="tab:red", linestyle="--", label="SIGKILL in a save")
    losses.set_ylabel("loss (nats per byte)")
    losses.set_title("killed in the middle of a save, resumed: the same losses bit for bit")
    losses.legend()
    seconds.set_ylabel("s per step")
    seconds.set_ylim(bottom=0)
    seconds.set_xlabel("step")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return f"   plot: {path}"


def pyplot_or_none() -> Any:
    """Where plots are drawn, without a screen; None where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def after_restart(run: Sequence[StepRecord]) -> Sequence[StepRecord]:
    """The steps after the restart, where the step number goes back; none without a restart."""
    backwards = (i for i in range(1, len(run)) if run[i].step <= run[i - 1].step)
    return run[next(backwards, len(run)) :]
