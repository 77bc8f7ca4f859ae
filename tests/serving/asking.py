"""A process with vLLM: answers prompts, and writes what it has answered as JSON.

    python asking.py JOB     JOB: {"model", "options", "prompts", "rounds", "tokens", "run", "out"}

Each round has a number: before it, vLLM takes that step of the run. 0: it forgets its own prefix
cache, so what the round has is from the connector.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(job: dict[str, object]) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=job["model"],
        enforce_eager=True,
        block_size=32,
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
    for step in job["rounds"]:
        if step:
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
