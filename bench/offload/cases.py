"""The table of cases: what is run, in which group, and what each is compared with.

Invariants: a case is a value that goes to its process as JSON. Cases of one group run in one run,
in turns. Not here: how a case is measured (process).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from statehold.planners.placement import SUBGROUPS_WANTED, buffers_in_transit
from statehold.units import parse_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One way to keep and update the state.

    kind: who runs it (process.RUNNERS), or "deepspeed". paths: DIR, or DIR=RATE. host: bytes that
    keep state. gradients: "memory", or "storage" for what the module below says. ranks: processes
    that do the same at the same time; with saves, one job of FSDP2. takes_turns: on their path.
    saves: after every update; the next one "waits" until that is committed, or is "lazy". trains:
    with a backward pass.
    widths: of the matrices of a model on a device, whose gradients are `drains`, and of whose
    subgroups one of `device_every` is updated there. of: the case that its ratio is to.
    rank, folder: of one process. The folder lies on the first path, and all ranks have it.
    """

    name: str
    kind: str = "offload"
    paths: tuple[str, ...] = ()
    host: int = 0
    gradients: str = "memory"
    subgroup_bytes: int | None = None
    ranks: int = 1
    takes_turns: bool = True
    saves: str = ""
    trains: bool = False
    widths: tuple[int, ...] = ()
    drains: bool = False
    device_every: int | str | None = None
    of: str = ""
    rank: int = 0
    folder: str = ""


@dataclass(frozen=True, slots=True)
class Setup:
    """What the command line decides: parameters, paths, and bytes of host memory."""

    numel: int
    paths: tuple[str, ...]
    host: int

    @property
    def state_bytes(self) -> int:
        return 12 * self.numel

    @property
    def all_in_host(self) -> int:
        """More than the state, because every subgroup has a buffer of the size of the largest."""
        return 16 * self.numel + (1 << 30)


def width_of(numel: int) -> int:
    """Of the square matrices of a model with so many parameters."""
    return WIDTH if numel >= 4 * WIDTH**2 else SMALL_WIDTH


def directory_of(path: str) -> str:
    return path.partition("=")[0]


def rate_of(path: str) -> int | None:
    rate = path.partition("=")[2]
    return parse_bytes(rate) if rate else None


def host(setup: Setup) -> list[Case]:
    """All state in memory, beside torch."""
    return [Case(name=IN_HOST, kind="beside_torch", host=setup.all_in_host)]


def paths(setup: Setup) -> list[Case]:
    """Each path alone, and all of them together."""
    alone = [Case(name=path, paths=(path,), host=setup.host) for path in setup.paths]
    together = Case(name="all paths", paths=setup.paths, host=setup.host, of=alone[0].name)
    return [*alone, together] if len(alone) > 1 else alone


def ideas(setup: Setup) -> list[Case]:
    """Each idea alone on top of a baseline without any, and all of them together.

    Without the cache an update goes through all subgroups in the same order each time. Then it
    finds none of them in memory, however many buffers there are. So the cases without it have no
    more than the buffers of the pipeline, and subgroups so small that these are 2 % of the state.
    """
    small = max(setup.state_bytes // 300, 1 << 18)
    cache = setup.state_bytes // 4

    def case(name: str, *, paths: int = 1, host: int = 0, gradients: str = "storage") -> Case:
        return Case(
            name=name,
            paths=setup.paths[:paths],
            host=host,
            gradients=gradients,
            subgroup_bytes=small,
            of=NO_IDEA,
        )

    return [
        case(NO_IDEA),
        case("gradients kept in 16 bit in memory", gradients="memory"),
        case("two paths", paths=2),
        case("cache of a quarter, order that uses it", host=cache),
        case("all three", paths=2, host=cache, gradients="memory"),
    ]


def sharing(setup: Setup) -> list[Case]:
    """Two ranks on one path, which take turns there or do not."""
    path = (directory_of(setup.paths[0]),)
    free = "2 ranks on one path, no turns"
    return [
        Case(name=free, paths=path, ranks=2, takes_turns=False),
        Case(name="2 ranks on one path, in turns", paths=path, ranks=2, of=free),
    ]


def saving(setup: Setup) -> list[Case]:
    """A save after each update, and a full save of the same state by torch's AdamW."""
    path = (directory_of(setup.paths[0]),)
    never = "no saves"
    return [
        Case(name=never, paths=path),
        Case(name="saves; an update waits for the commit", paths=path, saves="waits", of=never),
        Case(name="saves; an update does not wait", paths=path, saves="lazy", of=never),
        Case(name=FULL_SAVE, kind="torch_saving", paths=path, saves="waits"),
    ]


def saving_ranks(setup: Setup) -> list[Case]:
    """The same on two ranks with FSDP2, which begin each update together."""
    path = (directory_of(setup.paths[0]),)
    return [
        Case(name="2 ranks, saves; an update waits", paths=path, ranks=2, saves="waits"),
        Case(name=FULL_SAVE, kind="torch_saving", paths=path, ranks=2, saves="waits"),
    ]


def peers(setup: Setup) -> list[Case]:
    """DeepSpeed's offloads, and ours with no more memory."""
    path = (directory_of(setup.paths[0]),)
    theirs = 4 * DEEPSPEED_SUBGROUP * DEEPSPEED_BUFFERS
    as_much = max(0, theirs - OWN_BUFFERS * setup.state_bytes // SUBGROUPS_WANTED)
    nvme, cpu = "DeepSpeed ZeRO-3, NVMe", "DeepSpeed ZeRO-3, CPU"
    return [
        Case(name=nvme, kind="deepspeed", paths=path, trains=True),
        Case(name="statehold, path, no Host", paths=path, trains=True, of=nvme),
        Case(name="statehold, path, Host for the memory of their buffers", paths=path,
             host=as_much, trains=True, of=nvme),
        Case(name=cpu, kind="deepspeed", trains=True),
        Case(name="statehold, Host", host=setup.all_in_host, trains=True, of=cpu),
    ]  # fmt: skip


def device(setup: Setup) -> list[Case]:
    """Parameters on a device: who updates them, and DeepSpeed's CPU offload."""
    widths = llama_widths(setup.numel)
    cpu = "DeepSpeed ZeRO-3, CPU"

    def case(name: str, *, every: int | str | None = None, drains: bool = False) -> Case:
        return Case(name=name, kind="on_device", host=setup.all_in_host, trains=True, of=cpu,
                    widths=widths, drains=drains, device_every=every)  # fmt: skip

    return [
        Case(name=cpu, kind="deepspeed", trains=True, widths=widths),
        case("statehold, Host"),
        case("statehold, Host, drained"),
        case("statehold, Host and device in turn", every="auto"),
        case("statehold, Host and device in turn, drained", every="auto", drains=True),
        case("statehold, Host and device in turn, k = 2", every=2),
        Case(name=ON_DEVICE, kind="torch_on_device", trains=True, of=cpu, widths=widths),
    ]


def llama_widths(numel: int) -> tuple[int, ...]:
    """The matrices of Llama 2 7B in a row, or of one with fewer and narrower layers.

    Two layers have 8 matrices of attention, and 6 between the width and that of the MLP.
    """
    narrow = 16 if numel < 10**9 else 1
    hidden, mlp, words = 4096 // narrow, 11008 // narrow, 32000 // narrow
    pair = 8 * hidden**2 + 6 * hidden * mlp
    count = max(1, round((numel - 2 * hidden * words) / pair))
    layers = [hidden] * 8 + [mlp, hidden] * 3
    return words, hidden, *(layers * count), words


def numel_of(widths: Sequence[int]) -> int:
    """The parameters of matrices in a row."""
    return sum(into * out for into, out in itertools.pairwise(widths))


WIDTH, SMALL_WIDTH = 2048, 256
ON_DEVICE = "all on the device: torch's fused AdamW"
# Bytes of a parameter there: bfloat16 weight and gradient; master, its gradient, two moments.
ON_DEVICE_BYTES = 2 + 2 + 4 * 4
IN_HOST = "Host"
FULL_SAVE = "torch, saves of all state"
NO_IDEA = "none: one path, fixed order, gradients on storage"
# The smallest pool with which DeepSpeed's pipelined swapper does not run out of buffers, and its
# subgroup in parameters; the buffers that our pipeline has for one path.
DEEPSPEED_BUFFERS, DEEPSPEED_SUBGROUP, OWN_BUFFERS = 12, 1 << 23, buffers_in_transit(1)

GROUPS: dict[str, Callable[[Setup], Sequence[Case]]] = {
    "host": host,
    "paths": paths,
    "ideas": ideas,
    "sharing": sharing,
    "saving": saving,
    "saving-ranks": saving_ranks,
    "peers": peers,
    "device": device,
}
