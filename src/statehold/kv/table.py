"""Which slots of a tier hold which pages: a table in memory that all processes of a host map.

    words     magic, slots, changes (odd: one is under way), free, fresh, clock, unused, evicted,
              boot (of the host; 0 once all processes have closed the table), ranked (whether a
              page has a score)
    spaces    SPACES_MAX times: identity, last use, pages, newest, oldest
    seats     by process: 1 + its space; 0 without one
    by slot   index of the key, index of the page before it; generation, state with seat and space,
              last use, next newer, next older, rank (its score, in an order of integers)
    buckets   open addressing: 1 + slot, or 0

A space is the pages of one identity, in the order of their use. A slot that is needed is taken from
the space that nobody has used for longest. If all are in use, it is the slot that was used least
recently. Using a page uses those before it, too, so a page never goes before one that follows it.
With scores it is the page of the lowest score among the RANKED least recently used ones that no
other one of them follows.

Invariants: the caller holds the lock of the tier, except for find(), index() and generation().
These may see half a change. Then they miss a page, or name a slot of another one, and the reader
of a slot compares its generation after it has read. A slot gets a new generation each time that it
is taken. A process that dies inside a change leaves `changes` odd, and mend() makes
again what follows from the columns. The table is only a hint: each page proves itself.
Not here: the bytes of pages (tiers), the lock (opened).
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from statehold import _core

FREE, FILLING, WHOLE, DIRTY = range(4)

SPACES_MAX = 64
SEATS_MAX = 256

# Among how many pages a score decides. More would keep pages that nobody has used for long.
RANKED = 16

_MAGIC = int.from_bytes(b"SHKVTAB2", "little")
_WORDS = 16
_MAGIC_AT, _SLOTS, _CHANGES, _FREE, _FRESH, _CLOCK, _, _EVICTED, _BOOT, _IS_RANKED = range(10)
_SPACE_WORDS = 6
_LOW, _HIGH, _LAST_USE, _PAGES, _NEWEST, _OLDEST = range(_SPACE_WORDS)  # in a space
_LONG_COLUMNS, _COLUMNS = 2, 6
_IDENTITY = struct.Struct("<QQ")
_FLOAT, _UINT = struct.Struct("<f"), struct.Struct("<I")


def _buckets(slots: int) -> int:
    return 1 << max(3, (2 * slots - 1).bit_length())


class SlotTable:
    """The table in `memory`, which has nbytes(slots). New memory is zeros."""

    def __init__(self, memory: memoryview, slots: int) -> None:
        self.slots = slots
        self._words = words = memory.cast("Q")
        self._spaces = words[_WORDS : _WORDS + SPACES_MAX * _SPACE_WORDS]
        self._seats = words[_WORDS + len(self._spaces) :][:SEATS_MAX]
        at = _WORDS + len(self._spaces) + SEATS_MAX
        self._index, self._before = words[at:][:slots], words[at + slots :][:slots]
        rest = memory[8 * (at + _LONG_COLUMNS * slots) :].cast("I")
        columns = [rest[i * slots : (i + 1) * slots] for i in range(_COLUMNS)]
        self._generation, self._state, self._used, self._newer, self._older, self._rank = columns
        self._mask = _buckets(slots) - 1
        self._bucket = rest[_COLUMNS * slots :][: self._mask + 1]
        self._filled: Sequence[tuple[int, bool]] = ()

    @staticmethod
    def nbytes(slots: int) -> int:
        """The bytes of a table."""
        words = _WORDS + SPACES_MAX * _SPACE_WORDS + SEATS_MAX + _LONG_COLUMNS * slots
        return 8 * (words + (_COLUMNS * slots + _buckets(slots) + 1) // 2)

    @property
    def is_new(self) -> bool:
        """Whether the memory has no table of this size."""
        return self._words[_MAGIC_AT] != _MAGIC or self._words[_SLOTS] != self.slots

    def create(self) -> None:
        """Make new memory, which is zeros, an empty table."""
        self._words[_SLOTS] = self.slots
        self._words[_MAGIC_AT] = _MAGIC

    # -- without the lock ------------------------------------------------------------------

    def find(self, index: int) -> int:
        """The slot that may hold a page; -1 without one."""
        return self.find_all((index,))[0]

    def find_all(self, indices: Iterable[int]) -> list[int]:
        """The same for many."""
        return _core.find_pages(self._bucket, self._index, array("Q", indices))

    def generation(self, slot: int) -> int:
        """Changes whenever the slot is taken for another page."""
        return self._generation[slot]

    def index(self, slot: int) -> int:
        """By which the page of a slot is found."""
        return self._index[slot]

    @property
    def evicted(self) -> int:
        """How many pages had to go, since the table was made."""
        return self._words[_EVICTED]

    def pages(self) -> int:
        """How many pages there are that can be found."""
        return sum(self._spaces[at + _PAGES] for at in range(0, len(self._spaces), _SPACE_WORDS))

    # -- changes ---------------------------------------------------------------------------

    @property
    def is_torn(self) -> bool:
        """Whether a process has died inside a change."""
        return bool(self._words[_CHANGES] % 2)

    @contextmanager
    def change(self) -> Iterator[None]:
        """Around changes. An exception leaves the table torn; the next change mends it."""
        if self.is_torn:
            self.mend()
        self._words[_CHANGES] += 1
        self._filled = ()
        yield
        self._words[_CHANGES] += 1

    def take(self, seat: int, below: int | None = None) -> int:
        """A slot that is empty, or whose page has to go; it is FILLING then. -1 without one.

        below: slots that were never taken are taken only below this one.
        """
        slot = self._words[_FREE] - 1
        if slot >= 0:
            self._words[_FREE] = self._older[slot]
        elif self._words[_FRESH] < (self.slots if below is None else below):
            slot = self._words[_FRESH]
            self._words[_FRESH] += 1
        else:
            slot = self._oldest()
            if slot < 0:
                return -1
            self._unlink(slot)
            self._unhash(slot)
            self._words[_EVICTED] += 1
        self._generation[slot] = (self._generation[slot] + 1) & 0xFFFFFFFF
        self._state[slot] = FILLING | seat << 8
        return slot

    def publish(self, slot: int, index: int, before: int, space: int, score: float = 0.0) -> bool:
        """From now on find() names a slot that was taken. False if another one has the page."""
        if self.find(index) >= 0:
            return False
        self._fill(slot, index, before, space, score)
        self._hash(slot)
        self._link(slot)
        return True

    def hold(self, slot: int, seat: int) -> None:
        """A published page is DIRTY: its slot is not given away before release()."""
        self._unlink(slot)
        self._state[slot] = DIRTY | seat << 8 | self._state[slot] & 0xFF000000

    def release(self, slot: int) -> None:
        """A page is no longer DIRTY."""
        self._state[slot] = WHOLE | self._state[slot] & 0xFF000000
        self._link(slot)

    def free(self, slot: int) -> None:
        """Nothing is in a slot any more."""
        state = self._state[slot] & 0xFF
        if state == WHOLE:
            self._unlink(slot)
        if state in (WHOLE, DIRTY):
            self._unhash(slot)
        if state != FREE:
            self._give_back(slot)
            self._generation[slot] = (self._generation[slot] + 1) & 0xFFFFFFFF

    def cut(self, below: int) -> None:
        """The slots from this one on have no storage: nobody takes them any more."""
        if below < self._words[_FRESH]:
            self._words[_FRESH] = below
            self._rebuild()

    def touch(self, slots: Iterable[int]) -> None:
        """Pages were used, and so were those before them. The last page of a prefix comes first."""
        seen = set[int]()
        for slot in slots:
            while slot >= 0 and slot not in seen:
                seen.add(slot)
                if self._state[slot] & 0xFF == WHOLE:
                    self._unlink(slot)
                    self._link(slot)
                before = self._before[slot]
                slot = self.find(before) if before else -1

    def adopt(self, slot: int, index: int, before: int, space: int, score: float) -> None:
        """A page was found in a slot that the table does not know; mend() makes it known."""
        self._words[_FRESH] = max(self._words[_FRESH], slot + 1)
        self._fill(slot, index, before, space, score)

    @property
    def boot(self) -> int:
        """Of the host that has the table open; 0 at first, and once all have closed it."""
        return self._words[_BOOT]

    @boot.setter
    def boot(self, boot: int) -> None:
        self._words[_BOOT] = boot

    # -- spaces and seats ------------------------------------------------------------------

    def space(self, identity: bytes) -> int:
        """The number of the space of an identity. If there are too many, the oldest goes."""
        low, high = _IDENTITY.unpack(identity)
        spare = -1
        for at in range(0, len(self._spaces), _SPACE_WORDS):
            if (self._spaces[at + _LOW], self._spaces[at + _HIGH]) == (low, high):
                return at // _SPACE_WORDS
            if spare < 0 and not self._spaces[at + _PAGES]:
                spare = at if at // _SPACE_WORDS not in self._in_use() else spare
        if spare < 0:
            spare = self._longest_unused() * _SPACE_WORDS
            while oldest := self._spaces[spare + _OLDEST]:
                self.free(oldest - 1)
        self._spaces[spare + _LOW], self._spaces[spare + _HIGH] = low, high
        return spare // _SPACE_WORDS

    def seat(self, seat: int, space: int | None) -> None:
        """The process in a seat uses a space; None: it uses none."""
        self._seats[seat] = 0 if space is None else space + 1

    def clear_seats(self, is_alive: Callable[[int], bool]) -> list[int]:
        """Free what dead processes were filling; returns the slots that they have left DIRTY."""
        dead = {seat for seat in range(SEATS_MAX) if not is_alive(seat)}
        for seat in dead:
            self._seats[seat] = 0
        states = enumerate(self._state[: self._words[_FRESH]].tolist())
        left = [(slot, state & 0xFF) for slot, state in states if (state >> 8) & 0xFFFF in dead]
        for slot in [slot for slot, state in left if state == FILLING]:
            self.free(slot)
        return [slot for slot, state in left if state == DIRTY]

    def mend(self) -> None:
        """Make lists and buckets again from the columns. A page that is there twice stays once."""
        self._words[_CHANGES] |= 1
        self._rebuild()
        self._words[_CHANGES] += 1

    def _rebuild(self) -> None:
        self._words[_FREE] = 0
        self._words[_FRESH] = min(self._words[_FRESH], self.slots)
        for at in range(0, len(self._spaces), _SPACE_WORDS):
            self._spaces[at + _PAGES] = self._spaces[at + _NEWEST] = self._spaces[at + _OLDEST] = 0
        for at in range(0, self._mask + 1, 1 << 16):
            piece = self._bucket[at : at + (1 << 16)]
            piece[:] = memoryview(bytes(piece.nbytes)).cast("I")
        used = self._used
        for slot in sorted(range(self._words[_FRESH]), key=used.__getitem__):
            state = self._state[slot]
            if state & 0xFF in (WHOLE, DIRTY) and self.find(self._index[slot]) < 0:
                self._hash(slot)
                if state & 0xFF == WHOLE:
                    self._link(slot, self._used[slot])
            elif state & 0xFF != FILLING:
                self._give_back(slot)

    # -- inside ----------------------------------------------------------------------------

    def _fill(self, slot: int, index: int, before: int, space: int, score: float) -> None:
        self._state[slot] = WHOLE | space << 24
        self._index[slot], self._before[slot], self._rank[slot] = index, before, _ranked(score)
        if score:
            self._words[_IS_RANKED] = 1

    def _give_back(self, slot: int) -> None:
        self._state[slot] = FREE
        self._older[slot], self._words[_FREE] = self._words[_FREE], slot + 1

    def _hash(self, slot: int) -> None:
        at = self._index[slot] & self._mask
        while self._bucket[at]:
            at = at + 1 & self._mask
        self._bucket[at] = slot + 1

    def _unhash(self, slot: int) -> None:
        bucket, mask = self._bucket, self._mask
        hole = self._index[slot] & mask
        while bucket[hole] != slot + 1:
            if not bucket[hole]:
                return
            hole = hole + 1 & mask
        at = hole
        while bucket[at := at + 1 & mask]:  # those behind move up, or find() would stop too early
            home = self._index[bucket[at] - 1] & mask
            if (at - home & mask) >= (at - hole & mask):
                bucket[hole], hole = bucket[at], at
        bucket[hole] = 0

    def _link(self, slot: int, used: int | None = None) -> None:
        if used is None:
            self._words[_CLOCK] += 1
            used = self._words[_CLOCK] & 0xFFFFFFFF
        at = (self._state[slot] >> 24) * _SPACE_WORDS
        newest = self._spaces[at + _NEWEST]
        self._used[slot], self._newer[slot], self._older[slot] = used, 0, newest
        if newest:
            self._newer[newest - 1] = slot + 1
        else:
            self._spaces[at + _OLDEST] = slot + 1
        self._spaces[at + _NEWEST] = slot + 1
        self._spaces[at + _LAST_USE] = used
        self._spaces[at + _PAGES] += 1

    def _unlink(self, slot: int) -> None:
        at = (self._state[slot] >> 24) * _SPACE_WORDS
        newer, older = self._newer[slot], self._older[slot]
        if newer:
            self._older[newer - 1] = older
        else:
            self._spaces[at + _NEWEST] = older
        if older:
            self._newer[older - 1] = newer
        else:
            self._spaces[at + _OLDEST] = newer
        self._spaces[at + _PAGES] -= 1

    def _in_use(self) -> set[int]:
        return {each - 1 for each in self._seats if each}

    def _longest_unused(self) -> int:
        in_use = self._in_use()
        found = [number for number in range(SPACES_MAX) if number not in in_use]
        return min(found, key=lambda number: self._spaces[number * _SPACE_WORDS + _LAST_USE])

    def _oldest(self) -> int:
        """The slot whose page goes first."""
        best, best_key = -1, (True, 1 << 64)
        for at, is_used in self._filled or self._with_pages():
            oldest = self._spaces[at + _OLDEST] - 1
            if oldest >= 0:
                use = self._used[oldest] if is_used else self._spaces[at + _LAST_USE]
                if (is_used, use) < best_key:
                    best, best_key = oldest, (is_used, use)
        if best < 0 and self._filled:
            self._filled = ()  # others have got pages in this change
            return self._oldest()
        return best if best < 0 or not self._words[_IS_RANKED] else self._least(best)

    def _with_pages(self) -> Sequence[tuple[int, bool]]:
        """Where the spaces with pages are, and whether each is in use. It is looked up once in a
        change: many slots are taken in one."""
        in_use, spaces = self._in_use(), range(0, len(self._spaces), _SPACE_WORDS)
        filled = [at for at in spaces if self._spaces[at + _OLDEST]]
        self._filled = [(at, at // _SPACE_WORDS in in_use) for at in filled]
        return self._filled

    def _least(self, slot: int) -> int:
        """The page of the lowest score, among `slot` and those that were used next."""
        followed, best = set[int](), slot
        for _ in range(RANKED):
            if self._index[slot] not in followed and self._rank[slot] < self._rank[best]:
                best = slot
            followed.add(self._before[slot])
            slot = self._newer[slot] - 1
            if slot < 0:
                break
        return best


def _ranked(score: float) -> int:
    """An integer in the order of the scores: that of the bits of a float, in one direction."""
    bits = int(_UINT.unpack(_FLOAT.pack(score))[0])
    return bits ^ (0xFFFFFFFF if bits >> 31 else 0x80000000)
