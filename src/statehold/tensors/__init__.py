"""The torch-facing side of statehold: what is in a state, and how it gets back.

General layout: `marks` and `rng` are what users put into a state; `capture` flattens a state into
tensors and a tree of plain values, `placements` says which boxes of them this rank has; `restore`
matches a step with the live state, `destinations` finds or makes the memory for its bytes, `groups`
and `nodes` look into the saved tree; `optimizers` knows how torch optimizers keep theirs, `modules`
what they are called; `dtypes` names the element types; `loaders` and `first_iterator` know what
torch's data loaders leave out of their states.
Nothing in here touches a disk or the native core.
"""
