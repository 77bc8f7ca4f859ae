"""Runs that descend from runs: which step a run began from, and what runs share on storage."""
