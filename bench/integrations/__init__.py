"""Trainers of other people: what their loops lose to saves, with their own checkpoints and ours."""
