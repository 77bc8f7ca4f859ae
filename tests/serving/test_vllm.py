"""A real engine over pages: the tokens of a cold run, whatever the pages have become.

STATEHOLD_SERVING_PROMPTS, STATEHOLD_SERVING_UPDATES: how many. STATEHOLD_SERVING_MODEL: a folder
with another model than a tiny one.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import statehold
from serving.engines import PROMPTS, Rounds, ask, model_in, pages, prompts, tiny
from support.faults import must

COUNT, TOKENS = PROMPTS, 200
UPDATES = int(os.environ.get("STATEHOLD_SERVING_UPDATES", "24"))
BLOCK = 32
ALL = TOKENS // BLOCK * BLOCK
FP32 = {"dtype": "float32"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_in(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def cold(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Rounds:
    """Answers without a connector."""
    out = tmp_path_factory.mktemp("cold") / "cold.json"
    return ask(model, prompts(1, COUNT, TOKENS), out, **FP32).answers()


@pytest.fixture(scope="module")
def stored(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Rounds]:
    """A store of pages, and the answers of the engine that has made it."""
    folder = tmp_path_factory.mktemp("stored")
    asked = ask(
        model, prompts(1, COUNT, TOKENS), folder / "first.json", rounds=(0, 0), processes=3, **FP32,
        **pages(folder / "kv"),
    )  # fmt: skip
    return folder / "kv", asked.answers()


def tokens(answers: Rounds, at: int = 0) -> list[list[int]]:
    assert all(each["reason"] == "length" for each in answers[at])
    return [each["tokens"] for each in answers[at]]


def cached(answers: Rounds, at: int = 0) -> list[int]:
    return [each["cached"] for each in answers[at]]


def test_a_hit_has_the_tokens_of_a_cold_run(cold: Rounds, stored: tuple[Path, Rounds]) -> None:
    _, answers = stored
    assert cached(answers, 0) == [0] * COUNT
    assert cached(answers, 1) == [ALL] * COUNT
    assert tokens(answers, 0) == tokens(cold)
    assert tokens(answers, 1) == tokens(cold)


def test_engines_that_start_later_find_all_pages(
    model: Path, cold: Rounds, stored: tuple[Path, Rounds], tmp_path: Path
) -> None:
    """One of them has a copy of the model under another path."""
    path, _ = stored
    asked, copied = prompts(1, COUNT, TOKENS), shutil.copytree(model, tmp_path / "copy")
    given = {**FP32, **pages(path)}
    two = [ask(each, asked, tmp_path / f"{each.name}.json", **given) for each in (model, copied)]
    for each in two:  # two processes at the same time
        answers = each.answers()
        assert cached(answers) == [ALL] * COUNT
        assert tokens(answers) == tokens(cold)


def test_flipped_bits_are_computed_again(
    model: Path, cold: Rounds, stored: tuple[Path, Rounds], tmp_path: Path
) -> None:
    asked = prompts(1, COUNT, TOKENS)
    path = shutil.copytree(stored[0], tmp_path / "kv")  # its pages are in files alone
    damaged = 0
    for segment in path.glob("segment-*"):
        raw = bytearray(segment.read_bytes())
        begins = [at for at in range(0, len(raw), 4096) if raw[at : at + 8] == b"SHKVPAGE"]
        for begin in begins[::5]:
            raw[begin + 4096 + 1000] ^= 1
            damaged += 1
        segment.write_bytes(raw)
    assert damaged
    again = ask(model, asked, tmp_path / "again.json", rounds=(0, 0), **FP32, **pages(path))
    answers = again.answers()
    assert 0 < sum(cached(answers, 0)) < COUNT * ALL
    assert cached(answers, 1) == [ALL] * COUNT  # what was computed again is there again
    assert tokens(answers, 0) == tokens(answers, 1) == tokens(cold)


def test_other_weights_or_another_rope_find_nothing(
    stored: tuple[Path, Rounds], tmp_path: Path
) -> None:
    path, _ = stored
    asked = prompts(1, COUNT, TOKENS)
    others = [tiny(tmp_path / "weights", seed=1), tiny(tmp_path / "rope", rope_theta=20000.0)]
    for number, other in enumerate(others):
        answers = ask(other, asked, tmp_path / f"{number}.json", **FP32, **pages(path)).answers()
        assert cached(answers) == [0] * COUNT


def test_prompts_with_a_salt_find_nothing(
    model: Path, stored: tuple[Path, Rounds], tmp_path: Path
) -> None:
    answers = ask(
        model, prompts(1, COUNT, TOKENS), tmp_path / "salt.json", salt="one", **FP32,
        **pages(stored[0]),
    ).answers()  # fmt: skip
    assert cached(answers) == [0] * COUNT


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Step 1 is the model, step 2 has other weights in a layer."""
    from transformers import AutoModelForCausalLM

    trained = AutoModelForCausalLM.from_pretrained(model)
    folder = tmp_path_factory.mktemp("run")
    with statehold.Checkpointer(folder, keep=None) as ckpt:
        ckpt.save(1, {"model": trained}, metrics={"loss": 1.0}).wait("committed")
        trained.model.layers[1].mlp.up_proj.weight.data *= -1
        ckpt.save(2, {"model": trained}, metrics={"loss": 2.0}).wait("committed")
    return folder


def of(run: Path, step: str) -> dict[str, Any]:
    """vLLM starts from a step."""
    config = {"run": f"{run}@{step}", "name": "model"}
    return {**FP32, "load_format": "statehold", "model_loader_extra_config": config}


LIVE = {"weight_transfer_config": {"backend": "statehold"}}


@pytest.fixture(scope="module")
def fresh(model: Path, run: Path, tmp_path_factory: pytest.TempPathFactory) -> Rounds:
    """Answers of step 2, without a connector."""
    out = tmp_path_factory.mktemp("fresh") / "fresh.json"
    return ask(model, prompts(1, COUNT, TOKENS), out, **of(run, "2")).answers()


def test_an_engine_starts_from_a_run_and_takes_its_steps(
    model: Path, cold: Rounds, fresh: Rounds, run: Path, tmp_path: Path
) -> None:
    live = ask(
        model, prompts(1, COUNT, TOKENS), tmp_path / "live.json", rounds=(0, 0, 2, 0, 1), run=run,
        first=1, **of(run, "best:loss"), **LIVE, **pages(tmp_path / "kv"),
    ).answers()  # fmt: skip
    assert tokens(fresh) != tokens(cold)
    assert [tokens(live, at) == tokens(cold) for at in range(5)] == [True, True, False, False, True]
    assert tokens(live, 2) == tokens(live, 3) == tokens(fresh)
    # New weights find nothing, also in vLLM's own cache; then their own pages; then the old ones.
    assert [sum(cached(live, at)) for at in range(5)] == [
        0,
        COUNT * ALL,
        0,
        COUNT * ALL,
        COUNT * ALL,
    ]


def test_an_update_behind_reload_weights_has_the_tokens_of_the_step(
    model: Path, cold: Rounds, fresh: Rounds, run: Path, tmp_path: Path
) -> None:
    """The directory has the weights of step 1."""
    live = ask(
        model, prompts(1, COUNT, TOKENS), tmp_path / "live.json", rounds=(0, 2, 0), run=run,
        first=1, kind="reload", **FP32, **LIVE, **pages(tmp_path / "kv"),
    ).answers()  # fmt: skip
    assert tokens(live) == tokens(cold) != tokens(fresh)
    assert tokens(live, 1) == tokens(live, 2) == tokens(fresh)
    assert [sum(cached(live, at)) for at in range(3)] == [0, 0, COUNT * ALL]


def test_steps_that_come_while_requests_run_leave_nothing_stale(
    model: Path, cold: Rounds, fresh: Rounds, run: Path, tmp_path: Path
) -> None:
    steps, right = [2, 1] * (UPDATES // 2), {1: tokens(cold), 2: tokens(fresh)}
    must(all(one != two for one, two in zip(*right.values(), strict=True)))
    rounds = ask(
        model, prompts(1, COUNT, TOKENS), tmp_path / "live.json", rounds=steps, run=run, first=1,
        kind="live", max_num_seqs=4, **of(run, "1"), **LIVE, **pages(tmp_path / "kv"),
    ).answers()  # fmt: skip
    check_live(steps, rounds, right)


def check_live(steps: list[int], rounds: Rounds, right: dict[int, list[list[int]]]) -> None:
    """Each answer is of the step that it came behind, and pages of a step are found again."""
    hits = 0
    for step, answers in zip(steps, rounds, strict=True):
        for expected, each in zip(right[step], answers, strict=True):
            assert each is None or each["tokens"] == expected
            hits += each is not None and each["cached"] > 0
    assert hits > 0


def test_two_ranks_find_what_two_ranks_have_left(model: Path, run: Path, tmp_path: Path) -> None:
    asked, two = prompts(1, COUNT, TOKENS), {"tensor_parallel_size": 2, "processes": 4}
    cold = ask(model, asked, tmp_path / "cold.json", **FP32, **two).answers()
    given = {**of(run, "1"), **two, **pages(tmp_path / "kv")}
    first = ask(model, asked, tmp_path / "first.json", rounds=(0, 0), **given).answers()
    again = ask(model, asked, tmp_path / "again.json", **given).answers()
    assert tokens(first, 0) == tokens(first, 1) == tokens(again) == tokens(cold)
    hits = [cached(first, 0), cached(first, 1), cached(again)]
    assert hits == [[0] * COUNT, [ALL] * COUNT, [ALL] * COUNT]


TWO = {"tensor_parallel_size": 2, "processes": 2}


@pytest.fixture(scope="module")
def of_two_ranks(
    model: Path, run: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, list[list[int]]]:
    """Answers of engines with two ranks that start from a step, without a connector."""
    folder, asked = tmp_path_factory.mktemp("two"), prompts(1, COUNT, TOKENS)
    both = [ask(model, asked, folder / f"{n}.json", **of(run, f"{n}"), **TWO) for n in (1, 2)]
    return {n: tokens(each.answers()) for n, each in enumerate(both, 1)}


def test_two_ranks_take_steps_while_requests_run(
    model: Path, run: Path, of_two_ranks: dict[int, list[list[int]]], tmp_path: Path
) -> None:
    steps = [2, 1] * 4
    must(all(one != two for one, two in zip(*of_two_ranks.values(), strict=True)))
    rounds = ask(
        model, prompts(1, COUNT, TOKENS), tmp_path / "live.json", rounds=steps, run=run, first=1,
        kind="live", max_num_seqs=4, **of(run, "1"), **TWO, **LIVE, **pages(tmp_path / "kv"),
    ).answers()  # fmt: skip
    check_live(steps, rounds, of_two_ranks)


def test_other_connectors_beside_it_are_refused(model: Path, tmp_path: Path) -> None:
    """What they load may be wrong, and vLLM says so only when it is saved."""
    alone = pages(tmp_path / "kv")["kv_transfer_config"]
    example = {
        "kv_connector": "ExampleConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "example")},
    }  # fmt: skip
    both = {
        "kv_connector": "MultiConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [alone, example]},
    }  # fmt: skip
    asked = ask(model, prompts(1, 1, TOKENS), tmp_path / "both.json", kv_transfer_config=both)
    with pytest.raises(AssertionError, match="stand beside no connector"):
        asked.answers()


@pytest.mark.parametrize("fault", ["damaged", "saved again"])
@pytest.mark.parametrize("connector", [False, True])
def test_a_step_that_one_rank_cannot_take_is_taken_by_none(
    model: Path, run: Path, of_two_ranks: dict[int, list[list[int]]], tmp_path: Path,
    fault: str, connector: bool,
) -> None:  # fmt: skip
    other = shutil.copytree(run, tmp_path / "other")
    (data,) = other.glob("step-000000000002/*.safetensors")
    if fault == "damaged":
        weight = statehold.load(run, "model", step=2)["model.layers.1.mlp.up_proj.weight"]
        raw = bytearray(data.read_bytes())
        raw[raw.index(weight.numpy().tobytes())] ^= 1
        data.write_bytes(raw)
    else:  # with the weights of step 1
        shutil.rmtree(data.parent)
        with statehold.Checkpointer(tmp_path / "again") as ckpt:
            ckpt.save(2, {"model": statehold.load(run, "model", step=1)}).wait("committed")
        shutil.copytree(tmp_path / "again" / data.parent.name, data.parent)
    rounds = ask(
        model, prompts(1, COUNT, TOKENS), tmp_path / "apart.json", rounds=[2], run=run,
        other=other, kind="apart", **of(run, "1"), **TWO, **LIVE,
        **(pages(tmp_path / "kv") if connector else {}),
    ).answers()  # fmt: skip
    # vLLM 0.32 hears one rank's error, and takes the other one for its next answer, so it may end.
    assert not rounds or tokens(rounds) == of_two_ranks[1]
    assert not (rounds and connector)


def test_what_hangs_is_computed_at_its_time(
    model: Path, cold: Rounds, stored: tuple[Path, Rounds], tmp_path: Path
) -> None:
    path = shutil.copytree(stored[0], tmp_path / "kv")  # its pages are in files alone
    answers = ask(
        model, prompts(1, COUNT, TOKENS), tmp_path / "stuck.json", kind="stuck", **FP32,
        **pages(path, deadline_s=1.0),
    ).answers()  # fmt: skip
    assert cached(answers) == [0] * COUNT
    assert tokens(answers) == tokens(cold)
