"""What a serving engine does with a trace of requests, when its memory for pages is full (plan).

Requests of a trace are dealt to the replicas in turn. A replica admits a request if its tokens fit,
and then every running request gets a token in each step. If there is no room for the next token,
the request that came last leaves. It comes back with all its tokens: computed again, or loaded if
its pages survive and that is faster. Loads pass one after another, and the others run meanwhile.

Invariants: time goes from event to event, so an outcome is exact for these rules, and the same
trace has the same outcome.
Not here: counts of a model (shapes), the time of a step (costs).
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from statehold.errors import UsageError, refused
from statehold.kv.planning.costs import DeviceLayout, Gpu, LoadTimes, ServingCosts, is_load_faster
from statehold.planners.shapes import ModelShape
from statehold.planners.traces import csv_rows

_COLUMNS = ("arrival_s", "prompt", "answer")
_TOKENS_MAX = 10**8
# Deviation of the logarithm of a drawn length: one answer in a hundred is three times the mean.
_SPREAD = 0.5


@dataclass(frozen=True, slots=True)
class ServingRequest:
    """prompt, answer: tokens."""

    arrival_s: float
    prompt: int
    answer: int


Requests = Sequence[ServingRequest]


def drawn(
    count: int, prompt: int, answer: int, rate: float = math.inf, seed: int = 0
) -> list[ServingRequest]:
    """Requests with lengths around these means, `rate` of them a second."""
    random_ = random.Random(f"serving {seed}")
    at_s, found = 0.0, []
    for _ in range(count):
        sizes = (
            max(1, round(mean * random_.lognormvariate(-_SPREAD * _SPREAD / 2, _SPREAD)))
            for mean in (prompt, answer)
        )
        found.append(ServingRequest(at_s, *sizes))
        at_s += random_.expovariate(1.0) / rate
    return found


def parse(text: str) -> list[ServingRequest]:
    """Requests from CSV with the header arrival_s,prompt,answer. Raises UsageError."""
    rows = csv_rows(text, _COLUMNS, _COLUMNS)
    found = [_request(row, number) for number, row in enumerate(rows, 1)]
    if not found:
        raise UsageError("a trace has no requests", hint="give at least one")
    return sorted(found, key=attrgetter("arrival_s"))


def _request(row: dict[str, str], number: int) -> ServingRequest:
    values = [row[name] or "" for name in _COLUMNS]
    try:
        at_s, prompt, answer = (float(value) for value in values)
    except ValueError:
        at_s = prompt = answer = math.nan
    if not (0 <= at_s < 1e12 and 1 <= prompt <= _TOKENS_MAX and 1 <= answer <= _TOKENS_MAX):
        expected = "a time from 0 on, and at least one token of each"
        got = ",".join(values)[:80]
        raise refused("a request of the trace makes no sense", expected, got, request=number)
    return ServingRequest(at_s, int(prompt), int(answer))


@dataclass(slots=True)
class ServingOutcome:
    """What became of a trace. latency_s: the mean from arrival to the last token."""

    end_s: float = 0.0
    latency_s: float = 0.0
    answered: int = 0
    preemptions: int = 0
    recomputed: int = 0
    loaded: int = 0


def simulate(
    costs: ServingCosts, requests: Requests, concurrency: int, load: LoadTimes | None = None
) -> ServingOutcome:
    """The trace with at most `concurrency` requests at a time; load: pages survive, in a store that
    all replicas share.

    Raises UsageError if a request is too long for the memory of a replica.
    """
    longest = max(each.prompt + each.answer for each in requests)
    if longest > costs.tokens:
        summary = "a request is too long for the memory of a replica"
        expected, where = f"at most {costs.tokens:,} tokens", str(costs.layout)
        raise refused(summary, expected, f"{longest:,}", layout=where)
    dp = costs.layout.dp
    share = LoadTimes(load.bandwidth / dp, load.lookup_s) if load else None
    out = ServingOutcome()
    for first in range(min(dp, len(requests))):
        _ServingReplica(costs, requests[first::dp], -(-concurrency // dp), share, out).run()
    out.latency_s /= len(requests)
    return out


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request on its way. done: tokens of its answer up to the step `since`."""

    request: ServingRequest
    done: int = 0
    since: int = 0
    has_left: bool = False  # it ran before

    def size(self, step: int) -> int:
        return self.request.prompt + self.done + step - self.since


class _ServingReplica:
    def __init__(
        self, costs: ServingCosts, requests: Requests, most: int, load: LoadTimes | None,
        out: ServingOutcome,
    ) -> None:  # fmt: skip
        self._costs, self._most, self._load, self._out = costs, most, load, out
        self._coming = deque(requests)
        self._waiting = deque[_Sequence]()
        self._loading = deque[tuple[float, _Sequence]]()
        self._running: dict[_Sequence, None] = {}  # in the order in which they came
        self._ends: list[tuple[int, int, _Sequence]] = []  # step, number
        self._now_s = self._link_free_s = 0.0
        self._step = self._held = self._number = 0

    def run(self) -> None:
        """Add what becomes of the requests to the outcome; latency_s: a sum."""
        while self._coming or self._waiting or self._loading or self._running:
            self._arrive()
            self._admit()
            if not self._running:
                self._now_s = self._next_s()
            elif room := (self._costs.tokens - self._held) // len(self._running):
                self._decode(room)
            else:
                # The rest takes the room first, so a request that left does not come back at once.
                self._preempt()
                if self._running:
                    self._decode(1)
        self._out.end_s = max(self._out.end_s, self._now_s)

    def _arrive(self) -> None:
        while self._coming and self._coming[0].arrival_s <= self._now_s:
            self._waiting.append(_Sequence(self._coming.popleft()))
        while self._loading and self._loading[0][0] <= self._now_s:
            self._start(self._loading.popleft()[1])

    def _admit(self) -> None:
        while self._waiting and len(self._running) + len(self._loading) < self._most:
            first = self._waiting[0]
            size = first.request.prompt + first.done
            if self._held + size + 1 > self._costs.tokens:
                return
            self._waiting.popleft()
            self._held += size
            if first.has_left and self._is_load_chosen(first, size):
                continue
            self._now_s += self._costs.prefill.seconds(size)
            self._out.recomputed += size if first.has_left else 0
            self._start(first)

    def _is_load_chosen(self, sequence: _Sequence, size: int) -> bool:
        """Begin to load a sequence that comes back, if that is faster, with all loads before it."""
        if self._load is None:
            return False
        nbytes = self._costs.shape.kv_token
        wait_s = max(0.0, self._link_free_s - self._now_s)
        after = LoadTimes(self._load.bandwidth, self._load.lookup_s + wait_s)
        if not is_load_faster(size, nbytes, after, self._costs.prefill):
            return False
        self._link_free_s = self._now_s + after.seconds(size * nbytes)
        self._loading.append((self._link_free_s, sequence))
        self._out.loaded += size
        return True

    def _start(self, sequence: _Sequence) -> None:
        sequence.since = self._step
        self._running[sequence] = None
        self._number += 1
        end = self._step + sequence.request.answer - sequence.done
        heapq.heappush(self._ends, (end, self._number, sequence))

    def _next_s(self) -> float:
        loaded_s = self._loading[0][0] if self._loading else math.inf
        return min(loaded_s, self._coming[0].arrival_s if self._coming else math.inf)

    def _decode(self, room: int) -> None:
        """Steps until the next event."""
        batch = len(self._running)
        apart = sum(each.request.prompt + each.done for _, each in self._loading)
        while self._ends[0][2] not in self._running:  # it has left
            heapq.heappop(self._ends)
        steps = min(room, self._ends[0][0] - self._step)
        context = self._held - apart
        first_s = self._costs.step_s(batch, context)
        grows_s = self._costs.step_s(batch, context + batch) - first_s  # in a straight line
        if (next_s := self._next_s()) < math.inf:
            steps = min(steps, _steps_within(next_s - self._now_s, first_s, grows_s))
        self._now_s += steps * first_s + grows_s * steps * (steps - 1) / 2
        self._step += steps
        self._held += steps * batch
        while self._ends and self._ends[0][0] <= self._step:
            *_, sequence = heapq.heappop(self._ends)
            if sequence in self._running:
                del self._running[sequence]
                self._held -= sequence.size(self._step)
                self._out.answered += sequence.request.answer
                self._out.latency_s += self._now_s - sequence.request.arrival_s

    def _preempt(self) -> None:
        """Make room for a token of each: the last ones leave."""
        while self._held + len(self._running) > self._costs.tokens:
            last, _ = self._running.popitem()
            self._held -= last.size(self._step)
            done = last.done + self._step - last.since
            self._waiting.appendleft(_Sequence(last.request, done, has_left=True))
            self._out.preemptions += 1


def _steps_within(time_s: float, first_s: float, grows_s: float) -> int:
    """The fewest steps that take so long, at least one."""
    if grows_s <= 0:
        return max(1, math.ceil(time_s / first_s))
    half = first_s - grows_s / 2
    return max(1, math.ceil((math.sqrt(half * half + 2 * grows_s * time_s) - half) / grows_s))


# -- the plan --------------------------------------------------------------------------------------

# The sequences that an engine takes at a time, as vLLM does on a device of 70 GB and more.
SEQUENCES_MAX = 1024
# Of the cap: with answers half written on average, up to twice as many requests fit.
_SWEPT = (0.25, 0.5, 1.0, 1.5, 2.0)


@dataclass(frozen=True, slots=True)
class LayoutPlan:
    """A layout: what fits, what bounds it, and the concurrency that ends the trace first.

    cap: requests of mean length that fit at the same time. parts: of a step of that many. bound:
    `capacity` if more requests are there than that, else the largest part of a step. steady: tokens
    a second while requests wait. swept: outcomes by concurrency. kept: the same if pages survive a
    preemption.
    """

    costs: ServingCosts
    cap: int
    bound: str
    parts: dict[str, float]
    steady: float
    swept: dict[int, ServingOutcome]
    kept: dict[int, ServingOutcome]

    @property
    def tokens(self) -> int:
        """That all replicas keep."""
        return self.costs.layout.dp * self.costs.tokens

    @property
    def break_even(self) -> float:
        """The bandwidth that is as fast as a prefill, for one token. A longer prefix needs less."""
        return self.costs.shape.kv_token / self.costs.prefill.token_s

    @property
    def chosen(self) -> int:
        return min(self.swept, key=lambda each: self.swept[each].end_s)


def plan(
    shape: ModelShape, gpu: Gpu, chosen: Iterable[DeviceLayout], requests: Requests, *,
    utilization: float = 0.9, concurrency: Sequence[int] = (), load: LoadTimes | None = None,
) -> list[LayoutPlan]:  # fmt: skip
    """The layouts that the trace fits, that which ends it first at the top.

    Raises UsageError with the reason of the last one if it fits none.
    """
    found, refused = [], UsageError("there is no layout to plan for")
    for layout in chosen:
        try:
            costs = ServingCosts(shape, gpu, layout, utilization)
            found.append(_planned(costs, requests, concurrency, load))
        except UsageError as error:
            refused = error
    if not found:
        raise refused
    return sorted(found, key=lambda each: each.swept[each.chosen].end_s)


def _planned(
    costs: ServingCosts, requests: Requests, concurrency: Sequence[int], load: LoadTimes | None
) -> LayoutPlan:
    dp, count = costs.layout.dp, len(requests)
    prompt, answer = (sum(map(attrgetter(n), requests)) / count for n in ("prompt", "answer"))
    most = SEQUENCES_MAX * dp
    cap = min(most, max(1, int(costs.tokens / (prompt + answer))) * dp)
    batch = min(cap, count) / dp
    parts = costs.parts(batch, batch * (prompt + answer / 2))
    bound = "capacity" if cap < min(count, most) else max(parts, key=lambda name: parts[name])
    swept_at = concurrency or {min(count, most, max(1, int(cap * each))) for each in _SWEPT}
    swept = {each: simulate(costs, requests, each) for each in sorted(swept_at)}
    kept = {each: simulate(costs, requests, each, load) for each in swept} if load else {}
    return LayoutPlan(costs, cap, bound, parts, steady(costs, prompt, answer), swept, kept)


def steady(costs: ServingCosts, prompt: float, answer: float) -> float:
    """Tokens a second of all replicas while requests wait, and answers are half written on
    average."""
    size = prompt + answer / 2
    batch = min(SEQUENCES_MAX, costs.tokens / size)
    step_s = costs.step_s(batch, batch * size) + batch / answer * costs.prefill.seconds(prompt)
    return costs.layout.dp * batch / step_s
