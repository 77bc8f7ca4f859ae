"""`statehold plan offload`: the time of an update, what bounds it, and the tiers to use.

Invariants: it measures nothing. The rates of a path come from its argument, or from the profile of
its storage (`statehold bench io`).
Not here: the model (planners/interleaving).
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from statehold.cli import codes
from statehold.cli.output import emit, sections, table
from statehold.cli.tables import Table
from statehold.encoding import strictjson
from statehold.errors import UsageError, refused
from statehold.io import profile
from statehold.planners.interleaving import (
    FIELD_BYTES,
    Device,
    PathRates,
    Period,
    UpdatePlan,
    UpdateWork,
    plan,
)
from statehold.units import MiB, format_bytes, format_seconds, parse_bytes

T = TypeVar("T")

# Fields of a parameter on the tiers, by the type of the parameter: the master if it has 16 bits,
# and two moments. And the bytes of its gradient.
_TYPES = {"bf16": (3, 2), "fp16": (3, 2), "fp32": (2, 4)}
_PER_S = '"3 GB" and the like, a second'
DEEPSPEED_BYTES = 32  # of a parameter and step: planners/interleaving


def run(args: argparse.Namespace) -> int:
    fields, gradient_bytes = _TYPES[args.dtype]
    parameters, rate = _number(args.parameters, "--parameters"), _number(args.rate, "--rate")
    work = UpdateWork(math.ceil(parameters), fields, gradient_bytes, rate)
    paths = [_path(text, is_full_duplex=args.full_duplex) for text in args.path]
    size = None if args.subgroup is None else parse_bytes(args.subgroup)
    found = plan(work, parse_bytes(args.memory), paths, _device(args), size)
    document = _document(work, paths, found)
    emit(document) if args.json else sections(*_parts(args, work, paths, found, document))
    return codes.YES


def check_limits(args: argparse.Namespace, limits: Mapping[str, tuple[float, float]]) -> None:
    """Raise UsageError for an option beyond its limits."""
    for name, (least, most) in limits.items():
        value = getattr(args, name)
        if value is not None and not least <= value <= most:
            raise out_of_range(name, f"a number from {least:,} to {most:,}", value)


def out_of_range(name: str, expected: str, got: object) -> UsageError:
    """The error for an option."""
    return refused(f"--{name.replace('_', '-')} is out of range", expected, got)


def read_config(config: str | os.PathLike[str]) -> dict[str, Any]:
    """A config.json, or the config.json of a directory. Raises UsageError if it is not one."""
    path = Path(config)
    path = path / "config.json" if path.is_dir() else path
    try:
        document = strictjson.message(path.read_bytes())
    except (OSError, ValueError) as error:
        facts = {"file": os.fspath(path), "error": str(error)}
        raise UsageError("the configuration of the model cannot be read", facts=facts) from error
    if not isinstance(document, dict):
        raise refused("the configuration of the model is no object", "a JSON object", document)
    return document


def read_trace(path: str, parse: Callable[[str], T]) -> T:
    """What is in the file of a trace."""
    try:
        return parse(Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        facts = {"file": path, "error": str(error)}
        raise UsageError("the trace cannot be read", facts=facts) from error


def _path(text: str, *, is_full_duplex: bool) -> PathRates:
    """DIR=READ,WRITE, or a DIR whose storage has a profile with rates."""
    name, _, given = text.rpartition("=") if "=" in text else (text, "", "")
    if given:
        sizes = [parse_bytes(each) for each in given.split(",")]
        if len(sizes) != 2 or not all(sizes):
            raise refused("a path has two rates", f"DIR=READ,WRITE: {_PER_S}", text)
        return PathRates(name, float(sizes[0]), float(sizes[1]), is_full_duplex)
    rates = profile.rates_of(name)
    if rates is None:
        raise UsageError(
            "the rates of a path are not known",
            facts={"path": name, "expected": f"DIR=READ,WRITE ({_PER_S}), or a profile"},
            hint=f"measure them: statehold bench io {name}",
        )
    read, write = float(rates.read_bytes_per_s), float(rates.write_bytes_per_s)
    return PathRates(name, read, write, is_full_duplex)


def _device(args: argparse.Namespace) -> Device | None:
    if (args.device_link is None) is not (args.device_rate is None):
        raise UsageError("a device needs both --device-link and --device-rate")
    if args.device_link is None:
        return None
    link = parse_bytes(args.device_link)
    if not link:
        raise UsageError("--device-link must be at least one byte a second")
    return Device.full_duplex(float(link), _number(args.device_rate, "--device-rate"))


def _number(text: str, option: str) -> float:
    try:
        value = float(text) if text.isascii() and "_" not in text else 0.0
    except ValueError:
        value = 0.0
    if not 1 <= value <= 1e15:
        expected = 'a number from 1 to 1e15, such as "7e9"'
        raise refused(f"{option} is not a number that can be planned for", expected, text)
    return value


def _document(work: UpdateWork, paths: list[PathRates], found: UpdatePlan) -> dict[str, Any]:
    each_way = work.fields * FIELD_BYTES * (1 - found.cached) if paths else 0.0
    return {
        "parameters": work.parameters,
        "state_bytes": work.state_bytes,
        **asdict(found),
        "bound": found.bound,
        "bytes_per_parameter": {"read": each_way, "write": each_way},
        "paths": [
            {**asdict(path), "bandwidth": path.bandwidth, "subgroups": count}
            for path, count in zip(paths, found.counts, strict=True)
        ],
        "use": _use(paths, found),
    }


def _use(paths: list[PathRates], found: UpdatePlan) -> str:
    whole = found.host_bytes // MiB if paths else -(-found.host_bytes // MiB)  # all of it, if alone
    tiers = [f'Host("{whole}MiB")'] if whole else []
    tiers += [f'Path("{path.name}")' for path in paths]
    every = f", device_every={found.period.length}" if found.period else ""
    return f"tiers=[{', '.join(tiers)}], subgroup_bytes={found.subgroup_bytes}{every}"


def _parts(
    args: argparse.Namespace,
    work: UpdateWork,
    paths: list[PathRates],
    found: UpdatePlan,
    document: dict[str, Any],
) -> Iterator[str | Table]:
    yield (
        f"{work.parameters / 1e9:.3g} billion parameters in {args.dtype}: "
        f"{format_bytes(work.state_bytes)} of state, {format_bytes(found.gradients_bytes)} of "
        "gradients in host memory"
    )
    if paths:
        yield _path_table(paths, found)
    yield _times(found, document)
    yield f"Use: {document['use']}"


def _path_table(paths: list[PathRates], found: UpdatePlan) -> Table:
    rows = [
        (path.name, *(f"{rate / 1e9:.2f}" for rate in (path.read, path.write, path.bandwidth)),
         count, format_bytes(count * found.subgroup_bytes))
        for path, count in zip(paths, found.counts, strict=True)
    ]  # fmt: skip
    header = ("PATH", "READ", "WRITE", "BOTH", "SUBGROUPS", "STATE")
    return table(header, rows, right=" ".join(header[1:]), foot="(GB/s)")


def _times(found: UpdatePlan, document: dict[str, Any]) -> str:
    moved = 2 * document["bytes_per_parameter"]["read"]
    lines = [
        f"An update takes {format_seconds(found.update_s)}. It is bounded by the {found.bound}: "
        f"the paths need {format_seconds(found.storage_s)}, the arithmetic "
        f"{format_seconds(found.compute_s)}.",
        f"Memory holds {found.cached:.0%} of the state: {format_bytes(found.host_bytes)} as a tier "
        f"and {format_bytes(found.buffers_bytes)} in transit. Storage moves {moved:.1f} bytes for "
        f"each parameter and step (DeepSpeed: {DEEPSPEED_BYTES}).",
    ]
    if found.period:
        lines.append(_lanes(found.period))
    return "\n".join(lines)


def _lanes(period: Period) -> str:
    billion = {
        "host": period.host_s, "device": period.device_s, "to the device": period.to_device_s,
        "from the device": period.from_device_s,
    }  # fmt: skip
    lanes = ", ".join(f"{name} {format_seconds(s * 1e9)}" for name, s in billion.items())
    return (
        f"Every {period.length}. subgroup is updated on the device. Lanes of a period, if a "
        f"subgroup has a billion parameters: {lanes}."
    )
