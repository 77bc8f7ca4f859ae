"""Ranks of torchtitan that train its smallest model: python titan_ranks.py option|example OUT ...

option: the checkpointer is chosen by --override.imports; example: by examples/titan.py. After OUT
come more options of torchtitan.

The Trainer, the model, FSDP2, the data and the checkpointer are torchtitan's (0.3.0). What it
cannot do without a GPU is replaced here: it takes "cuda" for the device where it finds none; its
attention (flex, varlen) has no backward on a CPU; it measures device memory; and Gloo has neither
PREMUL_SUM nor a barrier of devices.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # it compiles attention and loss, which takes minutes

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

torch._utils._get_available_device_type = lambda: "cpu"

import torchtitan.components.metrics as metrics  # noqa: E402
import torchtitan.train  # noqa: E402
import torchtitan.trainer as trainer  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402

EXAMPLE = Path(__file__).parents[2] / "examples/titan.py"
OPTION = [
    "--module=llama3", "--config=llama3_debugmodel", "--checkpoint.enable",
    "--override.imports", "statehold.integrations.torchtitan.statehold_steps",
    "--checkpoint.interval=1", "--checkpoint.keep-latest-k=2",
    "--parallelism.spmd-backend=partial_dtensor",
]  # fmt: skip
SMALL = [
    "--training.steps=6", "--training.seq-len=64", "--training.local-batch-size=2",
    "--training.disable-cuda-graphs", "--checkpoint.folder=.",
]  # fmt: skip


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
    train = trainer.Trainer.train

    def summing(job: trainer.Trainer) -> None:
        for module in job.model_parts[0].modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        train(job)

    trainer.Trainer.train = summing


def recorded_losses() -> list[float]:
    """The losses that torchtitan will log."""
    losses, log = [], metrics.MetricsProcessor.log

    def recording(self: Any, step: int, loss: float, *others: Any, **more: Any) -> None:
        losses.append(loss)
        log(self, step, loss, *others, **more)

    metrics.MetricsProcessor.log = recording
    return losses


def assets(folder: Path) -> list[str]:
    """Make a tokenizer of letters, and some text. Returns the options that name them."""
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
    return [f"--hf-assets-path={folder}", f"--dataloader.dataset-path={data}"]


def main(way: str, out: str, *more: str) -> None:
    without_a_gpu()
    losses = recorded_losses()
    text = assets(Path(f"{out}.assets-{os.environ['RANK']}"))
    options = [*SMALL, *text, f"--dump-folder={out}", *more]
    if way == "example":
        sys.argv = [str(EXAMPLE), *options]
        sys.path.insert(0, str(EXAMPLE.parent))
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    else:
        sys.argv = ["torchtitan.train", *OPTION, *options]
        torchtitan.train.main()
    if os.environ["RANK"] == "0":
        Path(out, "losses.txt").write_text(str(losses[-2:]))


if __name__ == "__main__":
    main(*sys.argv[1:])
