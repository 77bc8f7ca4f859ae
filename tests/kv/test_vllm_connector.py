"""The connector, driven as vLLM drives it: each token has the keys and values of a cold run."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from serving.asking import wait_for
from statehold.errors import RunBusyError, StateholdError, UsageError, WaitTimeout
from statehold.kv.batch import PageBatch
from statehold.kv.opened import OpenStore
from statehold.kv.store import PageStore
from statehold.kv.vllm import connector, opening
from statehold.kv.vllm.connector import Connector, rows_of
from support.faults import must
from support.serving_engine import (
    BLOCKS,
    WIDTH,
    Engine,
    MambaSpec,
    content,
    group,
    kv_config,
    vllm_config,
)


def prompt(seed: int, tokens: int = 26) -> list[int]:
    return random.Random(seed).choices(range(256), k=tokens)


@pytest.fixture(params=["on the host", "by copy_()"])
def _moves(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Caches whose memory the host addresses, or does not."""
    cannot, of_host = list[int](), connector.host_memory

    def memory(rows: torch.Tensor) -> memoryview | None:
        if rows.shape[0] != BLOCKS:
            return of_host(rows)
        cannot.append(rows.data_ptr())
        return None

    if request.param == "by copy_()":
        monkeypatch.setattr(connector, "host_memory", memory)
    yield
    must(bool(cannot) == (request.param == "by copy_()"))


@pytest.mark.usefixtures("_moves")
def test_a_second_engine_computes_only_what_is_not_there(tmp_path: Path) -> None:
    with Engine(tmp_path) as engine:
        assert engine.run(prompt(1)) == 0
        engine.saved()
        assert engine.run(prompt(1)) == 24
    with Engine(tmp_path) as engine:
        assert engine.run(prompt(2)) == 0
        assert engine.run(prompt(1)) == 24
        assert engine.run(prompt(1)[:17] + prompt(3)) == 16
        assert engine.run(prompt(1)[:24]) == 23  # the last token's logits are the answer


def test_the_counters_say_when_the_pages_of_an_answer_are_there(tmp_path: Path) -> None:
    """The tests with vLLM wait for them."""
    with Engine(tmp_path) as engine:
        engine.run(prompt(1))
        wait_for(str(tmp_path), 6)
        assert engine.run(prompt(1)) == 24
        engine.run(prompt(2))
        wait_for(str(tmp_path), 12)
        assert engine.run(prompt(2)) == 24


def test_an_engine_of_two_ranks_has_pages_for_each(tmp_path: Path) -> None:
    with Engine(tmp_path, ranks=2) as engine:
        engine.run(prompt(1))
    with Engine(tmp_path, ranks=2) as engine:
        assert engine.run(prompt(1)) == 24


def test_blocks_of_several_hashes_are_named_by_the_last_one(tmp_path: Path) -> None:
    with Engine(tmp_path, hashed=2) as engine:
        engine.run(prompt(1))
    with Engine(tmp_path, hashed=2) as engine:
        assert engine.run(prompt(1)) == 24
        assert engine.run(prompt(1)[:7] + prompt(2)) == 4


def test_blocks_that_a_kernel_cuts_are_whole_in_pages(tmp_path: Path) -> None:
    with Engine(tmp_path, cut=2) as engine:
        engine.run(prompt(1))
    with Engine(tmp_path, cut=2) as engine:
        assert engine.run(prompt(2)) == 0
        assert engine.run(prompt(1)) == 24


def test_ranks_of_another_host_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector, "boot", chain([1, 1], repeat(2)).__next__)
    with pytest.raises(UsageError, match="on the scheduler's host") as raised:
        Engine(tmp_path, ranks=2)
    assert raised.value.facts["got"] == "[0, 1]"


def test_an_answer_that_goes_on_is_found_as_a_prompt(tmp_path: Path) -> None:
    ids = prompt(1, 30)
    with Engine(tmp_path) as engine:
        request = engine.request(ids)
        engine.step(request, 0)
        assert engine.scheduler.get_num_new_matched_tokens(request, 0)[0] == 0
    with Engine(tmp_path) as engine:
        assert engine.run([*ids, 7, 8, 9]) == 28


def flip(path: Path, at_token: int, ids: list[int]) -> None:
    """A bit of the page that has this token's values of layer 1."""
    raw = content(ids[: at_token + 1], 1, 0).numpy().tobytes()[: 4 * WIDTH]
    (segment,) = [each for each in path.glob("segment-*") if raw in each.read_bytes()]
    found = bytearray(segment.read_bytes())
    found[found.index(raw) + 3] ^= 16
    segment.write_bytes(found)


def test_a_flipped_bit_shortens_the_promise_and_is_computed_again(tmp_path: Path) -> None:
    ids = prompt(1)
    with Engine(tmp_path) as engine:
        engine.run(ids)
    flip(tmp_path, 9, ids)  # in the third of six pages
    with Engine(tmp_path) as engine:
        assert engine.run(ids) == 8
        engine.saved()
        assert engine.run(ids) == 24


class Stuck:
    def wait(self, timeout: float | None) -> bool:
        return False

    def cancel(self) -> None: ...


def test_a_storage_that_hangs_delays_one_request_until_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(tmp_path) as engine:
        engine.run(prompt(1))
    with Engine(tmp_path, deadline_s=0.2) as engine:
        with monkeypatch.context() as patched:
            patched.setattr(OpenStore, "job", lambda *_, **__: Stuck())
            request = engine.request(prompt(1))
            must(engine.scheduler.get_num_new_matched_tokens(request, 0) == (None, False))
            assert engine.run(prompt(2)) == 0  # another request goes on meanwhile
            assert engine.ask(request) == 0
            assert engine.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        engine.step(request, 0)


def test_only_a_step_in_which_nobody_runs_waits_for_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = list[float]()
    is_over = PageBatch.is_over

    def noted(batch: PageBatch, within_s: float = 0.0) -> bool:
        waited.append(within_s)
        return is_over(batch, within_s)

    with Engine(tmp_path) as engine:
        engine.run(prompt(1))
    monkeypatch.setattr(PageBatch, "is_over", noted)
    with Engine(tmp_path) as engine, monkeypatch.context() as patched:
        patched.setattr(OpenStore, "job", lambda *_, **__: Stuck())
        request, other = engine.request(prompt(1)), engine.request(prompt(2))
        must(engine.ask(other) == 0)
        must(engine.scheduler.get_num_new_matched_tokens(request, 0)[0] is None)
        engine.step(other, 0)
        assert max(waited) == 0
        engine.empty_step()
        assert max(waited) > 0
        engine.scheduler.request_finished_all_groups(request, ([],))


def test_a_request_that_is_given_up_leaves_its_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging = 6 * 4096  # a page has 768 bytes
    with Engine(tmp_path) as engine:
        engine.run(prompt(1))
    with Engine(tmp_path, staging=staging) as engine, monkeypatch.context() as patched:
        patched.setattr(OpenStore, "job", lambda *_, **__: Stuck())
        request = engine.request(prompt(1))
        must(engine.scheduler.get_num_new_matched_tokens(request, 0)[0] is None)
        assert engine.run(prompt(1)) == 0  # no slot is left
        engine.scheduler.request_finished_all_groups(request, ([],))
    with Engine(tmp_path, staging=staging) as engine:
        for _ in range(3):
            assert engine.run(prompt(1)) == 24
        request = engine.request(prompt(1))
        must(engine.ask(request) == 24)
        engine.scheduler.request_finished_all_groups(request, ([],))
        assert engine.run(prompt(1)) == 24


def test_little_staging_promises_little(tmp_path: Path) -> None:
    with Engine(tmp_path) as engine:
        engine.run(prompt(1))
    with Engine(tmp_path, staging=2 * 4096) as engine:
        assert engine.run(prompt(1)) == 8
        assert engine.run(prompt(1)) == 8


def test_what_has_no_buffer_is_not_saved_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Engine(tmp_path, buffers=1) as engine:
        engine.run(prompt(1))
        engine.saved()
        assert engine.workers[0].stats()["no buffer"] == 5
        assert caplog.text.count("buffers= is too small") == 1
        assert engine.run(prompt(1)) == 4


class Puts:
    """A store whose calls of put() do not end before the gate is open."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.begun, self.gate = threading.Event(), threading.Event()
        self.deadlines, self.now = list[float](), 1000.0
        self._put = PageStore.put
        patch.setattr(PageStore, "put", lambda *given, **named: self.put(*given, **named))
        patch.setattr(connector, "time", SimpleNamespace(monotonic=lambda: self.now))

    def put(self, *given: Any, deadline_s: float, **named: Any) -> Any:
        batch = self._put(*given, deadline_s=60.0, **named)
        self.deadlines.append(deadline_s)

        def wait() -> None:
            self.begun.set()
            must(self.gate.wait(60))
            batch.wait()

        return SimpleNamespace(wait=wait)


@contextlib.contextmanager
def held(path: Path, patch: pytest.MonkeyPatch) -> Iterator[tuple[Engine, Puts]]:
    """An engine with pages of three prompts that wait for the store."""
    with Engine(path) as engine:
        puts = Puts(patch)
        for seed in range(3):
            engine.run(prompt(seed))
        must(puts.begun.wait(60))
        yield engine, puts


def test_all_pages_that_wait_for_the_store_have_one_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held(tmp_path, monkeypatch) as (engine, puts):
        puts.now += connector.PUT_S + 1
        puts.gate.set()
        engine.saved()
        assert puts.deadlines == [connector.PUT_S, 0.0, 0.0]


def test_new_weights_do_not_wait_for_pages_of_the_old_ones(
    tmp_path: Path, others: pytest.MonkeyPatch
) -> None:
    with held(tmp_path, others) as (engine, puts):
        changes = threading.Thread(target=engine.change, args=("step 2",))
        changes.start()
        changes.join(30)
        assert not changes.is_alive()
        puts.gate.set()
        engine.saved()
        assert len(puts.deadlines) == 1  # what waited behind is of the weights before
        assert [engine.run(prompt(seed)) for seed in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("error", [WaitTimeout, RunBusyError])
def test_new_weights_that_the_store_has_no_place_for_end_no_engine(
    tmp_path: Path, others: pytest.MonkeyPatch, error: type[StateholdError],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def refuses(*_: object) -> None:
        raise error("no place")

    with Engine(tmp_path) as engine:
        engine.run(prompt(1))
        engine.saved()
        others.setattr(OpenStore, "use", refuses)
        engine.change("step 2")
        assert engine.run(prompt(1)) == 0
        assert "may not stay" in caplog.text


def test_tokens_that_vllm_has_are_not_loaded(tmp_path: Path) -> None:
    with Engine(tmp_path) as engine:
        engine.run(prompt(1))
    with Engine(tmp_path) as engine:
        request = engine.request(prompt(1))
        found = None
        while found is None:
            found = engine.scheduler.get_num_new_matched_tokens(request, 12)[0]
        assert found == 12
        assert engine.scheduler.get_num_new_matched_tokens(request, 20)[0] == 4
        assert engine.ask(request) == 24  # vLLM has lost all of it meanwhile


def test_a_forward_that_fails_leaves_no_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no memory")

    with Engine(tmp_path) as engine:
        with monkeypatch.context() as patched:
            patched.setattr(engine, "forward", fails)
            with pytest.raises(RuntimeError, match="no memory"):
                engine.run(prompt(1))
        engine.saved()
        assert engine.run(prompt(1)) == 0


def test_requests_with_adapters_leave_no_pages(tmp_path: Path) -> None:
    with Engine(tmp_path) as engine:
        engine.run(prompt(1), lora="an adapter")
        engine.saved()
        assert engine.run(prompt(1)) == 0
        engine.saved()
        assert engine.run(prompt(1), lora="an adapter") == 0


def test_a_reset_forgets_all_pages(tmp_path: Path) -> None:
    with Engine(tmp_path) as engine:
        engine.run(prompt(1))
        engine.saved()
        must(engine.ask(engine.request(prompt(1))) == 24)
        assert engine.scheduler.reset_cache()
        assert engine.run(prompt(1)) == 0
        engine.saved()
        assert engine.run(prompt(1)) == 24
    with Engine(tmp_path) as engine:
        assert engine.run(prompt(1)) == 24  # of the weights that it started with


def test_other_weights_find_nothing(tmp_path: Path) -> None:
    with Engine(tmp_path) as engine:
        engine.run(prompt(1))
    with Engine(tmp_path, identity="6" * 32) as engine:
        assert engine.run(prompt(1)) == 0


class Manager:
    """vLLM's own prefix cache, which cannot be reset while a request runs."""

    def __init__(self) -> None:
        self.runs, self.resets, self.refused = False, 0, 0

    def reset_prefix_cache(self) -> bool:
        self.resets += not self.runs
        self.refused += self.runs
        return not self.runs


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The process serves other weights until the test ends."""
    monkeypatch.setattr(opening, "_serves", [])
    return monkeypatch


def test_weights_that_change_change_what_is_found_in_the_same_moment(
    tmp_path: Path, others: pytest.MonkeyPatch
) -> None:
    with Engine(tmp_path, ranks=2) as engine:
        manager = Manager()
        engine.scheduler.bind_kv_cache_manager(manager)
        engine.run(prompt(1))
        engine.saved()
        runs = engine.request(prompt(2))
        runs.num_computed_tokens = 8
        must(engine.ask(engine.request(prompt(1))) == 24)

        engine.change("step 2")
        manager.runs = True
        waits = engine.request(prompt(1))
        engine.step(engine.request(prompt(3)), 0)  # it was planned before
        for _ in range(3):  # what vLLM has found itself is of the weights before
            assert engine.scheduler.get_num_new_matched_tokens(waits, 16) == (None, False)
        assert manager.refused == 0  # vLLM would warn each time
        engine.empty_step()
        must(engine.scheduler.get_num_new_matched_tokens(waits, 16) == (None, False))
        assert manager.refused == 1
        manager.runs = False
        assert engine.scheduler.get_num_new_matched_tokens(waits, 16) == (None, False)
        assert manager.resets == 1
        assert engine.ask(waits) == 0
        engine.step(waits, 0)
        engine.step(runs, 0)  # it has keys of the old weights: it leaves no page
        engine.saved()
        assert engine.run(prompt(1)) == 24
        assert engine.run(prompt(2)) == 0
        assert manager.resets == 1
    with Engine(tmp_path, ranks=2) as engine:
        assert engine.run(prompt(1)) == 24
    others.undo()
    with Engine(tmp_path, ranks=2) as engine:
        assert engine.run(prompt(1)) == 24  # of the weights before


def test_a_step_that_was_planned_before_the_weights_changed_saves_nothing(
    tmp_path: Path, others: pytest.MonkeyPatch
) -> None:
    with Engine(tmp_path) as engine:
        request = engine.request(prompt(1))
        plain = engine.forward

        def changed_meanwhile(*arguments: Any) -> None:
            engine.change("step 2")
            plain(*arguments)

        engine.forward = changed_meanwhile  # type: ignore[method-assign]
        engine.step(request, 0)
        engine.saved()
        engine.forward = plain  # type: ignore[method-assign]
        assert engine.run(prompt(1)) == 0
    others.undo()
    with Engine(tmp_path) as engine:
        assert engine.run(prompt(1)) == 0  # the weights before have computed none of it


def refused(config: Any, groups: Any, words: str) -> None:
    with pytest.raises(UsageError, match="cannot be kept") as raised:
        Connector().begin(config, groups)
    assert words in str(raised.value)


def test_what_pages_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    good = vllm_config(tmp_path)
    refused(good, kv_config(group(), group(MambaSpec)), "several kinds: FullAttentionSpec, MambaSp")
    refused(good, kv_config(group(MambaSpec)), "of the kind MambaSpec")
    for name, value, words in [
        ("pipeline_parallel_size", 2, "pipeline ranks"),
        ("decode_context_parallel_size", 2, "context ranks"),
        ("nnodes", 2, "several hosts"),
    ]:
        config = vllm_config(tmp_path)
        setattr(config.parallel_config, name, value)
        refused(config, kv_config(), words)
    config = vllm_config(tmp_path)
    config.speculative_config = SimpleNamespace()
    refused(config, kv_config(), "a draft model")
    config = vllm_config(tmp_path)
    config.cache_config.enable_prefix_caching = False
    refused(config, kv_config(), "without hashes")
    config = vllm_config(tmp_path)
    config.cache_config.cache_dtype = "fp8_per_token_head"
    refused(config, kv_config(), "scales that a forward sets")
    config = vllm_config(tmp_path)
    config.aux_output_config.enabled = True
    refused(config, kv_config(), "routed experts")
    config = vllm_config(tmp_path, ranks=2)
    config.parallel_config.distributed_executor_backend = "external_launcher"
    refused(config, kv_config(), "a scheduler each")
    config.parallel_config.world_size = 1
    Connector().begin(config, kv_config())
    Connector().begin(good, kv_config())


def test_a_cache_with_gaps_is_refused() -> None:
    cache = torch.zeros(4, 2, 6, 8)
    assert rows_of(cache.transpose(2, 3), 4).shape == (4, 2 * 6 * 8 * 4)
    assert rows_of(cache, 2).shape == (2, 2 * 2 * 6 * 8 * 4)
    for gaps, blocks in ((cache[:, :, :3], 4), (cache[:, :1], 2), (cache[:, 0], 2)):
        with pytest.raises(UsageError, match="layout that pages cannot hold"):
            rows_of(gaps, blocks)


def test_layers_that_share_an_allocation_are_told_apart() -> None:
    whole = torch.arange(2 * BLOCKS * 6, dtype=torch.float32).view(2, BLOCKS, 6)
    rows = rows_of(whole[1], BLOCKS)
    assert torch.equal(rows[3].view(torch.float32), whole[1, 3])
    packed = whole.transpose(0, 1)  # a block has all layers
    assert torch.equal(rows_of(packed[:, 1], BLOCKS)[3].view(torch.float32), whole[1, 3])
