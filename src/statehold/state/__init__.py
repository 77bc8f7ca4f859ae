"""The torch-facing side of statehold: what is in a state, and how it gets back.

General layout: `marks` and `rng` are what users put into a state; `capture` flattens a state into
tensors and a tree of plain values; `restore` matches a step with the live state and says where its
bytes go; `optimizers` knows how torch optimizers keep theirs; `dtypes` names the element types;
`device` moves bytes between a device and host buffers through streams.
Nothing in here touches a disk or the native core.
"""
