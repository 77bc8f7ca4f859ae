"""A process with vLLM: answers prompts, and writes what it has answered as JSON.

    python asking.py JOB
        JOB: {"model", "options", "prompts", "rounds", "tokens", "run", "first", "other", "out",
              "kind", "salt"}

Each round has a number: before it, vLLM takes that step of the run. 0: it forgets its own prefix
cache, so what the round has is from the connector. first: the step that vLLM has loaded. salt: the
cache_salt of all prompts, which vLLM's hashes count. kind:

    live    The steps come while requests run. A round has the answers, None for a request that ran
            while another step came.
    apart   Rank 1 reads its steps from another run, `other`, so no update is taken. Has the answers
            behind it, and none if the engine has ended.
    stuck   Reads of pages from files never end.
    reload  Before the answers of a round, the engine takes the step, vLLM reloads the weights of
            the directory, and the engine takes the step again.

Invariants: pages are saved behind the answers, so a round begins once the store has all pages of
the rounds before it.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from statehold.kv.looking import counts
from statehold.kv.opened import OpenStore

BLOCK = 32
LIMIT_S = 300


def wait_for(path: str, pages: int) -> None:
    """Return once the files of a store have so many pages."""
    until = time.monotonic() + LIMIT_S
    while sum(each["pages"] for each in counts(path).values()) < pages:
        if time.monotonic() > until:
            raise TimeoutError(f"{path} has no {pages} pages: {counts(path)}")
        os.sched_yield()  # to the processes of the engine


class Stuck:
    """A read that never ends."""

    count = 0

    def __init__(self) -> None:
        Stuck.count += 1

    def wait(self, timeout: float | None) -> bool:
        time.sleep(timeout or 0)  # as long as the caller has time
        return False

    def cancel(self) -> None: ...


def reads_never_end() -> None:
    job = OpenStore.job

    def begun(store: OpenStore, moves: Any, *, is_write: bool = False) -> Any:
        return job(store, moves, is_write=True) if is_write else Stuck()

    OpenStore.job = begun  # type: ignore[method-assign]


def read_ahead(llm: Any, step: int) -> None:
    llm.collective_rpc("start_weight_update")
    llm.collective_rpc("update_weights", args=({"step": step, "ahead": True},))


def take(llm: Any, step: int) -> None:
    """Behind read_ahead()."""
    llm.collective_rpc("update_weights", args=({"step": step},))
    llm.finish_weight_update(f"{step}")
    assert llm.get_weight_version() == f"{step}"
    assert len(set(llm.collective_rpc(serves))) == 1


def serves(worker: Any) -> str:
    """What a rank says that it serves."""
    from statehold.kv.vllm.opening import served

    return repr(served())


def reads_from(worker: Any, run: str) -> None:
    """Rank 1 reads the steps of this run from now on."""
    if worker.rank == 1:
        worker.init_weight_transfer_engine({"run": run, "name": "model"})


def answer(each: Any) -> dict[str, object]:
    out = each.outputs[0]
    return {
        "tokens": list(out.token_ids), "cached": each.num_cached_tokens,
        "reason": out.finish_reason,
    }  # fmt: skip


def live(llm: Any, job: dict[str, Any], sampling: Any) -> list[list[dict[str, object] | None]]:
    """A step comes when half of the requests that came behind the last step have their answers. It
    is read ahead while they run."""
    engine, prompts = llm.llm_engine, job["prompts"]
    rounds = []
    read_ahead(llm, job["rounds"][0])
    for number, (step, after) in enumerate(itertools.pairwise([*job["rounds"], None])):
        take(llm, step)
        for at, ids in enumerate(prompts):
            engine.add_request(f"{number} {at}", {"prompt_token_ids": ids}, sampling)
        if after is not None:
            read_ahead(llm, after)
        found: list[dict[str, object] | None] = [None] * len(prompts)
        while found.count(None) > len(prompts) // 2:
            for each in engine.step():
                came, at = map(int, each.request_id.split())
                if each.finished and came == number:
                    found[at] = answer(each)
        assert engine.has_unfinished_requests()  # the next step comes while requests run
        rounds.append(found)
    return rounds


def apart(llm: Any, job: dict[str, Any], sampling: Any) -> list[list[dict[str, object]]]:
    llm.collective_rpc(reads_from, args=(job["other"],))
    read_ahead(llm, job["rounds"][0])
    with pytest.raises(Exception, match="so the other ranks stopped"):
        take(llm, job["rounds"][0])
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    try:
        return [[answer(each) for each in llm.generate(prompts, sampling, use_tqdm=False)]]
    except Exception:
        return []


def main(job: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=job["model"],
        enforce_eager=True,
        block_size=BLOCK,
        max_model_len=1024,
        disable_log_stats=True,
        skip_tokenizer_init=True,
        **job["options"],
    )
    sampling = SamplingParams(
        max_tokens=job["tokens"], temperature=0, ignore_eos=True, detokenize=False
    )
    if job["run"]:
        llm.collective_rpc(
            "init_weight_transfer_engine", args=({"run": job["run"], "name": "model"},)
        )
    if job["kind"] == "stuck":
        reads_never_end()
    rounds = {"live": live, "apart": apart}.get(job["kind"], in_turn)(llm, job, sampling)
    assert bool(Stuck.count) == (job["kind"] == "stuck")
    Path(job["out"]).write_text(json.dumps(rounds))


def in_turn(llm: Any, job: dict[str, Any], sampling: Any) -> list[list[dict[str, object]]]:
    options, rounds = job["options"], []
    # The last token of an answer has no keys yet.
    pages = sum((len(ids) + job["tokens"] - 1) // BLOCK for ids in job["prompts"])
    pages *= options.get("tensor_parallel_size", 1)
    connector = options.get("kv_transfer_config", {})
    weights = {job["first"]}
    for number, step in enumerate(job["rounds"]):
        if number and connector:
            wait_for(connector["kv_connector_extra_config"]["path"], len(weights) * pages)
        if step:
            weights.add(step)
            read_ahead(llm, step)
            take(llm, step)
            if job["kind"] == "reload":
                llm.collective_rpc("reload_weights")
                llm.reset_prefix_cache(reset_connector=True)
                read_ahead(llm, step)
                take(llm, step)
        else:
            llm.reset_prefix_cache()
        prompts = [{"prompt_token_ids": ids, "cache_salt": job["salt"]} for ids in job["prompts"]]
        rounds.append([answer(each) for each in llm.generate(prompts, sampling, use_tqdm=False)])
    return rounds


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
