"""Preflight checks: is this node healthy enough to train?

Runs on: COMPUTE NODE.
"""
