"""Ranks in processes of their own that follow orders to use and to lose groups and transfers.

A rank does one thing at a time and tells how it has ended. It may be revoked meanwhile.
"""

from __future__ import annotations

import os
import signal
import threading
from multiprocessing.connection import Connection
from typing import Any

from statehold.process.worker import Flag
from support.faults import must
from support.forked import forked

ANSWER_S = 60
LOST = "lost"


class GroupRank:
    """A process with a desk, and the groups of one epoch at a time."""

    def __init__(self) -> None:
        context = forked()
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_live, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self.desk: str = self.answer()

    def begin(self, what: str, *args: Any) -> None:
        self._pipe.send((what, *args))

    def answer(self) -> Any:
        must(self._pipe.poll(ANSWER_S), f"{self._process.name} does not answer")
        return self._pipe.recv()

    def do(self, what: str, *args: Any) -> Any:
        self.begin(what, *args)
        return self.answer()

    def revoke(self) -> None:
        self._pipe.send(("revoke",))

    def stop(self) -> None:
        os.kill(self._process.pid or 0, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self._process.pid or 0, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def _live(pipe: Connection) -> None:
    import torch

    from statehold.resilience.meeting import Desk

    torch.set_num_threads(1)
    desk = Desk("127.0.0.1")
    pipe.send(desk.address)
    rank = _Rank()
    while True:
        try:
            what, *args = pipe.recv()
        except EOFError:
            os._exit(0)
        if what == "revoke":
            rank.revoked.set()
            continue
        if what in ("build", "serve", "fetch"):
            rank.revoked = Flag()
        run = getattr(rank, what)
        threading.Thread(target=_tell, args=(pipe, run, args), daemon=True).start()


def _tell(pipe: Connection, run: Any, args: Any) -> None:
    from statehold.resilience.groups import GroupLostError

    try:
        pipe.send(run(*args))
    except GroupLostError:
        pipe.send(LOST)


class _Rank:
    def __init__(self) -> None:
        self.revoked = Flag()
        self.groups: Any = None
        self.transfer: Any = None

    def where(self, desk: str, epoch: int, rank: int, size: int) -> Any:
        from statehold.resilience.meeting import MeetingPlace

        return MeetingPlace(desk, epoch, (rank, 0), (size, 1), "127.0.0.1", self.revoked)

    def build(self, desk: str, epoch: int, rank: int, size: int) -> str:
        from statehold.resilience.groups import Groups

        self.groups = Groups(self.where(desk, epoch, rank, size))
        return "built"

    def sum(self, value: int, elements: int) -> list[int]:
        """The smallest and the largest element of a sum."""
        import torch

        tensor = torch.full((elements,), value)
        self.groups.start(tensor).wait()
        return [int(tensor.min()), int(tensor.max())]

    def gather(self, value: int) -> list[int]:
        return [each[0][0] for each in self.groups.gather([value])]

    def make(self, seed: int, elements: int) -> str:
        """A model whose optimizer has stepped; the digest of its state. Seed 0: a fresh one."""
        import torch

        from statehold.resilience.transfer import StateTransfer

        torch.manual_seed(seed)
        model = torch.nn.Linear(elements, 1)
        optimizer = torch.optim.Adam(model.parameters())
        if seed:
            model(torch.randn(1, elements)).sum().backward()
            optimizer.step()
        self.state = {"model": model, "optimizer": optimizer}
        self.transfer = StateTransfer(self.state, "127.0.0.1")
        return self.digest()

    def digest(self) -> str:
        from statehold.resilience.likeness import Likeness

        return str(Likeness(self.state).digest())

    def serve(self, desk: str, epoch: int, rank: int, size: int) -> str:
        self.transfer.serve(self.where(desk, epoch, rank, size))
        return "serves"

    def fetch(self, desk: str, epoch: int, rank: int, size: int) -> str:
        """The digest of the state that has come."""
        self.transfer.fetch(self.where(desk, epoch, rank, size))
        return self.digest()

    def drop(self) -> bool:
        """Whether everything was released."""
        self.groups.drop()
        return bool(self.groups.join(ANSWER_S))
