"""The protocol on sockets: the process that coordinates, and the thread of a rank that talks to it.

    lines     messages as lines of a stream
    server    the process of `statehold coordinate`: one thread, any number of ranks
    link      the connection of a rank: it beats, answers, and connects again

Nothing here imports torch, and no bytes of the training state pass through here.
"""
