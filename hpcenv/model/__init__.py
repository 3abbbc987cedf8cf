"""Data and rules: no files, no clock, no environment, no processes.

Runs on: LOGIN NODE.
"""
