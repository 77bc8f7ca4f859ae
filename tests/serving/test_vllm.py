"""A real engine over pages: the tokens of a cold run, whatever the pages have become."""

from __future__ import annotations

from pathlib import Path

import pytest

from serving.engines import Rounds, ask, pages, prompts, tiny

COUNT, TOKENS = 20, 200
BLOCK = 32
ALL = TOKENS // BLOCK * BLOCK
FP32 = {"dtype": "float32"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("model"))


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
        model, prompts(1, COUNT, TOKENS), folder / "first.json", rounds=2, **FP32,
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
    path, _ = stored
    asked = prompts(1, COUNT, TOKENS)
    two = [ask(model, asked, tmp_path / f"{n}.json", **FP32, **pages(path)) for n in range(2)]
    for each in two:  # two processes at the same time
        answers = each.answers()
        assert cached(answers) == [ALL] * COUNT
        assert tokens(answers) == tokens(cold)


def test_flipped_bits_are_computed_again(model: Path, cold: Rounds, tmp_path: Path) -> None:
    asked, path = prompts(1, COUNT, TOKENS), tmp_path / "kv"
    ask(model, asked, tmp_path / "first.json", **FP32, **pages(path)).answers()
    damaged = 0
    for segment in path.glob("segment-*"):
        raw = bytearray(segment.read_bytes())
        begins = [at for at in range(0, len(raw), 4096) if raw[at : at + 8] == b"SHKVPAGE"]
        for begin in begins[::5]:
            raw[begin + 4096 + 1000] ^= 1
            damaged += 1
        segment.write_bytes(raw)
    assert damaged
    answers = ask(model, asked, tmp_path / "again.json", rounds=2, **FP32, **pages(path)).answers()
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


def test_an_engine_starts_from_a_run(model: Path, cold: Rounds, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    import statehold

    trained = AutoModelForCausalLM.from_pretrained(model)
    with statehold.Checkpointer(tmp_path / "run", keep=None) as ckpt:
        ckpt.save(1, {"model": trained}, metrics={"loss": 1.0}).wait("committed")
        for parameter in trained.parameters():
            parameter.data *= 0.5
        ckpt.save(2, {"model": trained}, metrics={"loss": 2.0}).wait("committed")
    asked, path = prompts(1, COUNT, TOKENS), tmp_path / "kv"
    given = {**FP32, "load_format": "statehold", **pages(path)}
    found = {
        text: ask(
            model, asked, tmp_path / f"{text}.json", **given,
            model_loader_extra_config={"run": f"{tmp_path / 'run'}@{text}", "name": "model"},
        ).answers()
        for text in ("best:loss", "2")
    }  # fmt: skip
    assert tokens(found["best:loss"]) == tokens(cold)
    assert tokens(found["2"]) != tokens(cold)
    assert cached(found["2"]) == [0] * COUNT  # other weights of the same run
