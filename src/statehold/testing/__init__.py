"""Tools for testing what is built on statehold: a simulated disk.

`SimFs` is a file system in memory with seeded faults and crashes that lose what was not synced.
A test that injects faults has to look at `fired`: a fault that did not fire tests nothing.
"""

from statehold._core import SimFs

__all__ = ["SimFs"]
