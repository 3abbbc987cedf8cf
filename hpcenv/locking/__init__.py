"""Make, check, compare and export a lockfile.

Runs on: LOGIN NODE. The room is not called `lock`: `hpcenv.lock` is a function of the Python API.
"""
