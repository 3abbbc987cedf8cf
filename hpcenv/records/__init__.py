"""The typed files of a run folder. Machines exchange data only through these files.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only.
"""
