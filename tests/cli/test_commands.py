"""ls, show, diff, prune and doctor: what they print, JSON, exit codes, and what they import."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from statehold.cli import main, numbers
from statehold.errors import UsageError
from statehold.format.entries import About
from statehold.steps.lock import RunLock
from support.runs import arrays_of, write_step

Ask = Callable[..., tuple[int, Any]]
Say = Callable[..., tuple[int, str]]

LS = """\
STEP  STATE      CREATED               RANKS  FILES     BYTES  WRITER
   7  committed  2026-11-21T07:30:00Z      1      2  11.6 KiB  statehold 0.1.0
   8  committed  2026-11-21T07:30:00Z      1      2     5 KiB  statehold 0.1.0
"""
SHOW = """\
step 8 in TMP/golden/step-000000000008
saved 2026-11-21T07:30:00Z by statehold 0.1.0, 1 rank, format 1
3 tensors, 12 B: 1 F6_E2M3 (6 B), 1 F6_E3M2 (3 B), 1 F4 (3 B)
2 files, 5 KiB

TENSOR        DTYPE    SHAPE   BYTES  LAYOUT  RANKS
rare.F6_E2M3  F6_E2M3  [4, 2]    6 B  whole   0
rare.F6_E3M2  F6_E3M2  [4]       3 B  whole   0
rare.F4       F4       [3, 2]    3 B  whole   0
"""
SHOW_TENSOR = """\
model.weight  F32 [20, 30]  2.34 KiB  whole, ranks 0

OFFSETS  SHAPE     FILE                             BYTES
[0, 0]   [20, 30]  rank-00000-of-00001.safetensors  [4136, 6536)

STATISTIC  IS
count      600
finite     600
zeros      1
nan        0
inf        0
min        0
max        599
mean       299.5
std        173.20484
"""
SHOW_SHARED = """\
TENSOR      DTYPE  SHAPE   BYTES  LAYOUT                RANKS
sharded     I64    [6, 4]  192 B  dim 0 / 2, dim 1 / 2  0-3
uneven      I16    [5]      10 B  dim 0 / 4             0-3
replicated  F64    [3]      24 B  whole x 4 copies      0-3
free        U8     [8]       8 B  3 boxes               0-3
own         I64    [2]      16 B  each rank its own     0-3

VALUE  IS
epoch  3
seed   {"ranks differ": "0 on 0; 1 on 1; 2 on 2; 3 on 3"}
"""
DIFF = """\
TENSOR        DTYPE  SHAPE     DIFFERING   OF  MAX ABS
model.weight  F32    [20, 30]        599  600  599

VALUE  A  B
epoch  1  2
different: 5 tensors and 2 values compared; different: 1 tensor and 1 value
"""
PRUNE = """\
GOES       BYTES
step 1  7.68 KiB
7.68 KiB in all; steps that stay: 2
nothing was changed; pass --yes to delete them
"""


def test_ls(golden: Path, say: Say) -> None:
    code, text = say("ls", golden)
    assert code == 0
    assert text == LS


def test_ls_lists_what_is_not_a_step(run: Path, ask: Ask, say: Say) -> None:
    for name in ("step-000000000003.partial", "step-000000000000.corrupt", ".spare", ".ready",
                 "step-000000000004.5f3a09c1-7.partial", "notes"):  # fmt: skip
        (run / name).mkdir()
    (run / "step-000000000001" / "manifest.json").write_text("{}")
    code, document = ask("ls", run)
    assert code == 1
    assert document.keys() == {"run", "steps", "other"}
    assert [step["state"] for step in document["steps"]] == ["damaged", "committed"]
    assert document["steps"][1].keys() == {
        "step", "path", "state", "bytes", "files", "created", "world_size", "version", "writer",
        "metrics", "tags",
    }  # fmt: skip
    assert {each["name"]: each["kind"] for each in document["other"]} == {
        ".ready": "spare",
        ".spare": "spare",
        "step-000000000000.corrupt": "corrupt",
        "step-000000000003.partial": "partial",
        "step-000000000004.5f3a09c1-7.partial": "partial",
    }
    assert "being written, or left by a crash" in say("ls", run)[1]


def test_ls_has_a_column_for_each_metric(tmp_path: Path, say: Say) -> None:
    for number, loss in enumerate((3.0, 1.5, 2.0, float("nan")), 1):
        tags = ("best-yet",) if number == 2 else ()
        write_step(tmp_path, number, {}, About({"val_loss": loss, "STEP": 7.0}, tags))
    write_step(tmp_path, 5, {})
    header, *rows, foot = say("ls", tmp_path)[1].splitlines()
    assert header.split()[:5] == ["STEP", "STATE", "val_loss", "STEP", "tags"]
    assert [row.split()[2] for row in rows] == ["3^", "1.5*", "2", "nan", "-"]
    assert [row.split()[3] for row in rows] == ["7", "7", "7", "7", "-"]  # nothing to compare
    assert rows[1].split()[4] == "#best-yet"
    assert foot == "* the least of its column, ^ the greatest"


def test_show(golden: Path, run: Path, shared: Path, say: Say) -> None:
    code, text = say("show", golden)
    assert code == 0
    assert text == SHOW
    assert say("show", f"{run}@1", "model.weight") == (0, SHOW_TENSOR)
    code, text = say("show", shared, "--values")
    assert code == 0
    assert text.split("\n\n", 1)[1] == SHOW_SHARED


def test_show_json(run: Path, shared: Path, ask: Ask) -> None:
    code, document = ask("show", run, "--values")
    assert code == 0
    assert document.keys() == {
        "step", "path", "created", "writer", "version", "world_size", "attempt", "files", "bytes",
        "tensor_bytes", "dtypes", "tensors", "values", "metrics", "tags",
    }  # fmt: skip
    assert document["values"] == {"epoch": 2, "name": "x"}
    code, document = ask("show", run, "model.bias")
    assert document.keys() == {
        "name", "dtype", "shape", "bytes", "layout", "ranks", "versions", "chunks", "statistics"
    }  # fmt: skip
    assert document["statistics"] == {
        "count": 4, "finite": 3, "zeros": 1, "nan": 1, "inf": 0, "min": -2.0, "max": 1.0,
        "mean": pytest.approx(-1 / 3), "std": pytest.approx(1.247219128924647),
    }  # fmt: skip
    for name, count, largest in (("sharded", 24, 23), ("uneven", 5, 4), ("free", 8, 7)):
        statistics = ask("show", shared, name)[1]["statistics"]
        assert (statistics["count"], statistics["max"]) == (count, largest)


def test_show_of_a_rank(shared: Path, ask: Ask, say: Say) -> None:
    code, text = say("show", shared, "own")
    assert code == 2
    assert "several ranks saved different tensors" in text
    assert ask("show", shared, "own", "--rank", 2)[1]["statistics"]["min"] == 2
    assert say("show", shared, "--rank", 4)[0] == 2


def test_show_of_a_tensor_without_numbers(golden: Path, ask: Ask) -> None:
    code, document = ask("show", golden, "rare.F4")
    assert (code, document["statistics"]) == (0, None)


def test_show_of_what_is_not_there(run: Path, say: Say) -> None:
    code, text = say("show", run, "model.wieght")
    assert code == 3
    assert "did you mean model.weight" in text


@pytest.mark.parametrize(("name", "near"), [("modle", "model?"), ("weight", "model.weight?")])
def test_show_names_what_is_near(run: Path, say: Say, name: str, near: str) -> None:
    code, text = say("show", str(run), name)
    assert code == 3
    assert f"did you mean {near}" in text


@pytest.mark.parametrize("chosen", ["model", "model.*", "*.[wb]e*"])
def test_show_of_a_part(run: Path, ask: Ask, say: Say, chosen: str) -> None:
    document = ask("show", run, chosen, "--values")[1]
    names = [tensor["name"] for tensor in document["tensors"]]
    assert set(names) == {"model.weight", *([] if "[" in chosen else ["model.bias"])}
    assert document["tensor_bytes"] == sum(tensor["bytes"] for tensor in document["tensors"])
    assert "epoch" not in document["values"]
    assert f"{len(names)} tensor" in say("show", run, chosen)[1]
    assert list(ask("show", run, "epoch", "--values")[1]["values"]) == ["epoch"]


@pytest.mark.parametrize("chosen", ["epoch", "epo*"])
def test_show_of_a_value_needs_no_option(run: Path, ask: Ask, say: Say, chosen: str) -> None:
    code, document = ask("show", run, chosen)
    assert (code, document["tensors"], document["values"]) == (0, [], {"epoch": 2})
    code, text = say("show", run, chosen)
    assert (code, text.splitlines()[-1].split()) == (0, ["epoch", "2"])
    assert "0 tensors" not in text
    assert "values" not in ask("show", run, "*e*")[1]  # tensors, too: as without a name
    code, text = say("show", run, "epohc")
    assert (code, "no such tensor or value" in text, "did you mean epoch?" in text) == (3, 1, 1)


def test_a_long_list_ends_with_what_it_began_with(tmp_path: Path, say: Say) -> None:
    write_step(tmp_path, 1, {f"w{i}": ("F32", np.zeros(1, "<f4")) for i in range(31)})
    lines = say("show", tmp_path)[1].splitlines()
    assert lines[-1] == lines[2]
    assert lines[-1].startswith("31 tensors, 124 B")


def test_diff_of_a_part(run: Path, ask: Ask, say: Say) -> None:
    code, document = ask("diff", f"{run}@1", "@2", "model.w*")
    assert (code, document["compared"], document["values"]) == (1, 1, [])
    code, document = ask("diff", f"{run}@1", "@2", "model.bias")
    assert (code, document["compared"]) == (0, 1)
    assert ask("diff", f"{run}@1", "@2", "epoch")[1]["values"][0]["path"] == "epoch"
    code, text = say("diff", f"{run}@1", "@2", "nothing.*")
    assert code == 3
    assert "neither step has such a tensor" in text


def test_a_step_is_no_run(run: Path, say: Say) -> None:
    step = next(run.glob("step-*"))
    code, text = say("ls", str(step))
    assert code == 3
    assert f"run@{int(step.name[5:])}" in text


def test_options_of_object_stores_need_levels(run: Path, say: Say) -> None:
    code, text = say("ls", str(run), "--option", "endpoint=x")
    assert code != 0
    assert "pass --levels, too" in text


def test_show_of_damaged_bytes(run: Path, say: Say) -> None:
    data = run / "step-000000000002" / "rank-00000-of-00001.safetensors"
    raw = bytearray(data.read_bytes())
    raw[5000] ^= 1
    data.write_bytes(raw)
    code, text = say("show", run, "model.weight")
    assert code == 1
    assert "do not match their checksum" in text
    assert say("show", run, "model.bias")[0] == 0


def test_diff(run: Path, say: Say) -> None:
    assert say("diff", f"{run}@1", f"{run}@2") == (1, DIFF)
    assert say("diff", f"{run}@1", "@2") == (1, DIFF)
    assert say("diff", f"{run}@1", run / "step-000000000001")[0] == 0


def test_diff_of_a_value_says_that_a_value_was_compared(run: Path, say: Say) -> None:
    code, text = say("diff", f"{run}@1", "@2", "epoch")
    assert code == 1
    assert text.splitlines()[-1] == (
        "different: 0 tensors and 1 value compared; different: 0 tensors and 1 value"
    )


def test_diff_json(run: Path, ask: Ask) -> None:
    code, document = ask("diff", f"{run}@1", "@2")
    assert code == 1
    assert document.keys() == {
        "a", "b", "equal", "only_in_a", "only_in_b", "tensors", "values", "not_compared",
        "compared", "compared_values", "read_bytes",
    }  # fmt: skip
    assert document["tensors"] == [
        {"name": "model.weight", "dtype": "F32", "shape": [20, 30], "elements": 600,
         "differing": 599, "max_abs": 599.0},
    ]  # fmt: skip
    assert document["read_bytes"] == 2 * 2400  # the others are known to be equal


def test_diff_of_names_shapes_and_kinds(run: Path, ask: Ask) -> None:
    arrays = arrays_of()
    arrays["count"] = ("I32", np.array(7, "<i4"))
    arrays["mask"] = ("BOOL", np.array([True, False]))
    arrays["new"] = arrays.pop("model.bias")
    write_step(run, 3, arrays, epoch=True, extra={})
    _, document = ask("diff", f"{run}@1", "@3")
    assert (document["only_in_a"], document["only_in_b"]) == (["model.bias"], ["new"])
    found = {tensor["name"]: tensor for tensor in document["tensors"]}
    assert found.keys() == {"count", "mask"}
    assert found["count"]["dtype"] == {"a": "I64", "b": "I32"}
    assert found["mask"]["shape"] == {"a": [3], "b": [2]}
    assert {each["path"]: each for each in document["values"]} == {
        "epoch": {"path": "epoch", "a": 1, "b": True},
        "name": {"path": "name", "a": "x"},
        "extra": {"path": "extra", "b": {}},
    }


def test_diff_of_other_layouts(
    shared: Path, tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of four ranks and one of one rank with the same tensors, but for two elements."""
    monkeypatch.setattr("statehold.cli.numbers.PART_BYTES", 40)
    sharded = np.arange(24).reshape(6, 4)
    sharded[2, 3] += 100
    sharded[5, 0] -= 1
    arrays = {
        "sharded": ("I64", sharded),
        "uneven": ("I16", np.arange(5, dtype="<i2")),
        "replicated": ("F64", np.arange(3.0)),
        "free": ("U8", np.arange(8, dtype="u1")),
        "own": ("I64", np.array([0, 5])),
    }
    write_step(tmp_path / "one", 7, arrays)
    code, document = ask("diff", shared, tmp_path / "one")
    assert code == 1
    assert [(each["name"], each["differing"], each["max_abs"]) for each in document["tensors"]] == [
        ("sharded", 2, 100.0)
    ]
    assert [each["name"] for each in document["not_compared"]] == ["own"]
    code, document = ask("diff", shared, shared)
    assert (code, document["equal"], document["read_bytes"]) == (4, True, 0)
    assert ask("diff", shared, shared, "--rank", 1)[0] == 0


def test_diff_of_other_grids(tmp_path: Path, ask: Ask) -> None:
    """Pieces of equal number and checksum, but not of the same elements."""
    zeros, one = np.zeros(5 << 19, "u1"), np.zeros(5 << 19, "u1")
    one[(2 << 20) - 6000] = 1
    write_step(tmp_path / "a", 1, {"w": ("U8", zeros)})
    write_step(tmp_path / "b", 1, {"before": ("F64", np.zeros(512)), "w": ("U8", one)})
    _, document = ask("diff", tmp_path / "a", tmp_path / "b")
    assert [(each["name"], each["differing"]) for each in document["tensors"]] == [("w", 1)]


def test_prune(run: Path, say: Say, ask: Ask) -> None:
    code, text = say("prune", run, "--keep", 1)
    assert code == 0
    assert text == PRUNE
    assert len(list(run.glob("step-*"))) == 2
    code, document = ask("prune", run, "--keep", 1, "--yes")
    assert code == 0
    assert document.keys() == {"run", "keep", "damaged", "retire", "leftovers", "bytes", "done"}
    assert [path.name for path in run.glob("step-*")] == ["step-000000000002"]
    code, _ = say("prune", run, "--keep", 5, "--yes")
    assert code == 0
    assert [path.name for path in run.glob("step-*")] == ["step-000000000002"]


def test_prune_does_not_count_a_damaged_step(run: Path, say: Say, ask: Ask) -> None:
    manifest = run / "step-000000000002" / "manifest.json"
    manifest.write_bytes(b"x\n")
    code, document = ask("prune", run, "--keep", 1)
    assert code == 0
    assert (document["keep"], document["damaged"], document["retire"]) == ([1, 2], [2], [])
    code, text = say("prune", run, "--keep", 1, "--yes")
    assert code == 0
    assert "damaged, or of a newer format, do not count and stay: 2" in text
    assert (run / "step-000000000001").exists()
    assert manifest.exists()


@pytest.mark.parametrize("pin", ["0002", "2", "99999999999999"])
def test_a_pin_of_digits_is_a_step_or_a_tag(tmp_path: Path, ask: Ask, pin: str) -> None:
    for step in range(1, 5):
        write_step(tmp_path / "run", step, {}, About(tags=(pin,) if step == 1 else ()))
    code, document = ask("prune", tmp_path / "run", "--keep", 1, "--pin", pin, "--yes")
    kept = [1, 4] if len(pin) > 12 else [1, 2, 4]
    assert (code, document["keep"]) == (0, kept)
    for other in ("77", "0" * 20, "other"):  # neither a step nor a tag: nothing is deleted
        assert ask("prune", tmp_path / "run", "--keep", 1, "--pin", other, "--yes")[0] == 3
    assert ask("ls", tmp_path / "run")[1]["steps"][0]["step"] == 1


def test_prune_of_leftovers(run: Path, ask: Ask) -> None:
    names = ["step-000000000003.partial", ".spare", "step-000000000000.corrupt"]
    for name in names:
        (run / name).mkdir()
    _, document = ask("prune", run, "--keep", 2, "--yes")
    assert document["leftovers"] == []
    assert all((run / name).exists() for name in names)
    _, document = ask("prune", run, "--keep", 2, "--leftovers", "--yes")
    assert sorted(each["name"] for each in document["leftovers"]) == sorted(names[:2])
    assert [(run / name).exists() for name in names] == [False, False, True]


def test_prune_waits_for_nobody(run: Path, say: Say) -> None:
    lock = RunLock(str(run))
    try:
        code, text = say("prune", run, "--keep", 1, "--yes")
    finally:
        lock.release()
    assert code == 4
    assert "already saving into" in text
    assert len(list(run.glob("step-*"))) == 2
    assert say("prune", run, "--keep", 0)[0] == 2


LEFT_ON_HOST = ("memory of runs", "brought near")


def test_doctor(tmp_path: Path, ask: Ask, say: Say) -> None:
    code, document = ask("doctor", tmp_path)
    assert code == 0
    assert document.keys() == {"path", "healthy", "checks"}
    # This test ignores what other jobs have left on this host.
    names = [each["name"] for each in document["checks"] if each["name"] not in LEFT_ON_HOST]
    assert names == [
        "system", "cores", "torch", "numpy", "backend", "kernel.io_uring_disabled",
        "memory", "locked memory", "open files", "file system", "free space", "I/O profile",
        "O_DIRECT", "F_SETLEASE", "renameat2 exchange", "fsync of a directory", "locks",
    ]  # fmt: skip
    assert all(check.keys() == {"name", "value", "ok", "means"} for check in document["checks"])
    assert list(tmp_path.iterdir()) == []
    assert "WHAT STATEHOLD DOES" in say("doctor", tmp_path)[1]
    assert say("doctor", tmp_path / "nowhere")[0] == 3


def test_doctor_where_nothing_can_be_saved(ask: Ask) -> None:
    code, document = ask("doctor", "/proc")
    assert (code, document["healthy"]) == (1, False)
    names = [each["name"] for each in document["checks"] if each["name"] not in LEFT_ON_HOST]
    assert names[-1] == "writing"


def test_without_numpy(run: Path, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    code, text = say("show", run, "model.weight")
    assert code == 2
    assert "pip install numpy" in text
    with pytest.raises(UsageError):
        numbers.numpy()
    assert say("show", run)[0] == say("verify", run)[0] == say("ls", run)[0] == 0


@pytest.mark.parametrize(
    "words",
    [
        "export {run} {run}-out --to hf",
        "export {run}/nowhere {run}-out --to hf",
        "import {run} {run}-in@1",
        "import {run}/nowhere {run}-in@1",
    ],
)
def test_torch_is_asked_for(run: Path, words: str) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from statehold.cli import main; "
        "sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, *words.format(run=run).split()]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert f"{words.split()[0]} needs PyTorch" in ended.stderr
    assert "pip install torch" in ended.stderr


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("export {run} {run}-out --to jpeg", 2),
        ("export {run}/nowhere {run}-out --to hf", 3),
        ("export {run}@77 {run}-out --to hf", 3),
        ("export {run} {run} --to hf", 2),
        ("import {run}/nowhere {run}-in@1", 3),
        ("import {run} {run}-in", 2),
    ],
)
def test_a_refusal_loads_no_torch(run: Path, words: str, code: int) -> None:
    ask = (
        "import sys; from statehold.cli import main\n"
        "try: code = main(sys.argv[1:])\n"
        "except SystemExit as left: code = left.code\n"
        "print(code, len([name for name in sys.modules if name.split('.')[0] == 'torch']))"
    )
    command = [sys.executable, "-c", ask, *words.format(run=run).split()]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.stdout.split() == [str(code), "0"], ended.stderr


def test_names_cannot_move_the_cursor(run: Path, say: Say) -> None:
    write_step(run, 3, {"a\x1b[2Jb": ("U8", np.zeros(1, "u1"))})
    _, text = say("show", run)
    assert "\x1b" not in text
    assert "a\\x1b[2Jb" in text


@pytest.mark.parametrize("words", ["", "nonsense", "ls", "prune x", "show x --rank x"])
def test_usage(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(words.split())
    assert left.value.code == 2
    capsys.readouterr()


@pytest.mark.thorough
@pytest.mark.parametrize("command", ["ls", "show", "verify", "diff", "prune", "doctor", "bench"])
def test_nothing_imports_torch(command: str, run: Path) -> None:
    """NumPy only where there is something to compute."""
    words = {
        "diff": [f"{run}@1", "@2"],
        "prune": [str(run), "--keep", "9"],
        "bench": ["io", str(run), "--no-profile", "--size", "1MiB", "--seconds", "1"],
    }.get(command, [str(run)])
    code = (
        "import sys; from statehold.cli import main; main(sys.argv[1:]); "
        "print(sorted({'torch', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, command, *words], capture_output=True, text=True, check=False
    )
    assert done.stderr.strip() == ("['numpy']" if command == "diff" else "[]"), done.stderr


def test_as_a_module(run: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "statehold", "ls", str(run / "nowhere")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (3, "")
    assert "no such run directory" in done.stderr
