"""Serves a model while another process trains it: each committed step is swapped in.

    python examples/serving.py [DIRECTORY]

The trainer tells what the model of each step answers to a probe. At the end the server compares all
of its own answers with these: each came from one whole step.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import torch
from torch import nn

import statehold

STEPS = 30
PROBE = torch.linspace(-1, 1, 256)


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 512), nn.Linear(512, 1))


def train(run: Path) -> None:
    """Train a head on a frozen base, save every step, and print what the probe gives."""
    model = made()
    model[0].requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    state = {"model": model, "optimizer": optimizer}
    levels = [statehold.Memory(keep=1), statehold.Directory(every=10)]
    with statehold.Checkpointer(run, levels=levels) as ckpt:
        for step in range(1, STEPS + 1):
            batch = torch.randn(64, 256)
            loss = (model(batch) - batch.sum(1, keepdim=True)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                print(json.dumps([step, model(PROBE).item()]), flush=True)
            ckpt.save(step, state).wait()


def answer(model: nn.Module, updates: statehold.Subscription, lock: threading.Lock,
           answers: list[tuple[int, float]], ended: threading.Event) -> None:  # fmt: skip
    """Answer requests, the last one after the end. The lock keeps the weights as they are while the
    model runs."""
    is_last = False
    while not is_last:
        is_last = ended.wait(0.0005)  # until the next request
        with lock, torch.inference_mode():
            if updates.step is not None:
                answers.append((updates.step, model(PROBE).item()))


def serve(run: Path) -> None:
    model, lock, ended = made(), threading.Lock(), threading.Event()
    answers: list[tuple[int, float]] = []
    words = [sys.executable, __file__, "train", str(run)]
    with (
        subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as trainer,
        statehold.subscribe(run, {"model": model}) as updates,
    ):
        server = threading.Thread(target=answer, args=(model, updates, lock, answers, ended))
        server.start()
        while update := updates.wait(60):  # each is read and verified beside the server
            with lock:
                update.apply()
            print(f"step {update.step}: {update.changed_bytes / 1e6:.2f} MB changed, in place "
                  f"{1000 * update.lag_s:.1f} ms after the commit")  # fmt: skip
            if update.step == STEPS:
                break
        ended.set()
        server.join()
        expected = dict(map(json.loads, trainer.stdout or ()))
    wrong = [each for each in answers if abs(each[1] - expected[each[0]]) > 1e-6]
    steps = len({step for step, _ in answers})
    print(f"{len(answers)} answers from {steps} steps, {len(wrong)} of them from no whole step")
    assert answers
    assert not wrong


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(Path(sys.argv[2]))
    else:
        serve(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()) / "run")
