"""Engines of DeepSpeed with steps of statehold.

    state = engine_state(engine)              # after deepspeed.initialize()
    step = ckpt.restore(state) or 0           # for engine.load_checkpoint()
    ckpt.save(step, state)                    # for engine.save_checkpoint()

A step of ZeRO restores on any number of ranks as it is. See docs/integrations.md.
"""

from __future__ import annotations

from statehold.integrations.deepspeed.state import engine_state, load_weights, save_into_steps

__all__ = ["engine_state", "load_weights", "save_into_steps"]
