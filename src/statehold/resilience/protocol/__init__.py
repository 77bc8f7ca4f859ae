"""The protocol of a training step that survives the loss of replicas: pure, without I/O or torch.

    messages      what replicas and their coordinator tell each other
    shares        which replica computes which microbatches, before and after a loss
    member        one rank of a replica: what it has promised, and what it may commit
    actions       the actions of a rank in one step, for the trainer and for the simulation
    coordinator   who belongs to the membership: arrivals, leases, promises, installations

The numbers R1 to R19 in comments are those of docs/resilience.md.
"""
