"""The Python face of the native core: staging memory, reads, object stores, profiles."""
