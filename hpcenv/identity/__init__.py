"""Check whether files are those that the manifest names: the SIF, overlays, binds, code and data.

Runs on: COMPUTE NODE and LOGIN NODE. Standard library only.
"""
