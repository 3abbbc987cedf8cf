"""Find runs and follow them: state, logs, wait, cancel, report, clean; also list and prune the store.

Runs on: LOGIN NODE.
"""
