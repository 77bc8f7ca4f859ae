"""The table of a tier, beside a model of dicts and lists."""

from __future__ import annotations

import contextlib
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator

import pytest

from statehold import _core
from statehold._core import RANKED, SPACES_MAX, PageTable
from statehold.kv.opened import address_of
from statehold.kv.page import HEADER_BYTES, IDENTITY_BYTES, indices_of

SLOTS = 16


def table(slots: int = SLOTS) -> PageTable:
    made = PageTable(memoryview(bytearray(PageTable.nbytes(slots))), slots)
    assert made.is_new
    made.create()
    return made


@contextlib.contextmanager
def changing(real: PageTable) -> Iterator[None]:
    real.begin_change()
    yield
    real.end_change()


def _gone(real: PageTable, count: int) -> list[int]:
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
        with changing(real):
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
    with changing(real):
        assert real.publish(real.take(0), 3, 0, old)
        assert real.publish(real.take(0), 1, 0, new)
        assert real.publish(real.take(0), 2, 0, new)
        assert real.publish(real.take(0), 4, 0, old)
        assert real.publish(real.take(0), 5, 0, new)
    assert [real.find(index) >= 0 for index in range(1, 6)] == [True, True, False, True, True]


def test_a_page_does_not_go_before_those_that_follow_it() -> None:
    real = table(4)
    space = real.space(bytes(16))
    with changing(real):
        for index in range(1, 5):
            assert real.publish(real.take(0), index, index - 1, space)
        real.touch([real.find(3)])
        gone = _gone(real, 4)
    assert gone == [4, 3, 2, 1]


def test_a_page_of_a_low_score_goes_first() -> None:
    real = table(8)
    space = real.space(bytes(16))
    with changing(real):
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
    with changing(real):
        for index in range(1, 5):
            assert real.publish(real.take(0), index, index - 1, space, float(index))
        real.touch([real.find(4)])
        gone = _gone(real, 4)
    assert gone == [4, 3, 2, 1]


def test_a_page_that_was_used_stays_whatever_its_score() -> None:
    real = table(2 * RANKED)
    space = real.space(bytes(16))
    with changing(real):
        for index in range(1, 2 * RANKED + 1):
            assert real.publish(real.take(0), index, 0, space, float(index))
        real.touch([real.find(1)])
        real.take(0)
    assert real.find(1) >= 0
    assert real.find(2) < 0


@contextlib.contextmanager
def at(real: PageTable, now_s: int) -> Iterator[None]:
    real.begin_change(now_s)
    yield
    real.end_change()


@pytest.mark.parametrize("seed", range(20))
def test_a_drop_takes_the_pages_that_a_filter_of_a_dict_takes(seed: int) -> None:
    """Those of the identities that were not used since a second, the least recently used first."""
    dice, real = random.Random(seed), table(4 * SLOTS)
    spaces = {bytes([n]) * IDENTITY_BYTES: 0 for n in range(1, 4)}
    used = dict[int, tuple[bytes, int]]()
    for index in range(1, 3 * SLOTS):
        name = dice.choice([*spaces])
        with at(real, index):
            assert real.publish(real.take(0), index, 0, real.space(name))
        used[index] = name, index
    for second in range(100, 110):
        index = dice.choice([*used])
        with at(real, second):
            real.touch([real.find(index)])
        used[index] = used[index][0], second
    for _ in range(6):
        names, before_s = dice.sample([*spaces], dice.randrange(3)), dice.randrange(120)
        most = dice.choice([0, 3, 100])
        fit = sorted(
            (second, index)
            for index, (name, second) in used.items()
            if second < before_s and (not names or name in names)
        )
        with at(real, 200):
            slots = {real.find(index): used[index][0] for _, index in fit}
            gone = real.drop(names, before_s, most)
        assert len(gone) == min(most, len(fit))
        assert {slot: slots[slot] for slot, _ in gone} == dict(gone)
        if names and len(names) == 1:  # among several identities, the one that nobody uses goes
            assert [slot for slot, _ in gone] == [*slots][: len(gone)]
        for index in [index for index in used if real.find(index) < 0]:
            del used[index]
        assert len(used) == real.pages()


def test_a_drop_leaves_pages_that_are_written_and_the_slots_are_used_again() -> None:
    real = table(4)
    space = real.space(bytes(16))
    with at(real, 1):
        slots = [real.take(0) for _ in range(4)]
        for index, slot in enumerate(slots[:3], 1):
            assert real.publish(slot, index, 0, space)
        real.hold(slots[0], 0)
        before = [real.generation(slot) for slot in slots]
        assert [slot for slot, _ in real.drop([], 2, 10)] == slots[1:3]
        assert [real.find(index) for index in (1, 2, 3)] == [slots[0], -1, -1]
        assert [real.generation(slot) for slot in slots] != before  # who reads them notices
        real.release(slots[0])
        assert {real.take(0), real.take(0)} == {*slots[1:3]}
        assert real.find(1) == slots[0]


@pytest.mark.parametrize("seed", range(10))
def test_a_drop_of_a_damaged_table_mends_it_first(seed: int) -> None:
    """Whatever the lists say, the pages go that the columns have, and no others."""
    dice, memory = random.Random(seed), memoryview(bytearray(PageTable.nbytes(SLOTS)))
    real = PageTable(memory, SLOTS)
    real.create()
    names = [bytes([n]) * IDENTITY_BYTES for n in (1, 2)]
    with at(real, 1):
        for index in range(1, SLOTS + 1):
            assert real.publish(real.take(0), index, 0, real.space(names[index % 2]))
    begin = len(memory) - 4 * (4 * SLOTS + 32)  # next newer, next older
    memory[begin : begin + 8 * SLOTS] = dice.randbytes(8 * SLOTS)
    with at(real, 2):
        gone = [slot for slot, name in real.drop([names[1]], 2, SLOTS) if name == names[1]]
    assert gone
    assert all(real.find(index) >= 0 for index in range(2, SLOTS + 1, 2))
    assert not any(real.find(index) >= 0 for index in range(1, SLOTS + 1, 2))


def test_a_table_counts_by_identity_and_keeps_what_others_have_counted() -> None:
    real = table()
    for name, amount in ((b"a", 3), (b"b", 4)):
        real.seat(7, real.space(name * IDENTITY_BYTES))
        real.count(7, [amount, 0, 1])
    real.mend()
    found = {name[:1]: counts for name, _, counts in real.counted()}
    assert {name: counts[:3] for name, counts in found.items()} == {
        b"a": [3, 0, 1],
        b"b": [4, 0, 1],
    }
    real.seat(7, None)
    with changing(real):
        for number in range(SPACES_MAX):
            space = real.space(bytes([100 + number]) * IDENTITY_BYTES)
            assert real.publish(real.take(0), number + 1, 0, space)
    name, pages, counts = real.counted()[-1]
    assert (name, pages, counts[:3]) == (b"", 0, [7, 0, 2])


def test_a_table_of_another_build_is_made_from_nothing() -> None:
    memory = memoryview(bytearray(b"\x55" * PageTable.nbytes(SLOTS)))
    real = PageTable(memory, SLOTS)
    assert real.is_new
    real.create()
    assert (real.pages(), real.evicted, real.boot, real.is_torn) == (0, 0, 0, False)


def test_a_change_that_a_dead_process_left_is_mended() -> None:
    memory = memoryview(bytearray(PageTable.nbytes(SLOTS)))
    real = PageTable(memory, SLOTS)
    real.create()
    space = real.space(bytes(16))
    with contextlib.suppress(KeyboardInterrupt), changing(real):
        for index in range(1, 9):
            assert real.publish(real.take(3), index, 0, space)
        left = real.take(3)
        memory[-4 * 32 :] = bytes(4 * 32)  # the buckets
        raise KeyboardInterrupt  # as if it were killed here
    assert real.is_torn
    with changing(real):
        assert all(real.find(index) >= 0 for index in range(1, 9))
    assert real.clear_seats(bytes(seat == 3 for seat in range(8))) == []
    with changing(real):
        assert real.take(0) == left
    assert not real.is_torn


def test_a_space_that_nobody_uses_is_given_to_a_new_identity() -> None:
    real = table(128)
    for number in range(100):
        with changing(real):
            space = real.space(number.to_bytes(16, "little"))
            real.seat(0, space)
            assert real.publish(real.take(0), number + 1, 0, space)
    found = [number for number in range(100) if real.find(number + 1) >= 0]
    assert found == list(range(36, 100))


def test_an_identity_that_there_is_no_space_for_has_no_pages() -> None:
    real = table(2)
    with changing(real):
        for seat in range(SPACES_MAX):
            real.seat(seat, real.space(bytes([seat]) * IDENTITY_BYTES))
        more = real.space(b"m" * IDENTITY_BYTES)
        slot = real.take(0)
        assert more == -1
        assert not real.publish(slot, 1, 0, more)
        assert real.find(1) == -1
        real.seat(7, None)
        assert real.publish(slot, 1, 0, real.space(b"m" * IDENTITY_BYTES))


@pytest.mark.parametrize("seed", range(30))
def test_a_damaged_table_ends_every_call(seed: int) -> None:
    """Whatever another process has damaged, nothing beyond the table is read, and mend() helps."""
    dice = random.Random(seed)
    memory = memoryview(bytearray(PageTable.nbytes(SLOTS)))
    real = PageTable(memory, SLOTS)
    real.create()
    with changing(real):
        space = real.space(bytes(16))
        for index in range(1, SLOTS + 1):
            assert real.publish(real.take(3), index, index - 1, space, float(index % 3))
    begin = 24 if dice.random() < 0.5 else len(memory) - 4 * (9 * SLOTS + 32)  # words, or columns
    for _ in range(dice.choice([1, 10, 300])):
        memory[dice.randrange(begin, len(memory))] = dice.getrandbits(8)
    calls: list[Callable[[], object]] = [
        lambda: real.find_all(list(range(40))),
        lambda: real.take(0),
        lambda: real.touch([dice.randrange(SLOTS) for _ in range(4)]),
        lambda: real.free(dice.randrange(SLOTS)),
        lambda: real.hold(dice.randrange(SLOTS), 3),
        lambda: real.release(dice.randrange(SLOTS)),
        lambda: real.space(dice.randbytes(16)),
        lambda: real.cut(dice.randrange(SLOTS)),
        lambda: real.drop([], dice.randrange(2), dice.randrange(4)),
        lambda: real.count(3, [dice.getrandbits(64)]),
        real.counted,
        lambda: real.clear_seats(bytes([0, 0, 0, 1])),
    ]
    for _ in range(100):
        with contextlib.suppress(IndexError, ValueError):
            dice.choice(calls)()
    real.mend()
    for index in range(100, 100 + SLOTS):
        with changing(real):
            slot = real.take(0)
            assert slot < 0 or real.find(index) >= 0 or real.publish(slot, index, 0, 0)


def test_a_slot_without_storage_is_not_taken_again() -> None:
    real = table(4)
    with changing(real):
        slots = [real.take(0) for _ in range(4)]
        real.cut(2)
        for slot in slots:
            real.free(slot)
        assert sorted([real.take(0, 2), real.take(0, 2)]) == [0, 1]
        assert real.take(0, 2) == -1


def test_slots_with_pages_are_not_cut() -> None:
    """Another process has storage for them, or the disk is too full to write there again."""
    real = table(4)
    space = real.space(bytes(16))
    with changing(real):
        slots = [real.take(0) for _ in range(4)]
        assert real.publish(slots[0], 1, 0, space)
        assert real.publish(slots[2], 3, 0, space)
        real.cut(1)
        assert (real.find(1), real.find(3)) == (slots[0], slots[2])
        assert real.publish(slots[3], 4, 0, space)  # it was being filled
        real.free(slots[1])
        assert [real.take(0, 1), real.take(0, 1)] == [slots[1], slots[0]]
        assert [real.find(index) for index in (1, 3, 4)] == [-1, slots[2], slots[3]]


def test_a_slot_that_a_process_fills_is_not_taken_after_a_cut() -> None:
    real = table(4)
    with changing(real):
        slots = [real.take(7) for _ in range(4)]
        real.cut(1)  # by a process whose disk is full
        assert real.take(0) == -1
        real.free(slots[2])
        assert (real.take(0), real.take(0)) == (slots[2], -1)
        assert real.publish(slots[3], 4, 0, real.space(bytes(16)))
    assert real.find(4) == slots[3]


def test_a_table_is_new_until_its_first_change_has_ended() -> None:
    """What a process that is killed meanwhile has taken up is not all that there is."""
    memory = memoryview(bytearray(PageTable.nbytes(SLOTS)))
    real = PageTable(memory, SLOTS)
    real.create()
    real.begin_change()
    assert real.publish(real.take(0), 1, 0, real.space(bytes(16)))
    assert PageTable(memory, SLOTS).is_new
    real.end_change()
    assert not PageTable(memory, SLOTS).is_new


def test_nothing_beyond_a_table_is_named() -> None:
    real = table()
    for slot in (SLOTS, 1 << 40):
        for call in (real.generation, real.index, real.free, real.release):
            with pytest.raises(IndexError, match="damaged"):
                call(slot)
    with pytest.raises(ValueError, match="does not fit"):
        PageTable(memoryview(bytearray(PageTable.nbytes(SLOTS) - 1)), SLOTS)
    with pytest.raises(IndexError, match="damaged"):
        real.touch([SLOTS])


def test_pages_that_are_taken_up_stay_with_their_identity() -> None:
    """Those of an identity that nobody uses go first, also after the table was lost."""
    old, new = (name * IDENTITY_BYTES for name in (b"o", b"n"))
    keys, stride = [bytes([number]) for number in range(8)], 2 * HEADER_BYTES
    headers = memoryview(bytearray(len(keys) * stride))
    address = address_of(headers)
    for number, key in enumerate(keys):
        if number == 3:
            continue  # a slot that holds nothing
        of = new if number % 2 else old
        _core.fill_page(address + number * stride, memoryview(b"page"), of, key, 0, 0.0)
    real = table(len(keys))
    with changing(real):
        real.adopt(0, headers, stride)
    real.mend()
    assert real.pages() == len(keys) - 1
    with changing(real):
        real.seat(0, real.space(new))
        slots = [real.take(0) for _ in range(5)]
    assert slots == [3, 0, 2, 4, 6]
    assert [real.find(each) for each in indices_of(new, keys)] == [-1, 1, -1, -1, -1, 5, -1, 7]
