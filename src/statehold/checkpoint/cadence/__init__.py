"""When a step is saved, and when it goes on to which level.

every      what a user says of a level: each n-th step, so much time, or "auto"
costs      what saving costs the training, measured, and the interval that makes worth it
turns      which calls of save() save, the same on all ranks
schedule   brings the three together for one session
"""
