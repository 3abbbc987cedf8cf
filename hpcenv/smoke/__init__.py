"""What runs in the container before the training: checks inside, and the smoke test of all ranks.

Runs on: COMPUTE NODE. Standard library only.
"""
