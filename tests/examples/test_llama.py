"""The example that `make demo` runs: model, loader, settings, and the demo itself with tiny sizes.

The demo test is the acceptance test of the whole engine in small: a training process killed in the
middle of a save, resumed, and compared bit for bit.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support import scripts
from support.llama import call, imported

torch = pytest.importorskip("torch")
pytest.importorskip("statehold._core", reason="the native module is not built")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MODULES = (
    "config", "data", "demo", "display", "journal", "model", "ranks", "report", "story",
    "story_alone", "train", "trainer"
)  # fmt: skip
# Another script, whose output comes line by line.
BY_LINES = """
import runpy, sys
sys.stdout.reconfigure(line_buffering=True)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
TEXT = bytes(range(1, 256)) * 40
TINY = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "seq": 16}


@pytest.fixture(scope="module")
def llama() -> Iterator[SimpleNamespace]:
    with imported(*MODULES) as modules:
        yield modules


def tiny_model(llama: SimpleNamespace, **changes: Any) -> Any:
    torch.manual_seed(0)
    return llama.model.Llama(llama.model.ModelConfig(**{**TINY, **changes}))


def loader(llama: SimpleNamespace, *, text: bytes = TEXT, seq: int = 16) -> Any:
    return llama.data.TextLoader(text, seq=seq, batch=4, seed=7)


# -- the model ---------------------------------------------------------------------------------


def test_logits_have_one_row_a_byte(llama):
    assert tiny_model(llama)(torch.zeros(3, 16, dtype=torch.long)).shape == (3, 16, 256)


def test_grouped_queries_share_keys_and_values(llama):
    attention = tiny_model(llama).layers[0].attention
    assert attention.wq.weight.shape == (32, 32)
    assert attention.wk.weight.shape == attention.wv.weight.shape == (16, 32)


def test_a_byte_does_not_see_the_ones_after_it(llama):
    model = tiny_model(llama)
    first = torch.randint(256, (1, 16))
    second = first.clone()
    second[0, 10:] = 0
    torch.testing.assert_close(model(first)[:, :10], model(second)[:, :10])


def test_rotation_keeps_lengths_and_depends_on_the_distance_only(llama):
    cos, sin = llama.model.rope_tables(16, 8)
    q, k = (torch.randn(8).expand(1, 16, 1, 8) for _ in range(2))
    rotated_q, rotated_k = llama.model.rotate(q, cos, sin), llama.model.rotate(k, cos, sin)
    torch.testing.assert_close(rotated_q.norm(dim=-1), q.norm(dim=-1))
    scores = torch.einsum("blhe,bmhe->lm", rotated_q, rotated_k)
    torch.testing.assert_close(scores[:-1, :-1], scores[1:, 1:])


def test_tied_embeddings_are_one_parameter(llama):
    tied, untied = tiny_model(llama, tie=True), tiny_model(llama, tie=False)
    assert tied.output.weight is tied.embedding.weight
    assert untied.num_parameters() - tied.num_parameters() == 256 * 32


def test_the_same_seed_gives_the_same_model(llama):
    pairs = zip(tiny_model(llama).parameters(), tiny_model(llama).parameters(), strict=True)
    assert all(torch.equal(first, second) for first, second in pairs)


@pytest.mark.parametrize("wrong", [{"heads": 5}, {"kv_heads": 3}, {"layers": 0}])
def test_a_shape_that_cannot_be_is_refused(llama, wrong):
    with pytest.raises(ValueError, match=r"must be"):
        llama.model.ModelConfig(**{**TINY, **wrong})


# -- the loader --------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("taken", [0, 1, 77, 150, 151, 152, 400])  # an epoch has 151 batches
def test_a_loader_resumes_exactly(llama, taken):
    original, resumed = loader(llama), loader(llama)
    for _ in range(taken):
        next(original)
    next(resumed)  # whatever it did before must not matter
    resumed.load_state_dict(original.state_dict())
    assert resumed.epoch == original.epoch
    for _ in range(200):
        for expected, got in zip(next(original), next(resumed), strict=True):
            assert torch.equal(expected, got)


def test_targets_are_the_bytes_that_follow(llama):
    tokens, targets = next(loader(llama))
    assert torch.equal(tokens[:, 1:], targets[:, :-1])


def test_every_epoch_is_shuffled_anew(llama):
    data = loader(llama)
    first = next(data)[0]
    while data.epoch == 0:
        second = next(data)[0]
    assert not torch.equal(first, second)


def test_validation_is_held_out_and_moves_nothing(llama):
    # Every window of this text is different, so a window can be recognised.
    text = b"".join(index.to_bytes(4, "big") for index in range(2000))
    data = loader(llama, text=text, seq=16)
    before = data.state_dict()
    held_out = {tuple(row.tolist()) for batch in data.validation(1000) for row in batch[0]}
    after = data.state_dict()
    assert {k: v for k, v in before.items() if k != "generator"} == {
        k: v for k, v in after.items() if k != "generator"
    }
    assert torch.equal(before["generator"], after["generator"])
    seen = set()
    while data.epoch == 0:
        seen |= {tuple(row.tolist()) for row in next(data)[0]}
    assert held_out
    assert not held_out & seen


@pytest.mark.parametrize("other", [{"text": TEXT + b"more"}, {"seq": 8}])
def test_a_position_in_other_data_is_refused(llama, other):
    position = loader(llama, **other).state_dict()
    with pytest.raises(ValueError, match="belongs to other data"):
        loader(llama).load_state_dict(position)


def test_too_little_text_is_refused(llama):
    with pytest.raises(ValueError, match="too few"):
        loader(llama, text=b"short")


def test_the_standard_library_is_the_text(llama):
    corpus = llama.data.read_corpus(None)
    assert len(corpus) > 5_000_000
    assert Path(argparse.__file__).read_bytes() in corpus


def test_a_directory_is_read_in_a_fixed_order(llama, tmp_path):
    (tmp_path / "b").mkdir()
    for name, text in (("b/2.txt", "two"), ("a.md", "one"), ("c.py", "three"), ("d.bin", "no")):
        (tmp_path / name).write_text(text)
    (tmp_path / "link.py").symlink_to(tmp_path / "gone.py")
    assert llama.data.read_corpus(str(tmp_path)) == b"one\0two\0three"
    with pytest.raises(FileNotFoundError, match="--data"):
        llama.data.read_corpus(str(tmp_path / "nothing"))


# -- the settings ------------------------------------------------------------------------------


def test_a_run_keeps_its_settings(llama, tmp_path, capsys):
    parse, run = llama.config.parse, ["--run", str(tmp_path)]
    first = parse([*run, "--dim", "64", "--untie", "--steps", "5"])
    llama.config.record(first.run, first.config)

    again = parse([*run, "--steps", "9"]).config
    assert (again.dim, again.tie, again.steps) == (64, False, 9)
    with pytest.raises(SystemExit):
        parse([*run, "--dim", "128"])
    assert "started with dim = 64, not 128" in capsys.readouterr().err


# -- the programs ------------------------------------------------------------------------------


@pytest.mark.thorough
def test_the_demo_dies_in_a_save_and_loses_nothing(llama, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(llama.story_alone, "call", call)
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
    words = ["--steps=6", "--kill-at=3", "--staging=32MiB", "--batch=4", "--accumulate=2"]
    words.append("--threads=1")  # threads that wait for each other cost what they compute
    where = ["--out", str(tmp_path / "demo"), "--data", str(EXAMPLES)]
    status = llama.demo.main([*where, *words, *sizes])
    said, errors = capfd.readouterr()
    assert status == 0, said + errors
    assert "staged yes, written" in said
    assert "committed no; now SIGKILL" in said
    assert "equal the reference in every bit" in said
    assert "durable throughput" in said

    demo = llama.story.Demo(out=tmp_path / "demo", steps=6, kill_at=3, options=())
    llama.story.compare(demo)
    last = llama.journal.read_steps(demo.run / "log.jsonl")[-1]
    other = float.fromhex(last.loss_hex) * (1 + 2**-52)
    with (demo.run / "log.jsonl").open("a") as log:
        record = {"event": "step", "step": last.step, "loss": other.hex()}
        log.write(json.dumps({**record, "step_s": 0.1, "blocked_s": 0.0}) + "\n")
    with pytest.raises(llama.story.DemoError, match="1 of 8 losses differ"):
        llama.story.compare(demo)


def logged(path: Path, losses: dict[int, float], states: dict[int, str]) -> Path:
    """A log as train.py writes it: the state of a step, then its loss."""
    records: list[dict[str, Any]] = []
    for step in sorted({*losses, *states}):
        if step in states:
            records.append({"event": "state", "step": step, "sha256": states[step]})
        if step in losses:
            loss = losses[step].hex()
            records.append({"event": "step", "step": step, "loss": loss, "step_s": 1.0,
                            "blocked_s": 0.0})  # fmt: skip
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return path


@pytest.mark.parametrize(
    ("states", "kind"),
    [
        ({0: "a", 1: "b", 2: "other"}, "OtherArithmetic"),
        ({0: "a", 1: "wrong", 2: "c"}, "DemoError"),  # the state was wrong before the loss was
        ({0: "a"}, "DemoError"),  # nobody knows
        ({}, "DemoError"),
    ],
)
def test_another_loss_from_an_equal_state_is_not_a_wrong_restore(llama, tmp_path, states, kind):
    reference = logged(tmp_path / "a", {1: 3.0, 2: 2.0}, {0: "a", 1: "b", 2: "c"})
    other = logged(tmp_path / "b", {1: 3.0, 2: 2.5}, states)
    with pytest.raises(llama.story.DemoError, match="1 of 2 losses differ") as caught:
        llama.story.same_losses(reference, other)
    assert type(caught.value).__name__ == kind


@pytest.mark.parametrize(
    ("error", "told", "status"), [("DemoError", 1, 1), ("OtherArithmetic", 3, 1), (None, 1, 0)]
)
def test_the_demo_starts_over_only_where_torch_computed_other_bits(
    llama, monkeypatch, error, told, status
):
    stories = []

    def carry_out(demo: Any) -> None:
        stories.append(demo)
        if error:
            raise getattr(llama.story, error)("as told")

    monkeypatch.setattr(llama.demo, "carry_out", carry_out)
    assert llama.demo.main(["--steps", "4"]) == status
    assert len(stories) == told


def test_the_demo_removes_nothing_but_demos(llama, tmp_path):
    (tmp_path / "thesis.tex").touch()
    demo = llama.story.Demo(out=tmp_path, steps=6, kill_at=3, options=())
    with pytest.raises(llama.story.DemoError, match="not a demo"):
        llama.story.prepare(demo)
    assert (tmp_path / "thesis.tex").exists()


@pytest.mark.thorough
def test_the_minimal_example_resumes_after_a_kill(tmp_path):
    def lines_until(wanted: str) -> list[str]:
        words = ["-c", BY_LINES, EXAMPLES / "minimal.py", tmp_path / "run"]
        with scripts.start(words, stdout=scripts.PIPE) as process:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line)
                if wanted in line:
                    break
            process.send_signal(signal.SIGKILL)
        return lines

    assert lines_until("step  12")[0] == "starting at step 0 of 60\n"
    # At most two saves are under way at a time, so at least nine steps were committed.
    resumed_at = int(lines_until("starting at")[0].split()[3])
    assert resumed_at >= 9
    shutil.rmtree(tmp_path / "run")
