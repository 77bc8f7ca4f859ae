"""What steps cost when little has changed: `python -m bench.unchanged --only GROUP ...`.

    lora    adapters on a frozen base, a save at each step; beside the same without sharing,
            torch.save, safetensors, DCP, and blobs named by their content
    proof   how fast memory is proven to have the bytes of a file, beside one plain pass over it
    full    training in which everything changes, with sharing and without
    many    restore of a step whose files were made by many steps, beside one that has its own
    fork    a run that begins with a step of another
    sweep   the bytes that go up to an object store: two steps of a run, and two of a second run

Invariants: the cases of a group take turns in one process, on the same live state, and each round
has another order. Ratios are medians of the ratios of rounds. What was written is restored, and
compared bit for bit. A group names the targets of the project and says which were met.
"""
