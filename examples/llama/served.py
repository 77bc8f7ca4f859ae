"""What the demo of serving runs: a trainer, and an engine that takes its steps while it answers.

    served.py train RUN STEPS           train on to this step; each step is saved
    served.py serve RUN PAGES LOG STEPS [--vllm]
                                        take each new step, answer twice; behind STEPS, SIGKILL
    served.py again RUN PAGES LOG STEPS [--vllm]
                                        answer once with that step, and end

Owns the two engines, one of transformers and one of vLLM. Invariants: an answer is logged only when
it is complete. The order of events is in story_serving.py.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any, Protocol

import torch

import statehold
from journal import Journal
from statehold import kv

LIMIT_S = 300.0
VOCABULARY, PROMPT_TOKENS, ANSWER_TOKENS = 64, 96, 16
PAGES = {"capacity": "64MiB", "memory": "16MiB", "deadline_s": 60.0}


def made() -> Any:
    """A small Llama, of random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, vocab_size=VOCABULARY, max_position_embeddings=256,
        bos_token_id=1, eos_token_id=None, pad_token_id=0,
    ))  # fmt: skip


def sequences(seed: int, count: int, tokens: int) -> torch.Tensor:
    """Each token is the one before it and a constant of its sequence."""
    dice = torch.Generator().manual_seed(seed)
    first, more = torch.randint(VOCABULARY, (2, count, 1), generator=dice)
    return (first + more * torch.arange(tokens)) % VOCABULARY


def prompt() -> list[int]:
    return sequences(1 << 20, 1, PROMPT_TOKENS)[0].tolist()


# -- the trainer ---------------------------------------------------------------------------------


def train(run: str, steps: int) -> None:
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    state = {"model": model, "optimizer": optimizer}
    with statehold.Checkpointer(run, keep=None) as ckpt:
        for step in range((ckpt.restore(state) or 0) + 1, steps + 1):
            tokens = sequences(step, 16, PROMPT_TOKENS)
            loss = model(input_ids=tokens, labels=tokens).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ckpt.save(step, state, metrics={"loss": loss.item()}).wait("committed")
    print(f"   trained to step {steps}, loss {loss.item():.3f}", flush=True)


# -- the engines ---------------------------------------------------------------------------------


class Engine(Protocol):
    """An engine that serves the steps of a run, over pages that outlive it."""

    def take(self) -> int:
        """Wait for a newer step, and serve it from now on."""
        ...

    def answer(self) -> tuple[list[int], int]:
        """The answer to the prompt, and how many tokens of the prompt came from pages."""
        ...


class TransformersEngine:
    """generate(), over a cache that is resumed from pages."""

    def __init__(self, run: str, pages: str) -> None:
        self._run, self._model = run, made().eval()
        self._updates = statehold.subscribe(run, {"model": self._model})
        self._store = kv.PageStore(pages, page_bytes="64KiB", **PAGES)

    def take(self) -> int:
        update = self._updates.wait(LIMIT_S)
        assert update is not None
        update.apply()
        config = self._model.config.to_dict()
        self._identity = kv.identity(f"{self._run}@{update.step}", config, dtype="float32")
        return update.step

    def answer(self) -> tuple[list[int], int]:
        asked = torch.tensor([prompt()])
        cache = kv.resume(asked, self._store, self._identity)
        found = cache.get_seq_length()
        tokens = self._model.generate(
            asked, attention_mask=torch.ones_like(asked), past_key_values=cache,
            max_new_tokens=ANSWER_TOKENS, do_sample=False,
        )  # fmt: skip
        kv.save(cache, tokens, self._store, self._identity)
        return tokens[0, PROMPT_TOKENS:].tolist(), found


class VllmEngine:
    """vLLM with the connector, which takes its weights from the run."""

    def __init__(self, run: str, pages: str) -> None:
        os.environ.update(
            VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", HF_HUB_OFFLINE="1",
            VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR",
        )  # fmt: skip
        from vllm import LLM

        self._steps = kv.follow(run, timeout_s=LIMIT_S)
        folder = Path(pages).with_name("model")
        made().config.save_pretrained(folder)
        connector = {"kv_connector": "StateholdConnector", "kv_role": "kv_both",
                     "kv_connector_extra_config": {"path": pages, **PAGES}}  # fmt: skip
        self._llm = LLM(
            str(folder), dtype="float32", block_size=32, max_model_len=256, enforce_eager=True,
            skip_tokenizer_init=True, distributed_executor_backend="uni", load_format="statehold",
            model_loader_extra_config={"run": run, "name": "model"}, kv_transfer_config=connector,
            weight_transfer_config={"backend": "statehold"}, disable_log_stats=True,
        )  # fmt: skip
        self._call("init_weight_transfer_engine", {"run": run, "name": "model"})

    def _call(self, method: str, *arguments: Any) -> None:
        self._llm.collective_rpc(method, args=arguments)

    def take(self) -> int:
        step = next(self._steps)
        self._call("start_weight_update")
        self._call("update_weights", {"step": step})
        self._call("finish_weight_update")
        return step

    def answer(self) -> tuple[list[int], int]:
        from vllm import SamplingParams

        self._llm.reset_prefix_cache()  # vLLM's own: what is found now is from pages
        sampling = SamplingParams(
            max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True, detokenize=False
        )
        [answer] = self._llm.generate([{"prompt_token_ids": prompt()}], sampling, use_tqdm=False)
        return list(answer.outputs[0].token_ids), answer.num_cached_tokens


def serve(run: str, pages: str, log: str, steps: int, kind: type[Engine], *, times: int) -> None:
    """Answer so often with each step that the engine sees, up to the step `steps`."""
    journal, engine, step = Journal(Path(log)), kind(run, pages), 0
    while step < steps:
        step = engine.take()
        for _ in range(times):
            tokens, found = engine.answer()
            journal.write("answer", step=step, tokens=tokens, found=found, pid=os.getpid())


def main(what: str, run: str, *rest: str) -> None:
    torch.set_num_threads(1)
    if what == "train":
        train(run, int(rest[0]))
        return
    pages, log, steps, *options = rest
    kind = VllmEngine if options == ["--vllm"] else TransformersEngine
    serve(run, pages, log, int(steps), kind, times=2 if what == "serve" else 1)
    if what == "serve":
        os.kill(os.getpid(), signal.SIGKILL)  # nothing is closed, and nothing is flushed


if __name__ == "__main__":
    main(*sys.argv[1:])
