"""Pages of a KV cache on tiers, for serving engines: PageStore, and what its calls return."""

from statehold.kv.batch import Batch, Verdict
from statehold.kv.store import PageStore

__all__ = ["Batch", "PageStore", "Verdict"]
