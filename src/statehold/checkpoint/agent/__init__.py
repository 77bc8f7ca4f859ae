"""A small process that outlives the trainer, and copies its newest step from memory if it dies."""
