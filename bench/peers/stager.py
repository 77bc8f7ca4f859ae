"""DCP's staging memory when it is kept from one save to the next: its cached form."""

from __future__ import annotations

from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions


def kept_stager(shared: bool) -> DefaultStager:
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=shared,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
    )
