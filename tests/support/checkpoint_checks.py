"""Checks that run on every rank of a job of four: real models saved and restored as users do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import statehold
from support.capture_checks import trained
from support.faults import DEADLINE_S, SMALL, must
from support.jobs import Job
from support.restore_checks import MODELS, bare, same, wholes

OPTIONS: dict[str, Any] = {**SMALL, "keep": 2, "peer_timeout_s": DEADLINE_S}


def training(layout: str, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = MODELS[layout]()
    optimizer = trained(model, torch.optim.AdamW(model.parameters(), lr=0.5))
    return {"model": model, "optimizer": optimizer, "rng": statehold.Rng(), "epoch": seed}


def all_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return wholes(bare(state["model"]), state["optimizer"])


def check_every_layout_restores_into_every_other(job: Job) -> None:
    live = {target: training(target, seed=99) for target in MODELS}  # from the step before, too
    for seed, source in enumerate(MODELS):
        saved = training(source, seed)
        with statehold.Checkpointer(job.folder / source, **OPTIONS) as ckpt:
            for step in range(1, 4):  # until what is learned of replicas is used
                trained(saved["model"], saved["optimizer"])
                saved["epoch"] = 10 * seed + step
                ckpt.save(step, saved).wait("committed", DEADLINE_S)
            expected = all_of(saved)
            for target, state in live.items():
                must(not same(all_of(state), expected))
                must(ckpt.restore(state) == 3, (source, target))
                must(same(all_of(state), expected), (source, target))
                must(state["epoch"] == 10 * seed + 3)


def check_training_goes_on_as_if_nothing_had_happened(job: Job) -> None:
    run = job.folder / "goes on"
    straight = training("fsdp", seed=3)
    with statehold.Checkpointer(run, **OPTIONS) as ckpt:
        ckpt.save(1, straight).wait("committed", DEADLINE_S)
    trained(straight["model"], straight["optimizer"])
    again = training("fsdp", seed=4)
    with statehold.Checkpointer(run, **OPTIONS) as ckpt:
        must(ckpt.restore(again) == 1)
    trained(again["model"], again["optimizer"])
    must(same(all_of(straight), all_of(again)))


def check_replicas_are_written_once(job: Job) -> None:
    for layout in ("fsdp", "fsdp x tp", "ddp"):
        run = job.folder / "once" / layout
        model = training(layout, seed=1)["model"]
        whole_bytes = sum(4 * each.numel() for each in bare(model).parameters())
        with statehold.Checkpointer(run, **OPTIONS) as ckpt:
            ckpt.save(1, {"model": model}).wait("committed", DEADLINE_S)
        must(sum(job.gather(_data_bytes(run, job))) == whole_bytes, layout)


def _data_bytes(run: Path, job: Job) -> int:
    """The bytes of tensors in this rank's file."""
    name = f"rank-{job.rank:05d}-of-{job.size:05d}.safetensors"
    raw = (run / "step-000000000001" / name).read_bytes()
    return len(raw) - 8 - int.from_bytes(raw[:8], "little")
