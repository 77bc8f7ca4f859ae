"""A small process that outlives the trainer, and persists its newest step in memory if it dies."""
