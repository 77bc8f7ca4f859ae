"""Gives each new step of a run to another process, as tensors in place."""
