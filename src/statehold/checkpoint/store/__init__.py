"""The run directory: the commit protocol, retention, and who may write. Never touches torch."""
