"""Checkpoints: the Checkpointer, how it saves and restores, and the places of steps."""
