"""What a session offers on its node, and how it is reached.

Runs on: COMPUTE NODE. Standard library only.
"""
