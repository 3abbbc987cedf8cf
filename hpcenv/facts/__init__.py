"""The facts that the check step collects on a node. A later step judges them.

Runs on: COMPUTE NODE (for `verify` and `doctor` also elsewhere). Standard library, and pynvml in a separate process.
"""
