"""Ctrl-C in a restore to a device, at any bytecode of what moves buffers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from statehold.tensors.devices import relay
from statehold.tensors.devices.mover import Mover
from support.cuda import Machine
from support.faults import DEADLINE_S, SMALL
from support.interrupts import Interrupts

# Every bytecode takes half a minute: the suite takes a sample.
EACH = int(os.environ.get("STATEHOLD_INTERRUPT_EACH", "7"))


@pytest.mark.parametrize("function", [relay.relay, relay._is_there, Mover.move])
def test_ctrl_c_at_every_bytecode_of_a_restore(
    tmp_path: Path, machine: Machine, function: Callable[..., Any]
) -> None:
    values = torch.arange(400_000.0)  # more than the staging memory
    live, at, fired = machine.put(values), 0, 0
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        ckpt.save(1, {"w": live}).wait("committed", DEADLINE_S)
        while True:
            interrupts = Interrupts([function], at)
            try:
                with interrupts.armed():
                    ckpt.restore({"w": live})
            except KeyboardInterrupt:
                pass
            if interrupts.fired is None:
                break
            fired += 1
            with machine.still():
                live.zero_()
            ckpt.restore({"w": live})
            assert torch.equal(machine.read(live), values), interrupts.fired
            at += EACH
    assert fired
