"""Every block of Python in the documents runs as it stands, and then once more, as a restart would.

A block runs in a directory of its own. What it uses and does not define comes from a preamble: that
of its heading, or `training`. The second time everything is made anew, with another seed, but for
the directory that the first time left behind.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import runpy
import subprocess
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import statehold
from statehold.resilience import replicas
from statehold.resilience.control import Server
from statehold.resilience.protocol.coordinator import Coordinator
from support import fourbit, frameworks, s3
from support.documents import Block, blocks, docstring_block

stateful = pytest.importorskip("torchdata.stateful_dataloader")

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/*/README.md"),
                    *ROOT.glob("*/README.md")])  # fmt: skip
BLOCKS = [each for path in DOCUMENTS for each in blocks(path)]
PYTHON = [each for each in BLOCKS if each.is_python]
TRAINING = next(each for each in PYTHON if each.path.name == "guide.md")
INIT = docstring_block(ROOT / "src/statehold/__init__.py")
RUN = "runs/llama"  # where the documents train

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]


# -- preambles: what the blocks use and do not define ---------------------------------------------


@contextlib.contextmanager
def training(seed: int) -> Iterator[dict[str, Any]]:
    """The training with which the guide begins. It notes its losses."""
    torch.manual_seed(seed)
    names: dict[str, Any] = {"losses": []}
    exec(compiled(TRAINING), names)
    train = names["train_step"]
    names["train_step"] = lambda *batch: names["losses"].append(train(*batch))
    yield names


@contextlib.contextmanager
def opened(seed: int) -> Iterator[dict[str, Any]]:
    """The same, and a Checkpointer of a run that has a step."""
    with training(seed) as names, statehold.Checkpointer(RUN, keep=3) as ckpt:
        if ckpt.restore(names["state"]) is None:
            ckpt.save(1, names["state"]).wait("committed")
        names["ckpt"] = ckpt
        yield names


@contextlib.contextmanager
def saved(seed: int) -> Iterator[dict[str, Any]]:
    """The training, and a run that has a step."""
    with opened(seed):
        pass
    with training(seed) as names:
        yield names


@contextlib.contextmanager
def subscribed(seed: int) -> Iterator[dict[str, Any]]:
    """A run that has a step, and an evaluation that ends the loop over updates."""
    with opened(seed) as names:
        real = statehold.subscribe

        def subscribe(*arguments: Any) -> statehold.Subscription:
            updates = real(*arguments)
            names["evaluate"] = lambda model: updates.close()
            return updates

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(statehold, "subscribe", subscribe)
            yield names


@contextlib.contextmanager
def qlora(seed: int) -> Iterator[dict[str, Any]]:
    """The training, of a model with a frozen 4-bit layer below a trained one."""
    with training(seed) as names:
        frozen = fourbit.Linear4bit(8, 8, bias=False).to("cpu")
        names["model"] = nn.Sequential(nn.Linear(8, 8), frozen)
        yield names


@contextlib.contextmanager
def first_run(seed: int) -> Iterator[dict[str, Any]]:
    """The run of the tutorial."""
    with training(seed) as names:
        with statehold.Checkpointer("runs/first", keep=1) as ckpt:
            ckpt.save((ckpt.restore({"model": names["model"]}) or 0) + 1, {"model": names["model"]})
        yield names


@contextlib.contextmanager
def stock(seed: int) -> Iterator[dict[str, Any]]:
    """Checkpoints that torch itself has written: a file, and a directory of its dcp."""
    import torch.distributed.checkpoint as dcp

    with training(seed) as names:
        state = {"model": names["model"].state_dict(), "step": 3}
        state["optim"] = names["optimizer"].state_dict()
        if not Path("old").exists():
            dcp.save(state, checkpoint_id="old/step-100", no_dist=True)
            torch.save(state, "old/step-100.pt")
        yield names


@contextlib.contextmanager
def coordinated(seed: int) -> Iterator[dict[str, Any]]:
    """A job of one replica has a coordinator."""
    torch.manual_seed(seed)
    server = Server(Coordinator(1), "127.0.0.1", 0, lambda event: None)
    thread = threading.Thread(target=server.serve)
    thread.start()
    os.environ[replicas.ENVIRONMENT] = f"127.0.0.1:{server.port}"
    try:
        yield {}
    finally:
        del os.environ[replicas.ENVIRONMENT]
        server.stop()
        thread.join()
        server.close()


PREAMBLES: dict[tuple[str, str], Callable[[int], AbstractContextManager[dict[str, Any]]]] = {
    ("guide.md", "QLoRA"): qlora,
    ("guide.md", "Restoring"): saved,
    ("dcp.md", "Restoring what others wrote"): stock,
    ("integrations.md", "The Trainer of transformers"): frameworks.trainer,
    ("integrations.md", "TRL, and trainers of your own"): frameworks.trainer,
    ("integrations.md", "Adapters"): frameworks.adapters,
    ("integrations.md", "Accelerate"): frameworks.accelerated,
    ("integrations.md", "The Trainer of Lightning"): frameworks.lit,
    ("integrations.md", "Lightning Fabric"): frameworks.lit,
    ("integrations.md", "DeepSpeed"): frameworks.zero,
    ("in_and_out.md", "Load tensors of one step"): opened,
    ("in_and_out.md", "Look at steps"): opened,
    ("incremental.md", "Publish steps to another process"): subscribed,
    ("migrating.md", "From torch.save"): stock,
    ("tutorial.md", "Use the weights"): first_run,
    ("resilience.md", "Resilience: training steps that survive the loss of ranks"): coordinated,
}
# Blocks with an object store, and whether they save a step there.
WITH_THE_BUCKET = {("guide.md", "Levels"): False, ("guide.md", "How often"): True}


# -- the blocks ----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _run_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def compiled(block: Block) -> types.CodeType:
    """With the document's name and line numbers, for whoever reads the traceback."""
    return compile("\n" * (block.line - 1) + block.code, str(block.path), "exec")


@pytest.fixture(scope="module")
def s3_port() -> Iterator[int]:
    """A server of an object store."""
    if not s3.is_installed():
        pytest.skip("moto is not installed: no S3 server to test against")
    with s3.s3_server() as port:
        yield port


@pytest.fixture
def bucket(s3_port: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """The environment names the server, whose bucket is empty. Tells whether it has a step."""
    s3.request(s3_port, "POST", "/moto-api/reset")
    s3.request(s3_port, "PUT", "/bucket")
    environment = {
        "ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret", "REGION": "us-east-1",
        "ALLOW_HTTP": "true", "ENDPOINT_URL": f"http://127.0.0.1:{s3_port}",
    }  # fmt: skip
    for name, value in environment.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    return lambda: b"llama/step-" in s3.request(s3_port, "GET", "/bucket?list-type=2")


@pytest.mark.thorough
@pytest.mark.parametrize("block", [*PYTHON, INIT], ids=str)
def test_a_block_runs_twice(block: Block, request: pytest.FixtureRequest) -> None:
    where = (block.path.name, block.heading)
    saves_there = WITH_THE_BUCKET.get(where)
    if saves_there is not None:
        has_step = request.getfixturevalue("bucket")
    preamble = PREAMBLES.get(where, training)
    for seed in range(2):
        with preamble(seed) as names:
            exec(compiled(block), names)
    if saves_there:
        assert has_step()


@pytest.mark.thorough
@pytest.mark.usefixtures("bucket")
def test_the_guide_runs_from_top_to_bottom_with_the_training_that_it_gives() -> None:
    """As a reader does it: in one directory, with nothing added to what stands there."""
    blocks_run = 0
    for block in (each for each in PYTHON if each.path.name == "guide.md"):
        names: dict[str, Any] = {}
        for code in (TRAINING, block):
            exec(compiled(code), names)
        blocks_run += 1
    assert blocks_run
    assert list(Path(RUN).glob("step-*"))


LOOPS = [
    next(each for each in PYTHON if (each.path.name, each.heading) == where)
    for where in (("README.md", "statehold"), ("guide.md", "Saving"))
]


@pytest.mark.thorough
@pytest.mark.parametrize("block", LOOPS, ids=str)
def test_the_first_loop_of_a_document_goes_on_bit_for_bit(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(seed: int, steps: int) -> list[float]:
        with training(seed) as names:
            exec(compiled(block), names | {"steps": steps})
        return names["losses"]

    whole = trained(seed=0, steps=10)
    assert len(whole) == 10
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    stops = [0, 1, 4, 6, 10, 10]  # the last start finds nothing to do
    for seed, (begin, end) in enumerate(itertools.pairwise(stops)):
        assert trained(seed, steps=end) == whole[begin:end]
    assert sorted(path.name[-2:] for path in Path(RUN).glob("step-*")) == ["08", "09", "10"]


def test_every_block_that_looks_like_python_is_one_that_runs() -> None:
    python = re.compile(
        r"\bckpt\.|\bstatehold\.\w+\(|^\s*(import |from \S+ import |with .*:$)", re.M
    )
    others = [each for each in BLOCKS if each.language != "python"]
    assert len(others) > 20
    assert [str(each) for each in others if python.search(each.code)] == []
    assert {each.path.name for each in PYTHON} == {
        "README.md", "guide.md", "dcp.md", "in_and_out.md", "incremental.md", "index.md",
        "integrations.md", "lowrank.md", "migrating.md", "offload.md", "resilience.md",
        "serving.md", "tutorial.md",
    }  # fmt: skip


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "bash"], ids=str)
def test_a_block_of_bash_is_well_formed(block: Block) -> None:
    subprocess.run(["bash", "-n"], input=block.code, text=True, check=True)


@pytest.mark.thorough
def test_the_example_runs_twice(capsys: pytest.CaptureFixture[str]) -> None:
    code = runpy.run_path(str(ROOT / "examples/minimal.py"))
    for begin in (0, code["STEPS"]):
        code["main"]("runs/minimal", pause_s=0)
        assert f"starting at step {begin} of {code['STEPS']}" in capsys.readouterr().out
