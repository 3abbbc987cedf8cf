"""Make, check, compare and export a lockfile.

Runs on: LOGIN NODE. This package is not called `lock`, because `hpcenv.lock` is a function of the Python API.
"""
