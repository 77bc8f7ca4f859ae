"""Pipeline stages, FSDP2 and tensor parallelism of pairs on one mesh: what one process computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor

from statehold import lowrank
from statehold.lowrank.parallel import parallelize
from support.gloo import run_ranks
from support.small_llama import Llama, loss_of, low_rank, next_token_loss, tokens_of

pytestmark = pytest.mark.thorough

LAYERS, MICROBATCHES = 4, 2


def stage_of(model: Llama, number: int) -> Llama:
    """The first half of a model, or the second one, with the names of the whole."""
    decoder = model.model
    half = LAYERS // 2
    for index in range(LAYERS):
        if index // half != number:
            decoder.layers[index] = nn.Identity()
    if number == 0:
        decoder.norm = model.lm_head = None  # type: ignore[assignment]
    else:
        decoder.embed_tokens = None  # type: ignore[assignment]
    return model


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def piped(rank: int, _: int) -> list[tuple[int, float]]:
    """For each mesh: how many gradients a rank has, and how far the worst is off."""
    found = []
    for shape in ((2, 1, 2), (2, 2, 1)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "tp"))
        number, share = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
        batches = [tokens_of(seed, batch=2 * MICROBATCHES) for seed in range(shape[1])]
        alone = low_rank(LAYERS)
        losses = [loss_of(alone, part) for each in batches for part in each.chunk(MICROBATCHES)]
        torch.stack(losses).mean().backward()
        expected = {name: each.grad for name, each in alone.named_parameters()}

        model = stage_of(low_rank(LAYERS), number)
        lowrank.keep_bottlenecks(model)
        parallelize(model, mesh)
        fully_shard(model, mesh=mesh["dp"])
        stage = PipelineStage(model, number, 2, torch.device("cpu"), group=mesh["pp"].get_group())
        schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=next_token_loss)
        if number == 0:
            schedule.step(batches[share])
        else:
            schedule.step(target=batches[share])
        apart = []
        for name, each in model.named_parameters():
            assert expected[name] is not None
            apart.append((whole(each.grad) - expected[name]).abs().max().item())
        found.append((len(apart), max(apart)))
    return found


def test_stages_with_fsdp_or_tensor_parallelism(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(piped, 4, tmp_path)):
        parameters = len(list(low_rank(LAYERS // 2).parameters()))
        # The first stage has neither norm nor head, and the second one no embeddings.
        assert [count for count, _ in found] == [parameters - (2 if rank < 2 else 1)] * 2
        assert max(worst for _, worst in found) < 1e-12
