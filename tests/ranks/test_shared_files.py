"""Several ranks share files between steps, each its own, and every layout restores them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.faults import DEADLINE_S
from support.in_memory import SimFs
from support.inside import inside
from support.ranks import RUN, Ranks
from support.sharing import Tuned, names, same

pytestmark = pytest.mark.usefixtures("small_shared_files")


def alike(size: int) -> list[Tuned]:
    """The same model on every rank."""
    models = []
    for _ in range(size):
        torch.manual_seed(5)
        models.append(Tuned(layers=6))
    return models


@pytest.mark.thorough
@pytest.mark.parametrize("size", [2, 3])
def test_what_all_ranks_hold_is_shared_by_its_writers(size: int) -> None:
    fs = SimFs(seed=1)
    models = alike(size)
    expected: dict[int, dict[str, torch.Tensor]] = {}
    linked = []
    with Ranks(fs, size, keep=3) as ranks:
        for step in range(1, 8):
            for model in models:
                model.train_once()
                if step == 5:
                    with torch.no_grad():
                        model.base[2].add_(1.0)
            expected[step] = models[0].bits()
            saves = ranks.save(step, lambda rank: {"model": models[rank]})
            ranks.each(lambda rank: inside(ranks.ckpts[rank]).pipeline.drain(DEADLINE_S))
            linked.append(sum(save.stats.linked_bytes for save in saves))
    assert linked[-1] > 4 * 16384
    assert ".shared" not in names(fs, RUN)
    for other in (1, 2, 4):
        with Ranks(fs, other) as ranks:
            for step in (5, 6, 7):
                found = [Tuned(layers=6) for _ in range(other)]
                ranks.each(
                    lambda rank, s=step, f=found: ranks.ckpts[rank].restore({"model": f[rank]}, s)
                )
                assert all(same(each.bits(), expected[step]) for each in found)
    fs.close()


def test_a_refuted_link_on_one_rank_is_written_there() -> None:
    fs = SimFs(seed=1)
    models = alike(2)
    for rank, model in enumerate(models):  # of each rank alone
        for each in model.base:
            each.data.add_(float(rank))
    with Ranks(fs, 2) as ranks:
        for step in (1, 2, 3):
            for model in models:
                model.train_once()
            saves = ranks.save(step, lambda rank: {"model": models[rank]})
            ranks.each(lambda rank: inside(ranks.ckpts[rank]).pipeline.drain(DEADLINE_S))
        whole = [save.stats.linked_bytes for save in saves]
        for model in models:
            model.train_once()
        models[1].base[0].detach().numpy()[0, 0] += 1.0
        saves = ranks.save(4, lambda rank: {"model": models[rank]})
        assert saves[0].stats.linked_bytes == whole[0] > 0
        assert saves[1].stats.linked_bytes < whole[1]
        found: list[Any] = [Tuned(layers=6), Tuned(layers=6)]
        ranks.each(lambda rank: ranks.ckpts[rank].restore({"model": found[rank]}, 4))
        assert all(same(a.bits(), b.bits()) for a, b in zip(found, models, strict=True))
    fs.close()
