"""Checks that run on every rank of a job of four: offloaded optimizers of sharded parameters.

They train as torch's fused optimizer does on the same shards, with the same gradients; and a step
of any layout restores into any other. Smaller jobs are the first ranks of this one, on a board of
their own; the others look on.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import statehold
from statehold import offload
from statehold.errors import StateMismatchError, UsageError
from statehold.layout.layout import Layout, Mesh
from statehold.observe import background_log
from statehold.tensors import placements
from statehold.tensors.storable import local_of
from statehold.tensors.stored import Role, role_of
from support.faults import DEADLINE_S, SMALL, must
from support.jobs import Job, captured
from support.sharded import (
    ROWS,
    WIDE,
    Make,
    Net,
    both,
    even,
    first,
    fsdp,
    groups_of,
    partly,
    replicated,
    same_local_bits,
    square,
    tensor_parallel,
    whole_of,
)
from support.twins import same_bits

F32, BF16 = torch.float32, torch.bfloat16
OPTIONS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
STEPS = int(os.environ.get("STATEHOLD_OFFLOAD_STEPS", "2"))
ALL = Layout(Mesh((4,), (0, 1, 2, 3)))
PLACED = [Shard(0), Shard(1), Replicate()]

# -- beside torch's optimizer ------------------------------------------------------------------

TRAINED: dict[str, Make] = {
    "fsdp on 4": lambda dtype: fsdp(groups_of(4), dtype),
    "fsdp on 2": lambda dtype: fsdp(groups_of(2), dtype),
    "fsdp on 1": lambda dtype: fsdp(groups_of(1), dtype),
    "tp": lambda dtype: tensor_parallel(even(dtype), groups_of(4)),
    "fsdp x tp": lambda dtype: both(even(dtype)),
    "ddp": replicated,
}


class Twins:
    """Two models of the same layout and weights: one is offloaded, and torch updates the other.

    masters: what torch's optimizer updates: the other's parameters, or float32 copies of these.
    """

    def __init__(self, job: Job, make: Make, dtype: torch.dtype, **offloading: Any) -> None:
        self.models = []
        for _ in range(2):
            torch.manual_seed(1)
            self.models.append(make(dtype))
        self.params, self.theirs = (list(model.parameters()) for model in self.models)
        is_half = dtype is BF16
        self.masters = [each.detach().float() for each in self.theirs] if is_half else self.theirs
        folder = job.folder / "tiers"
        folder.mkdir(exist_ok=True)
        given = {"tiers": [offload.Path(folder)], "subgroup_bytes": 50_000, **offloading}
        self.ours = offload.AdamW(self.models[0].named_parameters(), **OPTIONS, **given)
        self.torchs = torch.optim.AdamW(self.masters, **OPTIONS, fused=True)

    def backward(self, x: torch.Tensor) -> None:
        """Of both; the losses and the norms by which gradients are clipped are the same."""
        losses, norms = [], []
        for model in self.models:
            loss = model(x.to(next(model.parameters()).dtype)).float().square().mean()
            loss.backward()
            losses.append(loss.detach())
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        must(same_bits(*map(whole_of, losses)))
        must(same_bits(*map(whole_of, norms)))
        must(bool(whole_of(norms[0]) > 0.1), "nothing is clipped")

    def step(self) -> None:
        self.ours.step()
        self.ours.zero_grad()
        if self.masters is not self.theirs:
            for master, theirs in zip(self.masters, self.theirs, strict=True):
                master.grad = theirs.grad.float()
        self.torchs.step()
        with torch.no_grad():
            for master, theirs in zip(self.masters, self.theirs, strict=True):
                theirs.copy_(master)
                master.grad = theirs.grad = None

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.backward(torch.randn(8, WIDE))
            self.step()

    def check(self) -> None:
        """The same bits and placements, in weights and state."""
        must(all(map(same_local_bits, self.params, self.theirs)))
        ours, torchs = self.ours.state_dict()["state"], self.torchs.state_dict()["state"]
        must(ours.keys() == torchs.keys())
        for index, master in enumerate(self.masters):
            must(ours[index].keys() - {"master"} == torchs[index].keys())
            for name, value in torchs[index].items():
                must(same_local_bits(ours[index][name], value), (index, name))
            if self.masters is not self.theirs:
                must(same_local_bits(ours[index]["master"], master), index)


def check_loss_and_weights_are_those_of_torch(job: Job) -> None:
    for name, make in TRAINED.items():
        for dtype in (F32, BF16) if name == "fsdp on 4" else (F32,):
            twins = Twins(job, make, dtype)
            twins.train(STEPS)
            twins.check()
            if name == "fsdp on 1":
                must(twins.ours.stats.misses > 0, "the state never leaves memory")
            twins.ours.close()


def check_places_are_those_of_the_layout(job: Job) -> None:
    twins = Twins(job, TRAINED["fsdp x tp"], F32)
    for parameter in twins.ours._opened.parameters:
        place = parameter.place(job.rank)
        must(place.shape == tuple(parameter.tensor.shape))
        must(place.box == place.layout.box(place.shape, job.rank))
        must(place.box.shape == tuple(parameter.local.shape))
    twins.ours.close()


def check_other_rules(job: Job) -> None:
    """torch has no fused SGD for DTensors: what it does with the local tensors is the measure."""
    for rule, options in (("Adam", {}), ("SGD", {"momentum": 0.9})):
        torch.manual_seed(1)
        params = list(fsdp(groups_of(4), F32).parameters())
        masters = [nn.Parameter(local_of(each).clone()) for each in params]
        tiers = [offload.Host("4MiB")]
        ours = getattr(offload, rule)(params, **options, tiers=tiers)
        torchs = getattr(torch.optim, rule)(masters, **options, fused=True)
        for _ in range(2):
            for param, master in zip(params, masters, strict=True):
                param.grad = param.detach() * 0.3 + 0.1
                master.grad = local_of(param.grad).clone()
            ours.step()
            torchs.step()
        for param, master in zip(params, masters, strict=True):
            must(same_bits(local_of(param), master), rule)


def sharded(job: Job, values: torch.Tensor, mesh: Any, placements: Any) -> DTensor:
    """A DTensor in any placement; a sum has a part of its own on each rank."""
    if any(each.is_partial() for each in placements):
        return DTensor.from_local(values * (job.rank + 0.3), mesh, placements, run_check=False)
    return distribute_tensor(values.clone(), mesh, placements, src_data_rank=None)


def pairs(job: Job, tensors: Callable[[], list[torch.Tensor]]) -> tuple[Any, Any, Any, Any]:
    """An offloaded optimizer and torch's, and the parameters of both."""
    ours, theirs = ([nn.Parameter(each) for each in tensors()] for _ in range(2))
    optimizer = offload.AdamW(ours, **OPTIONS, tiers=[offload.Host("4MiB")])
    return optimizer, ours, torch.optim.AdamW(theirs, **OPTIONS, fused=True), theirs


def check_gradients_in_other_placements(job: Job) -> None:
    """They are redistributed as torch's kernels do it. But these read the memory of a gradient as
    if it had no gaps, which it has where one Shard was made of another."""
    line, grid, values = groups_of(4), square(), torch.randn(9, 11)
    given_on_line = (*PLACED, Partial(), Partial("avg"))
    cases = [
        *((line, [one], [other]) for one in PLACED for other in given_on_line),
        (grid, [Shard(0), Shard(1)], [Partial(), Replicate()]),
        (grid, [Shard(0), Shard(0)], [Replicate(), Partial("avg")]),
        (grid, [Replicate(), Shard(0)], [Shard(1), Replicate()]),
    ]
    optimizer, ours, torchs, theirs = pairs(
        job, lambda: [sharded(job, values, mesh, placed) for mesh, placed, _ in cases]
    )
    for _ in range(2):
        grads = [sharded(job, torch.randn(9, 11), mesh, given) for mesh, _, given in cases]
        for one, other, grad in zip(ours, theirs, grads, strict=True):
            one.grad, other.grad = grad.clone(), _without_gaps(grad, other)
        optimizer.step()
        torchs.step()
    for case, one, other in zip(cases, ours, theirs, strict=True):
        must(same_local_bits(one, other), case)
    ours[0].grad = sharded(job, torch.ones(9, 11), grid, [Replicate(), Replicate()])
    with pytest.raises(UsageError, match="does not lie on the ranks"):
        optimizer.step()
    ours[0].grad = ours[1].grad
    optimizer.step()


def _without_gaps(grad: DTensor, param: DTensor) -> DTensor:
    """A gradient that torch's fused kernel reads right."""
    if not any(isinstance(each, Shard) for each in grad.placements):
        return grad.clone()
    placed = grad.redistribute(param.device_mesh, param.placements)
    local = torch.empty_like(local_of(param), requires_grad=False).copy_(local_of(placed))
    return DTensor.from_local(
        local,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=grad.shape,
        stride=grad.stride(),
    )


def check_local_tensors_in_any_order_of_memory(job: Job) -> None:
    """Transposed ones, pieces of a larger storage, and none at all; gaps are refused."""
    mesh, grads = groups_of(4), [torch.randn(70, 90), torch.randn(70, 90), torch.randn(0, 5)]

    def locals_of() -> list[torch.Tensor]:
        torch.manual_seed(job.rank)
        storage = torch.randn(100, 90)
        found = [torch.randn(90, 70).t(), storage[30:], torch.randn(0, 5)]
        return [DTensor.from_local(each, mesh, [Shard(0)], run_check=False) for each in found]

    optimizer, ours, torchs, theirs = pairs(job, locals_of)
    for _ in range(2):
        for one, other, grad in zip(ours, theirs, grads, strict=True):
            one.grad = DTensor.from_local(grad, mesh, [Shard(0)], run_check=False)
            in_order = torch.empty_like(local_of(other), requires_grad=False).copy_(grad)
            other.grad = DTensor.from_local(in_order, mesh, [Shard(0)], run_check=False)
        optimizer.step()
        torchs.step()
    must(all(map(same_local_bits, ours, theirs)))
    gaps = DTensor.from_local(torch.randn(8, 8)[:, :4], mesh, [Shard(0)], run_check=False)
    refused = [gaps, sharded(job, torch.ones(3), mesh, [Partial()])]
    for each, what in zip(refused, ("gaps or overlaps", "a sum over ranks"), strict=True):
        with pytest.raises(UsageError, match=what):
            offload.AdamW([nn.Parameter(each)], tiers=[offload.Host("4MiB")])


def check_loaded_state_in_other_placements(job: Job) -> None:
    twins = Twins(job, TRAINED["fsdp on 4"], BF16)
    twins.train(1)
    state = twins.ours.state_dict()
    state["state"] = {
        index: {name: _replicated(value) for name, value in fields.items()}
        for index, fields in state["state"].items()
    }
    twins.train(1)
    twins.ours.load_state_dict(state)
    found = twins.ours.state_dict()["state"]
    for index, fields in state["state"].items():
        for name, value in fields.items():
            must(same_bits(whole_of(found[index][name]), whole_of(value)), (index, name))
    zeros = torch.zeros(ROWS, WIDE)
    for wrong in (zeros, sharded(job, zeros, square(), [Shard(0), Shard(1)])):
        state["state"][0]["exp_avg"] = wrong
        with pytest.raises(StateMismatchError, match="exp_avg in a DTensor"):
            twins.ours.load_state_dict(state)
    twins.ours.close()


def _replicated(value: torch.Tensor) -> torch.Tensor:
    if not isinstance(value, DTensor):
        return value
    return value.redistribute(value.device_mesh, [Replicate()])


def check_a_scaler_skips_the_update_on_all_ranks(job: Job) -> None:
    """One rank has an infinite gradient."""
    twins = Twins(job, TRAINED["fsdp on 4"], F32)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    for is_bad in (False, True, False):
        x = torch.randn(8, WIDE)
        optimizers = (twins.ours, twins.torchs)
        for model, optimizer, scaler in zip(twins.models, optimizers, scalers, strict=True):
            scaler.scale(model(x).square().mean()).backward()
            if is_bad and job.rank == 2:
                local_of(next(model.parameters()).grad)[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    must(twins.ours.stats.updates == 2)
    must(scalers[0].get_scale() == scalers[1].get_scale() == 512.0)
    twins.check()
    twins.ours.close()


# -- steps --------------------------------------------------------------------------------

Wholes = dict[str, torch.Tensor]
# How many ranks a job has, and the layout of what it trains.
LAYOUTS: dict[str, tuple[int, Make]] = {
    "fsdp on 4": (4, lambda dtype: fsdp(first(4), dtype)),
    "fsdp on 2": (2, lambda dtype: fsdp(first(2), dtype)),
    "one rank": (1, Net),
    "fsdp x tp": (4, lambda dtype: both(Net(dtype))),
    "ddp": (4, replicated),
    "replicas": (4, lambda dtype: fsdp(square(), dtype)),
    "tp and fsdp of the rest": (4, lambda dtype: partly(Net(dtype))),
}
# Bytes of Host, paths, and subgroup_bytes; None: torch's optimizer.
Tiers = tuple[str | None, list[str], int | None] | None
HOST: Tiers = ("8MiB", [], None)
MIXED: Tiers = ("150KB", ["near"], 65_536)
PATHS: Tiers = (None, ["near", "far"], 120_000)


class Training:
    """A model and its optimizer, on the ranks of a layout."""

    def __init__(self, job: Job, layout: str, tiers: Tiers, dtype: torch.dtype, seed: int) -> None:
        self.job, (self.size, make) = job, LAYOUTS[layout]
        torch.manual_seed(seed)
        self.model = make(dtype)
        self.optimizer = self._optimizer(tiers)
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def train(self, seed: int) -> None:
        """One update, from gradients that are the same in any layout."""
        for index, parameter in enumerate(self.model.parameters()):
            noise = torch.Generator().manual_seed(100 * seed + index)
            grad = torch.randn(parameter.shape, generator=noise).to(parameter.dtype)
            if isinstance(parameter, DTensor):
                mesh = parameter.device_mesh
                grad = distribute_tensor(grad, mesh, parameter.placements, src_data_rank=None)
            parameter.grad = grad
        self.optimizer.step()
        self.optimizer.zero_grad()

    def wholes(self) -> Wholes:
        """Every tensor as one rank would have it, by name."""
        inner = getattr(self.model, "module", self.model)
        named = dict(inner.named_parameters())
        found = {name: whole_of(value.detach()).clone() for name, value in named.items()}
        states = self.optimizer.state_dict()["state"]
        for index, name in enumerate(named):
            fields = states.get(index, {})
            found |= {f"{name}.{field}": whole_of(value) for field, value in fields.items()}
        return found

    def save(self, run: str) -> statehold.Save:
        with self._opened(run) as ckpt:
            return ckpt.save(1, self.state).wait("committed", DEADLINE_S)

    def restore(self, run: str) -> None:
        with self._opened(run) as ckpt:
            must(ckpt.restore(self.state) == 1)

    def _opened(self, run: str) -> statehold.Checkpointer:
        os.environ |= {"RANK": str(self.job.rank), "WORLD_SIZE": str(self.size)}
        where = self.job.folder / run
        return statehold.Checkpointer(
            where, **SMALL, coordination="directory", peer_timeout_s=DEADLINE_S
        )

    def _optimizer(self, tiers: Tiers) -> Any:
        named = self.model.named_parameters()
        if tiers is None:
            return torch.optim.AdamW(named, **OPTIONS, fused=True)
        host, paths, subgroup_bytes = tiers
        folders = [self.job.folder / path for path in paths]
        for folder in folders:
            folder.mkdir(exist_ok=True)
        used = [*([offload.Host(host)] if host else []), *map(offload.Path, folders)]
        return offload.AdamW(named, **OPTIONS, tiers=used, subgroup_bytes=subgroup_bytes)


def same(one: Wholes, other: Wholes) -> bool:
    return one.keys() == other.keys() and all(same_bits(one[n], other[n]) for n in one)


def takes_part(job: Job, layout: str) -> bool:
    """Whether this rank is one of the job's that trains. All ranks call this."""
    size, _ = LAYOUTS[layout]
    first(size)
    return job.rank < size


def saved(
    job: Job, layout: str, tiers: Tiers, dtype: torch.dtype = F32, run: str | None = None
) -> str:
    """A step of a training; returns its run. Its tensors lie beside it."""
    run = run or f"{layout} {tiers} {dtype}".replace("/", "")
    if takes_part(job, layout):
        training = Training(job, layout, tiers, dtype, seed=1)
        for seed in range(2):
            training.train(seed)
        training.save(run)
        wholes = training.wholes()
        if job.rank == 0:
            torch.save(wholes, job.folder / f"{run}.wholes")
        if tiers is not None:
            training.optimizer.close()
    distributed.barrier()
    return run


def goes_on_from(job: Job, run: str, layout: str, tiers: Tiers) -> None:
    """A run restores into an offloaded optimizer and torch's own, and both go on alike."""
    if takes_part(job, layout):
        expected = torch.load(job.folder / f"{run}.wholes")
        ours = Training(job, layout, tiers, F32, seed=2)
        torchs = Training(job, layout, None, F32, seed=3)
        for each in (ours, torchs):
            each.restore(run)
            must(same(each.wholes(), expected), (run, layout, each.optimizer))
            each.train(5)
        must(same(ours.wholes(), torchs.wholes()), (run, layout))
        must(not same(ours.wholes(), expected))
        ours.optimizer.close()
    distributed.barrier()


def check_fewer_and_more_ranks(job: Job) -> None:
    four = saved(job, "fsdp on 4", MIXED)
    goes_on_from(job, four, "fsdp on 2", PATHS)
    goes_on_from(job, four, "one rank", HOST)
    goes_on_from(job, saved(job, "fsdp on 2", PATHS), "fsdp on 4", MIXED)
    goes_on_from(job, saved(job, "one rank", HOST), "fsdp on 4", PATHS)


def check_from_torchs_optimizer(job: Job) -> None:
    plain = saved(job, "fsdp on 4", None)
    goes_on_from(job, plain, "fsdp on 4", MIXED)
    goes_on_from(job, plain, "fsdp on 2", MIXED)


def check_meshes_of_two_dimensions_and_replicas(job: Job) -> None:
    goes_on_from(job, saved(job, "fsdp x tp", MIXED), "ddp", HOST)
    goes_on_from(job, saved(job, "ddp", PATHS), "fsdp x tp", MIXED)


def check_masters(job: Job) -> None:
    run = saved(job, "fsdp on 4", MIXED, BF16)
    for layout in ("fsdp on 2", "fsdp on 4", "fsdp x tp"):
        if takes_part(job, layout):
            training = Training(job, layout, PATHS, BF16, seed=2)
            training.restore(run)
            expected = torch.load(job.folder / f"{run}.wholes")
            must("up.weight.master" in expected)
            must(same(training.wholes(), expected), layout)
            training.optimizer.close()
        distributed.barrier()


def check_a_rank_links_what_it_alone_writes(job: Job) -> None:
    """The state of parameters whose mesh is the whole job, and of these the first replica."""
    for layout in LAYOUTS:
        if takes_part(job, layout):
            training = Training(job, layout, PATHS, F32, seed=1)
            training.train(1)
            expected = 0
            for parameter in training.optimizer._opened.parameters:
                place = parameter.place(job.rank)
                if layout == "ddp":
                    place = placements.replicated(parameter.tensor.shape, ALL)
                world = LAYOUTS[layout][0]
                if role_of(place, job.rank if world > 1 else None, world) is Role.WRITES:
                    expected += 8 * parameter.local.numel()
            linked = training.save(f"linked {layout}").stats.linked_bytes
            must(linked >= expected, (layout, linked, expected))
            must((linked > 0) == (expected > 0), (layout, linked, expected))
            training.optimizer.close()
        distributed.barrier()
    goes_on_from(job, saved(job, "replicas", PATHS), "fsdp on 2", MIXED)
    goes_on_from(job, saved(job, "fsdp on 4", MIXED), "replicas", PATHS)
    goes_on_from(job, saved(job, "tp and fsdp of the rest", PATHS), "fsdp on 2", MIXED)


def check_a_save_of_what_is_in_a_wrapper_says_why_it_links_nothing(job: Job) -> None:
    training = Training(job, "ddp", PATHS, F32, seed=1)
    training.state["model"] = training.model.module
    training.train(1)
    records: list[logging.LogRecord] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(background_log, "_logged", set())
        patch.setattr(background_log.logger, "handle", records.append)
        for run in ("inside", "inside again"):
            must(training.save(run).stats.linked_bytes == 0)
    (warning,) = (each for each in records if each.levelno == logging.WARNING)
    must("save a DistributedDataParallel as it is, not its .module" in warning.getMessage())
    must("that of 4 parameters (module.up.weight, ...)" in warning.getMessage())
    training.optimizer.close()
    distributed.barrier()


def check_a_rank_that_cannot_link_writes_the_same_tensors(job: Job) -> None:
    """Its subgroups are too small for the rows of a parameter, or it has no path."""
    small: Tiers = (None, ["near"], 24_576)
    for layout, odd, its in (("fsdp on 4", 1, small), ("replicas", 0, small), ("ddp", 1, HOST)):
        tiers = its if job.rank == odd else (None, ["near"], 240_000)
        run = saved(job, layout, tiers, run=f"{layout}, rank {odd} writes")
        goes_on_from(job, run, "fsdp on 2", MIXED)


def check_a_save_is_that_of_torchs_optimizer(job: Job) -> None:
    """The same names, places and kinds, so nothing that restores a step knows a difference."""
    for layout in ("fsdp on 4", "fsdp x tp", "ddp"):
        found = []
        for tiers in (HOST, None):
            training = Training(job, layout, tiers, F32, seed=1)
            training.train(1)
            capture = captured(training.state)
            specs = {each.spec._replace(eager=False) for each in capture.tensors}
            found.append((specs, capture.tree))
        must(found[0] == found[1], layout)
