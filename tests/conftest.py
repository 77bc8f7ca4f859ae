"""Settings for all tests."""

from __future__ import annotations

from hypothesis import settings

# Shared machines stall for longer than any deadline; a failure prints how to replay it.
settings.register_profile("everyday", deadline=None, print_blob=True)
settings.load_profile("everyday")
