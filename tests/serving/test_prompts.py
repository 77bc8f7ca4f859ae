"""Many prompts through transformers and through the tier: cold, a hit, after a restart, elsewhere.

STATEHOLD_SERVING_PROMPTS: how many. STATEHOLD_SERVING_MODEL: a folder with another model than a
tiny one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache, DynamicCache

from serving.engines import PROMPTS, model_in, prompts
from statehold.kv import PageStore, TieredCache, resume, save
from statehold.kv.vllm.tier import Tier
from support import scripts
from support.caches import digest, filled, generated
from support.faults import must

TOKENS, ANSWER, PAGE_TOKENS, REQUEST = 200, 6, 32, "request"

Answers = list[list[int]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_in(tmp_path_factory.mktemp("model"))


def model_of(folder: Path) -> Any:
    """In float32: where one token is computed after others, bfloat16 rounds otherwise."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return model_of(folder)


@pytest.fixture(scope="module")
def asked() -> list[torch.Tensor]:
    return [torch.tensor([each]) for each in prompts(1, PROMPTS, TOKENS)]


@pytest.fixture(scope="module")
def caches(model: Any, asked: list[torch.Tensor]) -> list[Cache]:
    return [filled(model, ids) for ids in asked]


def answer(model: Any, ids: torch.Tensor, cache: Cache) -> list[int]:
    found: list[int] = generated(model, ids, cache, ANSWER)[0, TOKENS:].tolist()
    return found


@pytest.fixture(scope="module")
def cold(model: Any, asked: list[torch.Tensor]) -> Answers:
    return [answer(model, ids, DynamicCache()) for ids in asked]


def token_bytes(cache: Cache) -> int:
    """Of a token, in all layers."""
    return sum(each.keys.nbytes + each.values.nbytes for each in cache.layers) // TOKENS


@pytest.fixture
def opened(tmp_path: Path, caches: list[Cache]) -> Callable[[], PageStore]:
    """Opens the store, whose memory is gone when it is closed."""
    nbytes = PAGE_TOKENS * token_bytes(caches[0])
    options = {"capacity": 2 * PROMPTS * 8 * nbytes, "memory": 16 * nbytes}
    return lambda: PageStore(tmp_path / "kv", page_bytes=nbytes, deadline_s=60.0, **options)


def hits(model: Any, asked: Sequence[torch.Tensor], store: PageStore) -> Iterator[list[int]]:
    who = digest(model)
    for ids in asked:
        found = resume(ids, store, who)
        assert found.get_seq_length() == TOKENS - 1
        yield answer(model, ids, found)


def test_a_resumed_prompt_has_the_tokens_of_a_cold_one(
    model: Any, asked: list[torch.Tensor], caches: list[Cache], cold: Answers, folder: Path,
    tmp_path: Path, opened: Callable[[], PageStore],
) -> None:  # fmt: skip
    with opened() as store:
        for ids, cache in zip(asked, caches, strict=True):
            assert save(cache, ids, store, digest(model)) == TOKENS
        assert list(hits(model, asked, store)) == cold
    with opened() as store:  # from files
        assert list(hits(model, asked, store)) == cold
        (tmp_path / "job").write_text(json.dumps([str(folder), store.path, store.page_bytes]))
        words = ["-m", "serving.test_prompts", tmp_path / "job"]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
        done = scripts.run(words, env=environment, timeout=600)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1]) == cold


def test_layers_on_tiers_have_the_tokens_of_layers_in_memory(
    model: Any, asked: list[torch.Tensor], caches: list[Cache], cold: Answers, tmp_path: Path
) -> None:
    layers = len(caches[0].layers)
    nbytes = PAGE_TOKENS * token_bytes(caches[0]) // layers
    options = {"capacity": 1024 * layers * nbytes, "memory": 4 * layers * nbytes}
    with PageStore(tmp_path, page_bytes=nbytes, deadline_s=60.0, **options) as store:
        found = [answer(model, ids, TieredCache(model.config, store, 0)) for ids in asked]
        assert store.stats()["hit"] >= PROMPTS * ANSWER * layers
    assert found == cold


class ToldTier(Tier):
    Result = SimpleNamespace


def flat(cache: Cache) -> torch.Tensor:
    """A cache as the bytes of a chunk."""
    parts = [part for each in cache.layers for part in (each.keys, each.values)]
    return torch.cat([each.contiguous().view(torch.uint8).flatten() for each in parts])


def unflat(raw: torch.Tensor, like: Cache) -> DynamicCache:
    """The same without its last token, which is computed again."""
    found, at = DynamicCache(), 0
    for number, layer in enumerate(like.layers):
        parts = []
        for each in (layer.keys, layer.values):
            part = raw[at : at + each.nbytes].view(each.dtype).view(each.shape)
            parts.append(part[:, :, :-1].clone())
            at += each.nbytes
        found.update(*parts, number)
    return found


def test_a_prompt_through_the_tier_has_the_tokens_of_a_cold_one(
    model: Any, asked: list[torch.Tensor], caches: list[Cache], cold: Answers, tmp_path: Path
) -> None:
    nbytes = TOKENS * token_bytes(caches[0])
    memory = torch.zeros(1, nbytes, dtype=torch.uint8)
    keys = [str(number).encode() for number in range(PROMPTS)]

    def tier() -> ToldTier:
        made, options = ToldTier(), {"capacity": 3 * PROMPTS * nbytes, "memory": 8 * nbytes}
        store = PageStore(tmp_path, page_bytes=nbytes, deadline_s=60.0, **options)
        made.begin(store, memoryview(memory.numpy()))
        return made

    def job(number: int) -> Any:
        request = SimpleNamespace(req_id=REQUEST)
        return SimpleNamespace(
            job_id=number, keys=[keys[number]], chunk_ids=[0], req_context=request
        )

    def succeeds(by: ToldTier) -> bool:
        """Whether the only job does, which is over in 60 seconds."""
        while not (over := by.get_finished_jobs()):
            os.sched_yield()  # to the threads of the store
        return [each.success for each in over] == [True]

    def loaded(by: ToldTier) -> Iterator[list[int]]:
        for number, (ids, cache) in enumerate(zip(asked, caches, strict=True)):
            memory.zero_()
            by.submit_load(job(number))
            must(succeeds(by))
            yield answer(model, ids, unflat(memory[0], cache))

    first = tier()
    for number, cache in enumerate(caches):
        memory[0] = flat(cache)
        first.submit_store(job(number))
        must(succeeds(first))
    assert list(loaded(first)) == cold
    first.shutdown()
    again = tier()  # from files
    assert list(loaded(again)) == cold
    again.shutdown()


def main(job: str) -> None:
    """Another process with the same model and store."""
    folder, path, nbytes = json.loads(Path(job).read_text())
    asked = [torch.tensor([each]) for each in prompts(1, PROMPTS, TOKENS)]
    options = {"capacity": 2 * PROMPTS * 8 * nbytes, "memory": 16 * nbytes}
    with PageStore(path, page_bytes=nbytes, deadline_s=60.0, **options) as store:
        print(json.dumps(list(hits(model_of(Path(folder)), asked, store))))


if __name__ == "__main__":
    import sys

    main(sys.argv[1])
