"""Models and processes of vLLM for the tests."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
VOCABULARY = 512
PROMPTS = int(os.environ.get("STATEHOLD_SERVING_PROMPTS", "20"))
LIMIT_S = 600
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

Rounds = list[list[dict[str, Any]]]


def tiny(folder: Path, seed: int = 0, **changes: object) -> Path:
    """A random Llama of a megabyte."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, vocab_size=VOCABULARY, max_position_embeddings=2048,
        initializer_range=0.3, **changes,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder


def model_in(folder: Path) -> Path:
    """The model of STATEHOLD_SERVING_MODEL, or a tiny one."""
    given = os.environ.get("STATEHOLD_SERVING_MODEL")
    return Path(given) if given else tiny(folder)


def prompts(seed: int, count: int, tokens: int) -> list[list[int]]:
    dice = random.Random(seed)
    return [dice.choices(range(3, VOCABULARY), k=tokens) for _ in range(count)]


@dataclass
class Asked:
    process: subprocess.Popen[bytes]
    out: Path

    def answers(self) -> Rounds:
        code = self.process.wait(LIMIT_S)
        assert code == 0, self.out.with_suffix(".log").read_text()[-4000:]
        return json.loads(self.out.read_text())  # type: ignore[no-any-return]


def ask(
    model: Path,
    asked: list[list[int]],
    out: Path,
    *,
    rounds: Sequence[int] = (0,),
    run: Path | None = None,
    first: int = 0,
    other: Path | None = None,
    tokens: int = 6,
    processes: int = 1,
    kind: str = "",
    salt: str = "",
    **options: Any,
) -> Asked:
    """Start an engine, which answers the prompts and ends. processes: 1, or 2: the engine beside a
    process for each rank, or vLLM's usual 3, which take three times as long to start."""
    if processes < 3:
        options["distributed_executor_backend"] = "uni" if processes == 1 else "mp"
    job = {
        "model": str(model), "options": options, "prompts": asked, "rounds": list(rounds),
        "run": str(run or ""), "first": first, "other": str(other or ""), "tokens": tokens,
        "out": str(out), "kind": kind, "salt": salt,
    }  # fmt: skip
    out.with_suffix(".job").write_text(json.dumps(job))
    env = {
        **os.environ,
        **ENVIRONMENT,
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(processes > 2)),
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # functions of asking.py, for the ranks
    }
    env.pop("PYTHONHASHSEED", None)  # engines find each other's pages without it
    with open(out.with_suffix(".log"), "wb") as log:
        process = subprocess.Popen(
            [sys.executable, HERE / "asking.py", out.with_suffix(".job")],
            stdout=log, stderr=log, env=env,
        )  # fmt: skip
    return Asked(process, out)


def pages(path: Path, **options: object) -> dict[str, Any]:
    """The line of configuration that switches the connector on."""
    room = {"capacity": "64MiB", "memory": "16MiB"}
    if "STATEHOLD_SERVING_MODEL" in os.environ:
        # All prompts come at once, and each has its pages in staging.
        room = {"capacity": "4GiB", "memory": "256MiB", "staging": "1GiB"}
    extra = {"path": str(path), **room, "deadline_s": 60, **options}
    return {
        "kv_transfer_config": {
            "kv_connector": "StateholdConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
    }
