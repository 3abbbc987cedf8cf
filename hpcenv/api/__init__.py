"""The Python API: submit scripts and functions, and follow their jobs.

Runs on: LOGIN NODE. The API uses the same words as the command line, and does not import `cli`.
"""
