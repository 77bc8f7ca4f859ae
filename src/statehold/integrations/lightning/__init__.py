"""The Trainer of Lightning with checkpoints that are steps of statehold.

    trainer = Trainer(callbacks=[StateholdCallback(), ModelCheckpoint("out", save_last=True)])
    trainer.fit(model, loader, ckpt_path="last")

See docs/integrations.md. Fabric needs nothing of this: pass its model and optimizer to a
Checkpointer.
"""

from __future__ import annotations

from statehold.integrations.lightning.callback import StateholdCallback

__all__ = ["StateholdCallback"]
