"""A restore: choose a step, read what this rank needs of it, and put it into the live state."""
