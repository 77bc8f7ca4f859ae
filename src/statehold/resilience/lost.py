"""The end of a membership's groups, as an exception."""

from __future__ import annotations

from statehold.errors import StateholdError


class GroupLostError(StateholdError):
    """An operation of the groups of an epoch has failed, or the epoch has ended."""
