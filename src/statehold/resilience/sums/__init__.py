"""The gradients of a step, summed over its microbatches and over the replicas: exact, or fast."""
