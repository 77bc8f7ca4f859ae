"""Which subgroups a device updates, and which the host.

A device may update the subgroups whose parameters are all there. It updates every k-th of these,
always the same ones, so training with a given k is repeatable. With "auto" k comes from the model
of planners/interleaving and from rates that are measured here.

Not here: the model (planners/interleaving), the updates (on_device).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from statehold.errors import UsageError
from statehold.offload.on_device import OnDevice
from statehold.offload.parameters import Parameter
from statehold.offload.rules import Batch, Rule
from statehold.offload.subgroups import CUT, ITEM_BYTES, Span, Subgroup, strips
from statehold.offload.workers import STRIP, Workers
from statehold.planners.interleaving import Carried, Device, best_period
from statehold.tensors.storable import device_of, is_external

logger = logging.getLogger("statehold")

TRIES = 3  # of each measurement; the fastest counts


def check_every(every: object) -> None:
    """Refuse what is neither None, "auto", nor a number of subgroups."""
    is_number = isinstance(every, int) and not isinstance(every, bool) and every >= 1
    if every is not None and every != "auto" and not is_number:
        raise UsageError(
            "device_every has to say which subgroups a device updates",
            facts={"expected": 'None, "auto", or k for every k-th one', "got": repr(every)},
        )


def alternate(
    every: int | str | None,
    on_device: OnDevice,
    parameters: Sequence[Parameter],
    memory: torch.Tensor,
    rule: Rule,
    groups: Sequence[Mapping[str, Any]],
    workers: Workers,
    *,
    drains: bool,
) -> None:
    """Have devices update every k-th of the candidates. memory: a buffer without content."""
    if on_device.places:
        try:
            rate, device = measure(on_device, memory, rule, groups[0], workers)
        except NotImplementedError as error:
            raise UsageError(
                "torch has no fused kernel of this optimizer for the device",
                facts={"device": str(next(iter(on_device.lanes)))},
                hint="leave device_every off: the host updates everything then",
            ) from error
        found = best_period(rate, device, carried(parameters, drains=drains))
        best = found.length if found else None
        length = every if isinstance(every, int) else best
        logger.info(
            "offload: the host updates %.3g parameters a second, and the device %.3g. The link "
            "carries %.3g GB/s to the device, %.3g from it, and %.3g both ways at once. By these "
            "figures it is best that the device updates %s. It updates %s",
            rate, device.rate, device.to_device / 1e9, device.from_device / 1e9, device.both / 1e9,
            _share(best), _share(length),
        )  # fmt: skip
        on_device.choose(length)


def candidates(
    subgroups: Sequence[Subgroup], parameters: Sequence[Parameter]
) -> dict[int, torch.device]:
    """The indices of the subgroups that a device may update, and which device."""
    found = {}
    for subgroup in subgroups:
        tensors = [parameters[span.parameter].local for span in subgroup.spans]
        devices = {device_of(each) for each in tensors}
        if len(devices) == 1 and is_external(tensors[0]):
            found[subgroup.index] = devices.pop()
    return found


def carried(parameters: Sequence[Parameter], *, drains: bool) -> Carried:
    """What the link carries for a parameter on a device, on average."""
    there = [each for each in parameters if is_external(each.local)]
    numel = sum(each.local.numel() for each in there)
    state = sum(each.local.numel() * ITEM_BYTES * len(each.fields) for each in there)
    weights = sum(each.local.nbytes for each in there) / numel
    return Carried(state / numel, weights, weights if drains else 0)


def measure(
    on_device: OnDevice,
    memory: torch.Tensor,
    rule: Rule,
    group: Mapping[str, Any],
    workers: Workers,
) -> tuple[float, Device]:
    """The parameters a second that the host updates, and what the first device and its link do."""
    lanes = next(iter(on_device.lanes.values()))
    one, other = (lane.state for lane in lanes)
    memory, half = memory[: one.numel()], one.numel() // 2
    fields = rule.fields(group)
    numel = memory.numel() // (2 + len(fields)) // CUT * CUT

    def update(state: torch.Tensor, step: torch.Tensor, spans: Sequence[Span]) -> None:
        for span in spans:
            shifts = range(0, numel * (2 + len(fields)), numel)
            params, grads, *kept = ([state[at + span.begin : at + span.end]] for at in shifts)
            batch = Batch(params, grads, [step], dict(zip(fields, kept, strict=True)))
            rule.update(batch, {**group, "lr": 0.0}, None)

    def in_lanes(*calls: Callable[[], object]) -> float:
        def run() -> None:
            for lane, call in zip(lanes, calls, strict=False):
                with on_device.work.on(lane.device, lane.name):
                    call()
            on_device.wait()

        return _seconds(run)

    whole, step = [Span(0, 0, numel)], torch.ones((), device="cpu")
    cut = list(strips(whole, STRIP, workers.count))
    memory.zero_()
    on_host_s = _seconds(lambda: workers.run(lambda strip: update(memory, step, strip), cut))
    to_device_s = in_lanes(lambda: one.copy_(memory, non_blocking=True), lambda: other.zero_())
    from_device_s = in_lanes(lambda: memory.copy_(one, non_blocking=True))
    both_s = in_lanes(
        lambda: one[:half].copy_(memory[:half], non_blocking=True),
        lambda: memory[half:].copy_(other[half:], non_blocking=True),
    )
    there = lanes[0].numbers[0] if rule.keeps_step else step
    on_device_s = in_lanes(lambda: update(one, there.fill_(1), whole))
    nbytes = memory.nbytes
    rates = nbytes / to_device_s, nbytes / from_device_s, nbytes / both_s
    return numel / on_host_s, Device(*rates, numel / on_device_s)


def _share(every: int | None) -> str:
    return "no subgroup" if every is None else f"one subgroup of {every}"


def _seconds(call: Callable[[], object]) -> float:
    """What a call takes, when it has been made before."""
    taken = []
    for _ in range(TRIES):
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    return min(taken)
