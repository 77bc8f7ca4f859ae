"""The benchmark of a device, without one: what makes sense on the CPU runs for real, and the table
says what happened to every check. The figures mean nothing here.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support import benches
from support.benches import DEADLINE_S, ROOT

ONLY_CUDA = {"unsettled", "replay", "capture", "dropped", "contexts", "pinning", "dcp-process"}

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """The modules of the benchmark, by attribute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        import bench.gpu.checks
        import bench.gpu.graphs
        import bench.gpu.model
        import bench.gpu.run
        import bench.gpu.task

        yield bench.gpu


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """gpu.json of a run over all checks."""
    out = tmp_path_factory.mktemp("gpu")
    benches.run("bench.gpu", "--smoke", "--in-process", "--device", "cpu", "--out", out)
    assert sorted(each.name for each in out.iterdir()) == ["gpu.json", "gpu.md"]
    found: dict[str, Any] = json.loads((out / "gpu.json").read_text())
    found["markdown"] = (out / "gpu.md").read_text()
    return found


def _figures(whole: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for found in whole["checks"].values() for each in found}


@pytest.mark.thorough
def test_every_check_is_in_the_table(bench: Any, whole: dict[str, Any]) -> None:
    assert list(whole["checks"]) == list(bench.checks.CHECKS)
    for name, found in whole["checks"].items():
        assert found, name
        assert not {"failed", "not run"} & {each["verdict"] for each in found}, found
        assert f"| {name} |" in whole["markdown"]


@pytest.mark.thorough
def test_what_needs_cuda_is_skipped_with_a_reason(whole: dict[str, Any]) -> None:
    skipped = {
        name
        for name, found in whole["checks"].items()
        if [each["verdict"] for each in found] == ["skipped"]
    }
    assert skipped == ONLY_CUDA
    assert all(whole["checks"][name][0]["reason"] for name in skipped)


def test_targets_are_compared_with_ceilings_of_the_run(whole: dict[str, Any]) -> None:
    figures = _figures(whole)
    for tensors in (800, 20000):
        for staging in ("given", "chosen"):
            name = f"{tensors} tensors, staging {staging}"
            ratio = figures[f"{name}: staged / D2H"]
            ceiling = figures["D2H pinned, 16 MiB pieces"]["value"]
            staged = figures[f"{name}: staged"]["value"]
            assert ratio["value"] == pytest.approx(staged / ceiling)
            assert ratio["verdict"] == ("reached" if ratio["value"] >= 0.9 else "missed")
            assert figures[f"{name}: blocked"]["verdict"] in ("reached", "missed")
    assert figures["restore, cold / smaller of disk and H2D"]["expected"] == "at least 0.9"
    assert figures["statehold, device-bound steps: saving / plain"]["expected"] == "at most 1.03"
    assert figures["DCP, thread, device-bound steps: saving / plain"]["verdict"] == "measured"


def test_what_must_be_right_is_right(whole: dict[str, Any]) -> None:
    figures = _figures(whole)
    for name in (
        "restore, cold: wrong tensors",
        "restore, warm: wrong tensors",
        "statehold: wrong tensors after a restore",
        "DCP, thread: wrong tensors after a restore",
        "two optimizers on two streams: wrong tensors",
        "wrong fingerprints, trainer on a side stream",
    ):
        assert figures[name]["verdict"] == "reached", figures[name]


def test_the_facts_of_the_machine_are_in_the_table(whole: dict[str, Any]) -> None:
    expected = {"command", "cpu", "kernel", "io", "huge_pages", "numa_nodes", "versions", "commit"}
    assert expected <= whole["facts"].keys()
    assert whole["facts"]["command"].startswith("python -m bench.gpu --smoke")
    assert whole["facts"]["state_bytes"] == whole["facts"]["asked_bytes"]


# -- checks that do not end well, in runs of their own ---------------------------------------------


def _raises(_: Any) -> Iterator[Any]:
    from bench.gpu import figures

    yield figures.measured("before", 1.0, "GB/s")
    raise ValueError("no | such\ndevice")


def _misses(task: Any) -> Iterator[Any]:
    from bench.gpu import figures

    yield figures.at_most("too slow", 6.0, 5.0, "ms")
    yield figures.at_least("fast", 0.95, 0.9)
    yield figures.equal("wrong", "torn", "right", "refused")
    yield task.of_ceiling("half of it", 0.5, "before", 0.9)
    yield task.of_ceiling("of nothing", 0.5, "never measured", 0.9)


def _run(bench: Any, patch: pytest.MonkeyPatch, out: Path, *words: str, **checks: Any) -> Any:
    entries = {name: bench.checks.Entry(check) for name, check in checks.items()}
    patch.setattr(bench.run, "CHECKS", entries)
    smoke = ["--smoke", "--in-process", "--device", "cpu", "--out", str(out), *words]
    return bench.run.main(smoke), json.loads((out / "gpu.json").read_text())


def test_a_check_that_raises_is_recorded_and_the_next_one_runs(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, whole = _run(bench, monkeypatch, tmp_path, bad=_raises, next=_misses)
    assert status == 1
    before, failure = whole["checks"]["bad"]
    assert (before["verdict"], before["value"]) == ("measured", 1.0)
    assert (failure["verdict"], failure["reason"]) == ("failed", "ValueError: no | such\ndevice")
    verdicts = {each["name"]: each["verdict"] for each in whole["checks"]["next"]}
    assert verdicts == {
        "too slow": "missed",
        "fast": "reached",
        "wrong": "missed",
        "half of it": "missed",
        "of nothing": "skipped",
    }
    assert whole["counts"] == {"measured": 1, "failed": 1, "missed": 3, "reached": 1, "skipped": 1}
    shown = (tmp_path / "gpu.md").read_text()
    assert "1 reached, 3 missed, 1 failed, 1 skipped, 0 not run." in shown
    assert "| bad | bad | ValueError: no / such device |  |  | FAILED |" in shown
    assert "| next | too slow | 6 | ms | at most 5 | MISSED |" in shown


def test_a_target_that_is_missed_is_no_failure(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, whole = _run(bench, monkeypatch, tmp_path, it=_misses)
    assert status == 0
    assert whole["counts"]["missed"] == 2


def test_the_table_is_there_while_checks_run(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is cut off keeps what it had: the second check reads what the first one has left."""
    seen: list[Any] = []

    def reads(_: Any) -> Iterator[Any]:
        seen.append(json.loads((tmp_path / "gpu.json").read_text()))
        yield from _misses(_)

    _run(bench, monkeypatch, tmp_path, first=_raises, second=reads)
    [then] = seen
    assert [each["name"] for each in then["checks"]["first"]] == ["before", "first"]
    assert then["checks"]["second"][0]["verdict"] == "not run"


def test_checks_are_left_out_when_the_time_is_up(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, whole = _run(bench, monkeypatch, tmp_path, "--seconds", "0", bad=_raises)
    assert status == 0
    [left_out] = whole["checks"]["bad"]
    assert (left_out["verdict"], left_out["reason"]) == ("not run", "the time of the run was up")


@pytest.mark.parametrize(
    ("words", "deadline_s", "reason"),
    [
        (["-c", "import signal; signal.pause()"], 1.0, "did not end in 1 s"),
        (["-c", "import os; os.abort()"], DEADLINE_S, "its process ended with -6: see checks.log"),
    ],
)
def test_a_process_that_hangs_or_dies_is_recorded(
    bench: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    deadline_s: float,
    reason: str,
) -> None:
    """With the figures that it had written, and with nothing of it left behind."""
    options = bench.run.parse(["--smoke", "--device", "cpu", "--out", str(tmp_path)])
    started: list[int] = []
    popen = subprocess.Popen

    def starts(command: list[str], **settings: Any) -> Any:
        figure = (
            '{"name": "before", "value": 1.0, "unit": "", "expected": "", "verdict": "measured"}'
        )
        Path(command[-1]).write_text(figure + "\n")
        process = popen([command[0], *words], **settings)
        started.append(process.pid)
        return process

    monkeypatch.setattr(bench.run.subprocess, "Popen", starts)
    runner = bench.run.Runner(options, 1 << 20, tmp_path)
    before, failure = runner.run("bad", bench.checks.Entry(_raises, deadline_s=deadline_s))
    assert (before.value, failure.verdict) == (1.0, "failed")
    assert reason in failure.reason
    assert runner.found == {"before": 1.0}
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)


# -- what needs CUDA, with functions in its place that do nothing ----------------------------------


class _Nothing:
    """A stream, a graph, or the capture of one."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...
    def wait_stream(self, _: Any) -> None: ...
    def capture_begin(self) -> None: ...
    def capture_end(self) -> None: ...
    def replay(self) -> None: ...


class _Runtime:
    """It refuses no memory, and has a count of what is pinned."""

    def __init__(self) -> None:
        self.pinned = 0

    def cudaHostRegister(self, _address: int, _nbytes: int, _flags: int) -> int:
        self.pinned += 1
        return 0

    def cudaHostUnregister(self, _address: int) -> int:
        self.pinned -= 1
        return 0


@pytest.fixture
def runtime(bench: Any, monkeypatch: pytest.MonkeyPatch) -> _Runtime:
    import torch

    runtime = _Runtime()
    for name in ("Stream", "stream", "CUDAGraph", "graph", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, _Nothing)
    monkeypatch.setattr(torch.accelerator, "Graph", _Nothing, raising=False)
    for name in ("synchronize", "set_device"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda _: True, raising=False)
    monkeypatch.setattr(bench.task.Task, "need_cuda", lambda *_: None)
    return runtime


def _found(bench: Any, name: str, directory: Path, device: str = "cpu") -> dict[str, Any]:
    task = bench.task.Task(name, device, str(directory), 2 << 20, is_smoke=True)
    return {each.name: each for each in bench.checks.CHECKS[name].run(task)}


def test_replays_that_change_nothing_prove_nothing(
    bench: Any, runtime: _Runtime, tmp_path: Path
) -> None:
    found = _found(bench, "replay", tmp_path)
    assert found["replay of a captured update while saving"].value == "right bytes"
    assert found["the replays took place"].verdict == "missed"
    assert found["the replays took place, accelerator.Graph"].verdict == "missed"


def test_a_refused_save_is_right_and_a_torn_one_is_not(
    bench: Any, runtime: _Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from statehold.checkpoint.checkpointer import Checkpointer
    from statehold.errors import TornSnapshot

    save = Checkpointer.save

    def refusing(self: Checkpointer, step: int, state: Any) -> Any:
        def wait(*_: Any) -> None:
            raise TornSnapshot("the state has changed")

        return SimpleNamespace(wait=wait)

    @torch.no_grad()
    def tearing(self: Checkpointer, step: int, state: Any) -> Any:
        state["model"][0][-1] += 1
        return save(self, step, state)

    name = "replay of a captured update while saving"
    for saving, value, verdict in (
        (refusing, "refused", "reached"),
        (tearing, "WRONG BYTES", "missed"),
    ):
        monkeypatch.setattr(Checkpointer, "save", saving)
        found = _found(bench, "replay", tmp_path / saving.__name__)
        assert (found[name].value, found[name].verdict) == (value, verdict)


def test_captures_and_contexts_and_pins_are_told(
    bench: Any, runtime: _Runtime, tmp_path: Path
) -> None:
    captures = _found(bench, "capture", tmp_path / "capture")
    assert [each.verdict for each in captures.values()] == ["reached"] * 4
    [contexts] = _found(bench, "contexts", tmp_path / "contexts").values()
    assert (contexts.value, contexts.verdict) == (1, "missed")
    dropped = _found(bench, "dropped", tmp_path / "dropped")
    assert dropped["pinned before it was dropped"].verdict == "missed"  # it was no device
    assert dropped["still pinned after it was dropped"].verdict == "reached"
    pins = _found(bench, "pinning", tmp_path)
    assert pins["pinning cold memory, 16 MiB a call"].value > 0
    assert runtime.pinned == 0


def test_the_facts_name_the_device(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    properties = SimpleNamespace(name="A Device", total_memory=80e9, pci_bus_id=0x1B)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    found = _found(bench, "facts", tmp_path, device="cuda")
    assert found["device"].value == "A Device"
    assert found["device memory"].value == 80.0
    assert found["NUMA node of the device"].value == "unknown"


def test_ceilings_run_with_the_checks_that_need_them(bench: Any) -> None:
    def parse(words: list[str]) -> Any:
        return bench.run.parse(["--device", "cpu", *words])

    chosen = bench.run.chosen
    assert list(chosen(parse(["--only", "save-few"]))) == ["transfers", "disk", "save-few"]
    assert list(chosen(parse(["--only", "memory"]))) == ["memory"]
    assert "dcp-thread" not in chosen(parse(["--peers"]))
    assert {"dcp-thread", "dcp-process"} <= chosen(parse([])).keys()
    with pytest.raises(SystemExit):
        parse(["--only", "nonsense"])
    with pytest.raises(SystemExit):
        parse(["--in-process"])


def test_a_machine_without_a_device_is_told(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        bench.run.parse([])
    assert "finds no CUDA device here; --smoke --device cpu" in capsys.readouterr().err


def test_the_content_of_the_model_shows_a_wrong_byte(bench: Any) -> None:
    import torch

    trained = bench.model.Trained(torch.device("cpu"), 8, 9600)
    assert len(trained.tensors()) == 8
    assert trained.total_bytes() == 9600 + 2 * 4  # two parameters, with a `step` each
    trained.fill(3)
    assert trained.difference(3) == ""
    assert trained.difference(4) == "0"
    trained.tensors()["1.exp_avg"][-1] += 1
    assert trained.difference(3) == "1.exp_avg"


def test_a_state_is_made_to_fit(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    cpu = torch.device("cpu")
    monkeypatch.setattr(bench.run.harness, "available_memory", lambda: 1000)
    assert bench.run.fitting(100, tmp_path, cpu) == 100
    assert bench.run.fitting(10**9, tmp_path, cpu) == 400
