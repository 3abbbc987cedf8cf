"""Slurm commands, and the parsers of their output.

Runs on: LOGIN NODE.
"""
