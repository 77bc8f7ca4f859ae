"""How far runs that were resumed on other ranks are from the reference: by step, as table and plot.

Owns the comparison of losses that need not be equal. Invariants: only what was trained after the
restore is compared, and equal means equal bits. Reads logs only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from journal import StepRecord, read_steps
from report import NO_PLOT, after_restart, pyplot_or_none


@dataclass(frozen=True, slots=True)
class Difference:
    """The losses of one resumed run, less those of the reference, by step."""

    label: str
    reference: Mapping[int, float]
    losses: Mapping[int, float]

    @property
    def apart(self) -> dict[int, float]:
        """What each loss differs by; 0.0 where it is equal bit for bit."""
        return {step: loss - self.reference[step] for step, loss in self.losses.items()}

    @property
    def largest(self) -> float:
        """The largest difference, without its sign."""
        return max(abs(value) for value in self.apart.values())

    def __str__(self) -> str:
        apart = self.apart
        equal = sum(value == 0.0 for value in apart.values())
        if equal == len(apart):
            return f"{self.label}: all {equal} losses are equal bit for bit"
        at = max(apart, key=lambda step: abs(apart[step]))
        return (
            f"{self.label}: {equal} of {len(apart)} losses are equal bit for bit; the largest "
            f"difference is {self.largest:.1e} nats, at step {at}"
        )


def difference(label: str, reference: Path, run: Path) -> Difference:
    """Compare the log of a resumed run with that of the reference."""
    expected = {each.step: each.loss for each in read_steps(reference)}
    found = {each.step: each.loss for each in after_restart(read_steps(run))}
    return Difference(label, expected, found)


def table(differences: Sequence[Difference]) -> str:
    """The losses of the reference, and what each run differs by; "=" where the bits are equal."""
    columns = "".join(f"{each.label:>12}" for each in differences)
    lines = [f"   {'step':>6}{'reference':>12}{columns}"]
    for step in differences[0].losses:
        cells = (each.apart[step] for each in differences)
        shown = "".join(f"{f'{value:+.1e}' if value else '=':>12}" for value in cells)
        lines.append(f"   {step:>6}{differences[0].reference[step]:>12.6f}{shown}")
    return "\n".join(lines)


def save_plot(
    reference: Sequence[StepRecord], differences: Sequence[Difference], killed_in: int, path: Path
) -> str:
    """Draw the loss curves, and how far they are apart, as a PNG; says where."""
    pyplot = pyplot_or_none()
    if pyplot is None:
        return NO_PLOT
    figure, (losses, apart) = pyplot.subplots(
        2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    grey = {"label": "uninterrupted", "color": "0.75", "linewidth": 6}
    losses.plot([each.step for each in reference], [each.loss for each in reference], **grey)
    for each in differences:
        losses.plot(list(each.losses), list(each.losses.values()), label=f"resumed {each.label}")
        apart.plot(list(each.apart), [abs(value) for value in each.apart.values()], marker=".")
    for axes in (losses, apart):
        axes.axvline(
            killed_in, color="tab:red", linestyle="--", label="SIGKILL of a rank in a save"
        )
    losses.set_ylabel("loss (nats per byte)")
    losses.set_title("one rank killed in the middle of a save, resumed on other numbers of ranks")
    losses.legend()
    apart.set_yscale("symlog", linthresh=1e-8)
    apart.set_ylim(bottom=0)
    apart.set_ylabel("difference (nats)")
    apart.set_xlabel("step")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return f"   plot: {path}"
