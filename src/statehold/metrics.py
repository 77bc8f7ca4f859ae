"""The public name of the endpoint for Prometheus: `statehold.metrics.serve(9400)`."""

from __future__ import annotations

from statehold.observe.endpoint import Endpoint, serve

__all__ = ["Endpoint", "serve"]
