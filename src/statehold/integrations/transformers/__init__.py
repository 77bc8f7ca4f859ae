"""The Trainer of transformers, and trainers built on it, with steps of statehold.

    trainer = StateholdTrainer(model=model, args=args, train_dataset=data)  # for Trainer
    trainer.train(resume_from_checkpoint=True)

    class MyTrainer(SFTTrainer, StateholdTrainer): ...    # for a trainer of your own, or of TRL

See docs/integrations.md.
"""

from __future__ import annotations

from statehold.integrations.transformers.trainer import StateholdTrainer

__all__ = ["StateholdTrainer"]
