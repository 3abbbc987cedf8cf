"""Find the properties of this cluster, and write a site profile.

Runs on: LOGIN NODE.
"""
