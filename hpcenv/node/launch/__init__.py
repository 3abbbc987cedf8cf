"""Start the ranks, watch them, stop them and requeue the job.

Runs on: COMPUTE NODE. Standard library only.
"""
