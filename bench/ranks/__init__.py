"""`python -m bench.ranks`: the benchmarks of jobs of several ranks on one node; see run.py."""
