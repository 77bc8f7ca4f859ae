"""Supervised fine-tuning with TRL's SFTTrainer: StateholdTrainer is its base.

Kill it at any moment, then run it again: it goes on bit for bit.

python examples/sft.py [OUTPUT_DIR]
"""

from __future__ import annotations

import sys
from pathlib import Path

from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

from statehold.integrations.transformers import StateholdTrainer

STEPS = 12
LETTERS = "abcdefgh"


class Trainer(SFTTrainer, StateholdTrainer):
    """The only change: another base."""


def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: number for number, word in enumerate(["<pad>", "<eos>", *LETTERS])}
    of_words = Tokenizer(WordLevel(words, unk_token="<pad>"))
    of_words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=of_words, pad_token="<pad>", eos_token="<eos>")


def main(out: str = "runs/sft") -> None:
    set_seed(0)
    config = LlamaConfig(vocab_size=10, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=4, attention_dropout=0.1, pad_token_id=0)  # fmt: skip
    texts = [" ".join(LETTERS[i % 8 :] + LETTERS[: i % 5]) for i in range(32)]
    arguments = SFTConfig(
        out, max_steps=STEPS, per_device_train_batch_size=4, logging_steps=1, save_steps=1,
        save_total_limit=2, report_to=[], disable_tqdm=True, use_cpu=True, bf16=False,
    )  # fmt: skip
    trainer = Trainer(
        model=LlamaForCausalLM(config), args=arguments, processing_class=tokenizer(),
        train_dataset=Dataset.from_dict({"text": texts}),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=True)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    Path(out, "losses.txt").write_text(str(losses))
    print(f"trained {trainer.state.global_step} steps; the last loss is {losses[-1]}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
