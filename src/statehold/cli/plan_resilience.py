"""`statehold plan resilience`: redundancy, interval and spares of a job, for each policy.

Invariants: it measures nothing. The same arguments print the same plan. SimPy is needed, and
matplotlib for `--plot` only.
Not here: the choice (planners/resilience), what policies do (planners/policies).
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from statehold.cli import codes
from statehold.cli.output import emit, sections, table
from statehold.cli.plan import check_limits, out_of_range, read_trace
from statehold.cli.tables import Table
from statehold.errors import UsageError
from statehold.planners import resilience, traces
from statehold.planners.policies import Job
from statehold.planners.resilience import PolicyChoice, Rates
from statehold.units import format_seconds

# The least and the most of each option. The simulation is for jobs; beyond these it has no end.
_LIMITS = {
    "replicas": (1, 100_000), "steps": (1, 1_000_000_000), "nodes": (1, 10_000),
    "step_seconds": (1e-6, 1e7), "save_seconds": (0, 1e7), "restart_seconds": (0, 1e7),
    "mtbf": (1e-6, 1e12), "shape": (0.05, 100),
}  # fmt: skip
_FAILURES_MAX = 50_000
_PARTS = ("ideal_s", "saving_s", "down_s", "lost_s", "recovery_s", "slower_s")
_COLORS = ("#6c8ebf", "#82b366", "#c23b22", "#d79b00", "#9673a6", "#b0b0b0")


def run(args: argparse.Namespace) -> int:
    job, trace = _job(args), _trace(args)
    mtbf_s = trace.mtbf_s() if isinstance(trace, traces.Given) else args.mtbf
    if job.ideal_s / mtbf_s > _FAILURES_MAX:
        name = "mtbf" if args.trace is None else "trace"
        expected = f"at most {_FAILURES_MAX:,} failures in {format_seconds(job.ideal_s)}"
        raise out_of_range(name, expected, f"one in {mtbf_s:g} s")
    rates = Rates(mtbf_s, repair_s=args.repair_seconds)
    usual = [each for each in resilience.POLICIES if each != "stacked" or job.replicas > 1]
    found = resilience.plan(job, rates, trace, args.policy or usual)
    if args.plot:
        _draw(found, Path(args.plot))
    document = _document(job, rates, found)
    emit(document) if args.json else sections(*_parts(job, rates, found))
    return codes.YES


def _job(args: argparse.Namespace) -> Job:
    check_limits(args, _LIMITS)
    if not args.repair_seconds >= 0:
        raise out_of_range("repair_seconds", "a number from 0 on", args.repair_seconds)
    if not 0 <= args.reduce_seconds < args.step_seconds:
        raise out_of_range("reduce_seconds", "less than --step-seconds", args.reduce_seconds)
    microbatches = args.microbatches or 4 * args.replicas
    least_replicas = args.min_replicas or max(1, args.replicas // 2)
    if microbatches < args.replicas:
        raise out_of_range("microbatches", "at least one for each replica", microbatches)
    if not 1 <= least_replicas <= args.replicas:
        raise out_of_range("min_replicas", f"1 to {args.replicas}", least_replicas)
    compute_s = args.step_seconds - args.reduce_seconds
    return Job(
        args.replicas, args.steps, compute_s, args.reduce_seconds, args.save_seconds,
        args.restart_seconds, microbatches, min_replicas=least_replicas,
    )  # fmt: skip


def _trace(args: argparse.Namespace) -> traces.Trace:
    if (args.mtbf is None) is (args.trace is None):
        raise UsageError("a plan needs either --mtbf or --trace")
    if args.trace is not None:
        return read_trace(args.trace, traces.parse)
    return traces.DrawnTrace(
        args.replicas, args.mtbf, args.seed, args.shape, args.nodes, args.repair_seconds
    )


def _document(job: Job, rates: Rates, found: Sequence[PolicyChoice]) -> dict[str, Any]:
    return {
        **asdict(job),
        "mtbf_s": rates.mtbf_s,
        "best": _best(found),
        "policies": [
            {
                **asdict(each.chosen),
                "closed": asdict(each.closed),
                "finished": each.outcome.is_finished,
                "time_over_ideal": each.outcome.time_over_ideal,
                "goodput": each.outcome.goodput_allocated,
                "goodput_alive": each.outcome.goodput_alive,
                "availability": each.outcome.availability,
                **{part: getattr(each.outcome, part) for part in _PARTS},
                "failures": each.outcome.failures,
                "restarts": each.outcome.restarts,
                "lost_batches": each.outcome.lost_batches,
                "again_batches": each.outcome.again_batches,
            }
            for each in found
        ],
    }


def _best(found: Sequence[PolicyChoice]) -> str | None:
    """The best policy that finishes, and trains every sample."""
    exact = [each for each in found if each.outcome.is_finished and not each.outcome.lost_batches]
    return resilience.best(exact).chosen.policy if exact else None


def _parts(job: Job, rates: Rates, found: Sequence[PolicyChoice]) -> Iterator[str | Table]:
    rows = [_row(each) for each in found]
    header = ("POLICY", "REDUNDANCY", "INTERVAL", "SPARES", "TIME", "GOODPUT", "UP", "RESTARTS",
              "LOST", "AGAIN")  # fmt: skip
    best = _best(found)
    yield (
        f"{job.replicas} replicas, {job.steps} steps of {format_seconds(job.step_s)}, "
        f"a failure every {format_seconds(rates.mtbf_s)}"
    )
    foot = (
        "TIME: of the ideal time. GOODPUT: useful time of all machines, with spares. "
        "LOST, AGAIN: batches that are never trained, or computed twice."
    )
    yield table(header, rows, right=" ".join(header[1:]), foot=foot)
    yield f"Use: {best}" if best else "No policy finishes the job with every sample."


def _row(each: PolicyChoice) -> tuple[object, ...]:
    chosen, out = each.chosen, each.outcome
    settings = (chosen.policy, chosen.redundancy, format_seconds(chosen.interval_s), chosen.spares)
    if not out.is_finished:
        return (*settings, "never", "-", "-", out.restarts, "-", "-")
    return (
        *settings, f"{out.time_over_ideal:.2f}", f"{out.goodput_allocated:.1%}",
        f"{out.availability:.1%}", out.restarts, f"{out.lost_batches:.1f}",
        f"{out.again_batches:.1f}",
    )  # fmt: skip


def _draw(found: Sequence[PolicyChoice], path: Path) -> None:
    """A bar for each policy that finishes: where its time goes."""
    try:
        importlib.import_module("matplotlib").use("Agg")
        pyplot: Any = importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        hint = "pip install matplotlib, or leave --plot out"
        raise UsageError("a plot needs matplotlib, which is missing", hint=hint) from error
    done = [each for each in reversed(found) if each.outcome.is_finished]
    figure, axis = pyplot.subplots(figsize=(9, 1.5 + 0.5 * len(done)))
    begin = [0.0] * len(done)
    for part, color in zip(_PARTS, _COLORS, strict=True):
        sizes = [getattr(each.outcome, part) / each.outcome.ideal_s for each in done]
        axis.barh(range(len(done)), sizes, left=begin, color=color, label=part[:-2])
        begin = [a + b for a, b in zip(begin, sizes, strict=True)]
    axis.set_yticks(range(len(done)), [each.chosen.policy for each in done])
    axis.set_xlabel("time over the ideal time")
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=6, fontsize=8, frameon=False)
    try:
        figure.savefig(path, dpi=110, bbox_inches="tight")
    except (OSError, ValueError) as error:
        facts = {"file": str(path), "error": str(error)}
        raise UsageError("the plot cannot be written", facts=facts) from error
    finally:
        pyplot.close(figure)
