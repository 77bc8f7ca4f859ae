"""The demo of serving: an engine takes the steps of a training live, and its pages survive a kill.

    1  a trainer saves a first step, an engine begins to serve it, and the trainer trains on. The
       engine takes each step that it sees and answers with it, twice: first without any page of
       the weights before, then from its own pages. Behind the last step it kills itself (SIGKILL)
    2  a new engine serves the last step, and finds the pages of the one that was killed
    3  each answer, token by token, against what the model of that step says without pages

Owns the order of these. Invariants: it raises DemoError unless all of this was seen. The engine is
vLLM where it is installed, and otherwise transformers; both are in served.py.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from journal import read_events
from story import Demo, DemoError, heading, prepare

PROGRAM = str(Path(__file__).with_name("served.py"))
LIMIT_S = 600.0
STEPS_SEEN_MIN = 3  # or nothing was taken live
Answers = list[dict[str, Any]]


def carry_out(demo: Demo) -> None:
    """All phases."""
    began = time.monotonic()
    prepare(demo)
    log, options = demo.out / "answers.jsonl", ["--vllm"] * has_vllm()
    log.touch()
    heading(1, f"{'vLLM' if options else 'transformers'} serves a run while it trains")
    serve_live(demo, log, options)
    live = list(read_events(log, "answer"))
    check_live(live, demo.steps)
    heading(2, f"a new engine serves step {demo.steps}")
    end(start("again", demo, log, options), 0, demo)
    check_found(live[-1], list(read_events(log, "answer"))[-1])
    heading(3, "each answer against its model without pages")
    compare(demo, list(read_events(log, "answer")))
    print(f"\nthe pages of an engine that was killed served the next one; "
          f"{time.monotonic() - began:.0f} s")  # fmt: skip


def has_vllm() -> bool:
    """Whether the engine is vLLM."""
    return importlib.util.find_spec("vllm") is not None


def serve_live(demo: Demo, log: Path, options: list[str]) -> None:
    """Phase 1."""
    end(run("train", demo.run, 1), 0, demo)
    engine = start("serve", demo, log, options)
    try:
        wait_for(lambda: any(read_events(log, "answer")), engine, demo)
        end(run("train", demo.run, demo.steps), 0, demo)
        end(engine, -signal.SIGKILL, demo)
    finally:
        engine.kill()
        engine.wait()


def run(*words: object, errors: Any = None) -> subprocess.Popen[bytes]:
    """Start a process of served.py."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, PROGRAM, *map(str, words)], env=environment, stderr=errors
    )


def start(what: str, demo: Demo, log: Path, options: list[str]) -> subprocess.Popen[bytes]:
    """Start an engine. What it says goes to a file: vLLM has much to say."""
    with errors_of(demo).open("ab") as errors:
        return run(what, demo.run, demo.out / "pages", log, demo.steps, *options, errors=errors)


def errors_of(demo: Demo) -> Path:
    """Where the engines log."""
    return demo.out / "engine.log"


def wait_for(is_so: Callable[[], bool], process: subprocess.Popen[bytes], demo: Demo) -> None:
    """Wait for what a process logs."""
    until = time.monotonic() + LIMIT_S
    while not is_so():
        if process.poll() is not None or time.monotonic() > until:
            raise DemoError(f"the engine did not answer; see {errors_of(demo)}")
        time.sleep(0.05)


def end(process: subprocess.Popen[bytes], expected: int, demo: Demo) -> None:
    """Wait for the end of a process."""
    code = process.wait(LIMIT_S)
    if code != expected:
        raise DemoError(f"a process ended with {code}, not {expected}; see {errors_of(demo)}")


def check_live(live: Answers, last: int) -> None:
    """Each step was served without pages first, and then from pages."""
    first, second = live[::2], live[1::2]
    steps = [each["step"] for each in first]
    if len(steps) < STEPS_SEEN_MIN or steps[-1] != last:
        raise DemoError(f"the engine has taken only the steps {steps}")
    if stale := [each["step"] for each in first if each["found"]]:
        raise DemoError(f"pages of other weights were found at the steps {stale}")
    if missed := [each["step"] for each in second if not each["found"]]:
        raise DemoError(f"the second answers of the steps {missed} found no page")
    print(f"   {len(steps)} steps of {last} taken in place, from {steps[0]} to {last}; "
          f"{len(live)} answers")  # fmt: skip
    print(f"   after each step: 0 tokens from pages of the weights before; then "
          f"{second[-1]['found']} from its own; killed behind step {last}")  # fmt: skip


def check_found(before: dict[str, Any], after: dict[str, Any]) -> None:
    """The new engine found what the one that was killed had put."""
    if after["pid"] == before["pid"] or after["found"] < before["found"]:
        raise DemoError(f"found {after['found']} tokens of {before['found']} after the kill")
    print(f"   {after['found']} tokens of the prompt came from the pages of the killed engine")


def compare(demo: Demo, logged: Answers) -> None:
    """Phase 3."""
    import torch

    import statehold
    from served import ANSWER_TOKENS, made, prompt

    model, asked, expected = made().eval(), torch.tensor([prompt()]), dict[int, list[int]]()
    with statehold.Checkpointer(demo.run) as ckpt:
        for step in {each["step"] for each in logged}:
            ckpt.restore({"model": model}, only=["model"], step=step)
            answer = model.generate(
                asked, attention_mask=torch.ones_like(asked), max_new_tokens=ANSWER_TOKENS,
                do_sample=False,
            )  # fmt: skip
            expected[step] = answer[0, asked.shape[1] :].tolist()
    different = [each["step"] for each in logged if each["tokens"] != expected[each["step"]]]
    if different:
        raise DemoError(f"the answers of the steps {different} have other tokens")
    kinds = len({tuple(tokens) for tokens in expected.values()})
    print(f"   {len(logged)} answers equal, {kinds} different ones among them")
