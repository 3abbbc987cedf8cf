"""The network of a job: what each node has, and which settings follow from it.

Runs on: COMPUTE NODE; the login node explains with the same code. Standard library only.
"""
