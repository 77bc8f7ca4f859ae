"""Between device memory and the engine's buffers: copies on side streams, and what may follow them.

    backends    what has to be known of a kind of device: the protocol, and accelerators in general
    cuda        CUDA and ROCm
    pinning     the engine's buffers, pinned as they are used
    relay       lent buffers: several are under way at once, and each is given back
    elements    tensors as bytes and as what is moved
    gathering   pieces of tensors, brought together in few launches
    fingerprinting  whether ranks hold the same, without copying it
    copying     the copies of a save, and the gate as a stream wait
    placing     where bytes of saved chunks go
    loading     the copies of a restore
    devices     what belongs to one engine
    graphs      CUDA graphs that hold updates, what runs before their replays; streams of updates

Invariants: copies of a save go as copying says. The copies of a restore start after, and end
before, what the current stream does around it.
"""

from statehold.tensors.devices.devices import Devices

__all__ = ["Devices"]
