"""Starting the ranks, watching and stopping them, and what is recorded of their end.

Runs on: COMPUTE NODE. Standard library only.
"""
