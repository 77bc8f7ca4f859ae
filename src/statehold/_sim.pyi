"""The simulated disk: an Fs in memory, for tests. Contracts in native/fs_sim.h and sim_tree.h.

A module of its own, because it is built for tests and not shipped. A checkout has it, and
`pip install . -C cmake.define.STATEHOLD_SIM=ON` installs it.
"""

from collections.abc import Sequence

from statehold._core import Fs

class SimFs(Fs):
    """A disk in memory, with seeded faults and crashes that lose what was not synced."""

    def __init__(
        self,
        seed: int,
        *,
        short_io: float = 0.0,
        reorder: bool = True,
        eio: float = 0.0,
        capacity: int | None = None,
        torn: float = 0.0,
        misdirected: float = 0.0,
        slow: float = 0.0,
    ) -> None: ...
    def set_faults(
        self,
        seed: int = 0,
        *,
        short_io: float = 0.0,
        eio: float = 0.0,
        capacity: int | None = None,
        torn: float = 0.0,
        misdirected: float = 0.0,
        slow: float = 0.0,
    ) -> None:
        """Other faults from now on; what fail_next has announced is forgotten."""
    def crash(self) -> None:
        """Lose what was not synced, at random; the power is on again."""
    def crash_as(self, choices: Sequence[int]) -> list[int]:
        """Crash with these outcomes, and 0 (lost) for what they do not cover; returns between how
        many outcomes each choice was."""
    def cut_power(self, after: int) -> None:
        """After so many more operations everything fails, until crash()."""
    def record(self) -> None:
        """Keep the state before every change from now on."""
    @property
    def recorded(self) -> list[str]: ...
    def at_moment(self, index: int) -> SimFs:
        """A disk as this one was just before a recorded change."""
    def hold(self) -> None:
        """From now on a transfer waits until complete()."""
    @property
    def waiting(self) -> list[str]:
        """The transfers that wait, oldest first: kind, path, offset and bytes."""
    def complete(self, index: int) -> None:
        """Do this one of the transfers that wait, on this thread."""
    @property
    def damaged(self) -> list[str]:
        """The files of which some bytes, by rot or misdirection, are not what was written."""
    def fail_next(self, operation: str, errno: int, count: int = 1, skip: int = 0) -> None: ...
    def corrupt(self, path: str, offset: int, xor: int) -> None: ...
    @property
    def fired(self) -> dict[str, int]: ...
    @property
    def operations(self) -> list[str]: ...
