"""Ranks of torchtitan that train its smallest model: python titan_ranks.py OUT

The Trainer, the model, FSDP2, the data and the checkpointer are torchtitan's (0.3.0). What it
cannot do without a GPU is replaced here: it takes "cuda" for the device where it finds none; its
attention (flex, varlen) has no backward on a CPU; it measures device memory; and Gloo has neither
PREMUL_SUM nor a barrier of devices.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # it compiles attention and loss, which takes minutes

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

torch._utils._get_available_device_type = lambda: "cpu"

import torchtitan.components.metrics as metrics  # noqa: E402
import torchtitan.trainer as trainer  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402

STEPS = 6


class NoMemory:
    device_name, device_capacity_gib = "cpu", 1.0

    def get_peak_stats(self) -> Any:
        return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

    def reset_peak_stats(self) -> None:
        pass


def attend(q: Any, k: Any, v: Any, *, scale: Any, enable_gqa: bool, **_: Any) -> Any:
    attention = torch.nn.functional.scaled_dot_product_attention
    return attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa), None


def without_a_gpu() -> None:
    metrics.build_device_memory_monitor = NoMemory
    trainer.utils.get_peak_flops = lambda _: 1e12
    trainer.dist_utils.set_pg_timeouts = lambda **_: None
    FlexAttention.compiled_flex_attn = staticmethod(attend)


def assets(folder: Path) -> Path:
    """A tokenizer of letters, and some text."""
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    letters = [chr(ord("a") + index) for index in range(26)]
    vocabulary = {word: i for i, word in enumerate([*letters, "[UNK]", "<bos>", "<eos>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<bos>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    texts = ("".join(letters[i % 26 :] + letters[: i % 5]) * 9 for i in range(90))
    (data / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return folder


def config_of(out: str) -> Any:
    folder = assets(Path(f"{out}.assets-{os.environ['RANK']}"))
    config = llama3_debugmodel()
    config.hf_assets_path, config.dump_folder = str(folder), out
    config.dataloader.dataset_path = str(folder / "data")
    config.training.steps, config.training.seq_len, config.training.local_batch_size = STEPS, 64, 2
    config.training.disable_cuda_graphs = True
    config.parallelism.spmd_backend = "partial_dtensor"  # the others need a newer torch
    config.checkpoint.enable, config.checkpoint.interval = True, 1
    config.checkpoint.folder, config.checkpoint.keep_latest_k = ".", 2
    config.override.imports = ["statehold.integrations.torchtitan.statehold_steps"]
    return config


def main(out: str) -> None:
    without_a_gpu()
    job = config_of(out).build()
    for module in job.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    losses = []
    log = job.metrics_processor.log
    job.metrics_processor.log = lambda step, loss, *a, **k: (
        losses.append(loss),
        log(step, loss, *a, **k),
    )
    try:
        job.train()
    finally:
        job.close()
    if torch.distributed.get_rank() == 0:
        Path(out, "losses.txt").write_text(str(losses[-2:]))


if __name__ == "__main__":
    main(*sys.argv[1:])
