"""Four replicas, one of which is killed: the same work under each subject of bench.resilience.kill.

work.py has what all of them do. Another module is one replica of one subject.
"""
