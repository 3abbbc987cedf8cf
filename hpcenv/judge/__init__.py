"""What is compared and decided, from records alone. Pure: no program is started.

Runs on: COMPUTE NODE and LOGIN NODE. Standard library only. `decide` judges the facts of all nodes against the
manifest; the folders hold what it asks: compatibility, network settings, preflight checks, the smoke test.
"""
