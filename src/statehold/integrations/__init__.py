"""Other people's frameworks on top of statehold."""
