"""The agents on this host, the places of their logs, and what may end them.

For people: nothing relies on it.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

AGENT = "statehold-agent"  # in its arguments, before the run
LOG_NAME = ".agent.log"  # in the run directory
_NAMED = AGENT[1:].encode()  # in a script, which may look for "[s]tatehold-agent"


def agents_of(run: str) -> list[int]:
    """The processes that are agents of a run."""
    # An agent begins as a process that leaves another behind, perhaps while we look.
    return _listed(run) or _listed(run)


def ends_with_slurm(proc: Path = Path("/proc")) -> bool:
    """Whether SLURM ends all processes of this step, the agent too, as soon as this one has ended.

    Not if a shell has started this process that waits for the agent.
    """
    pid = "self"
    with contextlib.suppress(OSError):
        while pid not in ("0", "1"):
            name, _, rest = (proc / pid / "stat").read_text().partition("(")[2].rpartition(")")
            if name.endswith("sh") and _waits(proc / pid):
                return False
            if name == "slurmstepd":
                return True
            pid = rest.split()[1]
    return False


def _waits(shell: Path) -> bool:
    """Whether a shell outlives agents: its script names them, or a person sits before it."""
    _, *words = (shell / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    texts = [word for word in words if not word.startswith(b"-")]
    for path in [shell / "cwd" / os.fsdecode(text) for text in texts[:1]]:
        with contextlib.suppress(OSError):  # a command, and not the name of a script
            texts.append(path.read_bytes() if path.is_file() else b"")
    return not texts or any(_NAMED in text for text in texts)


def _listed(run: str) -> list[int]:
    ending = b"\0".join([os.fsencode(AGENT), os.fsencode(run), b""])
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "cmdline").read_bytes().endswith(b"\0" + ending):
                found.append(int(entry.name))
    return sorted(found)
