"""Which samples a microbatch has, with which random numbers, and who draws them ahead of time."""
