"""Caches of transformers: they lie on tiers, come back in another process, or drop pages."""
