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
    graphs      CUDA graphs that hold updates, and what runs before their replays
    update_streams    the streams that updates were given to

Holds, for a save:
- the side stream starts after everything that the current stream had been given when save() ran,
  and the current stream has been made to wait for updates on others;
- a buffer is given back only after the copies into it have completed, also when the save fails;
- a source is kept alive until then;
- an update is let through before that only if every copy is enqueued, nothing has changed so far,
  and the updating stream has been made to wait for the last copy;
- save() returns only when the current stream is after the copies of eager tensors that have no
  clone.
For a restore: the copies start after, and end before, what the current stream does around it.
"""

from statehold.tensors.devices.devices import Devices

__all__ = ["Devices"]
