"""The server that users start takes the steps of a run: each call of docs/serving.md over HTTP."""

from __future__ import annotations

import threading
from pathlib import Path

import statehold
from serving.engines import ask, pages, prompts, tiny
from serving.served import Server, served, with_tokenizer

COUNT, TOKENS = 4, 200
ALL = TOKENS // 32 * 32 * COUNT


def trained(model: Path, run: Path) -> Path:
    """Three steps: the model, other weights in a layer, and again, with a flipped bit."""
    from transformers import AutoModelForCausalLM

    trained = AutoModelForCausalLM.from_pretrained(model)
    weight = trained.model.layers[1].mlp.up_proj.weight
    with statehold.Checkpointer(run, keep=None) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, {"model": trained}).wait("committed")
            weight.data *= -2
    (data,) = run.glob("step-000000000003/*.safetensors")
    raw = bytearray(data.read_bytes())
    raw[raw.index((weight.data / -2).numpy().tobytes())] ^= 1
    data.write_bytes(raw)
    return run


def take(server: Server, step: int, *, pause: bool = True) -> None:
    """The calls that take a step."""
    server.post("/start_weight_update")
    server.post("/update_weights", {"update_info": {"step": step, "ahead": True}})
    if pause:
        server.post("/pause?mode=wait&clear_cache=false")
    server.post("/update_weights", {"update_info": {"step": step}})
    server.post("/finish_weight_update", {"weight_version": f"{step}"})
    if pause:
        server.post("/resume")
    assert server.call("GET", "/weight_info") == (200, {"weight_version": f"{step}"})


def refuse(server: Server, step: int, text: str) -> None:
    """A step that cannot be taken is an error of the update."""
    server.post("/start_weight_update")
    status, answer = server.call("POST", "/update_weights", {"update_info": {"step": step}})
    assert (status, text in answer) == (500, True), answer
    assert server.call("POST", "/finish_weight_update", {"weight_version": "3"})[0] == 500


def test_a_server_takes_steps_over_http(tmp_path: Path) -> None:
    model = with_tokenizer(tiny(tmp_path / "model"))
    run, asked = trained(model, tmp_path / "run"), prompts(1, COUNT, TOKENS)
    of = {"run": f"{run}@2", "name": "model"}
    fresh = ask(
        model, asked, tmp_path / "fresh.json", dtype="float32", load_format="statehold",
        model_loader_extra_config=of,
    ).answers()  # fmt: skip
    right = [each["tokens"] for each in fresh[0]]
    connector = pages(tmp_path / "kv")["kv_transfer_config"]
    options = {"model-loader-extra-config": {**of, "run": f"{run}@1"}, "load-format": "statehold",
               "kv-transfer-config": connector, "dtype": "float32",
               "weight-transfer-config": {"backend": "statehold"}}  # fmt: skip
    with served(model, tmp_path / "server.log", **options) as server:
        old, cached = server.complete(asked)
        assert cached == 0
        status, answer = server.call("POST", "/start_weight_update")
        assert (status, "init_weight_transfer_engine" in answer) == (500, True), answer
        info = {"init_info": {"run": str(run), "name": "model"}}
        server.post("/init_weight_transfer_engine", info)

        server.post("/start_weight_update")
        server.post("/update_weights", {"update_info": {"step": 2, "ahead": True}})
        assert server.complete(asked) == (old, ALL)
        server.post("/pause?mode=wait&clear_cache=false")
        server.post("/update_weights", {"update_info": {"step": 2}})
        server.post("/finish_weight_update", {"weight_version": "2"})
        server.post("/resume")
        assert old != right
        assert server.complete(asked) == (right, 0)

        refuse(server, 3, "bytes on disk do not match their checksum")
        refuse(server, 99, "step 99 is not committed")
        assert server.call("GET", "/weight_info") == (200, {"weight_version": "2"})
        assert server.complete(asked) == (right, ALL)
        steps_that_come_while_requests_run(server, asked)
        assert server.complete(asked)[0] == right
        take(server, 1)
        assert server.complete(asked) == (old, ALL)


def steps_that_come_while_requests_run(server: Server, asked: list[list[int]]) -> None:
    """Without a pause their answers may be of two steps. The server goes on."""
    is_over, errors = threading.Event(), list[BaseException]()

    def client() -> None:
        try:
            while not is_over.is_set():
                server.complete(asked, tokens=32)
        except BaseException as error:
            errors.append(error)

    beside = threading.Thread(target=client)
    beside.start()
    try:
        for step in (1, 2) * 4:
            take(server, step, pause=False)
    finally:
        is_over.set()
        beside.join()
    assert not errors
