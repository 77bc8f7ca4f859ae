"""The first ten minutes on a real device: `python -m bench.gpu`.

    run         the options, the order, the time; a process for each check
    report      the table, written again after every check
    checks      the list of all checks
    task        what one check is given, and how it is run and recorded
    figures     what a check finds, what was expected of it, and the verdict
    device      what the checks ask of a device; the CPU stands in where there is none
    schedule    what a save should take, from measured costs, in virtual time; needs no device
    model       a model and optimizer of any number of tensors
    ceilings    transfers, pinning, disk: the denominators
    saving      save() and the gate; restore
    steps       how much longer steps take while a save is under way, also with DCP
    peers       DCP with pinned staging
    unsettled   questions of a review that only a device can answer
    graphs      CUDA graphs: replay and capture while a save is under way
    order       several streams, a busy device
    memory      device memory of saves and restores, pinned memory, contexts

Invariants: a check stands alone. If it raises, hangs or kills its process, its figures so far and
the reason are recorded, and the next check goes on.
"""
