"""A short form of the campaign on ext4, with controls; and that no disk outlives what serves it.

`make powerloss` is the long form. STATEHOLD_POWERLOSS=400 draws so many states here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from powerloss.filesystems import BY_NAME, why_not
from support.faults import DEADLINE_S
from support.faulty import compiler

STATES = int(os.environ.get("STATEHOLD_POWERLOSS", "32"))
TESTS = Path(__file__).parents[1]

needs_a_disk = pytest.mark.skipif(
    why_not(BY_NAME["ext4"]) is not None, reason=str(why_not(BY_NAME["ext4"]))
)


def ran(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=10 * DEADLINE_S,
        check=False,
    )


@pytest.mark.thorough
@needs_a_disk
@pytest.mark.skipif(compiler() is None, reason="the control needs a C compiler")
def test_states_that_a_loss_of_power_leaves_on_a_real_disk() -> None:
    few = ("--per-session", "8", "--controls", "8", "--file-systems", "ext4")
    kinds = ("--kinds", "resave", "ranks", "levels", "offload", "shared")
    done = ran("-m", "powerloss", "--states", str(STATES), *few, *kinds)
    print(done.stdout)
    assert "0 violations" in done.stdout, done.stdout + done.stderr
    for control in ("directories", "directories, offload"):
        assert f"control {control}: noticed" in done.stdout
    assert re.search(r"\boffload [1-9]", done.stdout), "no state of an offloaded optimizer"
    assert done.returncode == 0, done.stderr


# The server is killed while a file system is mounted on its disk and a write waits for it.
SERVER_DIES = """
import os, signal, sys
from pathlib import Path
from powerloss.device import RecordingDevice
from powerloss.filesystems import BY_NAME
from powerloss.journal import Position
from powerloss.linux import mount, own_mounts, unmount

folder = Path(sys.argv[1])
own_mounts()
image, root = folder / "image", folder / "root"
BY_NAME["ext4"].format(image)
root.mkdir()
with RecordingDevice(folder, image, Position(), 1) as device:
    mount(device.name, str(root), "ext4")
    fd = os.open(root / "file", os.O_RDWR | os.O_CREAT)
    os.write(fd, b"x" * 100000)
    os.kill(device._server, signal.SIGKILL)
    try:
        os.fsync(fd)
    except OSError as error:
        print("fsync failed", error.errno)
    os.close(fd)
    unmount(str(root))
print("ended")
"""


@needs_a_disk
def test_a_disk_whose_server_dies_hangs_nobody(tmp_path: Path) -> None:
    done = ran("-c", SERVER_DIES, str(tmp_path))
    assert done.stdout.splitlines() == ["fsync failed 5", "ended"], done.stderr
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
