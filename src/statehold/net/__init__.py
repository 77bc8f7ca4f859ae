"""How processes of a job talk: one way for levels of hosts, the coordinator, desks and state.

    addresses   as text, to listen at, and which of its own a host tells to others
    secret      what the processes of a job know and nobody else, and the proof of it
    wire        one connection: frames and bytes, with a moment by which each call ends
    reception   a thread's listeners and guests: who is let in, who is hung up on

HTTP is spoken only where other people's clients read: to the figures (metrics) and to
object stores.
"""
