"""Images: references, registries, conversion to SIF, the store, proof.

Runs on: LOGIN NODE. This room knows nothing of runs or of lock commands.
"""
