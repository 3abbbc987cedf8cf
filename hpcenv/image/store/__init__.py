"""The store: layers and SIF files that are kept, their leases and their records.

Runs on: LOGIN NODE.
"""
