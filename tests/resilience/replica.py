"""A replica of a test: trains a small model, writes down what it does, and dies when it has to.

Lines of its log, as JSON: {"computed": [step, index, samples]}, {"vote": a Vote}, {"step", "loss",
"share", "norm", "seconds", "at", "state": checksum of the weights, "name", "epoch": of the vote},
{"error": its class}, and at the end {"weights": checksum}. A vote is written down before anybody
can hear of it, so whatever a member has counted is in its log, also if it dies then.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from statehold import Checkpointer, Directory, Memory, lowrank
from statehold.errors import StateholdError
from statehold.lowrank.parallel import AlongBottleneck
from statehold.resilience import Microbatch, Replicas
from statehold.resilience.data.checksums import checksum
from statehold.resilience.driver import Driver
from statehold.resilience.protocol import actions
from statehold.resilience.seat import ColumnStart, Seat
from statehold.resilience.transfer import OfferServer
from statehold.tensors.storable import local_of

SAMPLES, BATCH, MICROBATCHES, SEED = 96, 2, 8, 7
FEATURES, MAX_NORM = 16, 0.1
LEASE_S = 30.0  # deaths are seen at once; a busy machine is no death


class Vote(NamedTuple):
    """That a replica counts its share of a step, under an epoch."""

    name: str
    epoch: int
    step: int
    share: list[int]
    members: list[str]


@dataclass(frozen=True)
class Order:
    """What a replica does.

    doom: (step, moment): it dies then. Moments are "backward", before the gradients of a
    microbatch; "sum", in the middle of the reduction; "serving", when it is to send a piece of its
    state, whatever the step; the name of an action of rounds, and "after" that. place, width: which
    rank of the replica it is, and of how many. They shard the model by "fsdp", and each takes its
    part of the samples, or by "tp" (tensor parallelism: a layer by columns, and a low-rank pair
    along its bottleneck). pause_s: of each microbatch. run: the
    directory of its checkpoints. every: which of its steps go there. memory: of a level in memory
    before it; then only every fourth step goes to `run`. is_impure: what it draws depends on the
    process. workers: of the loader that draws; 0 takes none. waits: wait_s of each rank, after the
    beginning. odd: (step, how): after that step its state differs from that of others, by a
    learning rate ("lr"), by a "bit" of a moment, by an update that it "skips", or because it has
    "frozen" a layer. hold: (step, file): in that step it goes on when the file exists.
    leaves: in that step it is asked to leave. options: for Replicas.
    """

    coordinator: str
    log: Path
    until: int
    doom: tuple[int, str] | None = None
    place: int = 0
    width: int = 1
    shards: str = "fsdp"
    pause_s: float = 0.0
    run: Path | None = None
    every: int = 1
    memory: Path | None = None
    is_impure: bool = False
    workers: int = 0
    waits: tuple[float, ...] = ()
    odd: tuple[int, str] | None = None
    hold: tuple[int, Path] | None = None
    leaves: int | None = None
    options: tuple[tuple[str, Any], ...] = ()


def data() -> torch.Tensor:
    return torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(1))


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, FEATURES)
    )


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(order: Order) -> None:
    """In a process of its own: the number of threads is set, and the process may die."""
    torch.set_num_threads(1)
    stacks = order.log.with_suffix(".stacks").open("w")
    faulthandler.register(signal.SIGUSR1, stacks)  # where it stands
    model = sharded(model_of(), order)
    optimizer = optimizer_of(model)
    with (
        order.log.open("w", buffering=1) as log,
        doomed(order.doom),
        waiting(order),
        checkpoints(order) as checkpointer,
        Replicas(
            model,
            optimizer,
            microbatches=MICROBATCHES,
            samples=SAMPLES,
            batch=BATCH,
            seed=SEED,
            coordinator=order.coordinator,
            checkpointer=checkpointer,
            **{"lease_s": LEASE_S, **dict(order.options)},
        ) as replicas,
        contextlib.ExitStack() as listening,
    ):

        def say(**line: Any) -> None:
            log.write(json.dumps(line) + "\n")

        draw = drawing(replicas, order)
        begin = time.monotonic()
        votes = listening.enter_context(told(say))
        listening.enter_context(said(say))
        for step in replicas.steps(order.until):
            for microbatch in step:
                held(order.hold, microbatch.step)
                x = draw(microbatch)
                time.sleep(order.pause_s)
                microbatch.backward(nn.functional.mse_loss(model(x), x))
                say(computed=[microbatch.step, microbatch.index, microbatch.samples])
            norm = step.clip_grad_norm(MAX_NORM)
            if order.odd != (step.number, "skips"):
                optimizer.step()
            optimizer.zero_grad()
            differ(order.odd, step.number, model, optimizer)
            if checkpointer is not None and step.number == order.leaves:
                checkpointer.leave()
            now = time.monotonic()
            done = {"step": step.number, "loss": step.loss.hex(), "share": step.share}
            vote = {"name": votes[-1].name, "epoch": votes[-1].epoch}
            say(**done, **vote, state=weights(model), norm=norm, seconds=now - begin, at=now)
            begin = now
        say(weights=weights(model))


def differ(
    odd: tuple[int, str] | None, step: int, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """As Order.odd says."""
    last = list(model.parameters())[-1]
    if odd == (step, "lr"):
        optimizer.param_groups[0]["lr"] *= 2
    elif odd == (step, "bit"):
        local_of(optimizer.state[last]["exp_avg"]).view(torch.uint8)[0] ^= 1
    elif odd == (step, "frozen"):
        last.requires_grad_(False)


def drawing(replicas: Replicas, order: Order) -> Callable[[Microbatch], torch.Tensor]:
    """What draws the samples of this rank, and says what was drawn."""
    samples = data()
    if order.workers:
        return replicas.loader(samples, workers=order.workers).batch
    place, width = (order.place, order.width) if order.shards == "fsdp" else (0, 1)

    def draw(microbatch: Microbatch) -> torch.Tensor:
        x = samples[microbatch.samples[place::width]]
        microbatch.drew((x, os.getpid()) if order.is_impure else x)
        return x

    return draw


def weights(model: nn.Module) -> int:
    return checksum([local_of(each) for each in model.parameters()])


def held(hold: tuple[int, Path] | None, step: int) -> None:
    while hold is not None and step == hold[0] and not hold[1].exists():
        time.sleep(0.01)


@contextlib.contextmanager
def waiting(order: Order) -> Iterator[None]:
    """Give up when `waits` says so; but wait for long in the beginning, where processes start."""
    if not order.waits:
        yield
        return
    real = Seat._comes

    def comes(seat: Seat, after: int, seconds: float) -> bool:
        return real(seat, after, order.waits[order.place] if after else seconds)

    with patched(Seat, _comes=comes):
        yield


@contextlib.contextmanager
def told(say: Callable[..., None]) -> Iterator[list[Vote]]:
    """Write down each vote; yields them."""
    execute, votes = Driver.execute, list[Vote]()

    def executing(driver: Driver, action: Any) -> object:
        if isinstance(action, actions.Vote):
            member, ballot = driver.seat.member, action.ballot
            with driver.seat.link.changed:
                is_newest, members = member.epoch == ballot.epoch, list(member.members)
            if is_newest:  # or the vote fails
                vote = Vote(member.name, ballot.epoch, ballot.step, driver.share, members)
                votes.append(vote)
                say(vote=vote)
        return execute(driver, action)

    with patched(Driver, execute=executing):
        yield votes


@contextlib.contextmanager
def said(say: Callable[..., None]) -> Iterator[None]:
    """Write down an error that ends the loop."""
    try:
        yield
    except StateholdError as error:
        say(error=type(error).__name__, facts={key: str(each) for key, each in error.facts.items()})
        raise


def sharded(model: nn.Module, order: Order) -> nn.Module:
    """Over the ranks of the replica. They meet at a file beside the log, or where torchrun says."""
    if order.width == 1:
        return model
    if distributed.is_torchelastic_launched():
        distributed.init_process_group("gloo")
    else:
        meeting = order.log.with_suffix(".meeting")
        distributed.init_process_group(
            "gloo", f"file://{meeting}", rank=order.place, world_size=order.width
        )
    mesh = init_device_mesh("cpu", (order.width,))
    if order.shards == "tp":
        return tensor_parallel(model, mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """A layer by columns gives a pair its input, split by features; what that gives is gathered."""

    def gather(_: nn.Module, __: object, y: torch.Tensor) -> torch.Tensor:
        return DTensor.from_local(y, mesh, [Shard(-1)], run_check=False).full_tensor()

    lowrank.convert(model, rank=4, where="3")
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "3": AlongBottleneck()})
    model.get_submodule("3").register_forward_hook(gather)
    return model


@contextlib.contextmanager
def checkpoints(order: Order) -> Iterator[Checkpointer | None]:
    if order.run is None:
        yield None
        return
    levels = [Memory(path=order.memory), Directory(every=4)] if order.memory else None
    levels = levels or [Directory(every=order.every)]
    with Checkpointer(order.run, levels=levels) as checkpointer:
        if order.leaves is not None:
            checkpointer.leave_on(signal.SIGTERM, within_s=LEASE_S)
        yield checkpointer


@contextlib.contextmanager
def doomed(doom: tuple[int, str] | None) -> Iterator[None]:
    """This process ends with SIGKILL at a moment of a step."""
    if doom is None:
        yield
        return
    at, moment = doom
    execute, start, begin = Driver.execute, ColumnStart.__call__, Driver.start
    send = OfferServer._send
    numbers: list[int] = []

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def executing(driver: Driver, action: Any) -> object:
        numbers.append(driver.number)
        if driver.number == at and type(action).__name__ == moment:
            die()
        result = execute(driver, action)
        if driver.number == at and f"after {type(action).__name__}" == moment:
            die()
        return result

    def starting(column: ColumnStart, tensor: torch.Tensor) -> Any:
        pending = start(column, tensor)
        if numbers[-1] == at and moment == "sum":
            die()
        return pending

    def beginning(driver: Driver, index: int) -> Any:
        numbers.append(driver.number)
        if driver.number == at and moment == "backward":
            die()
        return begin(driver, index)

    def sending(*args: Any, **named: Any) -> None:
        if moment == "serving":
            die()
        send(*args, **named)

    with (
        patched(Driver, execute=executing, start=beginning),
        patched(ColumnStart, __call__=starting),
        patched(OfferServer, _send=sending),
    ):
        yield


@contextlib.contextmanager
def patched(owner: type, **members: Callable[..., Any]) -> Iterator[None]:
    before = {name: getattr(owner, name) for name in members}
    for name, value in members.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
