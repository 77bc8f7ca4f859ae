"""ColumnStart: what begins sums is equal under one epoch, and differs from that of another one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from statehold.resilience.protocol.actions import GroupLostError
from statehold.resilience.seat import ColumnStart
from statehold.resilience.sums.fast import FastSum


class Groups:
    """Groups of one replica, whose operations are over at once."""

    def __init__(self) -> None:
        self.begun = 0

    def start(self, tensor: Tensor) -> Any:
        self.begun += 1
        return self

    def wait(self) -> None:
        return


def agreed(param: torch.nn.Parameter) -> FastSum:
    """A sum that has been reduced once, so that its members know of each other what they train."""
    sums = FastSum([("param", param)], microbatches=1)
    sums.begin()
    (param * 2).sum().backward()
    sums.count(0, None)
    sums.reduce(ColumnStart(Groups()))  # type: ignore[arg-type]
    sums.finish()
    param.grad = None
    return sums


def test_what_another_epoch_has_begun_is_not_used() -> None:
    """Also if it has ended well: the members of the next epoch begin all of their sums again."""
    param = torch.nn.Parameter(torch.zeros(3))
    sums = agreed(param)
    old, new = Groups(), Groups()
    sums.begin()
    sums.watch(ColumnStart(old))  # type: ignore[arg-type]
    (param * 2).sum().backward()
    sums.count(0, None)
    assert old.begun == 1
    sums.reduce(ColumnStart(new))  # type: ignore[arg-type]
    assert (old.begun, new.begun) == (1, 2)
    sums.finish()
    assert param.grad is not None
    assert param.grad.tolist() == [2, 2, 2]


def test_what_the_epoch_has_begun_is_used() -> None:
    param = torch.nn.Parameter(torch.zeros(3))
    sums = agreed(param)
    groups = Groups()
    sums.begin()
    sums.watch(ColumnStart(groups))  # type: ignore[arg-type]
    (param * 2).sum().backward()
    sums.count(0, None)
    sums.reduce(ColumnStart(groups))  # type: ignore[arg-type]
    assert groups.begun == 2  # a bucket, and the report


def test_nothing_is_raised_before_it_is_waited_for() -> None:
    pending = ColumnStart(None)(torch.zeros(1))
    with pytest.raises(GroupLostError, match="dropped"):
        pending.wait()
