"""A process with vLLM: answers prompts, and writes what it has answered as JSON.

    python asking.py JOB
        JOB: {"model", "options", "prompts", "rounds", "tokens", "run", "first", "out"}

Each round has a number: before it, vLLM takes that step of the run. 0: it forgets its own prefix
cache, so what the round has is from the connector. first: the step that vLLM has loaded.

Invariants: pages are saved behind the answers, so a round begins once the store has all pages of
the rounds before it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from statehold.kv.looking import counts

BLOCK = 32
LIMIT_S = 300


def wait_for(path: str, pages: int) -> None:
    """Return once the files of a store have so many pages."""
    until = time.monotonic() + LIMIT_S
    while sum(each["pages"] for each in counts(path).values()) < pages:
        if time.monotonic() > until:
            raise TimeoutError(f"{path} has no {pages} pages: {counts(path)}")
        os.sched_yield()  # to the processes of the engine


def main(job: dict[str, object]) -> None:
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
    rounds = []
    if job["run"]:
        llm.collective_rpc(
            "init_weight_transfer_engine", args=({"run": job["run"], "name": "model"},)
        )
    # The last token of an answer has no keys yet.
    pages = sum((len(ids) + job["tokens"] - 1) // BLOCK for ids in job["prompts"])
    connector = job["options"].get("kv_transfer_config", {})
    weights = {job["first"]}
    for number, step in enumerate(job["rounds"]):
        if number and connector:
            wait_for(connector["kv_connector_extra_config"]["path"], len(weights) * pages)
        if step:
            weights.add(step)
            llm.collective_rpc("start_weight_update")
            llm.collective_rpc("update_weights", args=({"step": step},))
            llm.collective_rpc("finish_weight_update")
        else:
            llm.reset_prefix_cache()
        prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
        answers = llm.generate(prompts, sampling, use_tqdm=False)
        rounds.append([
            {"tokens": list(each.outputs[0].token_ids), "cached": each.num_cached_tokens,
             "reason": each.outputs[0].finish_reason}
            for each in answers
        ])  # fmt: skip
    Path(job["out"]).write_text(json.dumps(rounds))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
