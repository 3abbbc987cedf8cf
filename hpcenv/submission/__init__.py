"""All stages from a request to a queued job: options, plan, early checks, batch script, sweep, code snapshot, rerun.

Runs on: LOGIN NODE. This package is not called `submit`, because `hpcenv.submit` is a function of the Python API.
"""
