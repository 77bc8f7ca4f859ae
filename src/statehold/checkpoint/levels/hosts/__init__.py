"""Levels of which each host has its own: who is where, what is whole, how files get across."""
