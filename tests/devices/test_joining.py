"""The state of a replica on a device goes to a joiner in the order of the trainer's streams."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

import statehold
from statehold.resilience.state_bytes import Arriving, Offer
from support.cuda import Machine


def on_another_thread(machine: Machine, action: Callable[[], object]) -> None:
    def run() -> None:
        machine.enter()
        action()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def test_a_joiner_gets_the_last_update_whatever_stream_has_it(machine: Machine) -> None:
    held, live = machine.put(torch.zeros(64)), machine.put(torch.zeros(64))
    piece = torch.empty(held.nbytes, dtype=torch.uint8)
    with machine.cuda.stream(machine.cuda.Stream()):
        held.fill_(3)
        offer = Offer({"w": statehold.Gated(held)})
        on_another_thread(machine, lambda: offer.run.read(0, piece))
        assert torch.equal(piece.view(torch.float32), torch.full((64,), 3.0))
        live.fill_(1)  # of the joiner: queued before what arrives
        arriving = Arriving({"w": statehold.Gated(live)}, offer.document)
        on_another_thread(machine, lambda: arriving.run.write(0, piece))
        arriving.finish()
        got = torch.empty(64).copy_(live.add_(1))
    assert torch.equal(got, torch.full((64,), 4.0))
