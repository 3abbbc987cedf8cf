"""Images: references, registries, conversion to SIF, the store, and the check that a SIF has the image's content.

Runs on: LOGIN NODE. This room knows nothing of runs or of lock commands.
"""
