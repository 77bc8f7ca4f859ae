"""Training steps that survive the loss of ranks, exactly."""
