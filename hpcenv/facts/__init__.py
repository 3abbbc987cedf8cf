"""What the check step observes on a node, before anybody judges it.

Runs on: COMPUTE NODE (with `verify` and `doctor` also elsewhere). Standard library, and pynvml in its own process.
"""
