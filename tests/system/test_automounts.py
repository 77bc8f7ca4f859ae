"""A run, or a store in files, in the root of a file system that is mounted in a directory which
cannot be synced. Such is /home, where an automounter mounts the home of each user; here it is
/proc."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from statehold.process.whole_files import sync_files

UNSHARED = ["unshare", "--mount", "sh", "-ec", 'mount -t tmpfs tmpfs /proc/fs; exec "$@"', "sh"]
WRITES = """
from statehold.io.objects.client import ObjectClient
from statehold.reading.places import file_system
from statehold.steps.store import Store

Store(file_system(), "/proc/fs/run").create()
client = ObjectClient("file:///proc/fs/store", {})
client.put("name", b"content")
assert client.has("name", 7)
"""


def permitted() -> bool:
    try:
        return subprocess.run([*UNSHARED, "true"], capture_output=True).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(not permitted(), reason="mounting in a namespace is not permitted")
def test_a_run_is_made_below_a_directory_that_cannot_be_synced() -> None:
    done = subprocess.run([*UNSHARED, sys.executable, "-c", WRITES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_cannot_be_synced_is_passed_over(tmp_path: Path) -> None:
    sync_files(["/proc", tmp_path])
    with pytest.raises(FileNotFoundError):
        sync_files([tmp_path / "missing"])
