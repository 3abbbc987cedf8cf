"""Start, watch and stop the ranks, and record how they ended.

Runs on: COMPUTE NODE. Standard library only.
"""
