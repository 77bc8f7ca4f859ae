"""What training with replicas costs, beside the ways that torch has.

run.py has the command line; a module has a group of measurements (sums.py).
"""
