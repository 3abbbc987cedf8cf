"""Programs that run in the container before the training: the checks inside it, and the smoke test of all ranks.

Runs on: COMPUTE NODE. Standard library only.
"""
