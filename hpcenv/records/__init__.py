"""The typed files of a run folder; the only coupling between machines.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only.
"""
