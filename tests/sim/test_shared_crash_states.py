"""The power goes off before every change of saves whose steps share files.

What is shared changes with every third save, so files are linked, refuted and made anew. A part of
it is compared in place, and a part on its way through staging memory.
"""

from __future__ import annotations

import pytest

from sim.test_crash_states import ALL, LEAST, Record, Script, new_job, play, recover_all
from statehold.checkpoint.save import shared
from statehold.checkpoint.save.writes import Segments
from support.in_memory import SimFs
from support.stepped import simulated

SHARED: Script = [("save", step) for step in (1, 2, 3, 4, 4, 5, 6)]
pytestmark = pytest.mark.usefixtures("small_shared_files")


def played(size: int) -> tuple[SimFs, Record]:
    """A disk on which a job was recorded that shares files."""
    fs, record = SimFs(seed=5), Record(keep=2, shares=True)
    fs.record()
    with simulated("shared"):
        outcomes = play(new_job(fs, size, 2), SHARED, record, fs, 1)
    assert outcomes == [None] * size
    links = [each for each in fs.recorded if each.startswith("link ")]
    assert len(links) > 4 * size, "hardly a step shares files"
    return fs, record


@pytest.mark.thorough
@pytest.mark.parametrize("size", [1, 2] if ALL else [1])
def test_every_crash_state_of_a_job_whose_steps_share_files(size: int) -> None:
    fs, record = played(size)
    states = recover_all(fs, record, size)
    print(f"{len(fs.recorded)} changes, {states} crash states")
    assert states >= int(LEAST * len(fs.recorded))


@pytest.mark.thorough
def test_a_link_for_a_tensor_that_has_changed_would_be_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Segments, "can_be_read_in_place", True)
    monkeypatch.setattr(shared, "refuted", lambda claims, _: [set() for _ in claims])
    fs, record = played(1)
    with pytest.raises(AssertionError, match="is not that of serial"):
        recover_all(fs, record, 1)
