"""The table of a tier, beside a model of dicts and lists."""

from __future__ import annotations

import contextlib
import random
from array import array
from collections import OrderedDict

import pytest

from statehold import _core
from statehold.kv.table import RANKED, SlotTable

SLOTS = 16


def table(slots: int = SLOTS) -> SlotTable:
    made = SlotTable(memoryview(bytearray(SlotTable.nbytes(slots))), slots)
    assert made.is_new
    made.create()
    return made


def _gone(real: SlotTable, count: int) -> list[int]:
    """Of pages 1 to `count`, those that go for the next so many slots, in their order."""
    gone = list[int]()
    for _ in range(count):
        there = [index for index in range(1, count + 1) if real.find(index) >= 0]
        real.take(0)
        gone += [index for index in there if real.find(index) < 0]
    return gone


class Model:
    """Pages by index, the least recently used first; their slots; and the page before each."""

    def __init__(self) -> None:
        self.pages: OrderedDict[int, int] = OrderedDict()
        self.before: dict[int, int] = {}

    def touch(self, index: int) -> None:
        seen = set[int]()
        while index in self.pages and index not in seen:  # a page may come again after its own end
            seen.add(index)
            self.pages.move_to_end(index)
            index = self.before[index]


@pytest.mark.parametrize("seed", range(20))
def test_a_table_does_what_a_dict_in_order_of_use_does(seed: int) -> None:
    slots = SLOTS + seed % 4
    dice, real, model = random.Random(seed), table(slots), Model()
    space = real.space(bytes(16))
    real.seat(0, space)
    indices = [dice.getrandbits(64) & ~0xF | dice.randrange(3) for _ in range(40)]  # they collide
    for _ in range(600):
        index = dice.choice(indices)
        with real.change():
            match dice.randrange(4):
                case 0 | 1 if index not in model.pages:
                    before = dice.choice([0, *model.pages])
                    slot = real.take(0)
                    if len(model.pages) == slots:
                        gone, freed = model.pages.popitem(last=False)
                        assert freed == slot
                        assert real.find(gone) < 0
                        before = 0 if before == gone else before
                    assert real.publish(slot, index, before, space)
                    model.pages[index], model.before[index] = slot, before
                case 2 if index in model.pages:
                    real.touch([model.pages[index]])
                    model.touch(index)
                case 3 if index in model.pages and dice.random() < 0.3:
                    real.free(model.pages.pop(index))
        if dice.random() < 0.02:
            real.mend()
        assert {each: real.find(each) for each in indices if real.find(each) >= 0} == model.pages
        assert real.pages() == len(model.pages)
    assert real.evicted


def test_pages_of_an_identity_that_nobody_uses_go_first() -> None:
    real = table(4)
    old = real.space(b"o" * 16)
    real.seat(0, old)
    new = real.space(b"n" * 16)
    real.seat(0, new)
    with real.change():
        assert real.publish(real.take(0), 3, 0, old)
        assert real.publish(real.take(0), 1, 0, new)
        assert real.publish(real.take(0), 2, 0, new)
        assert real.publish(real.take(0), 4, 0, old)
        assert real.publish(real.take(0), 5, 0, new)
    assert [real.find(index) >= 0 for index in range(1, 6)] == [True, True, False, True, True]


def test_a_page_does_not_go_before_those_that_follow_it() -> None:
    real = table(4)
    space = real.space(bytes(16))
    with real.change():
        for index in range(1, 5):
            assert real.publish(real.take(0), index, index - 1, space)
        real.touch([real.find(3)])
        gone = _gone(real, 4)
    assert gone == [4, 3, 2, 1]


def test_a_page_of_a_low_score_goes_first() -> None:
    real = table(8)
    space = real.space(bytes(16))
    with real.change():
        for index, score in enumerate([3.5, -1.0, 0.0, 2.0, -2.5, 1e-30, 7.0, -1e30], 1):
            assert real.publish(real.take(0), index, 0, space, score)
        gone = []
        for _ in range(8):
            there = [index for index in range(1, 9) if real.find(index) >= 0]
            real.take(0)
            gone += [index for index in there if real.find(index) < 0]
    assert gone == [8, 5, 2, 3, 6, 4, 1, 7]


def test_a_low_score_does_not_take_a_page_before_those_that_follow_it() -> None:
    real = table(4)
    space = real.space(bytes(16))
    with real.change():
        for index in range(1, 5):
            assert real.publish(real.take(0), index, index - 1, space, float(index))
        real.touch([real.find(4)])
        gone = _gone(real, 4)
    assert gone == [4, 3, 2, 1]


def test_a_page_that_was_used_stays_whatever_its_score() -> None:
    real = table(2 * RANKED)
    space = real.space(bytes(16))
    with real.change():
        for index in range(1, 2 * RANKED + 1):
            assert real.publish(real.take(0), index, 0, space, float(index))
        real.touch([real.find(1)])
        real.take(0)
    assert real.find(1) >= 0
    assert real.find(2) < 0


def test_a_change_that_a_dead_process_left_is_mended() -> None:
    memory = memoryview(bytearray(SlotTable.nbytes(SLOTS)))
    real = SlotTable(memory, SLOTS)
    real.create()
    space = real.space(bytes(16))
    with contextlib.suppress(KeyboardInterrupt), real.change():
        for index in range(1, 9):
            assert real.publish(real.take(3), index, 0, space)
        left = real.take(3)
        memory[-4 * 32 :] = bytes(4 * 32)  # the buckets
        raise KeyboardInterrupt  # as if it were killed here
    assert real.is_torn
    with real.change():
        assert all(real.find(index) >= 0 for index in range(1, 9))
    assert real.clear_seats(lambda seat: seat != 3) == []
    with real.change():
        assert real.take(0) == left
    assert not real.is_torn


def test_a_space_that_nobody_uses_is_given_to_a_new_identity() -> None:
    real = table(128)
    for number in range(100):
        with real.change():
            space = real.space(number.to_bytes(16, "little"))
            real.seat(0, space)
            assert real.publish(real.take(0), number + 1, 0, space)
    found = [number for number in range(100) if real.find(number + 1) >= 0]
    assert found == list(range(36, 100))


def test_a_look_up_reads_nothing_beyond_its_tables() -> None:
    """Whatever a table says that another process has damaged."""
    pages = array("Q", [3, 4])
    assert _core.find_pages(array("I"), array("Q"), pages) == [-1, -1]
    assert _core.find_pages(array("I", [9, 9]), array("Q", [3]), pages) == [-1, -1]
    assert _core.find_pages(array("I", [1, 1]), array("Q", [3]), pages) == [0, -1]
