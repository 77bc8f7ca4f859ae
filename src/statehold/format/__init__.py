"""What a step says of itself: manifests, records, and one view of both for readers. Pure."""
