"""A process with vLLM: answers prompts, and writes what it has answered as JSON.

    python asking.py JOB     JOB: {"model", "options", "prompts", "rounds", "tokens", "out"}

Between two rounds vLLM forgets its own prefix cache, so what a round has is from the connector.
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
    for _ in range(job["rounds"]):
        prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
        answers = llm.generate(prompts, sampling, use_tqdm=False)
        rounds.append([
            {"tokens": list(each.outputs[0].token_ids), "cached": each.num_cached_tokens,
             "reason": each.outputs[0].finish_reason}
            for each in answers
        ])  # fmt: skip
        llm.reset_prefix_cache()
    Path(job["out"]).write_text(json.dumps(rounds))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
