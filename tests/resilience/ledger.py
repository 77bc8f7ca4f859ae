"""Ledger: what the replicas of a job have counted, and everything that must hold of it.

Each commit names the epoch of its vote. Every member of that epoch has written down its vote before
it could be heard, so the votes of a committed epoch are complete, whoever has died since.

- Each microbatch of each step is in the votes of the step's epoch once.
- An epoch has one membership, and exactly its members vote.
- A step that was committed under two epochs was committed under the older one by replicas that the
  newer one is without: what they did is dropped.
- Losses and weights of each commit are those of the undisturbed run, bit for bit, and samples are.
- Nobody computes a microbatch twice.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from resilience.jobs import Commit, Log
from resilience.replica import MICROBATCHES, Vote


class Ledger:
    """logs: of all replicas. alone: of an undisturbed run that is at least as long.

    dropped: commits that replicas without a membership have made for themselves.
    """

    def __init__(self, logs: Sequence[Log], alone: Log) -> None:
        self.violations: list[str] = []
        self.counted: Counter[int] = Counter()
        self.expected: Counter[int] = Counter()
        self.dropped = 0
        self._alone = alone
        self._votes: dict[tuple[int, int], dict[str, Vote]] = defaultdict(dict)
        self._commits: dict[int, list[Commit]] = defaultdict(list)
        for number, log in enumerate(logs):
            self._read(number, log)
        self.steps = 1 + max(self._commits)
        self._memberships()
        for step in range(self.steps):
            self._step(step)

    @property
    def commits(self) -> int:
        return sum(map(len, self._commits.values()))

    @property
    def lost(self) -> int:
        """How many samples were counted too rarely."""
        return (self.expected - self.counted).total()

    @property
    def repeated(self) -> int:
        return (self.counted - self.expected).total()

    @property
    def sizes(self) -> Counter[int]:
        """How many steps were committed by so many members."""
        newest = {step: max(each.epoch for each in found) for step, found in self._commits.items()}
        return Counter(len(self._votes[epoch, step]) for step, epoch in newest.items())

    def _read(self, number: int, log: Log) -> None:
        for vote in log.votes:
            self._votes[vote.epoch, vote.step][vote.name] = vote
        for commit in log.commits:
            self._commits[commit.step].append(commit)
            self._compare(f"replica {number}", commit)
        for each, times in log.computed.items():
            if times > 1:
                self._wrong(f"replica {number} computes {each} {times} times")
            if log.samples[each] != self._alone.samples.get(each, log.samples[each]):
                self._wrong(f"replica {number} draws other samples for {each}")

    def _compare(self, who: str, commit: Commit) -> None:
        alone = self._alone.commits[commit.step]
        if (commit.loss, commit.state) != (alone.loss, alone.state):
            self._wrong(
                f"{who}, step {commit.step}: loss {commit.loss} and weights {commit.state:x}, "
                f"undisturbed {alone.loss} and {alone.state:x}"
            )

    def _memberships(self) -> None:
        found: dict[int, list[str]] = {}
        for (epoch, _), votes in self._votes.items():
            for vote in votes.values():
                if found.setdefault(epoch, vote.members) != vote.members:
                    self._wrong(f"epoch {epoch} has two memberships")

    def _step(self, step: int) -> None:
        """The newest epoch of a step is that of the run."""
        commits = self._commits[step]
        epochs = {each.epoch for each in commits} or {
            epoch for epoch, voted in self._votes if voted == step
        }
        if not epochs:
            self._wrong(f"nobody has taken step {step}")
        for epoch in sorted(epochs):
            self._epoch(step, epoch, epoch == max(epochs))
        members = self._members(max(epochs), step) if epochs else set()
        for each in commits:
            if each.epoch != max(epochs):
                self.dropped += 1
                if each.name in members:
                    self._wrong(f"{each.name} has committed step {step} and takes it again")

    def _epoch(self, step: int, epoch: int, is_newest: bool) -> None:
        votes = self._votes[epoch, step]
        if votes.keys() != self._members(epoch, step):
            self._wrong(f"step {step}, epoch {epoch}: {sorted(votes)} vote")
        found = Counter(index for vote in votes.values() for index in vote.share)
        if found != Counter(range(MICROBATCHES)):
            self._wrong(f"step {step}, epoch {epoch} counts {sorted(found.elements())}")
        if is_newest:
            samples = self._alone.samples
            for index, times in found.items():
                self.counted.update(samples.get((step, index), []) * times)
            for index in range(MICROBATCHES):
                self.expected.update(samples[step, index])

    def _members(self, epoch: int, step: int) -> set[str]:
        return {name for vote in self._votes[epoch, step].values() for name in vote.members}

    def _wrong(self, what: str) -> None:
        self.violations.append(what)
