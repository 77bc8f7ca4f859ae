"""Takes every subgroup through memory: read, use, write, on all paths at once.

Owns: which subgroup is read, used and written when; the path that each goes to when it is written
next.
Invariants:
- A subgroup is fresh (nothing has been kept of it yet), in a buffer, or on a path. If it has
  changed in its buffer, the generation on the path is old. It is kept until a newer one is written.
- Each buffer has one owner at a time: a subgroup, an exchange, or nobody.
- When visit() returns or raises, no exchange is under way, and no subgroup is used elsewhere.
- A subgroup that is being written for hold() is not used, moved or forgotten before that has ended.
- After an error, some subgroups have changed and others have not. Only reset() goes on from there.

Not here: the meaning of the bytes (state), files (store).
"""

from __future__ import annotations

import contextlib
import errno
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from statehold.errors import (
    MissingFileError,
    NoSpaceError,
    StateholdError,
    StorageError,
    TruncatedFileError,
)
from statehold.layout.stored import StoredFile
from statehold.offload.head import Head
from statehold.offload.sizes import Buffers
from statehold.offload.store import Stored, SubgroupStore
from statehold.offload.subgroups import Subgroup
from statehold.planners import placement
from statehold.process.warn import logger
from statehold.process.worker import Crew, Task, Woken
from statehold.units import format_bytes

# -- the pipeline ----------------------------------------------------------------------------------
# A visit uses what is in memory first, and then the rest in the order in which it arrives. The
# buffer of a subgroup that was used goes to the next one that is still to be read: what is in it is
# written, if it has changed, and then the other one is read into it. This is an **exchange**. Some
# exchanges are under way while another subgroup is used. What was used last stays in memory, and
# the next visit begins with it. So with B buffers each visit of N subgroups reads N - B of them and
# writes N - B, which is the least that any order can do. A subgroup may also be used elsewhere, by
# a device, while this thread goes on with others. Its buffer is free again when that has ended.


# Of a subgroup, its buffer, and whether it is fresh: then the buffer has any content. Returns what
# waits for the end of a use elsewhere, on a thread of the pipeline; None: the use has ended.
Use = Callable[[Subgroup, torch.Tensor, bool], Callable[[], None] | None]


STALL_S = 60.0
LOOK_S = 1.0


class StallWatch:
    """What the threads of an optimizer do with its paths. Thread-safe.

    A call that hangs in the kernel, because a server is gone, cannot be cancelled, and it may still
    use its memory. So an update waits for it. The log says what it waits for after STALL_S, and
    again each time the wait has doubled.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._doing: dict[str, float] = {}

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Around one thing that is done: "reading subgroup 3 from /nvme0"."""
        with self._guard:
            self._doing[what] = time.perf_counter()
        try:
            yield
        finally:
            with self._guard:
                del self._doing[what]

    def wait_for_one(self, moving: Collection[Task[None]], woken: Woken) -> None:
        """Wait until at least one of them has ended. woken: gets an item when one does."""
        begin, pause_s = time.perf_counter(), STALL_S
        while not any(each.has_ended for each in moving):
            # An interrupted caller may have lost an item.
            with contextlib.suppress(queue.Empty):
                woken.get(timeout=min(STALL_S, LOOK_S))
            if time.perf_counter() - begin > pause_s:
                begin, pause_s = time.perf_counter(), 2 * pause_s
                self._warn()

    def wait_for_all(self, moving: Collection[Task[None]], woken: Woken) -> None:
        """Wait until all of them have ended."""
        while left := [each for each in moving if not each.has_ended]:
            self.wait_for_one(left, woken)

    def _warn(self) -> None:
        now = time.perf_counter()
        with self._guard:
            doing = list(self._doing.items())
        for what, begin in doing:
            logger.warning(
                "an update waits: %s takes %.3g s so far. The path or device is slow or does not "
                "answer, or another process has the turn there",
                what, now - begin,
            )  # fmt: skip


@dataclass(eq=False)
class Held:
    """The files of a state as it was at one moment: what a save takes into a step.

    Of each subgroup it is the generation in `writes`, which the store holds once it is there. From
    the moment on until release(), none of these files is removed, and nothing in them is written
    but headers. What was only in memory is being written since then; files() waits for that, and
    then writes the headers that are missing. release() is called once. Ctrl-C may come before
    anybody can call it: then the files go when nothing refers to this any more.
    """

    store: SubgroupStore
    writes: dict[int, Task[Stored]] = field(default_factory=dict)
    taken: list[Stored] = field(default_factory=list)

    def take(self, stored: Stored) -> None:
        """Hold a generation. On a thread of the pool, where no signal's handler comes."""
        self.store.files[stored.path].hold(stored.file)
        self.taken.append(stored)

    def files(self, heads: Mapping[int, Head]) -> list[StoredFile]:
        """All files, with these headers. Raises the error of a write that has failed."""
        found = {index: write.result() for index, write in self.writes.items()}
        for index, stored in found.items():
            self.store.write_head(stored, heads[index])
        return [heads[index].stored(stored.file, stored.sums) for index, stored in found.items()]

    def release(self) -> None:
        """Let the files go."""
        for write in self.writes.values():
            write.error()
        self.__del__()

    def __del__(self) -> None:
        while self.taken:
            stored = self.taken.pop()
            self.store.files[stored.path].release(stored.file)


@dataclass
class _Place:
    """Where a subgroup is."""

    buffer: int | None = None
    is_changed: bool = False
    stored: Stored | None = None


class SubgroupPipeline:
    """Subgroups, and the buffers and the `store` that hold them. bandwidths: see Targets.

    places: where each is. exchanges: how many may be under way.
    """

    def __init__(
        self,
        subgroups: Sequence[Subgroup],
        buffers: Buffers,
        store: SubgroupStore,
        bandwidths: Sequence[float],
    ) -> None:
        self._subgroups, self._buffers, self.store = subgroups, buffers, store
        self.places = [_Place() for _ in subgroups]
        self._free = deque(range(buffers.count))
        self._owners: list[int | None] = [None] * buffers.count
        self.exchanges = max(1, placement.EXCHANGES_PER_PATH * len(store.files))
        self._threads = Crew("statehold-offload", self.exchanges)
        self._elsewhere = Crew("statehold-elsewhere", 1)
        self.waited_s, self.hits, self.misses = 0.0, 0, 0
        self.targets = Targets([each.nbytes for each in store.forms], store, bandwidths)
        self._watch = StallWatch()
        self._writes: dict[int, Task[Stored]] = {}  # of hold()
        if buffers.count < len(subgroups):
            self.targets.reserve(self.exchanges)

    def visit(self, wanted: Iterable[int], use: Use, *, changes: bool) -> None:
        """Call `use` once with each of the subgroups; `changes` says that it changes them."""
        wanted = list(wanted)
        self.targets.renew()
        ready = deque(index for index in wanted if self.places[index].buffer is not None)
        absent = deque(index for index in wanted if self.places[index].buffer is None)
        self.hits += len(ready)
        kept = set(ready)
        idle = [buffer for buffer, owner in enumerate(self._owners) if owner not in {None, *kept}]
        spare = deque([*self._free, *idle])
        moving: dict[Task[None], int] = {}
        away: dict[Task[None], int] = {}  # the buffers of what is used elsewhere
        woken: Woken = queue.SimpleQueue()
        try:
            while ready or absent or moving or away:
                while absent and spare and len(moving) < self.exchanges:
                    index = absent.popleft()
                    buffer = spare.popleft()
                    exchange = self._threads.submit(self._exchange, buffer, index, woken=woken)
                    moving[exchange] = index
                    self.misses += self.places[index].stored is not None
                ended = self._ended([*moving, *away], woken, must_wait=not ready)
                ready.extend(moving.pop(each) for each in ended if each in moving)
                spare.extend(away.pop(each) for each in ended if each in away)
                if ready:
                    buffer, end = self._use(ready.popleft(), use, changes=changes)
                    if end is None:
                        spare.append(buffer)
                    else:
                        away[self._elsewhere.submit(self._wait_for, end, woken=woken)] = buffer
        finally:
            self._watch.wait_for_all([*moving, *away], woken)
            if not changes:
                self.targets.skip()
            self._free = deque(i for i, owner in enumerate(self._owners) if owner is None)

    def hold(self, wanted: Iterable[int]) -> Held:
        """The generations of these subgroups as they are now. Writes those that only memory has."""
        held = Held(self.store)
        try:
            for index in wanted:
                self._settle([index])
                write = self._threads.submit(self._hold, index, held)
                self._writes[index] = held.writes[index] = write
        except BaseException:  # as Ctrl-C: nobody else can release it
            held.release()
            raise
        return held

    def reset(self) -> None:
        """Forget all content: every subgroup is fresh again."""
        self._settle(list(self._writes))
        for place in self.places:
            if place.stored is not None:
                self.store.files[place.stored.path].give_back(place.stored.file)
        self.places = [_Place() for _ in self._subgroups]
        self._owners = [None] * self._buffers.count
        self._free = deque(range(self._buffers.count))

    def close(self) -> None:
        """End the threads. No visit is under way."""
        self._threads.close()
        self._elsewhere.close()

    def _hold(self, index: int, held: Held) -> Stored:
        """Hold the file of a subgroup. It is written first if the subgroup has changed, which stays
        in its buffer. On a thread of the pool."""
        place, stored = self.places[index], self.places[index].stored
        if place.is_changed and place.buffer is not None:
            stored = self._store_changed(place, index, self._buffers[place.buffer])
        if stored is None or place.is_changed:
            raise AssertionError("a subgroup is held that is fresh, or neither here nor there")
        held.take(stored)
        return stored

    def _settle(self, subgroups: Iterable[int]) -> None:
        """Return once none of these is being written for hold(). Held raises what fails there."""
        for index in subgroups:
            if index in self._writes:
                self._writes.pop(index).error()

    def _use(self, index: int, use: Use, *, changes: bool) -> tuple[int, Callable[[], None] | None]:
        """Use a subgroup that is in memory. Returns its buffer, and what `use` has returned."""
        begin = time.perf_counter()
        self._settle([index])
        self.waited_s += time.perf_counter() - begin
        place = self.places[index]
        if place.buffer is None:
            raise AssertionError("a subgroup is used that is not in memory")
        is_fresh = place.stored is None and not place.is_changed
        end = use(self._subgroups[index], self._buffers[place.buffer], is_fresh)
        place.is_changed |= changes
        return place.buffer, end

    def _ended(
        self, under_way: Collection[Task[None]], woken: Woken, *, must_wait: bool
    ) -> list[Task[None]]:
        """The tasks that have ended. Raises their errors. must_wait: until there is one."""
        if must_wait:
            begin = time.perf_counter()
            self._watch.wait_for_one(under_way, woken)
            self.waited_s += time.perf_counter() - begin
        ended = [each for each in under_way if each.has_ended]
        for each in ended:
            each.result()
        return ended

    def _wait_for(self, end: Callable[[], None]) -> None:
        """Wait for a use elsewhere. On a thread of its own."""
        with self._watch.doing("updating a subgroup on a device"):
            end()

    def _exchange(self, buffer: int, coming: int) -> None:
        """Give a buffer to another subgroup. On a thread of the pool."""
        memory = self._buffers[buffer]
        leaving = self._owners[buffer]
        if leaving is not None:
            self._settle([leaving])
            self._leave(leaving, memory)
        self._owners[buffer] = None
        place = self.places[coming]
        if place.stored is not None:
            self._read(coming, place.stored, memory)
        place.buffer, self._owners[buffer] = buffer, coming

    def _leave(self, index: int, memory: torch.Tensor) -> None:
        place = self.places[index]
        if place.is_changed:
            self._store_changed(place, index, memory)
        place.buffer = None

    def _store_changed(self, place: _Place, index: int, memory: torch.Tensor) -> Stored:
        old, stored = place.stored, self._write(index, memory)
        place.stored, place.is_changed = stored, False
        if old is not None:
            self.store.files[old.path].give_back(old.file)
        return stored

    def _read(self, index: int, stored: Stored, memory: torch.Tensor) -> None:
        what = f"reading subgroup {index} from {self.store.files[stored.path].directory}"
        try:
            with self._watch.doing(what):
                self.store.read(self._subgroups[index], stored, memory)
        except StateholdError as error:
            self.targets.give_up(stored.path, error, what)
            raise

    def _write(self, index: int, memory: torch.Tensor) -> Stored:
        """Write a subgroup to its path, or to another one if that fails: it is still in memory."""
        while True:
            path = self.targets[index]
            what = f"writing subgroup {index} to {self.store.files[path].directory}"
            try:
                with self._watch.doing(what):
                    return self.store.write(self._subgroups[index], memory, path)
            except StateholdError as error:
                if not self.targets.give_up(path, error, what):
                    needed = format_bytes(self.store.forms[index].nbytes)
                    error.with_fact("failed", f"{what}: its file needs {needed}")
                    raise


# -- the path that a subgroup goes to --------------------------------------------------------------
# The choice follows the measured bandwidths. A path that has no subgroups is measured again after a
# while, with one subgroup. A path that fails is given up: it gets no more writes until the
# optimizer ends.
#
# A subgroup always has a target that is not given up, so the last path never is. A new placement is
# taken only when its space is there, because a path that is full would be given up.


# The process is short of something, whatever the path.
OWN_ERRNOS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}


class Targets:
    """Of subgroups with these `sizes`, on the paths of `store`.

    bandwidths: of each path, in any unit; they decide the first placement.

    Thread-safe.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        store: SubgroupStore,
        bandwidths: Sequence[float],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._sizes, self.store, self._clock = sizes, store, clock
        self._guard = threading.RLock()
        self.given_up: dict[int, str] = {}  # paths, and why
        self._weights = list(bandwidths)
        self._measured: list[float | None] = [None] * len(bandwidths)
        self._seen = [placement.Moved()] * len(bandwidths)
        self._measured_at = [clock()] * len(bandwidths)
        self.counts = placement.shares(len(sizes), bandwidths) if bandwidths else []
        self._most = list(self.counts)  # subgroups for which a path has files
        self._paths = placement.in_turns(self.counts)
        self._may_grow = True

    def __getitem__(self, subgroup: int) -> int:
        return self._paths[subgroup]

    def reserve(self, more: int) -> None:
        """Make the files of this placement, and `more` on each path for what is under way.

        These are of the largest size, so a file may take any subgroup and no space is lacking.
        """
        for path, files in enumerate(self.store.files):
            sizes = [
                size for size, each in zip(self._sizes, self._paths, strict=True) if each == path
            ]
            files.reserve(sizes + [max(self._sizes)] * min(more, len(sizes)))

    def renew(self) -> None:
        """Place subgroups by the bandwidths of late, if that pays. No transfer is under way."""
        self._measure()
        with self._guard:
            usable = [path for path in range(len(self.counts)) if path not in self.given_up]
            if len(usable) < 2 or not self._may_grow:
                return
            if all(self._measured[path] for path in usable if self.counts[path]):
                idle = self._to_measure_again(usable)
                if idle is not None:
                    self._measured[idle], self._seen[idle] = None, self.store.moved(idle)
                    self._take(placement.with_one_on(idle, self.counts))
                    return
                self._weights = [
                    (self._measured[path] or 0.0) if path in usable else 0.0
                    for path in range(len(self.counts))
                ]
                self._take(placement.replaced(self.counts, self._weights))

    def skip(self) -> None:
        """Do not count what was moved since renew(), because it was not read and written alike."""
        self._seen = [self.store.moved(path) for path in range(len(self.counts))]

    def give_up(self, path: int, error: StateholdError, what: str) -> bool:
        """Write no more to a path on which `what` has failed: "writing subgroup 3 to /nvme0".

        False if that is no way out: the path is not at fault, or it is the last one. Then the error
        says so.
        """
        if not isinstance(error, StorageError | MissingFileError | TruncatedFileError):
            return False
        if getattr(error, "errno", 0) in OWN_ERRNOS:
            return False
        directory = self.store.files[path].directory
        with self._guard:
            if path in self.given_up:
                return True
            if len(self.given_up) + 1 == len(self.counts):
                error.with_fact("other paths", "none is left, so this one is not given up")
                return False
            self.given_up[path] = f"{what} failed: {_in_short(error)}"
            self._weights[path] = 0.0
            self.counts = placement.shares(len(self._sizes), self._weights)
            self._paths = placement.in_turns(self.counts)
        logger.warning(
            "an optimizer gives up its path %s: %s. Its other paths take the subgroups from now "
            "on. Committed steps are safe",
            directory, self.given_up[path],
        )  # fmt: skip
        return True

    def _measure(self) -> None:
        for path in range(len(self.counts)):
            moved = self.store.moved(path)
            late = placement.bandwidth(moved - self._seen[path])
            if late is not None:
                before = self._measured[path]
                self._measured[path] = placement.averaged(before, late)
                self._seen[path], self._measured_at[path] = moved, self._clock()

    def _to_measure_again(self, usable: Sequence[int]) -> int | None:
        """A path without subgroups whose bandwidth may have changed."""
        now, nbytes = self._clock(), max(self._sizes)
        for path in usable:
            if self.counts[path] == 0 and placement.is_worth_measuring(
                self._measured[path], nbytes, now - self._measured_at[path]
            ):
                return path
        return None

    def _take(self, counts: list[int]) -> None:
        """Take a placement, if there is space for the files that it needs in addition."""
        for path, count in enumerate(counts):
            more = count - self._most[path]
            if more <= 0:
                continue
            try:
                self.store.files[path].reserve([max(self._sizes)] * more)
            except NoSpaceError as error:
                self._may_grow = False
                logger.warning(
                    "an optimizer would be faster with more of its state on %s, which is full "
                    "(%s). Its subgroups stay where they are",
                    self.store.files[path].directory, _in_short(error),
                )  # fmt: skip
                return
            except StorageError as error:
                if not self.give_up(path, error, "making files"):
                    raise
                return
            self._most[path] = count
        if counts != self.counts:
            self.counts, self._paths = counts, placement.in_turns(counts)


def _in_short(error: StateholdError) -> str:
    return f"{error.summary}: {error.facts['errno']}" if "errno" in error.facts else error.summary
