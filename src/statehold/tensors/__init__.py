"""The torch-facing side of statehold: what is in a state, and how it gets back.

General layout: `kinds` has a file for each kind of thing in a state; `capture` makes of a state
tensors and a tree of values, `placements` says which boxes of them this rank has; `restore`
matches a step with the live state, `destinations` finds or makes the memory for its bytes, `nodes`
looks into the saved tree; `dtypes` names the element types.
Nothing in here touches a disk or the native core.
"""
