"""SFT of TRL over StateholdTrainer: stopped, resumed, and compared with a whole run.

Needs `trl`, which only `make integrations` installs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

from statehold.integrations.transformers import StateholdTrainer  # noqa: E402

STEPS, STOP = 6, 3


class Stop(Exception):
    pass


class StopAt(transformers.TrainerCallback):  # type: ignore[misc]
    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == STOP:
            raise Stop


def tokenizer() -> Any:
    words = {word: index for index, word in enumerate(["<pad>", "<eos>", *"abcdefgh"])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", eos_token="<eos>"
    )


def trainer(out: Path, *callbacks: Any) -> Any:
    class Ours(trl.SFTTrainer, StateholdTrainer):  # type: ignore[misc]
        pass

    transformers.set_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=10, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, attention_dropout=0.1, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    letters = "abcdefgh"
    texts = [" ".join(letters[i % 8 :] + letters[: i % 5]) for i in range(24)]
    arguments = trl.SFTConfig(
        str(out), max_steps=STEPS, save_steps=1, logging_steps=1, per_device_train_batch_size=2,
        report_to=[], disable_tqdm=True, use_cpu=True, bf16=False, learning_rate=1e-2,
        save_total_limit=2,
    )  # fmt: skip
    return Ours(
        model=transformers.LlamaForCausalLM(config), args=arguments, processing_class=tokenizer(),
        train_dataset=datasets.Dataset.from_dict({"text": texts}), callbacks=list(callbacks),
    )  # fmt: skip


def test_sft_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole")
    whole.train(resume_from_checkpoint=True)
    with pytest.raises(Stop):
        trainer(tmp_path / "cut", StopAt()).train(resume_from_checkpoint=True)
    again = trainer(tmp_path / "cut")
    again.train(resume_from_checkpoint=True)
    for one, other in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)
    folder = tmp_path / f"cut/checkpoint-{STEPS}"
    assert (tmp_path / "cut/README.md").exists()  # the card: SFTTrainer's own code has run
    assert transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert transformers.AutoTokenizer.from_pretrained(folder)
