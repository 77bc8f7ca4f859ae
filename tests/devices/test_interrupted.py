"""Ctrl-C in a restore to a device, at any bytecode of what moves buffers."""

from __future__ import annotations

import os
from pathlib import Path

import torch

import statehold
from statehold.tensors.devices import relay
from statehold.tensors.devices.mover import Mover
from support.cuda import Machine
from support.faults import DEADLINE_S, SMALL
from support.interrupts import Interrupts

FUNCTIONS = [relay.relay, relay._is_there, Mover.move]
# Every bytecode takes half a minute: the suite takes a sample.
EACH = int(os.environ.get("STATEHOLD_INTERRUPT_EACH", "7"))


def test_ctrl_c_at_every_bytecode_of_a_restore(tmp_path: Path, machine: Machine) -> None:
    values = torch.arange(400_000.0)  # more than the staging memory
    live, at, places = machine.put(values), 0, set()
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        ckpt.save(1, {"w": live}).wait("committed", DEADLINE_S)
        while True:
            interrupts = Interrupts(FUNCTIONS, at)
            try:
                with interrupts.armed():
                    ckpt.restore({"w": live})
            except KeyboardInterrupt:
                pass
            if interrupts.fired is None:
                break
            places.add(interrupts.fired.partition(",")[0])
            with machine.still():
                live.zero_()
            ckpt.restore({"w": live})
            assert torch.equal(machine.read(live), values), interrupts.fired
            at += EACH
    assert places >= {"relay", "_is_there", "move"}
