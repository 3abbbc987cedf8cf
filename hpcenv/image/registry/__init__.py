"""Fetch manifests and layers from registries and OCI layouts.

Runs on: LOGIN NODE.
"""
