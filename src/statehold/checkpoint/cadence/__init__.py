"""When a step is saved, and when it is copied to which level.

    every      the user's cadence of a level: each n-th step, so much time, or "auto"
    costs      the measured costs of saving, and the best intervals
    schedule   which calls of save() save, the same on all ranks; which step goes to which level

Not here: the formulae (planners/intervals).
"""
