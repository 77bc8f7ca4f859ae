"""The agent of a session: it is started when the run is saved, and ended with the run.

Invariants: an agent that gets a goodbye has nothing left to copy. A session has an agent only
while that could copy a whole step, so not if each host has only a part of one.
Not here: how an agent is started (starting), what it does (process).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from statehold.checkpoint.agent.starting import Agent, agent_for
from statehold.checkpoint.levels.levels import Levels
from statehold.checkpoint.levels.specs import Level
from statehold.io.runtime import Runtime
from statehold.observe.background_log import BackgroundLog


def companion_of(
    specs: Sequence[Level], runtime: Runtime, levels: Levels, log: BackgroundLog
) -> Companion:
    """The agent of the run, not started yet. A run has no agent if another rank leads, or if its
    disk is handed in."""
    agent = None
    if runtime.has_own_fs and levels.store.leads:
        agent = agent_for(levels.run, specs, runtime.options, log)
    return Companion(agent, levels)


class Companion:
    """`agent`: None if the run has none."""

    def __init__(self, agent: Agent | None, levels: Levels) -> None:
        self._agent = agent
        self._levels = levels

    def keep(self, ahead: Callable[[Callable[[], None]], None]) -> None:
        """See that the agent is there. `ahead` runs an action in the background, before the next
        commit."""
        if self._agent is None:
            return
        if self._levels.hosts.are_apart:
            ahead(self._agent.goodbye)
            self._agent = None
        elif self._agent.is_missing:
            ahead(self._agent.start)

    def end(self) -> None:
        """The agent is no longer needed, unless a level lacks the newest step."""
        if self._agent is None:
            return
        if self._levels.lacks_newest():
            self._agent.leave()
        else:
            self._agent.goodbye()
