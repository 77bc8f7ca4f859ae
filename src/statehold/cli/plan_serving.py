"""`statehold plan serving`: what fits a layout of devices, what bounds it, how a trace ends there.

Invariants: it measures nothing. The same arguments print the same plan. The bandwidth of a store
comes from its argument, or from the profile of its storage (`statehold bench io`).
Not here: what a configuration means (planners/shapes), the plan (kv/planning).
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from statehold.cli import codes
from statehold.cli.output import emit, sections, table
from statehold.cli.plan import check_limits, out_of_range, read_config, read_trace
from statehold.cli.tables import Table
from statehold.errors import refused
from statehold.io import profile
from statehold.kv import planning
from statehold.kv.planning.costs import GPUS, DeviceLayout, Gpu, LoadTimes, layouts
from statehold.planners.shapes import ModelShape, shape_in
from statehold.units import format_bytes, format_seconds, parse_bytes

_LIMITS = {
    "gpus": (1, 4096), "requests": (1, 100_000), "prompt": (1, 10**7), "answer": (1, 10**7),
    "rate": (1e-6, math.inf), "utilization": (0.01, 1.0),
}  # fmt: skip
_LAYOUTS_MAX = 64


def run(args: argparse.Namespace) -> int:
    check_limits(args, _LIMITS)
    if min(args.concurrency, default=1) < 1:
        raise out_of_range("concurrency", "at least 1", min(args.concurrency))
    shape = shape_in(read_config(args.config), args.kv_dtype)
    gpu, load = _gpu(args.gpu), _load(args)
    chosen = [_layout(each, args.gpus, shape) for each in args.layout]
    found = planning.plan(
        shape, gpu, chosen or [*layouts(shape, args.gpus)][:_LAYOUTS_MAX], _requests(args),
        utilization=args.utilization, concurrency=args.concurrency, load=load,
    )  # fmt: skip
    if args.json:
        emit(_document(shape, found, load))
    else:
        sections(*_parts(shape, found, load))
    return codes.YES


def _gpu(text: str) -> Gpu:
    """A name, or the fields of a data sheet, or a name and fields that differ."""
    name, *fields = text.split(",")
    if "=" in name:
        name, fields = "", [name, *fields]
    values = dataclasses.asdict(GPUS[name]) if name in GPUS else {}
    for field in fields:
        key, _, value = field.partition("=")
        is_rate = key == "flops" and re.fullmatch(r"[0-9.]{1,9}e[0-9]{1,2}", value)
        values[key] = float(value) if is_rate else float(parse_bytes(value))
    names = [each.name for each in dataclasses.fields(Gpu)]
    if (name and name not in GPUS) or sorted(values) != sorted(names) or not all(values.values()):
        form = "memory=141GB,flops=989e12,bandwidth=4.8TB,link=450GB"
        raise out_of_range("gpu", f"{', '.join(GPUS)}, or {form}", text)
    return Gpu(**values)


def _layout(text: str, gpus: int, shape: ModelShape) -> DeviceLayout:
    match = re.fullmatch(r"([0-9]{1,4})x([0-9]{1,4})x([0-9]{1,4})", text, re.ASCII)
    layout = DeviceLayout(*map(int, match.groups())) if match else None
    if layout not in [*layouts(shape, gpus)]:
        expected = f"DPxTPxPP with a product of {gpus}, TP a divisor of {shape.heads} heads"
        raise out_of_range("layout", f"{expected}, PP at most {shape.layers} layers", text)
    return layout


def _load(args: argparse.Namespace) -> LoadTimes | None:
    if args.store is None:
        return None
    name, _, given = args.store.rpartition("=") if "=" in args.store else (args.store, "", "")
    rates = None if given else profile.rates_of(name)
    rate = parse_bytes(given) if given else rates.read_bytes_per_s if rates else 0
    if not rate:
        expected, hint = "DIR=BANDWIDTH, or a DIR with a profile", f"measure it: bench io {name}"
        raise refused("the bandwidth of the store is not known", expected, args.store, hint)
    return LoadTimes(float(rate))


def _requests(args: argparse.Namespace) -> list[planning.ServingRequest]:
    if args.trace is None:
        return planning.drawn(args.requests, args.prompt, args.answer, args.rate, args.seed)
    return read_trace(args.trace, planning.parse)


def _document(
    shape: ModelShape, found: Sequence[planning.LayoutPlan], load: LoadTimes | None
) -> dict[str, Any]:
    return {
        "parameters": shape.parameters, "active": shape.active, "weights_bytes": shape.weights,
        "kv_bytes_per_token": shape.kv_token,
        "load_bytes_per_s": load.bandwidth if load else None,
        "use": str(found[0].costs.layout),
        "layouts": [
            {
                **each.costs.layout._asdict(),
                "tokens": each.tokens, "cap": each.cap, "bound": each.bound, "step_s": each.parts,
                "steady_tokens_per_s": each.steady, "break_even_bytes_per_s": each.break_even,
                "concurrency": each.chosen,
                "swept": [
                    {"concurrency": n, "recompute": dataclasses.asdict(out),
                     "load": dataclasses.asdict(each.kept[n]) if each.kept else None}
                    for n, out in each.swept.items()
                ],
            }
            for each in found
        ],
    }  # fmt: skip


def _parts(
    shape: ModelShape,
    found: Sequence[planning.LayoutPlan],
    load: LoadTimes | None,
) -> Iterator[str | Table]:
    yield (
        f"{shape.parameters / 1e9:.1f} billion parameters ({shape.active / 1e9:.1f} for a token), "
        f"{format_bytes(shape.weights)} of weights, {format_bytes(shape.kv_token)} of KV a token"
    )
    header = ("LAYOUT", "TOKENS", "CAP", "BOUND", "STEP", "STEADY", "AT", "END", "PREEMPTED")
    rows = []
    for each in found:
        out, step_s = each.swept[each.chosen], sum(each.parts.values())
        rows.append((
            each.costs.layout, f"{each.tokens:,}", each.cap, each.bound, format_seconds(step_s),
            f"{each.steady:,.0f}", each.chosen, format_seconds(out.end_s), out.preemptions,
        ))  # fmt: skip
    foot = (
        "CAP: requests of mean length that fit. STEADY: tokens a second while requests wait. "
        "AT: the concurrency at which the trace ends first."
    )
    yield table(header, rows, right="TOKENS CAP STEP STEADY AT END PREEMPTED", foot=foot)
    best = found[0]
    yield _sweep(best, load)
    even = format_bytes(int(best.break_even))
    yield f"Use: {best.costs.layout}. A store that reads {even} a second is as fast as a prefill."


def _sweep(best: planning.LayoutPlan, load: LoadTimes | None) -> Table:
    header = ["CONCURRENCY", "END", "PREEMPTED", "COMPUTED AGAIN"]
    header += ["END IF PAGES SURVIVE", "LOADED"] if load else []
    rows = [
        [n, format_seconds(out.end_s), out.preemptions, f"{out.recomputed:,}",
         *([format_seconds(best.kept[n].end_s), f"{best.kept[n].loaded:,}"] if load else [])]
        for n, out in best.swept.items()
    ]  # fmt: skip
    return table(header, rows, right=" ".join(header), foot=f"({best.costs.layout}; tokens)")
