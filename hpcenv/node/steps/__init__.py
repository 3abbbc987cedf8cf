"""The steps of the batch script, from `begin` to `finish`: each module loads what its steps need (node/main.py).

Runs on: COMPUTE NODE.
"""
