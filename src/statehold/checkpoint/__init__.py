"""Checkpoints: the Checkpointer, how it saves and restores, and where steps are kept.

checkpointer   the public face: a handful of calls of a session
opening        opens a session: the other ranks, the runtime, the parts
session        what one membership has open; parts: what it is made of
keeper         ends a session, whatever becomes of the Checkpointer
flushing       the newest step goes to every level

save, restore  the two ways (docs/architecture.md)
levels, store  where steps are kept: what a level is, and the run directory itself
cadence        when a step is saved, and when it goes on to which level
agent          the process that outlives the trainer
telemetry      what is traced, counted and logged of all this
"""
