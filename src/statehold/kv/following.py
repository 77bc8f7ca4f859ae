"""follow(): which steps of a run an engine takes while it serves.

Invariants: a step is offered once it is committed, and the newest one counts. Nothing of its
tensors is read here: who takes a step reads and verifies it.
Not here: how an engine takes a step (vllm/weights), tensors in place (subscription).
"""

from __future__ import annotations

import math
import os
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from statehold.errors import refused
from statehold.options.paths import check_run
from statehold.subscription.subscribe import Subscription
from statehold.units import check_timeout

HISTORY = 8  # steps from which the fall of a metric is known


@dataclass(frozen=True, slots=True)
class WorthThePause:
    """Takes a step when its gain is worth the pause of the engine.

    Answers of older weights cost what the metric has fallen since. Answers that a pause takes away
    cost the metric itself. So an update every T seconds costs fall * T / 2 + metric * pause_s / T,
    which is least at T = sqrt(2 * pause_s * metric / fall). As in Viper (ICPP 2024), a prediction
    of the loss chooses the schedule; here the loss goes on falling as it did over the last steps.

    Args:
        metric: one that save(metrics=) gives each step; positive, and lower is better.
        pause_s: how many seconds an update keeps the engine from answering.
    """

    metric: str
    pause_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.pause_s < math.inf:
            raise refused("not the pause of an update", "seconds from 0 on", self.pause_s)

    def interval_s(self, seen: Sequence[tuple[float, float]]) -> float:
        """The seconds between two updates; inf while the metric does not fall.

        seen: of the last steps, when they were committed, and the metric.
        """
        times, values = zip(*seen, strict=True)
        if len(set(times)) < 2:
            return 0.0
        fall = -statistics.linear_regression(times, values).slope
        return math.sqrt(2 * self.pause_s * max(0.0, values[-1]) / fall) if fall > 0 else math.inf


def follow(
    run: str | os.PathLike[str], *, every: int = 1, worth: WorthThePause | None = None,
    timeout_s: float | None = None,
) -> Iterator[int]:  # fmt: skip
    """The steps that an engine takes, as they are committed. The first one comes at once.

        for step in kv.follow("runs/llama", every=100):
            take(step)

    Steps that are committed while the loop is busy are passed over, but for the newest. If the run
    goes back, or saves a step again, that step comes.

    Args:
        run: the run directory. It need not exist yet.
        every: a step comes if its number is at least so much above the last one that came.
        worth: a step comes only if it is worth the pause, too. One without the metric does not.
        timeout_s: end the loop after so long without a new step; None waits for ever.

    Raises:
        UsageError: an argument is not valid.
    """
    if type(every) is not int or every < 1:
        raise refused("not a distance of steps", "every of at least 1", every)
    check_timeout(timeout_s)
    return _followed(Subscription(check_run(run), {}), every, worth, timeout_s)


def _followed(
    updates: Subscription, every: int, worth: WorthThePause | None, timeout_s: float | None
) -> Iterator[int]:
    seen = deque[tuple[float, float]](maxlen=HISTORY)
    last_step = last_s = -math.inf
    with updates:
        while (update := updates.wait(timeout_s)) is not None:
            update.apply()
            if update.step <= last_step:  # rewound, or saved again
                seen.clear()
                last_step = last_s = -math.inf
            interval_s = 0.0
            if worth is not None:
                if worth.metric not in update.metrics:
                    continue
                seen.append((update.committed_s, update.metrics[worth.metric]))
                interval_s = worth.interval_s(seen)
            if update.step - last_step >= every and update.committed_s - last_s >= interval_s:
                last_step, last_s = update.step, update.committed_s
                yield update.step
