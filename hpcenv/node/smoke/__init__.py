"""The smoke test: can the ranks of all nodes communicate, and over the network that was chosen for them?

Runs on: COMPUTE NODE.
"""
