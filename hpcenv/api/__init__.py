"""The Python API: submit scripts and functions, and follow their jobs.

Runs on: LOGIN NODE. It has the words of the command line and does not import `cli`.
"""
