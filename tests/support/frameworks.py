"""What the blocks of docs/integrations.md use and do not define: tiny models in other frameworks.

Each skips the test if its framework is not installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch


@contextlib.contextmanager
def trainer(seed: int) -> Iterator[dict[str, Any]]:
    """What a Trainer takes; it trains three steps."""
    transformers = pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2,
        )  # fmt: skip
        arguments = transformers.TrainingArguments(
            "out", max_steps=3, save_steps=1, logging_steps=1, per_device_train_batch_size=2,
            report_to=[], disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        rows = torch.randint(64, (16, 8), generator=torch.Generator().manual_seed(7))
        yield {
            "model": transformers.LlamaForCausalLM(config), "arguments": arguments,
            "dataset": [{"input_ids": row, "labels": row} for row in rows],
            "Trainer": transformers.Trainer,
        }  # fmt: skip


@contextlib.contextmanager
def adapters(seed: int) -> Iterator[dict[str, Any]]:
    """The same with LoRA, which two steps have trained."""
    peft = pytest.importorskip("peft")
    with trainer(seed) as names:
        from statehold.integrations.transformers import StateholdTrainer

        lora = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"])
        model = peft.get_peft_model(names["model"], lora)
        data = names["dataset"]
        StateholdTrainer(model=model, args=names["arguments"], train_dataset=data).train(True)
        yield {**names, "model": model}


@contextlib.contextmanager
def accelerated(seed: int) -> Iterator[dict[str, Any]]:
    """A model, what trains it, and its data, not yet prepared."""
    pytest.importorskip("accelerate")
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.AdamW(model.parameters())
        rows = torch.randn(16, 8, generator=torch.Generator().manual_seed(7))
        yield {
            "model": model, "optimizer": optimizer, "steps": 6,
            "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
            "loader": stateful.StatefulDataLoader(rows, batch_size=4, shuffle=True),
        }  # fmt: skip


@contextlib.contextmanager
def lit(seed: int) -> Iterator[dict[str, Any]]:
    """A LightningModule and its data, and the same not yet set up by Fabric."""
    lightning = pytest.importorskip("lightning")
    with accelerated(seed) as names, warnings.catch_warnings():
        warnings.simplefilter("ignore")

        class Module(lightning.LightningModule):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.net = torch.nn.Linear(8, 8)

            def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
                return self.net(batch).pow(2).mean()

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.AdamW(self.parameters())

        dataset = torch.randn(16, 8, generator=torch.Generator().manual_seed(7))
        yield {**names, "module": Module(), "dataset": dataset}


@contextlib.contextmanager
def zero(seed: int) -> Iterator[dict[str, Any]]:
    """What deepspeed.initialize() takes, in a job of one rank; it trains three steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if importlib.util.find_spec("deepspeed") is None:
            pytest.skip("could not import 'deepspeed'")
        os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0"}  # before it is imported
        deepspeed = importlib.import_module("deepspeed")
        deepspeed.ops.__compatible_ops__.clear()  # it would compile kernels of its own
        if not torch.distributed.is_initialized():  # it stays: DeepSpeed knows of one only
            store = torch.distributed.HashStore()
            torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        deepspeed.init_distributed("gloo")
        torch.manual_seed(seed)
        config = {
            "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3},
            "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
            "bf16": {"enabled": True},
        }  # fmt: skip

        def loss_of(engine: Any, step: int) -> torch.Tensor:
            return engine(torch.randn(4, 8, dtype=torch.bfloat16)).float().pow(2).mean()

        yield {"deepspeed": deepspeed, "model": torch.nn.Linear(8, 8), "config": config, "steps": 3,
               "loss_of": loss_of}  # fmt: skip
