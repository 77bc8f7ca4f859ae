"""The description of a step: manifests, records, and one view of both for readers. Pure."""
