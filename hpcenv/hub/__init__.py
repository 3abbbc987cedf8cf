"""Models and data sets of a hub, fetched for nodes without network.

Runs on: LOGIN NODE.
"""
