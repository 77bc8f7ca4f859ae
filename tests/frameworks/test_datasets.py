"""Streaming data sets of Hugging Face in the state: a restored run sees the samples that are left.

Needs `datasets`, which only `make integrations` installs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold

datasets = pytest.importorskip("datasets")
stateful = pytest.importorskip("torchdata.stateful_dataloader")

SAMPLES, SHARDS, BATCH = 96, 4, 4


def rows(shards: list[int]) -> Iterator[dict[str, int]]:
    for shard in shards:
        yield from ({"x": index} for index in range(shard, SAMPLES, SHARDS))


def streaming(workers: int) -> Any:
    """Shards of a stream, as a set on the Hub is read. Not shuffled: datasets 5.2 then cannot load
    its own state where workers split the shards."""
    source = datasets.IterableDataset.from_generator(
        rows, gen_kwargs={"shards": list(range(SHARDS))}
    )
    source = source.map(lambda row: {"y": row["x"] * 2})
    return stateful.StatefulDataLoader(source, batch_size=BATCH, num_workers=workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_goes_on_after_the_last_batch(tmp_path: Path, workers: int) -> None:
    with statehold.Checkpointer(tmp_path / "run", staging_bytes="64MiB") as ckpt:
        loader = streaming(workers)
        batches = iter(loader)
        for _ in range(7):
            next(batches)
        ckpt.save(7, {"data": loader, "rng": statehold.Rng()}).wait("committed")
        left = [batch["y"].tolist() for batch in batches]

    again = streaming(workers)
    with statehold.Checkpointer(tmp_path / "run", staging_bytes="64MiB") as ckpt:
        assert ckpt.restore({"data": again, "rng": statehold.Rng()}) == 7
    assert [batch["y"].tolist() for batch in again] == left
    assert len(left) == SAMPLES // BATCH - 7
    assert torch.is_tensor(next(iter(again))["x"])
