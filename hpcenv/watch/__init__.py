"""Watching a run: one process on each node takes samples beside the ranks, and looks for a rank that hangs.

Runs on: COMPUTE NODE. Standard library, and pynvml if it is installed.
"""
