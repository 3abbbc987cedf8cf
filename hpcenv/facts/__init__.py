"""The facts that the check step collects on a node, and that a later step judges.

Runs on: COMPUTE NODE (for `verify` and `doctor` also elsewhere). Standard library, and pynvml in a separate process.
"""
