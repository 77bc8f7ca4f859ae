"""python -m powerloss: starts command.py with tests/support/faulty.c in front of libc.

The library stays without effect until a control arms it, in the process of a workload.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from support.faulty import compile_into, compiler


def main() -> int:
    command = [sys.executable, "-m", "powerloss.command", *sys.argv[1:]]
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ)
        if compiler() is not None:
            environment["LD_PRELOAD"] = str(compile_into(Path(folder)))
        with subprocess.Popen(command, env=environment) as process:
            while True:
                try:
                    return process.wait()
                except KeyboardInterrupt:
                    pass  # it was interrupted, too


if __name__ == "__main__":
    sys.exit(main())
