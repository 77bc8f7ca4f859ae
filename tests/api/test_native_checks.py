"""`make check` sees an access to a guarded member that lacks its mutex."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIDY = Path(sys.executable).with_name("clang-tidy")
COUNTER = """
#include "mutex.h"

class Counter {
 public:
  int next() {
    %s
    return ++value_;
  }

 private:
  statehold::Mutex mutex_;
  int value_ GUARDED_BY(mutex_) = 0;
};

int first() { return Counter().next(); }
"""


@pytest.mark.parametrize(
    ("statement", "is_found"), [("", True), ("const statehold::Lock lock(mutex_);", False)]
)
def test_an_access_without_its_mutex_is_found(
    statement: str, is_found: bool, tmp_path: Path
) -> None:
    if not TIDY.exists():
        pytest.skip("clang-tidy is not installed; make setup installs it")
    source = tmp_path / "counter.cpp"
    source.write_text(COUNTER % statement)
    words = [f"--config-file={ROOT / '.clang-tidy'}", "--quiet", str(source)]
    compiler = ["--", "-std=c++20", f"-I{ROOT / 'native'}"]
    done = subprocess.run([TIDY, *words, *compiler], capture_output=True, text=True, check=False)
    found = "requires holding mutex 'mutex_'" in done.stdout
    assert (found, done.returncode != 0) == (is_found, is_found), done.stdout + done.stderr
