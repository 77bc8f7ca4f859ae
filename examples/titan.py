"""A configuration of torchtitan with statehold as its checkpointer, and a step after every update.

Kill it at any moment, then run it again: on as many ranks it goes on bit for bit.

Run it in a checkout of torchtitan, which has a tokenizer and texts in tests/assets:
torchrun --nproc-per-node=2 PATH/titan.py --dump-folder runs/titan

It takes the options of torchtitan.train, which takes the configuration in return:
PYTHONPATH=PATH torchrun --nproc-per-node=2 -m torchtitan.train --module titan --config tiny_llama
"""

from __future__ import annotations

import sys

from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.train import main
from torchtitan.trainer import Trainer

from statehold.integrations.torchtitan import StateholdCheckpointManager


def tiny_llama() -> Trainer.Config:
    config = llama3_debugmodel()
    config.checkpoint = StateholdCheckpointManager.Config(
        enable=True, interval=1, keep_latest_k=2, folder="steps", last_save_model_only=False
    )
    config.parallelism.spmd_backend = "partial_dtensor"  # the default fails with torch 2.13
    return config


if __name__ == "__main__":
    sys.argv[1:1] = ["--module", "titan", "--config", "tiny_llama"]
    main()
