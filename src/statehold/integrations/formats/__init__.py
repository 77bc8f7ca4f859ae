"""Checkpoints of other libraries -> steps, and back: `export_step` and `import_step`."""
