"""Low-rank models: published times beside computed ones, steps, losses and saves (README)."""
