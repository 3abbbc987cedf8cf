"""The facts that the check step collects on a node. A later step compares these facts with the manifest.

Runs on: COMPUTE NODE (for `verify` and `doctor` also elsewhere). Uses only the standard library; a separate
process imports pynvml.
"""
