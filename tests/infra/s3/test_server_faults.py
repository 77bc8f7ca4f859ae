"""A real server that is killed, or whose disk is full, in the middle of an upload."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.s3.jobs import Job, settled
from infra.s3.network import before
from infra.s3.servers import BUCKET, DEADLINE_S, SEAWEED, SeaweedFs, Server, become, running
from statehold.steps.objects import attempt_of
from support import scripts
from support.agents import wait_for
from support.mounts import nearly_full, tmpfs, why_no_tmpfs

TESTS = Path(__file__).parents[2]
URL = f"s3://{BUCKET}/run"


class Once:
    """A fault that does something when the first second part of an upload comes."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._guard = threading.Lock()
        self.fired = threading.Event()

    def __call__(self, method: str, target: str) -> str | None:
        with self._guard:
            if "partNumber=2" in target and not self.fired.is_set():
                self._act()
                self.fired.set()
        return None


def whole_steps(server: Server) -> list[int]:
    """The steps of the directories in the store, with no others beside them."""
    found = [name.partition("/")[0] for name in server.objects("run") if "/" in name]
    return sorted({attempt_of(name)[0] for name in found})  # type: ignore[index]


def test_a_server_killed_in_mid_upload_gets_the_step_when_it_is_back(
    tmp_path: Path, own_server: Server
) -> None:
    with before(own_server) as network:
        job, kill = Job(tmp_path / "run", URL, network.port), Once(own_server.kill)

        def after(step: int) -> None:
            if step == 2:
                ckpt.flush(DEADLINE_S)
                network.fault = kill
            if step == 4:
                wait_for(kill.fired.is_set, "the second part of step 3", DEADLINE_S)
                asked = len(network.requests)
                wait_for(lambda: len(network.requests) > asked + 2, "attempts", DEADLINE_S)
                own_server.start()

        with job.open() as ckpt:
            job.train(ckpt, 5, after)
            ckpt.flush(DEADLINE_S)
            assert settled(ckpt, 5)
        assert whole_steps(own_server)[-1] == 5
        assert len(whole_steps(own_server)) == 2
        job.lose_host()
        with job.open() as ckpt:
            assert job.train(ckpt, 8) == 5


TRAINER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv.pop(1))
from infra.s3.jobs import Job
from infra.s3.servers import DEADLINE_S
job = Job(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
with job.open() as ckpt:
    job.train(ckpt, 8, lambda step: ckpt.flush(DEADLINE_S))
"""


def test_a_step_whose_upload_ended_with_server_and_trainer_does_not_count(
    tmp_path: Path, own_server: Server
) -> None:
    with before(own_server) as network:
        words = ["-c", TRAINER, str(TESTS), tmp_path / "run", URL, str(network.port)]
        with scripts.start(words) as trainer:

            def end() -> None:
                own_server.kill()
                trainer.kill()

            seen: list[str] = []

            def at_the_third_step(method: str, target: str) -> str | None:
                if "partNumber=1" in target:
                    seen.append(target)
                return both(method, target) if len(seen) > 2 else None

            both = Once(end)
            network.fault = at_the_third_step
            code = trainer.wait(DEADLINE_S)
        assert code < 0
        assert both.fired.is_set()
        network.heal()
        own_server.start()
        job = Job(tmp_path / "run", URL, network.port)
        job.lose_host()
        with job.open() as ckpt:
            assert ckpt.steps() == [1, 2]
            assert job.train(ckpt, 5, lambda _: ckpt.flush(DEADLINE_S)) == 2
        assert whole_steps(own_server) == [4, 5]  # what was left of step 3 is gone


@SEAWEED
@pytest.mark.skipif(why_no_tmpfs() is not None, reason=str(why_no_tmpfs()))
def test_a_disk_full_in_mid_upload_holds_nothing_up_and_takes_the_step_when_it_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "server").mkdir()
    become(monkeypatch, SeaweedFs.key, SeaweedFs.secret)
    with (
        tmpfs(tmp_path, 128 << 20) as disk,
        running(SeaweedFs(tmp_path / "server", disk / "data")) as server,
        before(server) as network,
    ):
        full = nearly_full(disk, 0)
        fill = Once(full.__enter__)
        job = Job(tmp_path / "run", URL, network.port, keep=1)

        def after(step: int) -> None:
            if step == 1:
                ckpt.flush(DEADLINE_S)
                network.fault = fill
            if step == 3:
                wait_for(lambda: network.answers[500], "a refusal for want of room", DEADLINE_S)
                assert ckpt.levels()[1].newest == 1
                full.__exit__(None, None, None)

        with job.open() as ckpt:
            job.train(ckpt, 4, after)
            ckpt.flush(DEADLINE_S)
            assert settled(ckpt, 4)
        print(network.answers)
        job.lose_host()
        with job.open() as ckpt:
            assert job.train(ckpt, 6) == 4
