"""An emulated machine with one CUDA device, and a training run on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import statehold
from support.cuda import Machine, install
from support.cuda.streams import Stream
from support.faults import SMALL
from support.training import Training, bits

NO_RNG = {"rng": b""}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    machine = install(monkeypatch)
    with machine.in_use():
        yield machine


@pytest.fixture
def ckpt(tmp_path: Path, machine: Machine) -> Iterator[statehold.Checkpointer]:
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        yield ckpt
        machine.timeline.may_finish.set()


@pytest.fixture
def reads(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the stream was idle, for each time that torch itself has waited for one."""
    found: list[bool] = []
    synchronize = Stream.synchronize

    def seen(stream: Stream) -> None:
        found.append(stream.query())
        synchronize(stream)

    monkeypatch.setattr(Stream, "synchronize", seen)
    return found


def training_on(machine: Machine, width: int = 32, seed: int = 0) -> Training:
    """A run whose model is on the device, before its first step."""
    training = Training(seed=seed, width=width)
    machine.module(training.model)
    return training


def trained_on(machine: Machine, width: int = 32) -> Training:
    """A run after its first step."""
    training = training_on(machine, width)
    training.step()
    return training


def bits_on(machine: Machine, training: Training) -> dict[str, bytes]:
    """What a run has after all work of the device, random numbers aside."""
    with machine.still():
        return bits(training) | NO_RNG


def restored_on(
    machine: Machine, ckpt: statehold.Checkpointer, step: int, width: int = 32
) -> dict[str, bytes]:
    """What a step gives to a new run on the device."""
    training = training_on(machine, width, seed=9)
    ckpt.restore(training.state, step)
    return bits_on(machine, training)
