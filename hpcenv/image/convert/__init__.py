"""Convert an OCI image to a SIF file.

Runs on: LOGIN NODE.
"""
