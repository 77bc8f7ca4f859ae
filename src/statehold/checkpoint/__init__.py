"""Checkpoints: the Checkpointer, how it saves and restores, and the places of steps.

    checkpointer   the public face: a handful of calls of a session
    opening        opens a session: the other ranks, the runtime, the parts
    session        what one membership has open, and its end
    keeper         ends a session, whatever becomes of the Checkpointer
    save, restore  the two ways (docs/architecture.md)
    levels         what a level is, and how steps get there
    cadence        when a step is saved, and when it goes on to which level
    agent          the process that outlives the trainer
    telemetry      what is traced, counted and logged

Not here: what a step says of itself (format), who writes what where (layout).
"""
