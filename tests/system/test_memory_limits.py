"""A memory level in a real control group: what does not fit goes to the next level, and the kernel
kills nobody, in the first job as after a restart."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import scripts
from support.cgroups import JOIN, memory_group, why_no_group

pytestmark = pytest.mark.skipif(why_no_group() is not None, reason=str(why_no_group()))

MIB = 1 << 20
STATE = 100 * MIB
TRAINER = f"""
{JOIN}
import torch, statehold
state = {{"w": torch.zeros({STATE} // 4)}}
near = statehold.{{level}}(path=sys.argv[3], keep=2, name="memory")
levels = [near, statehold.Directory(path=sys.argv[2] + "/far", every=2, keep=1)]
with statehold.Checkpointer(sys.argv[2], levels=levels, staging_bytes="32MiB") as ckpt:
    begin = ckpt.restore(state) or 0
    assert state["w"].eq(begin).all()
    for step in range(begin + 1, begin + 3):
        state["w"].fill_(step)
        ckpt.save(step, state).wait("committed", 60)
    print(begin, ckpt.steps())
"""


@pytest.fixture
def memory() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield folder / "level"
    shutil.rmtree(folder)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("limit", "inner", "level"),
    [
        (3 * STATE, ("job", "step"), "Memory"),  # the limit of an outer group
        (4 * STATE, (), "Memory"),  # the first file fits, and not the second or third
        (3 * STATE, (), "Directory"),  # on a file system in memory
    ],
)
def test_a_job_outlives_a_memory_level_that_does_not_fit(
    tmp_path: Path, memory: Path, limit: int, inner: tuple[str, ...], level: str
) -> None:
    script = TRAINER.replace("{level}", level)
    with memory_group(f"{limit}-{level}", limit, *inner) as group:
        for begin in (0, 2):
            words = ["-c", script, group, tmp_path / "run", memory]
            done = scripts.run(words)
            assert done.returncode == 0, done.stderr
            assert done.stdout.split()[0] == str(begin)
            assert "level memory cannot take" in done.stderr
