"""What a node finds out about itself, and the decision over all nodes.

Runs on: COMPUTE NODE; the login node reads the same facts for `lock` and `verify`. Standard library only.
"""
