"""The command line that starts the container, and what goes into it.

Runs on: COMPUTE NODE. Standard library only.
"""
