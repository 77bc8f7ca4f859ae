"""A loop over a stream of `datasets`, with workers, on any number of ranks.

Kill it at any moment, then run it again: on as many ranks it goes on with the next sample.

torchrun --nproc-per-node=2 examples/streaming.py [RUN]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from datasets import IterableDataset
from datasets.distributed import split_dataset_by_node
from torch import distributed, nn
from torchdata.stateful_dataloader import StatefulDataLoader

import statehold

STEPS = 16  # two epochs of two ranks


def texts(shards: list[int]) -> Iterator[dict[str, object]]:
    for number in (100 * shard + text for shard in shards for text in range(13)):
        yield {"id": number, "tokens": [number * place % 64 for place in range(1, 17)]}


def main(run: str = "runs/streaming") -> None:
    torch.manual_seed(0)
    distributed.init_process_group("gloo")
    model = nn.Sequential(nn.Embedding(64, 32), nn.Dropout(0.2), nn.Linear(32, 64))
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    stream = IterableDataset.from_generator(texts, gen_kwargs={"shards": [0, 1, 2, 3]})
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    stream = split_dataset_by_node(stream, rank, ranks).with_format("torch")
    loader = StatefulDataLoader(stream, batch_size=4, num_workers=2)
    state = {"model": model, "optimizer": optimizer, "data": loader, "rng": statehold.Rng()}
    state["losses"], state["samples"] = [], []
    with statehold.Checkpointer(run, keep=2) as ckpt:
        step = ckpt.restore(state) or 0
        while step < STEPS:
            for batch in loader:
                tokens = batch["tokens"]
                loss = nn.functional.cross_entropy(model(tokens[:, :-1]).mT, tokens[:, 1:])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                state["losses"].append(loss.item())
                state["samples"] += batch["id"].tolist()
                ckpt.save(step := step + 1, state)
    if rank == 0:
        Path(run, "losses.txt").write_text(str(state["losses"]))


if __name__ == "__main__":
    main(*sys.argv[1:2])
