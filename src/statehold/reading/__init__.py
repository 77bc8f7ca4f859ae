"""Reads committed steps without a live state: lists them, and loads tensors of them."""
