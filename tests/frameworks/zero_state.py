"""Ranks of DeepSpeed with engine_state(): python zero_state.py WHAT STAGE RUN

`save` trains, saves step 3 and tells in RUN/saved.pt what the engine has. `load` restores it, and
tells the same in RUN/loaded-STAGE-WORLD.pt. `gate` trains on while nothing of a save is staged.
`methods` uses save_checkpoint() and load_checkpoint() as a script of DeepSpeed does. `refused` is
about engines that have state which no step would hold.

The model has what ZeRO cuts in odd ways: tied weights, a frozen layer, buffers, two groups.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

import statehold
from statehold.checkpoint.save.gate import Gate
from statehold.errors import StateholdError, StepNotFoundError, UsageError, storage_error
from statehold.integrations.deepspeed import engine_state, save_into_steps
from statehold.steps import store

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.faults import SMALL, Holdup
from support.resumed import same

KEYS = ("exp_avg", "exp_avg_sq")
STEPS, WORDS = 3, 29


class Counting(torch.optim.AdamW):
    """Keeps one thing that is no tensor, as some optimizers count their steps."""

    under_way: statehold.Save | None = None

    def step(self, closure: Any = None) -> None:
        assert self.under_way is None or self.under_way.done("staged")
        super().step()
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each]["count"] = self.state[each].get("count", 0) + 1


class Model(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, 7)
        self.frozen = nn.Linear(7, 7)
        self.frozen.requires_grad_(False)
        self.norm = nn.LayerNorm(7)
        self.register_buffer("batches", torch.zeros(()))
        self.first = nn.Linear(7, 11)
        self.second = nn.Linear(11, 7)
        self.out = nn.Linear(7, words, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.batches += 1
        hidden = self.norm(self.frozen(self.embedding(tokens)))
        return self.out(self.second(torch.relu(self.first(hidden))))


def engine_of(stage: int, seed: int, words: int) -> Any:
    torch.manual_seed(seed)
    model = Model(words)
    named = dict(model.named_parameters())
    decayed = [each for each in named.values() if each.ndim > 1 and each.requires_grad]
    rest = [each for each in named.values() if each.ndim == 1 and each.requires_grad]
    groups = [{"params": decayed}, {"params": rest, "weight_decay": 0.0}]
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {
            "stage": stage,
            "round_robin_gradients": stage < 3,
            "sub_group_size": 60,
            "stage3_param_persistence_threshold": 20,
        },
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
    }
    found = deepspeed.initialize(model=model, config=config, optimizer=Counting(groups, lr=1e-2))
    return found[0]


def train(engine: Any) -> None:
    for _ in range(2):
        tokens = torch.randint(WORDS, (8,))
        loss = nn.functional.cross_entropy(engine(tokens).float(), tokens)
        engine.backward(loss)
        engine.step()


def whole(engine: Any, parameter: torch.Tensor, key: str) -> torch.Tensor:
    """A master weight or a moment of all ranks. In stages 1 and 2 DeepSpeed's own functions take
    another parameter's with round_robin_gradients, so the flat buffers are gathered here."""
    zero = engine.optimizer
    if hasattr(zero, "fp16_groups"):
        get = safe_get_full_fp32_param if key == "fp32" else safe_get_full_optimizer_state
        return get(parameter, *[] if key == "fp32" else [key]).clone()
    flats = zip(zero.bit16_groups_flat, zero.single_partition_of_fp32_groups, strict=True)
    for flat, master in flats:
        at = (parameter.data_ptr() - flat.data_ptr()) // flat.element_size()
        if 0 <= at < flat.numel():
            own = master if key == "fp32" else zero.optimizer.state[master][key]
            parts = [torch.empty_like(own) for _ in range(engine.world_size)]
            torch.distributed.all_gather(parts, own.detach())
            return torch.cat(parts)[at : at + parameter.numel()].view(parameter.shape).detach()
    raise AssertionError("the parameter is in no buffer")


def told(engine: Any) -> dict[str, Any]:
    """All that a step has to bring back, whole, on every rank."""
    found: dict[str, Any] = {"buffers": {k: v.clone() for k, v in engine.module.named_buffers()}}
    for name, each in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([each]):
            fields = {"weight": each.detach().clone()}
        if each.requires_grad:
            fields |= {key: whole(engine, each, key) for key in ("fp32", *KEYS)}
            assert torch.equal(fields["fp32"].bfloat16(), fields["weight"])
        found[name] = fields
    base = engine.optimizer.optimizer
    found["counts"] = sorted({state["count"] for state in base.state.values()})
    found["steps"] = sorted({float(state["step"]) for state in base.state.values()})
    found["options"] = [{k: v for k, v in g.items() if k != "params"} for g in base.param_groups]
    found["scheduler"] = engine.lr_scheduler.state_dict()
    found["global_steps"] = engine.global_steps
    return found


def save(engine: Any, run: str) -> None:
    for _ in range(STEPS):
        train(engine)
    with statehold.Checkpointer(run, staging_bytes="64MiB") as ckpt:
        ckpt.save(STEPS, {**engine_state(engine), "mine": 7}).wait("committed")
    tell(engine, f"{run}/saved.pt")


def load(engine: Any, run: str) -> None:
    with statehold.Checkpointer(run, staging_bytes="64MiB") as ckpt:
        state = {**engine_state(engine), "mine": 0}
        assert ckpt.restore(state) == STEPS
        assert state["mine"] == 7
    stage = engine.zero_optimization_stage()
    tell(engine, f"{run}/loaded-{stage}-{engine.world_size}.pt")
    train(engine)  # it can go on


def tell(engine: Any, path: str) -> None:
    found = told(engine)
    if torch.distributed.get_rank() == 0:
        torch.save(found, path)
    torch.distributed.barrier()


def gate(engine: Any, run: str) -> None:
    """Nothing is staged until the update waits for it, and then the update comes after."""
    train(engine)
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        holdup, wait = Holdup(ckpt), Gate.wait

        def wait_and_release(self: Gate, timeout: float | None = None) -> None:
            holdup.release()
            wait(self, timeout)

        state, had = engine_state(engine), told(engine)
        Counting.under_way = ckpt.save(1, state)
        assert not Counting.under_way.done("staged")
        with mock.patch.object(Gate, "wait", wait_and_release):
            train(engine)
        assert Counting.under_way.done("staged")
        Counting.under_way.wait("committed")
        assert not same(told(engine), had)
        assert ckpt.restore(state) == 1
    assert same(told(engine), had)


def methods(engine: Any, run: str) -> None:
    train(engine)
    engine.save_checkpoint(f"{run}/stock", client_state={"mine": 1})
    saved_by_deepspeed = told(engine)
    save_into_steps(engine, staging_bytes="64MiB")
    train(engine)
    engine.load_checkpoint(f"{run}/stock")
    assert same(told(engine), saved_by_deepspeed)

    had = {}
    for tag in ("first", None):
        train(engine)
        had[tag] = told(engine)
        assert engine.save_checkpoint(run, tag, client_state={"mine": tag})
    engine.save_checkpoint(run)  # the same step once more, and it waits for nothing
    train(engine)
    assert engine.load_checkpoint(run)[1] == {}
    assert same(told(engine), had[None])
    assert engine.load_checkpoint(run, "first")[1] == {"mine": "first"}
    assert same(told(engine), had["first"])
    train(engine)  # the same number as the newest step
    engine.save_checkpoint(run, "other")
    engine.load_checkpoint(run, "other")
    assert not Path(run, "latest").exists()
    with pytest.raises(StepNotFoundError):
        engine.load_checkpoint(run, "missing")
    fails_once(engine, run)
    weights_alone(engine, f"{run}/alone")


def weights_alone(engine: Any, run: str) -> None:
    """No training goes on from a step whose weights were loaded alone: none is discarded."""
    for tag in ("old", "new"):
        train(engine)
        engine.save_checkpoint(run, tag)
    engine.load_checkpoint(run, "old", load_module_only=True)
    train(engine)
    engine.save_checkpoint(run, "newest")
    for tag in ("new", "newest"):
        engine.load_checkpoint(run, tag)


def fails_once(engine: Any, run: str) -> None:
    """A full disk costs one checkpoint. The script hears of it, and older ones are there."""
    had = told(engine)
    train(engine)
    full = storage_error("write", errno.ENOSPC, run)
    with mock.patch.object(store, "publish", mock.Mock(side_effect=full)) as publish:
        engine.save_checkpoint(run)
        with pytest.raises(StateholdError):
            engine.load_checkpoint(run)
    assert publish.called or torch.distributed.get_rank()
    assert engine.load_checkpoint(run, "other")[0] == f"{run}/3"
    assert same(told(engine), had)


def refused(engine: Any, _: str) -> None:
    """Each case changes one thing of an engine. A name that DeepSpeed no longer has is an error."""
    if engine.zero_optimization_stage() == 0:
        refuses(engine, "it trains with ZeRO stage 0")
        return
    zero, two = engine.optimizer, mock.Mock(return_value=2)
    cases: list[tuple[str, Any, dict[str, Any]]] = [
        ("its optimizer is a Counting", engine, {"optimizer": zero.optimizer}),
        ("it is parallel over a pipeline", engine, {"pipeline_parallelism": True}),
        ("it has experts", engine, {"has_moe_layers": True}),
        ("not all ranks are data-parallel", torch.distributed, {"get_world_size": two}),
        ("on NVMe", zero, {"swap_optimizer": True}),
        ("on NVMe", zero, {"params_in_nvme_and_cpu": True}),
        ("a part of its optimizer", zero, {"offload_optimizer": True, "partial_offload": 0.5}),
        ("hpZ", engine, {"zero_hpz_partition_size": two}),
        ("is not one of torch", zero, {"optimizer": object()}),
        ("get_extra_state): the model", Model, {"get_extra_state": two}),
        ("get_extra_state): norm", nn.LayerNorm, {"get_extra_state": two}),
    ]
    for reason, target, changes in cases:
        with mock.patch.multiple(target, **changes):
            refuses(engine, reason)
    train(engine)
    engine_state(engine)["deepspeed"].state_dict()
    engine.micro_steps += 1
    with pytest.raises(UsageError, match="in the middle of an accumulation"):
        engine_state(engine)["deepspeed"].state_dict()


def refuses(engine: Any, reason: str) -> None:
    with pytest.raises(UsageError, match=re.escape(reason)):
        engine_state(engine)


def main() -> None:
    what, stage, run = sys.argv[1:]
    if "WORLD_SIZE" not in os.environ:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
                       "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # fmt: skip
    Path(run).mkdir(exist_ok=True)
    deepspeed.init_distributed("gloo")
    engine = engine_of(int(stage), 5 if what == "load" else 0, 90_000 if what == "gate" else WORDS)
    jobs = {"save": save, "load": load, "gate": gate, "methods": methods, "refused": refused}
    jobs[what](engine, run)


main()
