"""Comparisons and decisions, made from records alone. Pure: no program is started.

Runs on: COMPUTE NODE and LOGIN NODE. Standard library only. `decide` compares the facts of all nodes with the manifest.
The folders contain the parts of the decision: compatibility, network settings, preflight checks, and smoke test.
"""
