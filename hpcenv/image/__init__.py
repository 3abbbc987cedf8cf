"""Images: references, registries, conversion to SIF, the store, and the check that a SIF has the image's content.

Runs on: LOGIN NODE. This package does not depend on the code for runs or for lock commands.
"""
