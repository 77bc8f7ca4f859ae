"""Checkpoints: the Checkpointer, how it saves and restores, and where steps are kept."""
