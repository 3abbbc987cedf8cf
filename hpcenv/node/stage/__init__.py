"""Copy the image and data to the node's own disk.

Runs on: COMPUTE NODE. Standard library only.
"""
