"""What this cluster is like; writes a site profile.

Runs on: LOGIN NODE.
"""
