"""Benchmarks of statehold and its peers: save, train, restore, and the limits of the machine.

Start at README.md (how to read a number) or run.py (what is run, in which order).
"""
