"""Checks that run on every rank of a job of four: a step of any layout into a state of any."""

from __future__ import annotations

import copy
import types
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import statehold
from statehold.errors import StateMismatchError
from statehold.format.entries import TensorEntry
from statehold.format.selection import Selection
from statehold.format.trees import merge
from statehold.layout.layout import Box, Ranks
from statehold.tensors import destinations
from statehold.tensors.kinds import finish, prepare
from statehold.tensors.matching import Restoration
from statehold.tensors.storable import version_of
from statehold.tensors.stored import Wanted
from support import fourbit
from support.capture_checks import Mlp, live_tensors, piece, trained, two_dimensional
from support.faults import must
from support.jobs import Job, captured
from support.quantized import Made, Small
from support.wrapped import Flat, Hooked, Imitating, Nested, Subclassing, Translating


class SharedStep:
    """What all ranks captured, put together in the memory of each."""

    def __init__(self, job: Job, state: Mapping[str, Any], world_size: int = 4) -> None:
        found = captured(state)
        boxes = [(each.spec, each.tensor.clone()) for each in found.tensors]
        everything = job.gather((boxes, found.tree))
        self.whole: dict[str, torch.Tensor] = {}
        for spec, tensor in (each for boxes, _ in everything for each in boxes):
            shape = spec.global_shape or spec.shape
            whole = self.whole.setdefault(spec.name, torch.zeros(shape, dtype=tensor.dtype))
            piece(whole, Box(spec.offsets or (0,) * len(shape), spec.shape)).copy_(tensor)
            self.dtypes = {**getattr(self, "dtypes", {}), spec.name: spec.dtype}
        trees = [(Ranks.of([rank]), tree) for rank, (_, tree) in enumerate(everything)]
        self.saved = types.SimpleNamespace(
            step=7,
            world_size=world_size,
            tensors={n: TensorEntry(self.dtypes[n], tuple(w.shape)) for n, w in self.whole.items()},
            state=merge(trees, job.rank, world_size == job.size),
            chunks=lambda *_: [],
        )

    def prepare(self, state: Any, **options: Any) -> Restoration:
        return prepare(
            state,
            self.saved,
            selection=Selection(**options),
            rank=distributed.get_rank(),
            alone=False,
            world=distributed.get_world_size(),
        )

    def restore(self, state: Any, **options: Any) -> Restoration:
        restoration = self.prepare(state, **options)
        for target in restoration.destinations:
            target.tensor.copy_(piece(self.whole[target.name], target.box))
        for stream in restoration.streams:
            stream(self._fill)
        finish(restoration)
        return restoration

    def _fill(self, wanted: Sequence[Wanted]) -> None:
        for each in wanted:
            must(each.memory.dtype == self.whole[each.name].dtype)
            each.memory.copy_(piece(self.whole[each.name], each.box))


def wholes(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    """Every tensor as one rank would have it; all ranks call this."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in live_tensors(model, optimizer).items()
    }


def sharded() -> nn.Module:
    model = Mlp()
    for part in (model.up, model):
        fully_shard(part, mesh=init_device_mesh("cpu", (4,)))
    return model


def replicated() -> nn.Module:
    return nn.parallel.DistributedDataParallel(Mlp())


MODELS = {"fsdp": sharded, "fsdp x tp": two_dimensional, "plain": Mlp, "ddp": replicated}


def bare(model: nn.Module) -> nn.Module:
    return model.module if hasattr(model, "module") else model


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def check_every_layout_into_every_other(job: Job) -> None:
    for source, make in MODELS.items():
        torch.manual_seed(1)
        model = make()
        optimizer = trained(model, torch.optim.AdamW(model.parameters(), lr=0.5))
        expected = wholes(bare(model), optimizer)
        step = SharedStep(job, {"m": model, "o": optimizer})
        for target, remake in MODELS.items():
            torch.manual_seed(2)
            other = remake()
            fresh = torch.optim.AdamW(other.parameters())
            restoration = step.restore({"m": other, "o": fresh})
            must(same(wholes(bare(other), fresh), expected), (source, target))
            must(fresh.param_groups[0]["lr"] == 0.5)
            must(restoration.used == step.saved.tensors.keys())
            must(not restoration.unexpected)
            trained(other, fresh)  # what was allocated works with the parameters


WRAPPED = {
    "bare": lambda inner: inner,
    "wrapper": Subclassing,
    "class at run time": Imitating,
    "hooks": Hooked.on,
    "own methods": Translating.of,
}


def check_optimizers_with_state_dicts_of_their_own(job: Job) -> None:
    """A fresh one gets DTensors where its parameters are, and goes on."""
    for source, save in WRAPPED.items():
        torch.manual_seed(1)
        model = sharded()
        optimizer = save(torch.optim.AdamW(model.parameters(), 0.5))
        expected = wholes(model, trained(model, optimizer))
        step = SharedStep(job, {"m": model, "o": optimizer})
        for target, load in WRAPPED.items():
            other = sharded()
            fresh = load(torch.optim.AdamW(other.parameters()))
            step.restore({"m": other, "o": fresh})
            must(same(wholes(other, fresh), expected), (source, target))
            for parameter in other.parameters():
                moment = fresh.state[parameter]["exp_avg"]
                must(isinstance(moment, DTensor), (source, target))
                must(moment.placements == parameter.placements)
            trained(other, fresh)


def check_nested_optimizer_state_is_sharded(job: Job) -> None:
    model, other = sharded(), sharded()
    optimizer = trained(model, Nested(model.parameters()))
    step = SharedStep(job, {"m": model, "o": optimizer})
    fresh = Nested(other.parameters())
    step.restore({"m": other, "o": fresh})
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        restored, saved = (
            o.state[p]["of"]["mean"] for o, p in ((fresh, ours), (optimizer, theirs))
        )
        must(isinstance(restored, DTensor))
        must(torch.equal(restored.full_tensor(), saved.full_tensor()))
    trained(other, fresh)


def check_state_of_unknown_parameters_is_refused(job: Job) -> None:
    model, other = sharded(), sharded()
    optimizer = trained(model, Flat(torch.optim.AdamW(model.parameters())))
    step = SharedStep(job, {"m": model, "o": optimizer})
    before = [parameter.full_tensor().clone() for parameter in other.parameters()]
    fresh = Flat(torch.optim.AdamW(other.parameters()))
    with pytest.raises(StateMismatchError) as caught:
        step.prepare({"m": other, "o": fresh})
    must("take one step before restoring" in caught.value.facts["o.0/exp_avg"])
    must("o.0/step" not in caught.value.facts)
    must(not fresh.state)
    must(
        all(
            torch.equal(a.full_tensor(), b) for a, b in zip(other.parameters(), before, strict=True)
        )
    )
    step.restore({"m": other, "o": trained(other, fresh)})
    must(same(wholes(other, fresh), wholes(model, optimizer)))


def quantized(rows: int, shards: int) -> tuple[nn.Module, Small]:
    """A layer and an optimizer whose state is made of several tensors; 0 shards: not sharded."""
    model = nn.Linear(5, rows, bias=False)
    if shards == 4:
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    elif shards == 2:
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "shard")))
    return model, Small(model.parameters())


def stepped(model: nn.Module, optimizer: Small) -> None:
    (weight,) = model.parameters()
    whole = torch.arange(float(weight.numel())).reshape(weight.shape).sin()
    weight.grad = torch.zeros_like(weight)
    local = weight.grad.to_local() if isinstance(weight, DTensor) else weight.grad
    local.copy_(own(weight, whole))
    optimizer.step()


def own(like: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """This rank's rows, as a tensor like this one has them."""
    if not isinstance(like, DTensor):
        return whole
    axis = like.device_mesh.ndim - 1
    rows = -(-len(whole) // like.device_mesh.size(axis))
    return whole.split(rows)[like.device_mesh.get_local_rank(axis)]


def check_made_of_others_in_every_layout(job: Job) -> None:
    statehold.allow_tensor_class(Made, rowwise=["codes", "scale"], shared=["levels"])
    for rows in (8, 7):
        for source in (0, 2, 4):
            torch.manual_seed(1)
            model, optimizer = quantized(rows, source)
            stepped(model, optimizer)
            step = SharedStep(job, {"m": model, "o": optimizer})
            must(tuple(step.whole["o.state.m.weight.mean.scale"].shape) == (rows,))
            for target in (0, 2, 4):
                for fresh in (True, False):
                    other, restored = quantized(rows, target)
                    if not fresh:
                        stepped(other, restored)
                    step.restore({"m": other, "o": restored})
                    must_be_part_of(step, other, restored)
                    stepped(other, restored)


def must_be_part_of(step: SharedStep, model: nn.Module, optimizer: Small) -> None:
    """What this rank has of the moment is its part of what was saved."""
    (weight,) = model.parameters()
    mean = optimizer.state[weight]["mean"]
    must(isinstance(mean, DTensor) is isinstance(weight, DTensor))
    local = mean.to_local() if isinstance(mean, DTensor) else mean
    must(type(local) is Made)
    for name in ("codes", "scale"):
        whole = step.whole[f"o.state.m.weight.mean.{name}"]
        must(torch.equal(getattr(local, name), own(mean, whole)), name)
    must(torch.equal(local.levels, torch.arange(4.0)))


def check_made_of_unknown_others_in_their_layout_only(job: Job) -> None:
    statehold.allow_tensor_class(Made)
    model, optimizer = quantized(8, 4)
    stepped(model, optimizer)
    found = captured({"m": model, "o": optimizer})
    specs = {each.spec.name: each.spec for each in found.tensors}
    must(specs["o.state.m.weight.mean.codes"].layout is None)
    node = found.tree["o"]["state"]["m.weight"]["mean"]["$subclass"]
    must(node["part"] == {"offsets": [2 * job.rank, 0], "of": [8, 5]})
    step = OwnStep(found)
    for fresh in (True, False):
        other, restored = quantized(8, 4)
        if not fresh:
            stepped(other, restored)
        step.restore({"m": other, "o": restored})
        theirs = optimizer.state[model.weight]["mean"].to_local()
        ours = restored.state[other.weight]["mean"].to_local()
        must(torch.equal(ours.codes, theirs.codes))
        stepped(other, restored)
    for target in (0, 2):
        other, restored = quantized(8, target)
        with pytest.raises(StateMismatchError, match="in a way that this layout cannot take"):
            step.prepare({"m": other, "o": restored})
        stepped(other, restored)
        with pytest.raises(StateMismatchError, match="in a way that this layout cannot take"):
            step.prepare({"m": other, "o": restored})


def check_fourbit_weights_below_data_parallel(job: Job) -> None:
    def built() -> nn.Module:
        layer = fourbit.Linear4bit(8, 4, bias=False, quant_type="nf4").to("cpu")
        return nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), layer))

    torch.manual_seed(1)
    model = built()
    found = captured({"m": model})
    specs = {each.spec.name: each.spec for each in found.tensors}
    for name in ("m.1.weight", "m.1.weight.absmax", "m.1.weight.nested_offset"):
        layout = specs[name].layout
        must(layout is not None and layout.replica_count == 4, name)
    step = SharedStep(job, {"m": model})
    torch.manual_seed(2)
    other = built()
    step.restore({"m": other})
    inputs = torch.randn(2, 8)
    must(torch.equal(other(inputs), model(inputs)))


class OwnStep(SharedStep):
    """What this rank alone captured, with the global shapes of what is sharded."""

    def __init__(self, found: Any) -> None:
        self.whole, dtypes = {}, {}
        for each in found.tensors:
            spec = each.spec
            shape = spec.global_shape or spec.shape
            self.whole[spec.name] = torch.zeros(shape, dtype=each.tensor.dtype)
            box = Box(spec.offsets or (0,) * len(shape), spec.shape)
            piece(self.whole[spec.name], box).copy_(each.tensor)
            dtypes[spec.name] = TensorEntry(spec.dtype, shape)
        self.saved = types.SimpleNamespace(step=7, world_size=4, tensors=dtypes, state=found.tree)


def check_complex_parameters_in_every_layout(job: Job) -> None:
    def build(is_sharded: bool) -> nn.Module:
        model = nn.Linear(5, 7, bias=False, dtype=torch.complex128)
        return fully_shard(model, mesh=init_device_mesh("cpu", (4,))) if is_sharded else model

    for source in (True, False):
        model = build(source)
        optimizer = trained(model, torch.optim.SGD(model.parameters(), momentum=0.5))
        step = SharedStep(job, {"m": model, "o": optimizer})
        must(tuple(step.whole["m.weight"].shape) == (7, 5, 2))
        for target in (True, False):
            other = build(target)
            fresh = torch.optim.SGD(other.parameters(), momentum=0.5)
            step.restore({"m": other, "o": fresh})
            must(same(wholes(other, fresh), wholes(model, optimizer)), (source, target))


def check_boxes_of_destinations(job: Job) -> None:
    step = SharedStep(job, {"m": Mlp(), "t": torch.ones(2)})
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    hybrid = fully_shard(Mlp(), mesh=mesh)
    for model, expected in ((sharded(), False), (hybrid, True), (replicated(), True)):
        found = {
            target.name: target
            for target in step.prepare({"m": model, "t": torch.ones(2)}).destinations
        }
        weight = bare(model).up.weight
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        must(found["m.up.weight"].box.shape == local.shape)
        must(found["m.up.weight"].shared is expected)
        must(found["m.up.weight"].tensor.data_ptr() == local.data_ptr())
        must(found["t"].shared)
        must(found["t"].box == Box.whole((2,)))


def check_filled_in_place(job: Job) -> None:
    model = two_dimensional()
    optimizer = trained(model)
    step = SharedStep(job, {"m": model, "o": optimizer})
    before = live_tensors(model, optimizer)
    places = {
        name: each.to_local().data_ptr() for name, each in before.items() if "step" not in name
    }
    versions = version_of(model.up.weight)
    step.restore({"m": model, "o": optimizer})
    after = live_tensors(model, optimizer)
    must(all(after[name] is value for name, value in before.items()))
    must({name: after[name].to_local().data_ptr() for name in places} == places)
    must(version_of(model.up.weight) > versions)


def check_global_shapes_are_compared(job: Job) -> None:
    step = SharedStep(job, {"m": nn.Linear(5, 8)})
    model = fully_shard(nn.Linear(5, 7), mesh=init_device_mesh("cpu", (4,)))
    with pytest.raises(StateMismatchError) as caught:
        step.prepare({"m": model})
    must(caught.value.facts["m.weight"] == "expected F32 [7, 5], got F32 [8, 5] in the step")


def check_stages_move_between_ranks(job: Job) -> None:
    def stage(rank: int) -> dict[str, Any]:
        model = nn.ModuleDict({f"stage{rank}": nn.Linear(2, rank + 1)})
        return {"m": model, "o": trained(model, torch.optim.AdamW(model.parameters(), lr=0.5))}

    step = SharedStep(job, stage(job.rank))
    step.saved.state = merge_of_all(job, step, stage(job.rank))
    fresh = stage((job.rank + 1) % 4)
    fresh["o"] = torch.optim.AdamW(fresh["m"].parameters())
    restoration = step.restore(fresh)
    names = {each for each in step.whole if f"stage{(job.rank + 1) % 4}." in each}
    must(restoration.used == names)
    must(set.union(*job.gather(restoration.used)) == set(step.whole))
    must(fresh["o"].param_groups[0]["lr"] == 0.5)
    nowhere = set.intersection(*map(set, job.gather(restoration.unexpected)))
    must(restoration.unexpected)
    must(not nowhere)


def check_groups_of_stages(job: Job) -> None:
    """Ranks with different numbers of groups; parameters that move into another one."""

    def stage(rank: int, lr: float) -> dict[str, Any]:
        model = nn.ModuleDict({f"stage{rank}": nn.Linear(2, 2)})
        weight, bias = model.parameters()
        found = [{"params": [weight], "lr": lr}, {"params": [bias], "lr": lr / 2}]
        return {"m": model, "o": torch.optim.SGD(found if rank else [weight, bias], lr)}

    step = SharedStep(job, stage(job.rank, 0.5), world_size=8)
    fresh = stage(job.rank, 9.0)
    step.restore(fresh)
    rates = [group["lr"] for group in fresh["o"].param_groups]
    must(rates == ([0.5, 0.25] if job.rank else [0.5]))

    both = nn.ModuleDict({"stage0": nn.Linear(2, 2), "stage1": nn.Linear(2, 2)})
    loose = {"m": both, "o": torch.optim.SGD(both.parameters(), 9.0)}
    with pytest.raises(StateMismatchError) as caught:
        step.prepare(loose)
    must(caught.value.facts["o.param_groups.0"].endswith("which differ in lr"))

    step = SharedStep(job, stage(0, job.rank + 1.0), world_size=8)
    with pytest.raises(StateMismatchError) as caught:
        step.prepare(stage(0, 9.0))
    must(caught.value.facts.keys() >= {"o.param_groups.0.lr"})


def check_extra_state_of_sharded_modules(job: Job) -> None:
    class Counting(nn.Linear):
        calls = 3

        def get_extra_state(self) -> Any:
            return {"calls": self.calls}

        def set_extra_state(self, state: Any) -> None:
            self.calls = state["calls"]

    mesh = init_device_mesh("cpu", (4,))
    saved, live = (fully_shard(nn.Sequential(Counting(3, 3)), mesh=mesh) for _ in range(2))
    saved[0].calls = 5
    step = SharedStep(job, {"m": saved})
    step.restore({"m": live})
    must(live[0].calls == 5)
    must(torch.equal(live[0].weight.full_tensor(), saved[0].weight.full_tensor()))


def check_ties_of_empty_boxes(job: Job) -> None:
    def tied() -> nn.Module:
        model = nn.Module()
        model.one, model.other = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        model.other.weight = model.one.weight
        return fully_shard(model, mesh=init_device_mesh("cpu", (4,)))

    saved, live = tied(), tied()
    step = SharedStep(job, {"m": saved})
    step.restore({"m": live})
    must(step.whole.keys() == {"m.one.weight"})
    must(torch.equal(live.other.weight.full_tensor(), saved.one.weight.full_tensor()))


def merge_of_all(job: Job, step: SharedStep, state: Mapping[str, Any]) -> Any:
    """The tree that a job of another size sees: nobody is at its place again."""
    trees = job.gather(captured(state).tree)
    return merge([(Ranks.of([rank]), tree) for rank, tree in enumerate(trees)], 0, False)


def check_own_values_come_back_to_their_ranks(job: Job) -> None:
    def state(rank: int) -> dict[str, Any]:
        return {"seed": rank, "where": {"shard": [rank, 9]}, "rng": statehold.Rng(), "same": 3}

    torch.manual_seed(job.rank)
    step = SharedStep(job, state(job.rank))
    live = state(99)
    step.restore(live)
    must((live["seed"], live["where"]["shard"]) == (job.rank, [job.rank, 9]))

    other = SharedStep(job, state(job.rank), world_size=8)
    with pytest.raises(StateMismatchError) as caught:
        other.prepare(state(99))
    must(caught.value.facts.keys() == {"seed", "where.shard"})
    must("8 ranks saved their own" in caught.value.facts["seed"])
    must('skip=["seed"]' in caught.value.facts["seed"])

    live = state(99)
    drawn = copy.deepcopy(torch.get_rng_state())
    report = other.restore(live, skip=["seed", "where.shard"]).report
    must(report.kept == ("seed", "where.shard", "rng"))
    must(report.loaded == ("same",))
    must(torch.equal(torch.get_rng_state(), drawn))


def check_casts_into_other_layouts(job: Job) -> None:
    model = sharded()
    optimizer = trained(model)
    step = SharedStep(job, {"m": model, "o": optimizer})
    expected = wholes(model, optimizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(destinations, "BLOCK_BYTES", 64)
        for other in (two_dimensional().bfloat16(), sharded().bfloat16()):
            fresh = torch.optim.AdamW(other.parameters())
            restoration = step.restore({"m": other, "o": fresh}, cast=True)
            must(bool(restoration.report.cast))
            for name, found in wholes(other, fresh).items():
                must(torch.equal(found, expected[name].to(found.dtype)), name)
                must(found.dtype == torch.bfloat16 or name.endswith("step"), name)


def check_weights_only(job: Job) -> None:
    model = sharded()
    optimizer = trained(model)
    step = SharedStep(job, {"m": model, "o": optimizer})
    other = two_dimensional()
    fresh = torch.optim.AdamW(other.parameters())
    restoration = step.restore({"m": other, "o": fresh}, only=["m"])
    must(not fresh.state)
    must(restoration.report.kept == ("o",))
    must(restoration.used == {name for name in step.whole if name.startswith("m.")})
