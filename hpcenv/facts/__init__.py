"""What the check step observes on a node; a later step judges it.

Runs on: COMPUTE NODE (with `verify` and `doctor` also elsewhere). Standard library, and pynvml in its own process.
"""
